"""Gradients by Hopper kernels: which kernels a backward pass starts, and in which order.

begin → backward → end                                                        the usual form
begin → backward → end → NaN-safe keys → NaN-safe queries                     where pairs are hidden
begin → backward (without partial sums) → NaN-safe keys → Triton's queries    the ordered form
begin → backward_keys → backward_queries → NaN-safe keys and queries          above 128 channels
… → one Triton pass for each bias that wants a gradient
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import Box, aligned, descriptor, width_of
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
from saccade.ops.attention.hopper import backward_d256_dq, configs, dq_accumulate, nonfinite
from saccade.ops.attention.hopper.backward import BackwardMeta, attention_backward
from saccade.ops.attention.hopper.backward_d256 import attention_backward_keys
from saccade.ops.attention.hopper.configs import backward_problem
from saccade.ops.attention.hopper.dq_accumulate import (
    PARTS,
    BackwardScratch,
    attention_backward_begin,
    attention_backward_end,
)
from saccade.ops.attention.triton import host as triton_host
from saccade.ops.attention.triton.backward_common import SavedForward
from saccade.ops.attention.triton.backward_dq import attention_backward_queries
from saccade.ops.attention.triton.call_spec import CallSpec, memory_like, remembered
from saccade.runtime.spec import Gradients, Inputs, KernelConfig, Variant, empty_gradients
from saccade.runtime.validation import strides_fit_tma

LONGEST_SIDE = 256  # of what TMA moves at once


class BackwardInputs(NamedTuple):
    """What a backward pass takes beside the inputs: results of the forward pass, and gradients."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None


class BackwardMemory(NamedTuple):
    """What is written in one pass; None where it is not needed."""

    of_query: Tensor
    of_key: Tensor
    of_value: Tensor
    starts: Tensor  # what sums start at, by slot
    lse_log2: Tensor | None  # with row_dot: for Triton kernels, if some come after
    row_dot: Tensor | None
    dq_accumulate: Tensor | None  # of the gradients of queries, float32, by slot
    flag: Tensor | None  # whether hidden rows may have made nonfinite something
    semaphores: Tensor | None  # by part


def numbers_beside(beside: Tensor, dtype: torch.dtype, *shape: int) -> Callable[[], Tensor]:
    """What makes a contiguous tensor on another one's device."""
    strides = torch.empty(shape, device="meta").stride()
    return partial(torch.empty_strided, shape, strides, dtype=dtype, device=beside.device)


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
        triton_host.refuse_unordered(variant, wanted_tables)
    if grad_output.data_ptr() % ALIGNMENT:  # TMA could not read it
        grad_output = grad_output.clone(memory_format=torch.contiguous_format)
    key = (
        signature(inputs, variant), output.stride(), lse.stride(), grad_output.stride(),
        None if grad_lse is None else grad_lse.stride(), len(wanted_tables) > 0, deterministic,
        configs.BACKWARD_OVERRIDE,
    )  # fmt: skip

    def prepare() -> HopperBackward:
        problem = backward_problem(inputs, variant, deterministic)
        call = aligned(inputs), variant, lse, grad_output
        return HopperBackward(*call, problem, len(wanted_tables) > 0)

    prepared = remembered(_backwards, key, prepare)
    passed = BackwardInputs(output, lse, grad_output, grad_lse)
    return prepared(inputs, variant, config, passed, wanted_tables, deterministic)


class HopperBackward:
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
        self.spec = spec = CallSpec.of(inputs, tensor_view.packed_program)
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
        slots, by_triton = self.slots, self.nan_safe or self.ordered or self.rest
        statistics = memory_like(lse) if by_triton else None
        single, whole = torch.float32, torch.int32
        self.makers = (  # of BackwardMemory, in its order
            *map(memory_like, gradients),
            numbers_beside(lse, single, slots, 2 * tile),
            statistics,
            statistics,
            None if self.ordered else numbers_beside(lse, single, slots * tile, width),
            numbers_beside(lse, whole) if self.nan_safe else None,
            numbers_beside(lse, whole, slots * PARTS.value) if self.in_key_order else None,
        )
        scored = variant.score != "" or variant.scale <= 0
        self.factor = LOG2_E.value if scored else 1.0 / variant.scale
        self.begin, self.main, self.end = self._launches(inputs)
        call = inputs, variant
        self.nan_safe_keys = spec.launch(
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
        self.query_pass = None
        if self.apart:
            rows = grad_output, gradients[0]
            self.query_pass = WideQueryPass(spec, inputs, variant, rows, self.nan_safe)

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
        of_part = tile * width // PARTS.value
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
        passed: BackwardInputs,
        wanted_tables: Sequence[int],
        deterministic: bool,
    ) -> Gradients:
        """Gradients of a call like the one that was prepared; see `backward`."""
        if self.copies:
            copy = passed.grad_output.clone(memory_format=torch.contiguous_format)
            passed = passed._replace(grad_output=copy)
        made: Any = [None if make is None else make() for make in self.makers]
        inputs, memory = aligned(inputs), BackwardMemory(*made)
        HopperBackwardCall(self, inputs, variant, passed, memory).run()
        found = Gradients(memory.of_query, memory.of_key, memory.of_value, None, {})
        if not self.rest:
            return found
        launches = triton_host.prepare(inputs, variant, config, deterministic)
        assert memory.lse_log2 is not None and memory.row_dot is not None
        results = triton_host.ForwardResults(*passed, memory.lse_log2, memory.row_dot)
        rest = triton_host.TritonBackwardCall(inputs, variant, launches, results)
        tables = {
            position: rest.table(position, rest.known(), config) for position in wanted_tables
        }
        return found._replace(sinks=rest.sinks(), tables=tables)


