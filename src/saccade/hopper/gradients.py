"""Gradients by Hopper kernels: which kernels a backward pass starts, and in which order.

begin → backward → end                                  the fast form, and the one in turns
begin → backward → end → again, keys → again, queries   … where hidden rows may spoil something
begin → backward (without shares) → again, keys → portable queries          the ordered form
begin → backward_keys → backward_queries → again, keys → again, queries     above 128 channels
… → one portable pass for each bias that wants a gradient

What these kernels do not serve goes to the portable ones; `configs.backward_unsupported` says
why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.hopper import again, backward_rows, configs, counter, schedule, stretches
from saccade.hopper.backward import attention_backward
from saccade.hopper.backward_keys import attention_backward_keys
from saccade.hopper.backward_rows import Scratch, attention_backward_begin, attention_backward_end
from saccade.hopper.descriptors import Box, aligned, descriptor, width_of
from saccade.hopper.query_gradients import Queries
from saccade.kernels import tiles
from saccade.kernels.launch import Launch, Pointer, next_width
from saccade.kernels.places import ALIGNMENT
from saccade.kernels.softmax import LOG2_E
from saccade.portable import gradients as portable
from saccade.portable.arguments import (
    Geometry,
    mask_argument,
    refuse_missing_derivative,
    rules,
    signature,
    tensors_of,
    there_are,
    view,
)
from saccade.portable.backward_queries import attention_backward_queries
from saccade.portable.gradients import Results
from saccade.portable.kind import Kind, memory_like, remembered
from saccade.portable.pairs import Forward
from saccade.portable.planning import Planner
from saccade.prepare import strides_fit_tma
from saccade.problem import Config, Gradients, Inputs, Variant, empty_gradients

LONGEST_SIDE = 256  # of what TMA moves at once


def backward(
    inputs: Inputs,
    variant: Variant,
    config: Config,
    output: Tensor,
    lse: Tensor,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> Gradients:
    """Gradients of the inputs, and of the wanted tensors that the score captured."""
    if variant.score:
        refuse_missing_derivative(variant.score)
    problem = backward_problem(inputs, variant, deterministic)
    if configs.backward_unsupported(problem) is not None:
        return portable.backward(
            inputs, variant, config, output, lse, grad_output, grad_lse, wanted_tables,
            deterministic,
        )  # fmt: skip
    inputs, grad_output = aligned(inputs), readable(grad_output)
    statistics = torch.empty_like(lse), torch.empty_like(lse)
    results = Results(output, lse, grad_output, grad_lse, *statistics)
    strides = output.stride(), grad_output.stride(), lse.stride()
    strides += (None if grad_lse is None else grad_lse.stride(),)
    key = (signature(inputs, variant), strides, deterministic, configs.BACKWARD_OVERRIDE)
    prepared = remembered(_backwards, key, lambda: Backward(inputs, variant, results, problem))
    call = Call(prepared, inputs, variant, results, prepared.memory(inputs.query.device))
    found = call.run()
    if inputs.sinks is None and not wanted_tables:
        return found
    launches = portable.prepare(inputs, variant, config, deterministic)
    rest = portable.Call(inputs, variant, launches, results)
    tables = {place: rest.table(place, rest.known(), config) for place in wanted_tables}
    return found._replace(sinks=rest.sinks(), tables=tables)


def backward_problem(
    inputs: Inputs, variant: Variant, deterministic: bool
) -> configs.BackwardProblem:
    """What decides whether and how these kernels serve a backward pass."""
    head_width, value_width = (width_of(rows.shape[-1]) for rows in (inputs.query, inputs.value))
    lengths = Geometry.of(inputs).lengths()
    return configs.BackwardProblem(
        head_width, value_width, *lengths, variant.mask != "", deterministic,
        stretch=stretches.stretch_of(variant.mask), packed=inputs.cu_seqlens_q is not None,
        scored=variant.score != "",
    )  # fmt: skip


def readable(rows: Tensor) -> Tensor:
    """Rows as TMA can read them; copied where it could not (gradients of a sum have no strides)."""
    if strides_fit_tma(rows) and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)


class Memory(NamedTuple):
    """What the kernels of one pass write."""

    of_query: Tensor
    of_key: Tensor
    of_value: Tensor
    starts: Tensor  # what sums start at, by slot
    shares: Tensor | None  # of the gradients of queries, float32, by slot
    flag: Tensor | None
    turns: Tensor | None


class Backward:
    """The backward pass of one kind of call, prepared."""

    def __init__(
        self,
        inputs: Inputs,
        variant: Variant,
        results: Results,
        problem: configs.BackwardProblem,
    ):
        self.kind = kind = Kind.of(inputs, tiles.packed_program)
        head_dim, value_dim = inputs.query.shape[-1], inputs.value.shape[-1]
        self.width = width = problem.head_width
        self.schedule = chosen = configs.choose_backward(problem)
        self.ordered = configs.ordered(problem)
        apart = configs.apart(problem)
        self.in_turns = configs.in_turns(problem)
        self.tile = tile = chosen.query_tile
        self.careful = variant.mask != "" or kind.packed
        sizes = tile, chosen.kv_tile
        self.planner = Planner(inputs, variant, kind.geometry, sizes, over_keys=False)
        gradients = empty_gradients(inputs)[:3]
        self.gradients = tuple(map(memory_like, gradients))
        self.slots = kind.geometry.queries.programs(tile)
        self.boxes = self._boxes(inputs, results, *gradients[1:])
        scored = variant.score != "" or variant.scale <= 0
        self.factor = LOG2_E.value if scored else 1.0 / variant.scale
        rows = {"QUERY_TILE": tile, "HEAD_WIDTH": width}
        options = {"num_warps": 4, "num_stages": 1}
        widths = {"VALUE_DIM": value_dim, "VALUE_WIDTH": next_width(value_dim)}
        of_begin = {**widths, **rows, "KV_TILE": configs.BACKWARD_KV_TILE}
        self.begin = Launch(attention_backward_begin, of_begin, options)
        constants = {
            "HEADS_PER_KV_HEAD": kind.constants["HEADS_PER_KV_HEAD"],
            "HEAD_DIM": head_dim,
            "VALUE_DIM": value_dim,
            "STAGES": chosen.stages,
            "CAREFUL": self.careful,
            "CONSUMER_REGISTERS": chosen.consumer_registers,
            "PRODUCER_REGISTERS": chosen.producer_registers,
        }
        kernel = attention_backward_keys if apart else attention_backward
        self.main = Launch(kernel, constants, options)
        constants = {"HEAD_DIM": head_dim, **rows, "CAREFUL": self.careful}
        self.end = Launch(attention_backward_end, constants, options)
        call = inputs, variant
        self.again_keys = kind.launch(
            again.attention_backward_again_keys, "backward_keys", call, None
        )
        of_queries = again.attention_backward_again_queries
        if self.ordered and not apart:
            of_queries = attention_backward_queries
        self.queries = kind.launch(of_queries, "backward_queries", call, None)
        sizes = self.queries.constants["QUERY_TILE"], self.queries.constants["KV_TILE"]
        self.over_keys = Planner(inputs, variant, kind.geometry, sizes, over_keys=True)
        self.order = self._order(problem.query_len)
        total = kind.geometry.keys.programs(self.schedule.kv_tile)
        self.programs = min(total, kind.multiprocessors)
        self.own_queries = None
        if apart:
            self.own_queries = Queries(kind, inputs, variant, results, gradients[0], self.careful)

    def _boxes(
        self, inputs: Inputs, results: Results, of_key: Tensor, of_value: Tensor
    ) -> tuple[Box, ...]:
        """What TMA moves at once, in the kernel's order."""
        packed, width, tile = self.kind.packed, self.width, self.tile
        value_width = width_of(inputs.value.shape[-1])
        of_part = tile * width // backward_rows.PARTS.value
        return (
            Box.of(inputs.query, packed, tile, width),
            Box.of(inputs.key, packed, self.schedule.kv_tile, width),
            Box.of(inputs.value, packed, self.schedule.kv_tile, value_width),
            Box.of(results.grad_output, packed, tile, value_width),
            Box.plain(self.slots, 2 * tile, 1),
            Box.plain(
                self.slots * tile * width // LONGEST_SIDE, LONGEST_SIDE, of_part // LONGEST_SIDE
            ),
            Box.of(of_key, packed, configs.ROWS, width),
            Box.of(of_value, packed, configs.ROWS, value_width),
        )

    def _order(self, query_len: int) -> tuple[int, int, int]:
        """In which order the kernel takes tiles of keys."""
        of_query_head = 8 * self.width * query_len  # queries, gradients of outputs, float32 shares
        of_kv_head = of_query_head * self.kind.constants["HEADS_PER_KV_HEAD"]
        heads = (self.schedule.at_once_mb << 20) // max(of_kv_head, 1)
        keys = self.kind.geometry.keys
        if self.in_turns:
            slots = keys.slots(self.schedule.kv_tile)
            heads = configs.heads_in_turns(slots, self.kind.multiprocessors)
        return schedule.order_of(keys, self.schedule.kv_tile, heads)

    def memory(self, device: torch.device) -> Memory:
        """Memory for one pass."""
        of_query, of_key, of_value = (memory() for memory in self.gradients)
        numbers = {"dtype": torch.float32, "device": device}
        starts = torch.empty(self.slots, 2 * self.tile, **numbers)
        shares = None
        if not self.ordered:
            shares = torch.empty(self.slots * self.tile, self.width, **numbers)
        flag = torch.zeros((), dtype=torch.int32, device=device) if self.careful else None
        turns = None
        if self.in_turns:
            parts = self.slots * backward_rows.PARTS.value
            turns = torch.empty(parts, dtype=torch.int32, device=device)
        return Memory(of_query, of_key, of_value, starts, shares, flag, turns)


