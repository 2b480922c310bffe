"""Linear attention by Hopper kernels: the body that the operators run on GPUs of capability 9.0.

The forward pass has a kernel of its own (forward.py), and so have gradients
(gradients.py). Where heads are few, the length is cut into segments, the states of which
come first (chunk_state.py). Steps are those of `saccade.ops.linear_attention.triton.host`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.hopper.descriptors import aligned
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.hopper.chunk_state import collect_keys, linear_nan_safe
from saccade.ops.linear_attention.hopper.forward import LinearForwardMeta, linear_forward
from saccade.ops.linear_attention.hopper.gradients import WidePass
from saccade.ops.linear_attention.hopper.gradients import backward as backward
from saccade.ops.linear_attention.hopper.program import Kept
from saccade.ops.linear_attention.hopper.split import BLOCK, WIDE, HeadSplit, moved, sizes
from saccade.ops.linear_attention.triton.chain import chained
from saccade.ops.linear_attention.triton.host import initial_of, passes_of
from saccade.ops.linear_attention.triton.host import step as step
from saccade.ops.linear_attention.triton.passes import Passes
from saccade.ops.linear_attention.triton.positions import Recompute, State, sums
from saccade.runtime.spec import (
    KernelConfig,
    LinearInputs,
    LinearResults,
    LinearVariant,
    empty_linear_results,
)


class LinearSchedule(NamedTuple):
    """How the kernel runs."""

    stages: int  # of queries, keys and values
    output_stages: int
    consumer_registers: int
    mapper_registers: int


SCHEDULE = LinearSchedule(3, 2, 168, 56)
OVERRIDE: LinearSchedule | None = None
"""Taken instead of SCHEDULE, to measure what it should be."""


def forward(inputs: LinearInputs, variant: LinearVariant, config: KernelConfig) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    inputs = aligned(inputs)
    passes = passes_of(inputs, variant, KernelConfig(kv_tile=BLOCK))
    results = empty_linear_results(inputs, variant)
    before, after = initial_of(passes), None
    split = HeadSplit.of(passes.spec)
    if split.segments == 1:
        after = results.kv, results.key_sum
    else:
        parts = collect_keys(passes, split)
        before, last = chained(passes, parts, before, split.segments, False)
        results.kv.copy_(last[0])
        results.key_sum.copy_(last[1])
    LinearHopperForward(passes, results, before, after, split).run()
    return results


class LinearHopperForward(NamedTuple):
    """One forward pass under way."""

    passes: Passes
    results: LinearResults
    before: State | None
    after: State | None
    split: HeadSplit

    def run(self) -> None:
        """Write the results, and once more what a nonfinite value may have reached."""
        spec = self.passes.spec
        shape = spec.sequences, spec.heads, self.split.segments, self.split.parts
        nonfinite = self.results.output.new_empty(shape, dtype=torch.int32)
        if self.split.blocks == WIDE:
            self._wide().start(self.passes, self.before, self.after, self.split.segments, nonfinite)
        else:
            self._sweep(nonfinite)
        totals = (
            self._totals()
        )  # of queries and keys alone: no value makes nonfinite them, so they are kept
        self.passes.output(
            self.results.output, totals, self.before, None, self.split.segments,
            totals is not None, Recompute(linear_nan_safe, nonfinite),
        )  # fmt: skip

    def _totals(self) -> Tensor | None:
        return None if self.passes.spec.variant.normalize == "none" else self.results.normaliser

    def _wide(self) -> WidePass:
        return WidePass(
            "output", *self.passes.inputs[:3], self.results.output, totals=self._totals()
        )

    def _states(self) -> list[Tensor]:
        return there_are((*(self.before or ()), *(self.after or ())))

    def _sweep(self, nonfinite: Tensor) -> None:
        passes, totals = self.passes, self._totals()
        spec, inputs = passes.spec, passes.inputs
        split = self.split
        schedule, output = OVERRIDE or SCHEDULE, self.results.output

        def make() -> Launch:
            constants = {
                "HEADS_PER_QUERY": passes.share(spec.query_heads),
                "HEADS_PER_KEY": passes.share(spec.key_heads),
                "HEADS_PER_VALUE": passes.share(spec.value_heads),
                "GROUP": spec.group,
                **split.constants(spec),
                "SCALE": spec.variant.scale,
                "NORMALIZE": spec.variant.normalize,
                "STAGES": schedule.stages,
                "OUTPUT_STAGES": schedule.output_stages,
                "CONSUMER_REGISTERS": schedule.consumer_registers,
                "MAPPER_REGISTERS": schedule.mapper_registers,
            }
            return Launch(linear_forward, constants, {"num_warps": 4}, meta=LinearForwardMeta)

        def arguments() -> tuple[Any, ...]:
            lengths = inputs.key_lengths
            return (
                *moved((*inputs[:3], output)),
                Kept(totals, lengths, nonfinite),
                sums(self.before),
                sums(self.after),
                sizes(spec, spec.heads),
                spec.variant.eps,
            )

        tensors = (*passes.known(), *there_are((output, totals, nonfinite)), *self._states())
        key = "hopper", split, self.before is None, schedule
        launch = remembered(spec.launches, key, make)
        launch(split.programs(spec, spec.heads), spec.device, tensors, arguments)