_backwards: dict[Any, HopperBackward] = {}


class HopperBackwardCall(NamedTuple):
    """One backward pass under way."""

    prepared: HopperBackward
    inputs: Inputs
    variant: Variant
    passed: BackwardInputs
    memory: BackwardMemory

    def run(self) -> None:
        """Start every kernel of the pass, but for sinks and tables."""
        prepared, memory = self.prepared, self.memory
        spec, slots = prepared.spec, prepared.slots
        brought = self.inputs[:3] if prepared.alone else tensors_of(self.inputs, self.variant)
        known = (*brought, *there_are((*self.passed, *memory)))
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
        if prepared.query_pass is not None:
            prepared.query_pass(
                self.inputs, self.variant, self.passed.grad_output, memory, known, counters
            )
        if memory.flag is not None:
            programs = spec.geometry.keys.programs(prepared.nan_safe_keys.constants["KV_TILE"])
            prepared.nan_safe_keys(programs, spec.device, known, self._nan_safe_keys_arguments)
        self._start_queries(known)

    def _start_queries(self, known: tuple[Tensor, ...]) -> None:
        """Gradients of queries by the Triton pass: in the ordered form, or once more."""
        prepared, memory = self.prepared, self.memory
        launch = prepared.queries
        programs = prepared.spec.geometry.queries.programs(launch.constants["QUERY_TILE"])
        if prepared.ordered and prepared.query_pass is None:
            plan = prepared.over_keys(self.inputs, self.variant)
            tensors = (*known, *plan.tensors)
            launch(
                programs, prepared.spec.device, tensors,
                lambda: self._queries_arguments(plan.argument()),
            )  # fmt: skip
        elif memory.flag is not None:
            launch(programs, prepared.spec.device, known, self._nan_safe_queries_arguments)

    def _begin_arguments(self) -> tuple[Any, ...]:
        output, lse, grad_output, grad_lse = self.passed
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
            inputs.query, inputs.key, inputs.value, self.passed.grad_output, memory.starts,
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
                tensor_view.packed_origin if packed else tensor_view.dense_origin,
                counters[0] if counters else None,
                *prepared.order,
            ),
            self._scratch(),
        )

    def _end_arguments(self) -> tuple[Any, ...]:
        of_queries = self._rows(self.memory.of_query)
        return of_queries, self._scratch(), self.variant.scale

    def _nan_safe_keys_arguments(self) -> tuple[Any, ...]:
        of_key, of_value = self.memory[1:3]
        gradients = self._of_keys(of_key), self._of_keys(of_value)
        return self._flag(), self._forward(), *gradients, self._rules()

    def _queries_arguments(self, plan: tuple[Any, ...]) -> tuple[Any, ...]:
        of_queries = self._rows(self.memory.of_query)
        changes = rules(self.inputs, self.variant, plan)
        return self._forward(), of_queries, changes, None, None, None  # statistics are there

    def _nan_safe_queries_arguments(self) -> tuple[Any, ...]:
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
        slot = dq_accumulate.packed_slot if packed else dq_accumulate.dense_slot
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
            self._rows(self.passed.grad_output),
            self._numbers(self.memory.lse_log2),
            self._numbers(self.memory.row_dot),
        )

    def _rules(self) -> Any:
        changes = rules(self.inputs, self.variant)
        if not self.prepared.planner.needed:
            return changes
        return changes._replace(mask=changes.mask._replace(tile_range=nonfinite.every_tile))


# ---- gradients of queries above 128 channels, as a pass of their own -----------------------------


class WideQueryPass:
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
        self.launch = Launch(
            backward_d256_dq.attention_backward_queries, constants, options, BackwardMeta
        )
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
                    tensor_view.packed_origin if spec.packed else tensor_view.dense_origin,
                    counters[0] if counters else None,
                    *self.order,
                    memory.flag,
                ),
            )

        self.launch(self.programs, spec.device, (*known, *plan.tensors, *counters), arguments)
