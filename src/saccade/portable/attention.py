"""Attention by portable kernels: the body that the operators run on GPUs.

A kind of call is prepared once: configs chosen, kernels compiled, strides worked out. After that
a call allocates its results, wraps addresses into Views and starts the kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from saccade.kernels.launch import Launch, Pointer
from saccade.portable.arguments import (
    all_aligned,
    number_strides,
    row_strides,
    rules,
    signature,
    view,
)
from saccade.portable.forward import attention_forward
from saccade.portable.gradients import backward as backward
from saccade.portable.kind import Kind, on_device, remembered, with_unit_channels
from saccade.portable.planning import Planner
from saccade.problem import Config, Inputs, Variant, empty_results


class Forward:
    """The forward pass of one kind of call, prepared."""

    def __init__(self, inputs: Inputs, variant: Variant, config: Config):
        self.unit_channels = all(tensor.stride(-1) == 1 for tensor in inputs[:3])
        inputs = with_unit_channels(inputs)
        self.kind = Kind.of(inputs)
        self.launch = self.kind.launch(attention_forward, "forward", (inputs, variant), config)
        self.tiles = self.launch.constants["QUERY_TILE"], self.launch.constants["KV_TILE"]
        self.programs = self.kind.geometry.queries.programs(self.tiles[0])
        self.planner = Planner(inputs, variant, self.kind.geometry, self.tiles, over_keys=True)
        tables = *variant.mask_captured.tensors, *variant.score_captured.tensors
        self.constant_rules = inputs.seed is None and not tables
        self.template: Template | None = None

    def __call__(self, inputs: Inputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse of a call of this kind."""
        if self.template is not None:
            found = self.template(inputs)
            if found is not None:
                return found
        inputs = with_unit_channels(inputs)
        output, lse = empty_results(inputs)
        with on_device(self.kind.device):
            aligned = all_aligned(inputs, variant)
            plan = self.planner(inputs, variant, aligned)

            def arguments(pointer: Pointer) -> tuple[Any, ...]:
                return (
                    *self.kind.inputs(pointer, inputs),
                    *self._results(pointer, inputs, output, lse),
                    rules(inputs, variant, pointer, plan.argument(pointer)),
                    None if inputs.sinks is None else pointer(inputs.sinks),
                )

            self.launch(self.programs, self.kind.device, aligned, arguments)
        simple = self.constant_rules and not self.kind.packed and inputs.sinks is None
        simple = simple and self.unit_channels
        if simple and self.launch.run is not None:
            self.template = Template(self.launch, self.programs, self.kind, arguments, output, lse)
        return output, lse

    def _results(
        self, pointer: Pointer, inputs: Inputs, output: Tensor, lse: Tensor
    ) -> tuple[Any, Any]:
        queries, offsets, packed = self.kind.geometry.queries, inputs.cu_seqlens_q, self.kind.packed
        return (
            view(pointer, output, row_strides(output, packed), queries, offsets),
            view(pointer, lse, number_strides(lse, packed), queries, offsets),
        )


class Template:
    """A dense call in which nothing but five addresses changes: the shortest way to its kernel."""

    def __init__(
        self,
        launch: Launch,
        programs: int,
        kind: Kind,
        arguments: Callable[[Pointer], tuple[Any, ...]],
        output: Tensor,
        lse: Tensor,
    ):
        *views, known_rules, sinks = arguments(Tensor.data_ptr)
        assert launch.run is not None and kind.device is not None
        self.run, self.start = launch.run, launch.rest
        self.programs, self.device = programs, kind.device
        self.of_query, self.of_key, self.of_value, self.of_output, self.of_lse = (
            tuple(view[1:]) for view in views
        )
        self.end = (known_rules, sinks, *launch.values)
        self.output = output.shape, output.stride()
        self.lse = lse.shape, lse.stride()

    def __call__(self, inputs: Inputs) -> tuple[Tensor, Tensor] | None:
        """Output and lse; None if the prepared kernel does not fit the addresses or the device."""
        query = inputs.query
        at = query.data_ptr(), inputs.key.data_ptr(), inputs.value.data_ptr()
        if (at[0] | at[1] | at[2]) & 15 or torch._C._cuda_getDevice() != self.device:
            return None
        output = torch.empty_strided(*self.output, dtype=query.dtype, device=query.device)
        lse = torch.empty_strided(*self.lse, dtype=torch.float32, device=query.device)
        self.run(
            self.programs, 1, 1, torch._C._cuda_getCurrentRawStream(self.device), *self.start,
            (at[0], *self.of_query), (at[1], *self.of_key), (at[2], *self.of_value),
            (output.data_ptr(), *self.of_output), (lse.data_ptr(), *self.of_lse), *self.end,
        )  # fmt: skip
        return output, lse


_forwards: dict[Any, Forward] = {}


def prepared(inputs: Inputs, variant: Variant, config: Config) -> Forward:
    """The forward pass of the call's kind; call it with inputs of that kind."""
    mask, score = variant.mask_captured, variant.score_captured
    numbers = (*mask.ints, *score.ints, *mask.floats, *score.floats, variant.scale)
    key = signature(inputs, variant), numbers, config
    return remembered(_forwards, key, lambda: Forward(inputs, variant, config))


def forward(inputs: Inputs, variant: Variant, config: Config) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention`."""
    return prepared(inputs, variant, config)(inputs, variant)
