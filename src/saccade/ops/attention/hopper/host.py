"""Attention by Hopper kernels, as the operators start them on GPUs of capability 9.0.

The forward pass is prepared once for calls like one another, as in
`saccade.ops.attention.triton.host`; gradients are in `saccade.ops.attention.hopper.gradients`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import Box, aligned, descriptor
from saccade.gpu.kernel_args import brings_three, rules, signature, tensors_of
from saccade.gpu.launcher import Launch
from saccade.gpu.planning import NO_PLAN, Planner, TileLists
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.configs import kernel_problem
from saccade.ops.attention.hopper.forward import ForwardMeta, attention_forward
from saccade.ops.attention.hopper.gradients import backward as backward
from saccade.ops.attention.triton.call_spec import CallSpec, memory_like, remembered
from saccade.runtime.spec import Inputs, KernelConfig, Variant, empty_results


class HopperForward:
    """The forward pass of calls like one another, prepared."""

    def __init__(self, inputs: Inputs, variant: Variant):
        self.spec = spec = CallSpec.of(inputs, tensor_view.packed_program)
        self.device = inputs.query.device
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        problem = kernel_problem(inputs, variant)
        widths = problem.head_width, problem.value_width
        self.schedule = chosen = configs.choose(problem)
        sizes = chosen.query_tile, chosen.kv_tile
        self.planner = Planner(inputs, variant, spec.geometry, sizes, over_keys=True)
        output, lse = empty_results(inputs)
        self.output, self.lse = memory_like(output), memory_like(lse)
        self.alone = brings_three(inputs, variant) and not self.planner.needed
        self.counted = chosen.grid == "dynamic"
        self.boxes = (
            Box.of(inputs.query, spec.packed, configs.ROWS, widths[0]),
            Box.of(inputs.key, spec.packed, chosen.kv_tile, widths[0]),
            Box.of(inputs.value, spec.packed, chosen.kv_tile, widths[1]),
            Box.of(output, spec.packed, configs.ROWS, widths[1] // chosen.output_parts),
        )
        options = {"num_warps": 4, "num_stages": chosen.stages, "launch_pdl": True}
        if chosen.programs > 1:
            options["maxnreg"] = chosen.launch_registers
        self.launch = Launch(
            attention_forward,
            {
                "HEADS_PER_KV_HEAD": spec.constants["HEADS_PER_KV_HEAD"],
                "HEAD_DIM": head_dim,
                "VALUE_DIM": value_dim,
                "CONSUMERS": chosen.consumers,
                "STAGES": chosen.stages,
                "QUERY_STAGES": chosen.query_stages,
                "CONSUMER_REGISTERS": chosen.consumer_registers,
                "PRODUCER_REGISTERS": chosen.producer_registers,
                "OVERLAP_SOFTMAX": chosen.overlap_softmax,
                "EXACT_MAX": chosen.exact_max,
                "SKIP_MASKED_TILE": chosen.skip_masked_tile,
            },
            options,
            meta=ForwardMeta,
        )
        queries, tile = spec.geometry.queries, chosen.query_tile
        heads = configs.heads_at_once(
            problem.masked, queries.heads * queries.sequences, queries.slots(tile),
            spec.multiprocessors, spec.constants["HEADS_PER_KV_HEAD"],
            2 * sum(widths) * spec.geometry.lengths()[1],
        )  # fmt: skip
        self.order = tile_scheduler.order_of(queries, tile, heads)
        self.programs = min(queries.programs(tile), chosen.programs * spec.multiprocessors)

    def __call__(self, inputs: Inputs, variant: Variant) -> tuple[Tensor, Tensor]:
        """Output and lse of a call like the one that was prepared."""
        output, lse = self.output(), self.lse()
        numbers = tile_scheduler.counter_of(self.device)
        plan, tensors = NO_PLAN, (*inputs[:3], output, lse, numbers)
        if not self.alone:
            plan = self.planner(inputs, variant)
            tensors = (*tensors_of(inputs, variant), output, lse, *plan.tensors, numbers)
        if not self.launch.relaunch(self.programs, self.spec.device, tensors):
            self._start(aligned(inputs), variant, output, lse, plan, numbers)
        return output, lse

    def _start(
        self, inputs: Inputs, variant: Variant, output: Tensor, lse: Tensor, plan: TileLists,
        numbers: Tensor,
    ) -> None:  # fmt: skip
        def arguments() -> tuple[Any, ...]:
            moved = (inputs.query, inputs.key, inputs.value, output)
            return (
                *(descriptor(t, box) for t, box in zip(moved, self.boxes, strict=True)),
                *self.spec.inputs(inputs),
                self.spec.rows(output, inputs),
                self.spec.numbers(lse, inputs),
                tile_scheduler.with_gluon_search(rules(inputs, variant, plan.argument())),
                inputs.sinks,
                tile_scheduler.TileOrder(
                    tensor_view.packed_origin if self.spec.packed else tensor_view.dense_origin,
                    numbers if self.counted else None,
                    *self.order,
                    numbers,
                ),
            )

        tensors = (*tensors_of(inputs, variant), output, lse, *plan.tensors, numbers)
        self.launch(self.programs, self.spec.device, tensors, arguments)


_forwards: dict[Any, HopperForward] = {}


def prepared(
    inputs: Inputs, variant: Variant, config: KernelConfig
) -> Callable[[Inputs, Variant], tuple[Tensor, Tensor]]:
    """The forward pass of calls like this one; call it with inputs like that one."""
    key = signature(inputs, variant), configs.OVERRIDE
    return remembered(_forwards, key, lambda: HopperForward(inputs, variant))


def forward(inputs: Inputs, variant: Variant, config: KernelConfig) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention`."""
    return prepared(inputs, variant, config)(inputs, variant)
