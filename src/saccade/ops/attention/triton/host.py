"""Attention by Triton kernels: the body that the operators run on GPUs.

A kind of call is prepared once: configs chosen, kernels compiled, strides worked out. After that
a call allocates its results, wraps addresses into Views and starts the kernels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from saccade.gpu.kernel_args import brings_three, rules, signature, tensors_of
from saccade.gpu.planning import NO_PLAN, Planner, TileLists
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.call_spec import (
    CallSpec,
    memory_like,
    remembered,
    with_unit_channels,
)
from saccade.ops.attention.triton.forward import attention_forward
from saccade.ops.attention.triton.gradients import backward as backward
from saccade.runtime.spec import Inputs, KernelConfig, Variant, empty_results


class TritonForward:
    """The forward pass of calls like one another, prepared."""

    def __init__(self, inputs: Inputs, variant: Variant, config: KernelConfig):
        self.unit_channels = all(tensor.stride(-1) == 1 for tensor in inputs[:3])
        inputs = with_unit_channels(inputs)
        self.spec = CallSpec.of(inputs)
        call = inputs, variant
        one_loop = configs.in_one_loop(self.spec.problem("forward", call))
        self.launch = self.spec.launch(
            attention_forward, "forward", call, config, ONE_LOOP=one_loop
        )
        tiles = self.launch.constants["QUERY_TILE"], self.launch.constants["KV_TILE"]
        self.programs = self.spec.geometry.queries.programs(tiles[0])
        self.planner = Planner(inputs, variant, self.spec.geometry, tiles, over_keys=True)
        self.alone = brings_three(inputs, variant) and not self.planner.needed
        self.output, self.lse = map(memory_like, empty_results(inputs))

    def __call__(self, inputs: Inputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse of a call of this kind."""
        if not self.unit_channels:
            inputs = with_unit_channels(inputs)
        output, lse = self.output(), self.lse()
        plan, tensors = NO_PLAN, (*inputs[:3], output, lse)
        if not self.alone:
            plan = self.planner(inputs, variant)
            tensors = (*tensors_of(inputs, variant), output, lse, *plan.tensors)
        if not self.launch.relaunch(self.programs, self.spec.device, tensors):
            self._start(inputs, variant, output, lse, plan, tensors)
        return output, lse

    def _start(
        self, inputs: Inputs, variant: Variant, output: Tensor, lse: Tensor, plan: TileLists,
        tensors: Sequence[Tensor],
    ) -> None:  # fmt: skip
        def arguments() -> tuple[Any, ...]:
            return (
                *self.spec.inputs(inputs),
                self.spec.rows(output, inputs),
                self.spec.numbers(lse, inputs),
                rules(inputs, variant, plan.argument()),
                inputs.sinks,
            )

        self.launch(self.programs, self.spec.device, tensors, arguments)


_forwards: dict[Any, TritonForward] = {}


def prepared(inputs: Inputs, variant: Variant, config: KernelConfig) -> TritonForward:
    """The forward pass of calls like this one; call it with inputs like that one."""
    key = signature(inputs, variant), config
    return remembered(_forwards, key, lambda: TritonForward(inputs, variant, config))


def forward(inputs: Inputs, variant: Variant, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention`."""
    return prepared(inputs, variant, config)(inputs, variant)
