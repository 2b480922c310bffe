"""Gradients by Hopper kernels: which kernels a backward pass starts, and in which order.

begin → backward → end                                  the fast form, and the one in turns
begin → backward → end → again, keys → again, queries   … where hidden rows may poison something
begin → backward (without partial sums) → again, keys → Triton queries          the ordered form
begin → backward_keys → backward_queries → again, keys → again, queries     above 128 channels
… → one Triton pass for each bias that wants a gradient

What these kernels do not serve goes to Triton's; `configs.backward_unsupported` says
why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import packing, tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.descriptors import Box, aligned, descriptor, width_of
from saccade.gpu.kernel_args import (
    brings_three,
    mask_argument,
    rules,
    signature,
    tensors_of,
    there_are,
    view,
)
from saccade.gpu.launcher import Launch, next_width
from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.planning import Planner
from saccade.gpu.signature import ALIGNMENT
from saccade.ops.attention.hopper import configs, nonfinite, preprocess
from saccade.ops.attention.hopper.backward import BackwardMeta, attention_backward
from saccade.ops.attention.hopper.backward_d256_dkdv import attention_backward_keys
from saccade.ops.attention.hopper.backward_memory import BackwardInputs, BackwardMemory, Makers
from saccade.ops.attention.hopper.configs import backward_problem
from saccade.ops.attention.hopper.preprocess import (
    BackwardScratch,
    attention_backward_begin,
    attention_backward_end,
)
from saccade.ops.attention.hopper.query_gradients import Queries
from saccade.ops.attention.triton import gradients as triton_gradients
from saccade.ops.attention.triton.backward_common import SavedForward
from saccade.ops.attention.triton.backward_dq import attention_backward_queries
from saccade.ops.attention.triton.call_spec import CallSpec, remembered
from saccade.ops.attention.triton.gradients import ForwardResults, refuse_unordered
from saccade.runtime.spec import Gradients, Inputs, KernelConfig, Variant, empty_gradients
from saccade.runtime.validation import strides_fit_tma

LONGEST_SIDE = 256  # of what TMA moves at once


def backward(
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> Gradients:
    """Gradients of the inputs, and of the wanted tensors that the score captured."""
    if deterministic and wanted_tables:
        refuse_unordered(variant, wanted_tables)
    if grad_output.data_ptr() % ALIGNMENT:  # TMA could not read it
        grad_output = grad_output.clone(memory_format=torch.contiguous_format)
    key = (
        signature(inputs, variant), output.stride(), lse.stride(), grad_output.stride(),
        None if grad_lse is None else grad_lse.stride(), len(wanted_tables) > 0, deterministic,
        configs.BACKWARD_OVERRIDE,
    )  # fmt: skip
    given = output, lse, grad_output, grad_lse, wanted_tables, deterministic

    def prepare() -> Backward:
        problem = backward_problem(inputs, variant, deterministic)
        call = aligned(inputs), variant, lse, grad_output
        return Backward(*call, problem, len(wanted_tables) > 0)

    prepared = remembered(_backwards, key, prepare)
    return prepared(inputs, variant, config, *given)


class Backward:
    """The backward pass of calls like one another, prepared."""

    def __init__(
        self,
        inputs: Inputs,
        variant: Variant,
        lse: Tensor,
        grad_output: Tensor,
        problem: configs.BackwardProblem,
        wants_tables: bool,
    ):
        self.copies = not strides_fit_tma(grad_output)  # gradients of a sum have no strides
        if self.copies:
            grad_output = torch.empty(grad_output.shape, dtype=grad_output.dtype, device="meta")
        self.spec = spec = CallSpec.of(inputs, packing.packed_program)
        self.alone = brings_three(inputs, variant)
        self.nan_safe = variant.mask != "" or spec.packed
        self.rest = inputs.sinks is not None or wants_tables
        self.ordered, self.in_key_order = configs.ordered(problem), configs.in_key_order(problem)
        self.apart = configs.apart(problem)
        self.schedule = chosen = configs.choose_backward(problem)
        self.width, self.tile = width, tile = problem.head_width, chosen.query_tile
        self.slots = spec.geometry.queries.programs(tile)
        sizes = tile, chosen.kv_tile
        self.planner = Planner(inputs, variant, spec.geometry, sizes, over_keys=False)
        gradients = empty_gradients(inputs)[:3]
        self.boxes = self._boxes(inputs, grad_output, *gradients[1:])
        self.memory = Makers.of(
            gradients, lse, self.slots, (tile, width), dq_accumulate=not self.ordered,
            by_triton=self.nan_safe or self.ordered or self.rest, flag=self.nan_safe,
            semaphores=self.in_key_order,
        )  # fmt: skip
        scored = variant.score != "" or variant.scale <= 0
        self.factor = LOG2_E.value if scored else 1.0 / variant.scale
        self.begin, self.main, self.end = self._launches(inputs)
        call = inputs, variant
        self.repeat_keys = spec.launch(
            nonfinite.attention_backward_nan_safe_keys, "backward_keys", call, None
        )
        of_queries: Any = nonfinite.attention_backward_nan_safe_queries
        more: dict[str, Any] = {}
        if self.ordered and not self.apart:
            of_queries, more = attention_backward_queries, {"CHAINED": False}
        self.queries = spec.launch(of_queries, "backward_queries", call, None, **more)
        sizes = self.queries.constants["QUERY_TILE"], self.queries.constants["KV_TILE"]
        self.over_keys = Planner(inputs, variant, spec.geometry, sizes, over_keys=True)
        self.order = self._order(problem.query_len)
        total = spec.geometry.keys.programs(self.schedule.kv_tile)
        self.programs = min(total, spec.multiprocessors)
        self.own_queries = None
        if self.apart:
            rows = grad_output, gradients[0]
            self.own_queries = Queries(spec, inputs, variant, rows, self.nan_safe)

    def _launches(self, inputs: Inputs) -> tuple[Launch, Launch, Launch]:
        """The kernels that are Hopper's own."""
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        values = {"VALUE_DIM": value_dim}
        rows = {"QUERY_TILE": self.tile, "HEAD_WIDTH": self.width}
        of_begin = {"VALUE_WIDTH": next_width(value_dim), "KV_TILE": configs.BACKWARD_KV_TILE}
        of_main = {
            "HEADS_PER_KV_HEAD": self.spec.constants["HEADS_PER_KV_HEAD"],
            "HEAD_DIM": head_dim,
            "STAGES": self.schedule.stages,
            "NAN_SAFE": self.nan_safe,
            "CONSUMER_REGISTERS": self.schedule.consumer_registers,
            "PRODUCER_REGISTERS": self.schedule.producer_registers,
        }
        of_end = {"HEAD_DIM": head_dim, "NAN_SAFE": self.nan_safe}
        kernel = attention_backward_keys if self.apart else attention_backward
        options = {"num_warps": 4, "num_stages": 1}
        return (
            Launch(attention_backward_begin, {**values, **rows, **of_begin}, options),
            Launch(kernel, {**values, **of_main}, options, BackwardMeta),
            Launch(attention_backward_end, {**rows, **of_end}, options),
        )

    def _boxes(
        self, inputs: Inputs, grad_output: Tensor, of_key: Tensor, of_value: Tensor
    ) -> tuple[Box, ...]:
        """What TMA moves at once, in the kernel's order."""
        packed, width, tile = self.spec.packed, self.width, self.tile
        value_width = width_of(inputs.value.shape[-1])
        of_part = tile * width // preprocess.PARTS.value
        return (
            Box.of(inputs.query, packed, tile, width),
            Box.of(inputs.key, packed, self.schedule.kv_tile, width),
            Box.of(inputs.value, packed, self.schedule.kv_tile, value_width),
            Box.of(grad_output, packed, tile, value_width),
            Box.plain(self.slots, 2 * tile, 1),
            Box.plain(
                self.slots * tile * width // LONGEST_SIDE, LONGEST_SIDE, of_part // LONGEST_SIDE
            ),
            Box.of(of_key, packed, configs.ROWS, width),
            Box.of(of_value, packed, configs.ROWS, value_width),
        )

    def _order(self, query_len: int) -> tuple[int, int, int]:
        """In which order the kernel takes tiles of keys."""
        of_query_head = (
            8 * self.width * query_len
        )  # queries, gradients of outputs, float32 partial sums
        of_kv_head = of_query_head * self.spec.constants["HEADS_PER_KV_HEAD"]
        heads = (self.schedule.at_once_mb << 20) // max(of_kv_head, 1)
        keys = self.spec.geometry.keys
        if self.in_key_order:
            slots = keys.slots(self.schedule.kv_tile)
            heads = configs.heads_in_key_order(slots, self.spec.multiprocessors)
        return tile_scheduler.order_of(keys, self.schedule.kv_tile, heads)

    def __call__(
        self,
        inputs: Inputs,
        variant: Variant,
        config: KernelConfig,
        output: Tensor,
        lse: Tensor,
        grad_output: Tensor,
        grad_lse: Tensor | None,
        wanted_tables: Sequence[int],
        deterministic: bool,
    ) -> Gradients:
        """As `backward`, for calls like this one."""
        if self.copies:
            grad_output = grad_output.clone(memory_format=torch.contiguous_format)
        inputs, memory = aligned(inputs), self.memory()
        given = BackwardInputs(output, lse, grad_output, grad_lse)
        HopperBackwardCall(self, inputs, variant, given, memory).run()
        found = Gradients(memory.of_query, memory.of_key, memory.of_value, None, {})
        if not self.rest:
            return found
        launches = triton_gradients.prepare(inputs, variant, config, deterministic)
        assert memory.lse_log2 is not None and memory.row_dot is not None
        results = ForwardResults(*given, memory.lse_log2, memory.row_dot)
        rest = triton_gradients.TritonBackwardCall(inputs, variant, launches, results)
        tables = {
            position: rest.table(position, rest.known(), config) for position in wanted_tables
        }
        return found._replace(sinks=rest.sinks(), tables=tables)