_backwards: dict[Any, Backward] = {}


class Call(NamedTuple):
    """One backward pass under way."""

    prepared: Backward
    inputs: Inputs
    variant: Variant
    results: Results
    memory: Memory

    def run(self) -> Gradients:
        """Start every kernel of the pass, but for sinks and tables."""
        prepared, memory = self.prepared, self.memory
        kind, slots = prepared.kind, prepared.slots
        known = (*tensors_of(self.inputs, self.variant), *there_are((*self.results, *memory)))
        prepared.begin(slots, kind.device, known, self._begin_arguments)
        plan = prepared.planner(self.inputs, self.variant)
        counters: tuple[Tensor, ...] = ()
        if prepared.schedule.grid == "dynamic":
            counters = (counter.counter_of(memory.starts.device),)
        prepared.main(
            prepared.programs, kind.device, (*known, *plan.tensors, *counters),
            lambda pointer: self._main_arguments(pointer, plan.argument(pointer), counters),
        )  # fmt: skip
        if memory.shares is not None:
            prepared.end(slots, kind.device, known, self._end_arguments)
        if prepared.own_queries is not None:
            prepared.own_queries(
                self.inputs, self.variant, self.results, (memory.of_query, memory.flag), known,
                counters,
            )  # fmt: skip
        if memory.flag is not None:
            programs = kind.geometry.keys.programs(prepared.again_keys.constants["KV_TILE"])
            prepared.again_keys(programs, kind.device, known, self._again_keys_arguments)
        self._start_queries(known)
        return Gradients(memory.of_query, memory.of_key, memory.of_value, None, {})

    def _start_queries(self, known: tuple[Tensor, ...]) -> None:
        """Gradients of queries by the portable pass: in the ordered form, or once more."""
        prepared, memory = self.prepared, self.memory
        launch = prepared.queries
        programs = prepared.kind.geometry.queries.programs(launch.constants["QUERY_TILE"])
        if prepared.ordered and prepared.own_queries is None:
            plan = prepared.over_keys(self.inputs, self.variant)
            tensors = (*known, *plan.tensors)
            launch(
                programs, prepared.kind.device, tensors,
                lambda pointer: self._queries_arguments(pointer, plan.argument(pointer)),
            )  # fmt: skip
        elif memory.flag is not None:
            launch(programs, prepared.kind.device, known, self._again_queries_arguments)

    def _begin_arguments(self, pointer: Pointer) -> tuple[Any, ...]:
        results, grad_lse = self.results, self.results.grad_lse
        return (
            self._rows(pointer, results.output),
            self._rows(pointer, results.grad_output),
            self._numbers(pointer, results.lse),
            None if grad_lse is None else self._numbers(pointer, grad_lse),
            self._numbers(pointer, results.lse_log2),
            self._numbers(pointer, results.row_dot),
            *self._whose_turn(pointer),
            self._scratch(pointer),
            pointer(self.memory.starts),
            self.prepared.factor,
        )

    def _main_arguments(
        self, pointer: Pointer, plan: tuple[Any, ...], counters: tuple[Tensor, ...]
    ) -> tuple[Any, ...]:
        prepared, inputs, memory = self.prepared, self.inputs, self.memory
        packed = prepared.kind.packed
        moved = (
            inputs.query, inputs.key, inputs.value, self.results.grad_output, memory.starts,
            memory.shares, memory.of_key, memory.of_value,
        )  # fmt: skip
        return (
            *(
                None if tensor is None else descriptor(pointer, tensor, box)
                for tensor, box in zip(moved, prepared.boxes, strict=True)
            ),
            *prepared.kind.inputs(pointer, inputs)[:2],
            self._of_keys(pointer, memory.of_key),
            self._of_keys(pointer, memory.of_value),
            schedule.with_own_walk(rules(inputs, self.variant, pointer, plan)),
            schedule.Schedule(
                tiles.packed_origin if packed else tiles.dense_origin,
                pointer(counters[0]) if counters else None,
                *prepared.order,
            ),
            self._scratch(pointer),
        )

    def _end_arguments(self, pointer: Pointer) -> tuple[Any, ...]:
        of_queries = self._rows(pointer, self.memory.of_query)
        return of_queries, self._scratch(pointer), self.variant.scale

    def _again_keys_arguments(self, pointer: Pointer) -> tuple[Any, ...]:
        of_key, of_value = self.memory[1:3]
        gradients = self._of_keys(pointer, of_key), self._of_keys(pointer, of_value)
        return self._flag(pointer), self._forward(pointer), *gradients, self._rules(pointer)

    def _queries_arguments(self, pointer: Pointer, plan: tuple[Any, ...]) -> tuple[Any, ...]:
        of_queries = self._rows(pointer, self.memory.of_query)
        changes = rules(self.inputs, self.variant, pointer, plan)
        return self._forward(pointer), of_queries, changes, None, None, None  # statistics are there

    def _again_queries_arguments(self, pointer: Pointer) -> tuple[Any, ...]:
        of_queries = self._rows(pointer, self.memory.of_query)
        return self._flag(pointer), self._forward(pointer), of_queries, self._rules(pointer)

    # ---- arguments that several kernels take ---------------------------------------------------

    def _rows(self, pointer: Pointer, rows: Tensor) -> Any:
        return self.prepared.kind.rows(pointer, rows, self.inputs)

    def _numbers(self, pointer: Pointer, numbers: Tensor) -> Any:
        return self.prepared.kind.numbers(pointer, numbers, self.inputs)

    def _of_keys(self, pointer: Pointer, rows: Tensor) -> Any:
        kind = self.prepared.kind
        return view(pointer, rows, kind.steps(rows), kind.geometry.keys, self.inputs.cu_seqlens_k)

    def _flag(self, pointer: Pointer) -> Any:
        assert self.memory.flag is not None  # else nothing is repeated
        return pointer(self.memory.flag)

    def _scratch(self, pointer: Pointer) -> Scratch:
        packed, memory = self.prepared.kind.packed, self.memory
        slot = backward_rows.packed_slot if packed else backward_rows.dense_slot
        found = (memory.shares, memory.flag, memory.turns)
        shares, flag, turns = (None if t is None else pointer(t) for t in found)
        return Scratch(slot, shares, flag, turns)

    def _whose_turn(self, pointer: Pointer) -> tuple[Any, Any]:
        """What `begin` finds the last tile of keys of a tile of queries by."""
        if not self.prepared.in_turns:
            return None, None
        keys = self.prepared.kind.inputs(pointer, self.inputs)[1]
        return keys, mask_argument(self.variant, pointer)

    def _forward(self, pointer: Pointer) -> Forward:
        return Forward(
            *self.prepared.kind.inputs(pointer, self.inputs),
            self._rows(pointer, self.results.grad_output),
            self._numbers(pointer, self.results.lse_log2),
            self._numbers(pointer, self.results.row_dot),
        )

    def _rules(self, pointer: Pointer) -> Any:
        changes = rules(self.inputs, self.variant, pointer)
        if not self.prepared.planner.needed:
            return changes
        return changes._replace(mask=changes.mask._replace(walk=again.every_tile))
