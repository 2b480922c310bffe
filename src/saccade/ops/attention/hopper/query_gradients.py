"""Gradients of queries by a Hopper kernel of their own, prepared: see `backward_d256_dq.py`."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.gpu import packing, tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.descriptors import Box, descriptor, width_of
from saccade.gpu.kernel_args import rules
from saccade.gpu.launcher import Launch
from saccade.gpu.planning import Planner
from saccade.ops.attention.hopper import configs
from saccade.ops.attention.hopper.backward import BackwardMeta
from saccade.ops.attention.hopper.backward_d256_dq import attention_backward_queries
from saccade.ops.attention.hopper.backward_memory import BackwardMemory
from saccade.ops.attention.triton.call_spec import CallSpec
from saccade.runtime.spec import Inputs, Variant


class Queries:
    """The pass of calls like one another, which comes after the one for keys and values."""

    def __init__(
        self, spec: CallSpec, inputs: Inputs, variant: Variant, rows: tuple[Tensor, Tensor],
        nan_safe: bool,
    ):  # fmt: skip
        self.spec = spec
        grad_output, of_query = rows
        chosen = configs.QuerySchedule()
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        widths = width_of(head_dim), width_of(value_dim)
        sizes = tile, kv_tile = chosen.query_tile, chosen.kv_tile
        self.planner = Planner(inputs, variant, spec.geometry, sizes, over_keys=True)
        self.boxes = (
            Box.of(inputs.query, spec.packed, configs.ROWS, widths[0]),
            Box.of(inputs.key, spec.packed, kv_tile, widths[0]),
            Box.of(inputs.value, spec.packed, kv_tile, widths[1]),
            Box.of(grad_output, spec.packed, configs.ROWS, widths[1]),
            Box.of(of_query, spec.packed, configs.ROWS, widths[0]),
        )
        constants = {
            "HEADS_PER_KV_HEAD": spec.constants["HEADS_PER_KV_HEAD"],
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "STAGES": chosen.stages,
            "NAN_SAFE": nan_safe,
            "CONSUMER_REGISTERS": chosen.consumer_registers,
            "PRODUCER_REGISTERS": chosen.producer_registers,
        }
        options = {"num_warps": 4, "num_stages": 1}
        self.launch = Launch(attention_backward_queries, constants, options, BackwardMeta)
        queries = spec.geometry.queries
        heads = configs.heads_at_once(
            variant.mask != "", queries.heads * queries.sequences, queries.slots(tile),
            spec.multiprocessors, spec.constants["HEADS_PER_KV_HEAD"],
            2 * sum(widths) * spec.geometry.lengths()[1],
        )  # fmt: skip
        self.order = tile_scheduler.order_of(queries, tile, heads)
        self.programs = min(queries.programs(tile), spec.multiprocessors)

    def __call__(
        self, inputs: Inputs, variant: Variant, grad_output: Tensor, memory: BackwardMemory,
        known: tuple[Tensor, ...], counters: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Write gradients of queries; raise the flag, if there is one, for NaN or inf."""
        spec, plan = self.spec, self.planner(inputs, variant)
        of_query, lse_log2, row_dot = memory.of_query, memory.lse_log2, memory.row_dot
        assert (
            lse_log2 is not None and row_dot is not None
        )  # the first kernel of the pass wrote them

        def arguments() -> tuple[Any, ...]:
            moved = (inputs.query, inputs.key, inputs.value, grad_output, of_query)
            return (
                *(descriptor(t, box) for t, box in zip(moved, self.boxes, strict=True)),
                *spec.inputs(inputs)[:2],
                spec.rows(of_query, inputs),
                spec.numbers(lse_log2, inputs),
                spec.numbers(row_dot, inputs),
                tile_scheduler.with_gluon_search(rules(inputs, variant, plan.argument())),
                tile_scheduler.TileOrder(
                    packing.packed_origin if spec.packed else tensor_view.dense_origin,
                    counters[0] if counters else None,
                    *self.order,
                    memory.flag,
                ),
            )

        self.launch(self.programs, spec.device, (*known, *plan.tensors, *counters), arguments)