_backwards: dict[Any, Backward] = {}


class HopperBackwardCall(NamedTuple):
    """One backward pass under way."""

    prepared: Backward
    inputs: Inputs
    variant: Variant
    given: BackwardInputs
    memory: BackwardMemory

    def run(self) -> None:
        """Start every kernel of the pass, but for sinks and tables."""
        prepared, memory = self.prepared, self.memory
        spec, slots = prepared.spec, prepared.slots
        brought = self.inputs[:3] if prepared.alone else tensors_of(self.inputs, self.variant)
        known = (*brought, *there_are((*self.given, *memory)))
        prepared.begin(slots, spec.device, known, self._begin_arguments)
        plan = prepared.planner(self.inputs, self.variant)
        counters: tuple[Tensor, ...] = ()
        if prepared.schedule.grid == "dynamic":
            counters = (tile_scheduler.counter_of(memory.starts.device),)
        prepared.main(
            prepared.programs, spec.device, (*known, *plan.tensors, *counters),
            lambda: self._main_arguments(plan.argument(), counters),
        )  # fmt: skip
        if memory.dq_accumulate is not None:
            prepared.end(slots, spec.device, known, self._end_arguments)
        if prepared.own_queries is not None:
            prepared.own_queries(
                self.inputs, self.variant, self.given.grad_output, memory, known, counters
            )
        if memory.flag is not None:
            programs = spec.geometry.keys.programs(prepared.repeat_keys.constants["KV_TILE"])
            prepared.repeat_keys(programs, spec.device, known, self._again_keys_arguments)
        self._start_queries(known)

    def _start_queries(self, known: tuple[Tensor, ...]) -> None:
        """Gradients of queries by the Triton pass: in the ordered form, or once more."""
        prepared, memory = self.prepared, self.memory
        launch = prepared.queries
        programs = prepared.spec.geometry.queries.programs(launch.constants["QUERY_TILE"])
        if prepared.ordered and prepared.own_queries is None:
            plan = prepared.over_keys(self.inputs, self.variant)
            tensors = (*known, *plan.tensors)
            launch(
                programs, prepared.spec.device, tensors,
                lambda: self._queries_arguments(plan.argument()),
            )  # fmt: skip
        elif memory.flag is not None:
            launch(programs, prepared.spec.device, known, self._again_queries_arguments)

    def _begin_arguments(self) -> tuple[Any, ...]:
        output, lse, grad_output, grad_lse = self.given
        return (
            self._rows(output),
            self._rows(grad_output),
            self._numbers(lse),
            self._numbers(grad_lse),
            self._numbers(self.memory.lse_log2),
            self._numbers(self.memory.row_dot),
            *self._semaphore_of(),
            self._scratch(),
            self.memory.starts,
            self.prepared.factor,
        )

    def _main_arguments(
        self, plan: tuple[Any, ...], counters: tuple[Tensor, ...]
    ) -> tuple[Any, ...]:
        prepared, inputs, memory = self.prepared, self.inputs, self.memory
        packed = prepared.spec.packed
        moved = (
            inputs.query, inputs.key, inputs.value, self.given.grad_output, memory.starts,
            memory.dq_accumulate, memory.of_key, memory.of_value,
        )  # fmt: skip
        return (
            *(
                None if tensor is None else descriptor(tensor, box)
                for tensor, box in zip(moved, prepared.boxes, strict=True)
            ),
            *prepared.spec.inputs(inputs)[:2],
            self._of_keys(memory.of_key),
            self._of_keys(memory.of_value),
            tile_scheduler.with_gluon_search(rules(inputs, self.variant, plan)),
            tile_scheduler.TileOrder(
                packing.packed_origin if packed else tensor_view.dense_origin,
                counters[0] if counters else None,
                *prepared.order,
            ),
            self._scratch(),
        )

    def _end_arguments(self) -> tuple[Any, ...]:
        of_queries = self._rows(self.memory.of_query)
        return of_queries, self._scratch(), self.variant.scale

    def _again_keys_arguments(self) -> tuple[Any, ...]:
        of_key, of_value = self.memory[1:3]
        gradients = self._of_keys(of_key), self._of_keys(of_value)
        return self._flag(), self._forward(), *gradients, self._rules()

    def _queries_arguments(self, plan: tuple[Any, ...]) -> tuple[Any, ...]:
        of_queries = self._rows(self.memory.of_query)
        changes = rules(self.inputs, self.variant, plan)
        return self._forward(), of_queries, changes, None, None, None  # statistics are there

    def _again_queries_arguments(self) -> tuple[Any, ...]:
        of_queries = self._rows(self.memory.of_query)
        return self._flag(), self._forward(), of_queries, self._rules()

    # ---- arguments that several kernels take ---------------------------------------------------

    def _rows(self, rows: Tensor) -> Any:
        return self.prepared.spec.rows(rows, self.inputs)

    def _numbers(self, numbers: Tensor | None) -> Any:
        if numbers is None:
            return None
        return self.prepared.spec.numbers(numbers, self.inputs)

    def _of_keys(self, rows: Tensor) -> Any:
        spec = self.prepared.spec
        return view(rows, spec.steps(rows), spec.geometry.keys, self.inputs.cu_seqlens_k)

    def _flag(self) -> Any:
        assert self.memory.flag is not None  # else nothing is repeated
        return self.memory.flag

    def _scratch(self) -> BackwardScratch:
        packed, memory = self.prepared.spec.packed, self.memory
        slot = preprocess.packed_slot if packed else preprocess.dense_slot
        return BackwardScratch(slot, memory.dq_accumulate, memory.flag, memory.semaphores)

    def _semaphore_of(self) -> tuple[Any, Any]:
        """What `begin` finds the last tile of keys of a tile of queries by."""
        if not self.prepared.in_key_order:
            return None, None
        keys = self.prepared.spec.inputs(self.inputs)[1]
        return keys, mask_argument(self.variant)

    def _forward(self) -> SavedForward:
        return SavedForward(
            *self.prepared.spec.inputs(self.inputs),
            self._rows(self.given.grad_output),
            self._numbers(self.memory.lse_log2),
            self._numbers(self.memory.row_dot),
        )

    def _rules(self) -> Any:
        changes = rules(self.inputs, self.variant)
        if not self.prepared.planner.needed:
            return changes
        return changes._replace(mask=changes.mask._replace(tile_range=nonfinite.every_tile))
