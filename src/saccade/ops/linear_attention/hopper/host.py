"""Linear attention by Hopper kernels: the body that the operators run on GPUs of capability 9.0.

    forward           forward.py
    grad_query        backward_dq.py, which also finds what rows have as numbers
    grad_key_value    backward_dkdv.py, in one sweep
    the same of more than 128 channels    scan_d256.py, a sweep for each

Where heads are few, the length is cut into segments, the states of which come first
(chunk_state.py). A gradient that heads share is summed in float32, which Triton passes do; so are
long sequences of few heads whose chunks would begin elsewhere. Steps are those of
`saccade.ops.linear_attention.triton.host`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.hopper.descriptors import Box, aligned, descriptor, readable
from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.hopper.backward_dkdv import KeyGradientMeta, linear_backward_keys
from saccade.ops.linear_attention.hopper.backward_dq import (
    QueryGradientMeta,
    linear_backward_queries,
)
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers
from saccade.ops.linear_attention.hopper.chunk_state import (
    collect_keys,
    collect_queries,
    linear_nan_safe,
)
from saccade.ops.linear_attention.hopper.forward import LinearForwardMeta, linear_forward
from saccade.ops.linear_attention.hopper.program import (
    BLOCK_CHANNELS,
    WIDE,
    HeadSplit,
    Kept,
    is_balanced,
    moved,
    sizes,
    unlike_triton,
)
from saccade.ops.linear_attention.hopper.scan_d256 import WideMeta, linear_wide
from saccade.ops.linear_attention.triton.host import (
    chained,
    ending_of,
    gradients_by,
    initial_of,
    passes_of,
)
from saccade.ops.linear_attention.triton.host import step as step
from saccade.ops.linear_attention.triton.normalizer import given_of
from saccade.ops.linear_attention.triton.passes import (
    LinearBackwardInputs,
    LinearCallSpec,
    Passes,
    Recompute,
    State,
    sums,
)
from saccade.runtime.spec import (
    KernelConfig,
    LinearGradients,
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


FORWARD_SCHEDULE = LinearSchedule(3, 2, 168, 56)


def forward(inputs: LinearInputs, variant: LinearVariant, config: KernelConfig) -> LinearResults:
    """Output, normaliser and last state; see `saccade.linear_attention`."""
    inputs = aligned(inputs)
    passes = passes_of(inputs, variant, KernelConfig(kv_tile=BLOCK_CHANNELS))
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
        schedule, output = FORWARD_SCHEDULE, self.results.output

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


# ---- heads of more than 128 channels -------------------------------------------------------------

INNER = 4 * BLOCK_CHANNELS  # channels of a and b, whether they exist or not
OUTER = 2 * BLOCK_CHANNELS  # channels of the result that a program computes


class WideSchedule(NamedTuple):
    """How the kernel runs."""

    stages: int  # of a, b and c
    consumer_registers: int
    mapper_registers: int


WIDE_SCHEDULE = WideSchedule(2, 208, 48)


class WidePass(NamedTuple):
    """What a pass reads and writes."""

    name: str
    a: Tensor
    b: Tensor
    c: Tensor
    result: Tensor
    own: Tensor | None = None  # what a gradient of features is of, before it is mapped
    given: LinearBackwardInputs | None = None
    totals: Tensor | None = None  # sums of scores, written with the output

    def start(
        self, passes: Passes, before: State | None, after: State | None, segments: int,
        nonfinite: Tensor,
    ) -> None:  # fmt: skip
        """Start the kernel. nonfinite: flags to be written, of each 64 channels of the result."""
        spec = passes.spec
        tiles = self.parts // 2
        schedule = WIDE_SCHEDULE

        def make() -> Launch:
            constants = {
                **self._shares(passes),
                "GROUP": spec.group,
                "HEAD_DIM": spec.head_dim,
                "VALUE_DIM": spec.value_dim,
                "TILES": tiles,
                "SEGMENTS": segments,
                "PASS": self.name,
                "BOTTOM_RIGHT": spec.bottom_right,
                "STARTED": spec.started,
                "FEATURE_MAP": spec.variant.feature_map,
                "SCALE": spec.variant.scale,
                "NORMALIZE": spec.variant.normalize,
                "STAGES": schedule.stages,
                "CONSUMER_REGISTERS": schedule.consumer_registers,
                "MAPPER_REGISTERS": schedule.mapper_registers,
            }
            return Launch(linear_wide, constants, {"num_warps": 4}, meta=WideMeta)

        def arguments() -> tuple[Any, ...]:
            lengths = passes.inputs.key_lengths
            return (
                *self._described(),
                self._numbers(),
                Kept(self.totals, lengths, nonfinite),
                sums(before),
                sums(after),
                sizes(spec, spec.heads),
                spec.variant.eps,
            )

        rows = there_are((self.a, self.b, self.c, self.own, self.result, self.totals, nonfinite))
        numbers = [] if self.given is None else there_are(self.given[:3])
        states = (*(before or ()), *(after or ()))
        strides = tuple(operand.stride() for operand in rows)
        key = "hopper wide", self.name, segments, before is None, after is None, schedule, strides
        launch = remembered(spec.launches, key, make)
        programs = spec.sequences * spec.heads * tiles * segments
        launch(programs, spec.device, (*passes.known(), *rows, *numbers, *states), arguments)

    @property
    def parts(self) -> int:
        """Blocks of 64 channels of the result that programs have."""
        return 2 * -(-self.result.shape[-1] // OUTER)

    def _shares(self, passes: Passes) -> dict[str, int]:
        operands = {"A": self.a, "B": self.b, "C": self.c, "OWN": self.own}
        return {
            f"HEADS_PER_{name}": 1 if rows is None else passes.share(rows.shape[1])
            for name, rows in operands.items()
        }

    def _described(self) -> Iterator[Any]:
        """All rows as TMA moves them: 64 of them, and so many channels."""
        for rows, channels in (
            (self.a, INNER), (self.b, INNER), (self.c, OUTER), (self.own, BLOCK_CHANNELS),
            (self.result, BLOCK_CHANNELS),
        ):  # fmt: skip
            if rows is None:
                yield None
            else:
                yield descriptor(rows, Box.of(rows, False, BLOCK_CHANNELS, channels))

    def _numbers(self) -> RowNumbers | None:
        if self.given is None:
            return None
        return RowNumbers(self.given.factors, self.given.minus_delta)


WIDEST = 2 * BLOCK_CHANNELS  # channels of a state's side in kernels of their own


class GradientSchedule(NamedTuple):
    """How a kernel runs."""

    stages: int  # of rows
    consumer_registers: int
    mapper_registers: int

    def constants(self) -> dict[str, int]:
        """What a kernel is compiled for."""
        return {
            "STAGES": self.stages,
            "CONSUMER_REGISTERS": self.consumer_registers,
            "MAPPER_REGISTERS": self.mapper_registers,
        }


OF_QUERIES = GradientSchedule(2, 168, 56)
OF_KEYS = GradientSchedule(2, 176, 48)
OUTPUT_STAGES = 1  # of gradients of queries: rows take the rest of shared memory


def backward(
    inputs: LinearInputs,
    variant: LinearVariant,
    config: KernelConfig,
    output: Tensor,
    normaliser: Tensor,
    grad_output: Tensor,
    grad_kv: Tensor | None,
    grad_key_sum: Tensor | None,
) -> LinearGradients:
    """Gradients of the inputs, the same bits in every run."""
    passes = HopperPasses(
        *passes_of(aligned(inputs), variant, KernelConfig(kv_tile=BLOCK_CHANNELS))
    )
    grad_output = readable(grad_output)
    split = split_of(passes.spec, keys=False)
    if variant.normalize == "none" or split is None or is_wide(passes.spec):
        given = given_of(passes, output, normaliser, grad_output)
    else:
        numbers = torch.empty_like(normaliser), torch.empty_like(normaliser)
        given = LinearBackwardInputs(grad_output, *numbers, (readable(output), normaliser))
    return gradients_by(passes, given, ending_of(passes, grad_kv, grad_key_sum))


def split_of(spec: LinearCallSpec, keys: bool) -> HeadSplit | None:
    """How gradients of queries, or of keys and values, are split; None: Triton kernels do it."""
    shared = (spec.state_heads, spec.key_heads, spec.value_heads) if keys else (spec.query_heads,)
    if any(heads != spec.heads for heads in shared):
        return None
    split = HeadSplit.whole(spec).cut(spec)
    return None if split.segments > 1 and unlike_triton(spec, keys) else split


def is_wide(spec: LinearCallSpec) -> bool:
    """Whether gradients are those of scan_d256.py."""
    return max(spec.head_dim, spec.value_dim) > WIDEST


class HopperPasses(Passes):
    """One call under way."""

    def gradient_segments(self, keys: bool) -> int:
        """Into how many parts sequences are cut for gradients of queries, or of keys and values."""
        split = split_of(self.spec, keys)
        return super().gradient_segments(keys) if split is None else split.segments

    def collect(self, given: LinearBackwardInputs | None, segments: int) -> State:
        """The states of each segment alone: of keys, or of queries where gradients are given."""
        split = split_of(self.spec, keys=given is not None)
        if split is None or is_wide(self.spec):
            return super().collect(given, segments)
        if given is not None:
            return collect_queries(self, split, given)
        variant = self.spec.variant
        balanced = bool(is_balanced(variant.feature_map, variant.normalize))
        return collect_keys(self, split, balanced)

    def grad_query(
        self, given: LinearBackwardInputs, result: Tensor, dots: Tensor | None, before: State |
        None, segments: int, recompute: Recompute | None = None,
    ) -> None:  # fmt: skip
        """Write the gradients of queries, one for each output head."""
        split = split_of(self.spec, keys=False)
        if split is not None and is_wide(self.spec):
            rows = given.grad_output, self.inputs.value, self.inputs.key
            wide = WidePass("grad_query", *rows, result, self._own(self.inputs.query), given)
            recompute = self._wide(wide, before, None, segments)
        elif split is not None:
            recompute = self._grad_query(split, given, result, before)
            # Done again from the first state on: segments may start from others than Triton's.
            recompute = recompute._replace(nonfinite=recompute.nonfinite.flatten(2))
            before, segments = initial_of(self), 1
        super().grad_query(given, result, dots, before, segments, recompute)

    def grad_key_value(
        self, given: LinearBackwardInputs, results: tuple[Tensor, Tensor], dots: Tensor | None,
        before: State | None, after: State | None, segments: int, recompute: Recompute | None =
        None,
    ) -> None:  # fmt: skip
        """Write the gradients of keys and of values, and of the first states."""
        split = split_of(self.spec, keys=True)
        if split is not None and is_wide(self.spec):
            self._wide_key_value(given, results, before, after, segments)
            return
        if split is not None:
            recompute, after = self._grad_key_value(split, given, results, before, after), None
        super().grad_key_value(given, results, dots, before, after, segments, recompute)

    def _wide_key_value(
        self, given: LinearBackwardInputs, results: tuple[Tensor, Tensor], before: State | None,
        after: State | None, segments: int,
    ) -> None:  # fmt: skip
        query, key, value = self.inputs[:3]
        wide = WidePass(
            "grad_key", value, given.grad_output, query, results[0], self._own(key), given
        )
        recompute = self._wide(wide, before, after, segments)
        self.grad_key(given, results[0], None, before, None, segments, recompute)
        wide = WidePass("grad_value", key, query, given.grad_output, results[1], None, given)
        recompute = self._wide(wide, before, None, segments)
        self.grad_value(given, results[1], before, segments, recompute)

    def _wide(
        self, wide: WidePass, before: State | None, after: State | None, segments: int
    ) -> Recompute:
        shape = self.spec.sequences, self.spec.heads, segments, wide.parts
        nonfinite = self.inputs.query.new_empty(shape, dtype=torch.int32)
        wide.start(self, before, after, segments, nonfinite)
        return Recompute(linear_nan_safe, nonfinite)

    def _own(self, rows: Tensor) -> Tensor | None:
        """Rows that a gradient goes through the feature map of, if it does more than scale."""
        return None if self.spec.variant.feature_map == "identity" else rows

    def _grad_query(
        self, split: HeadSplit, given: LinearBackwardInputs, result: Tensor, before: State | None
    ) -> Recompute:
        spec, nonfinite = self.spec, self._nonfinite(split)
        query, key, value = self.inputs[:3]
        output, normaliser = given.quotient or (None, None)

        def make() -> Launch:
            constants = {
                "HEADS_PER_QUERY": self.share(spec.query_heads),
                "HEADS_PER_KEY": self.share(spec.key_heads),
                "HEADS_PER_VALUE": self.share(spec.value_heads),
                "GROUP": spec.group,
                **self._constants(split),
                "NORMALIZE": spec.variant.normalize,
                **OF_QUERIES.constants(),
                "OUTPUT_STAGES": OUTPUT_STAGES,
            }
            return Launch(
                linear_backward_queries, constants, {"num_warps": 4}, meta=QueryGradientMeta
            )

        def arguments() -> tuple[Any, ...]:
            kept = Kept(
                normaliser, self.inputs.key_lengths,
                nonfinite,
            )  # fmt: skip
            return (
                *moved((query, given.grad_output, key, value)),
                None if output is None else next(moved((output,))),
                *moved((result,)),
                RowNumbers(given.factors, given.minus_delta),
                kept, sums(before), sizes(spec, spec.heads), spec.variant.eps,
            )  # fmt: skip

        rows = there_are((*given[:3], *(given.quotient or ()), result, nonfinite))
        strides = given.grad_output.stride(), None if output is None else output.stride()
        cache_key = "hopper grad_query", split, before is None, OF_QUERIES, strides
        tensors = (*self.known(), *rows, *(before or ()))
        launch = remembered(spec.launches, cache_key, make)
        launch(split.programs(spec, spec.heads), spec.device, tensors, arguments)
        return Recompute(linear_nan_safe, nonfinite)

    def _grad_key_value(
        self, split: HeadSplit, given: LinearBackwardInputs, results: tuple[Tensor, Tensor],
        before: State | None, after: State | None,
    ) -> Recompute:  # fmt: skip
        spec, nonfinite = self.spec, self._nonfinite(split)
        query, key, value = self.inputs[:3]

        def make() -> Launch:
            constants = {
                "HEADS_PER_QUERY": self.share(spec.query_heads),
                **self._constants(split),
                **OF_KEYS.constants(),
            }
            return Launch(linear_backward_keys, constants, {"num_warps": 4}, meta=KeyGradientMeta)

        def arguments() -> tuple[Any, ...]:
            return (
                *moved((query, given.grad_output, key, value, *results)),
                RowNumbers(given.factors, given.minus_delta),
                Kept(None, self.inputs.key_lengths, nonfinite),
                sums(before), sums(after), sizes(spec, spec.heads),
            )  # fmt: skip

        states = (*(before or ()), *(after or ()))
        strides = given.grad_output.stride()
        cache_key = "hopper keys", split, before is None, after is None, OF_KEYS, strides
        tensors = (*self.known(), *there_are(given[:3]), *results, nonfinite, *states)
        launch = remembered(spec.launches, cache_key, make)
        launch(split.programs(spec, spec.heads), spec.device, tensors, arguments)
        return Recompute(linear_nan_safe, nonfinite)

    def _constants(self, split: HeadSplit) -> dict[str, Any]:
        spec = self.spec
        constants = {
            **split.constants(spec), "STARTED": spec.started, "SCALE": spec.variant.scale,
        }  # fmt: skip
        del constants["TILES"]  # one
        return constants

    def _nonfinite(self, split: HeadSplit) -> Tensor:
        """Memory for flags."""
        spec = self.spec
        shape = spec.sequences, spec.heads, split.segments, split.parts
        return self.inputs.query.new_empty(shape, dtype=torch.int32)
