"""Gradients by Hopper kernels: which kernels a backward pass starts, and in which order.

begin → backward → end                                                        the usual form
residuals of the lse → begin → …                                  where the caller changes scores
begin → backward → end → NaN-safe keys → NaN-safe queries                     where pairs are hidden
begin → backward → add splits → end → …             where few kv heads leave programs without work
begin → backward (without partial sums) → NaN-safe keys → Triton's queries    the ordered form
begin → backward_keys → backward_queries → NaN-safe keys and queries          above 128 channels
… → one Triton pass for each bias that wants a gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import Box, descriptor
from saccade.gpu.kernel_args import mask_argument, rules, tensors_of, there_are, view
from saccade.gpu.signature import Number, sourced
from saccade.ops.attention.hopper import configs, dq_accumulate, nonfinite
from saccade.ops.attention.hopper.dq_accumulate import PARTS, BackwardScratch
from saccade.ops.attention.triton.backward_common import SavedForward
from saccade.ops.attention.triton.call_spec import CallSpec
from saccade.runtime.spec import Inputs, Variant

if TYPE_CHECKING:
    from saccade.ops.attention.hopper.host import BackwardLaunches, BackwardOfLengths

LONGEST_SIDE = 256  # of what TMA moves at once
SUM_TILE = 32  # rows of keys whose parts a program adds
QUERY_PASS = configs.QuerySchedule()


class BackwardInputs(NamedTuple):
    """What a backward pass takes beside the inputs: results of the forward pass, and gradients."""

    output: Tensor
    residual: Tensor | None
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None


class BackwardMemory(NamedTuple):
    """What is written in one pass; None where it is not needed."""

    of_query: Tensor
    of_key: Tensor
    of_value: Tensor
    starts: Tensor  # what sums start at, by slot
    row_lse: Tensor | None  # with row_dot: for Triton kernels, if some come after
    row_dot: Tensor | None
    lse_residual: Tensor | None  # what rounding took from the lse, where the caller changes scores
    dq_accumulate: Tensor | None  # of the gradients of queries, float32, by slot
    flag: Tensor | None  # whether hidden rows may have made nonfinite something
    semaphores: Tensor | None  # by part
    # float32, with a head for each program that a kv head's query heads are split over
    splits_of_key: Tensor | None
    splits_of_value: Tensor | None


class HopperBackwardCall(NamedTuple):
    """One backward pass under way."""

    prepared: BackwardOfLengths
    inputs: Inputs
    variant: Variant
    passed: BackwardInputs
    memory: BackwardMemory

    def run(self) -> None:
        """Start every kernel of the pass, but for sinks and tables."""
        prepared, memory, launches = self.prepared, self.memory, self.prepared.launches
        device, programs = prepared.spec.device, prepared.lengths.programs
        assert launches is not None
        brought = self.inputs[:3] if prepared.kind.alone else tensors_of(self.inputs, self.variant)
        known = (*brought, *there_are((*self.passed, *memory)))
        if launches.lse_residual is not None and programs.lse_residual is not None:
            arguments = self._residual_arguments
            launches.lse_residual(programs.lse_residual, device, known, arguments)
        launches.begin(programs.begin, device, known, self._begin_arguments)
        plan = launches.planner(self.inputs, self.variant)
        counters: tuple[Tensor, ...] = ()
        if prepared.lengths.schedule.grid == "dynamic":
            counters = (tile_scheduler.counter_of(self.inputs.query.device),)
        launches.main(
            programs.main, device, (*known, *plan.tensors, *counters),
            lambda: self._main_arguments(plan.argument(), counters),
        )  # fmt: skip
        if programs.add_splits is not None:
            launches.add_splits(programs.add_splits, device, known, self._splits_arguments)
        if programs.end is not None:
            launches.end(programs.end, device, known, self._end_arguments)
        if programs.query_pass is not None:
            self._start_query_pass(launches, programs.query_pass, known, counters)
        if launches.nan_safe_keys is not None and programs.nan_safe_keys is not None:
            arguments = self._nan_safe_keys_arguments
            launches.nan_safe_keys(programs.nan_safe_keys, device, known, arguments)
        if launches.queries is not None and programs.queries is not None:
            self._start_queries(launches, programs.queries, known)

    def _start_query_pass(
        self, launches: BackwardLaunches, programs: int, known: tuple[Tensor, ...],
        counters: tuple[Tensor, ...],
    ) -> None:  # fmt: skip
        """Gradients of queries above 128 channels; raises the flag, if there is one, for NaN or
        inf."""
        assert launches.query_pass is not None
        plan = launches.over_keys_apart(self.inputs, self.variant)
        launches.query_pass(
            programs, self.prepared.spec.device, (*known, *plan.tensors, *counters),
            lambda: self._query_pass_arguments(plan.argument(), counters),
        )  # fmt: skip

    def _start_queries(
        self, launches: BackwardLaunches, programs: int, known: tuple[Tensor, ...]
    ) -> None:
        """Gradients of queries by the Triton pass: in the ordered form, or once more."""
        kind, device = self.prepared.kind, self.prepared.spec.device
        assert launches.queries is not None
        if kind.ordered and not kind.apart:
            plan = launches.over_keys(self.inputs, self.variant)
            launches.queries(
                programs, device, (*known, *plan.tensors),
                lambda: self._queries_arguments(plan.argument()),
            )  # fmt: skip
        else:
            launches.queries(programs, device, known, self._nan_safe_queries_arguments)

    def _residual_arguments(self) -> tuple[Any, ...]:
        spec, inputs = self.spec, self.inputs
        assert self.memory.lse_residual is not None
        return (
            *spec.inputs(inputs)[:2],
            spec.numbers(self.passed.lse, inputs),
            spec.numbers(self.memory.lse_residual, inputs),
            self._rules(),
            inputs.sinks,
        )

    def _begin_arguments(self) -> tuple[Any, ...]:
        spec, inputs = self.spec, self.inputs
        output, residual, lse, grad_output, grad_lse = self.passed
        memory = self.memory
        of_rows = lse, grad_lse, memory.row_lse, memory.row_dot, memory.lse_residual
        return (
            spec.rows(output, inputs),
            None if residual is None else spec.rows(residual, inputs),
            spec.rows(grad_output, inputs),
            *(None if numbers is None else spec.numbers(numbers, inputs) for numbers in of_rows),
            *self._semaphore_of(spec),
            self._scratch(),
            memory.starts,
            self.prepared.kind.factor,
        )

    def _main_arguments(
        self, plan: tuple[Any, ...], counters: tuple[Tensor, ...]
    ) -> tuple[Any, ...]:
        prepared, inputs = self.prepared, self.inputs
        spec, numbers = self.spec, sourced(prepared.lengths.numbers)
        return (
            *self._moved(spec, numbers),
            *spec.inputs(inputs)[:2],
            *self._sums_of_keys(spec),
            tile_scheduler.with_gluon_search(rules(inputs, self.variant, plan)),
            tile_scheduler.TileOrder(
                tensor_view.packed_origin if spec.packed else tensor_view.dense_origin,
                counters[0] if counters else None,
                *numbers[:3],
            ),
            self._scratch(),
        )

    def _moved(self, spec: CallSpec, numbers: Sequence[Number]) -> tuple[Any, ...]:
        """What TMA moves, in the kernel's order."""
        prepared, inputs, memory = self.prepared, self.inputs, self.memory
        (width, value_width), tile = prepared.kind.widths, prepared.lengths.tile
        kv_tile, of_part = prepared.lengths.schedule.kv_tile, tile * width // PARTS.value

        def rows(tensor: Tensor, at_once: int, channels: int) -> Any:
            return descriptor(tensor, Box.of(spec.layout(tensor), spec.packed, at_once, channels))

        gradients: tuple[Any, Any] = None, None  # parts do not go by TMA
        if prepared.lengths.splits == 1:
            gradients = (
                rows(memory.of_key, configs.ROWS, width),
                rows(memory.of_value, configs.ROWS, value_width),
            )
        return (
            rows(inputs.query, tile, width),
            rows(inputs.key, kv_tile, width),
            rows(inputs.value, kv_tile, value_width),
            rows(self.passed.grad_output, tile, value_width),
            descriptor(
                memory.starts, Box.plain(numbers[3], 2 * tile, prepared.kind.rows_of_starts)
            ),
            None
            if memory.dq_accumulate is None
            else descriptor(
                memory.dq_accumulate, Box.plain(numbers[4], LONGEST_SIDE, of_part // LONGEST_SIDE)
            ),
            *gradients,
        )

    def _sums_of_keys(self, spec: CallSpec) -> tuple[Any, Any]:
        """Views of what the main kernel writes: gradients of keys and values, or their parts."""
        memory = self.memory
        if memory.splits_of_key is None or memory.splits_of_value is None:
            return self._gradients_of_keys(spec)

        def parts(rows: Tensor) -> Any:
            extent = spec.geometry.keys._replace(heads=spec.layout(rows).shape[1])
            return view(rows, spec.steps(rows), extent, self.inputs.cu_seqlens_k)

        return parts(memory.splits_of_key), parts(memory.splits_of_value)

    def _splits_arguments(self) -> tuple[Any, ...]:
        spec, splits = self.spec, sourced(self.prepared.lengths.numbers)[5]
        return *self._sums_of_keys(spec), *self._gradients_of_keys(spec), splits

    def _end_arguments(self) -> tuple[Any, ...]:
        of_queries = self.spec.rows(self.memory.of_query, self.inputs)
        return of_queries, self._scratch(), self.variant.scale

    def _nan_safe_keys_arguments(self) -> tuple[Any, ...]:
        spec = self.spec
        return self._flag(), self._forward(spec), *self._gradients_of_keys(spec), self._rules()

    def _queries_arguments(self, plan: tuple[Any, ...]) -> tuple[Any, ...]:
        spec = self.spec
        of_queries = spec.rows(self.memory.of_query, self.inputs)
        changes = rules(self.inputs, self.variant, plan)
        statistics_are_there = None, None, None, None
        return self._forward(spec), of_queries, changes, *statistics_are_there

    def _nan_safe_queries_arguments(self) -> tuple[Any, ...]:
        spec = self.spec
        of_queries = spec.rows(self.memory.of_query, self.inputs)
        return self._flag(), self._forward(spec), of_queries, self._rules()

    def _query_pass_arguments(
        self, plan: tuple[Any, ...], counters: tuple[Tensor, ...]
    ) -> tuple[Any, ...]:
        inputs, memory, spec = self.inputs, self.memory, self.spec
        # The first kernel of the pass wrote them.
        assert memory.row_lse is not None and memory.row_dot is not None
        width, value_width = self.prepared.kind.widths
        order = sourced(self.prepared.lengths.numbers)[-3:]
        sides = (
            (configs.ROWS, width), (QUERY_PASS.kv_tile, width), (QUERY_PASS.kv_tile, value_width),
            (configs.ROWS, value_width), (configs.ROWS, width),
        )  # fmt: skip
        moved = (*inputs[:3], self.passed.grad_output, memory.of_query)
        return (
            *(
                descriptor(rows, Box.of(spec.layout(rows), spec.packed, *side))
                for rows, side in zip(moved, sides, strict=True)
            ),
            *spec.inputs(inputs)[:2],
            spec.rows(memory.of_query, inputs),
            spec.numbers(memory.row_lse, inputs),
            spec.numbers(memory.row_dot, inputs),
            None if memory.lse_residual is None else spec.numbers(memory.lse_residual, inputs),
            tile_scheduler.with_gluon_search(rules(inputs, self.variant, plan)),
            tile_scheduler.TileOrder(
                tensor_view.packed_origin if spec.packed else tensor_view.dense_origin,
                counters[0] if counters else None,
                order[0],
                order[1],
                order[2],
                memory.flag,
            ),
        )

    # ---- arguments that several kernels take ---------------------------------------------------

    @property
    def spec(self) -> CallSpec:
        """The call's numbers, which know their places (see `Launch.of`): made once a kernel."""
        memory = self.memory
        tensors = (
            *self.inputs[:3], *there_are(self.passed), *memory[:3],
            *there_are(memory[4:7]), *there_are(memory[10:]),
        )  # fmt: skip
        return self.prepared.spec.sourced(sourced(self.prepared.lengths.numbers)[6:], tensors)

    def _gradients_of_keys(self, spec: CallSpec) -> tuple[Any, Any]:
        keys, offsets = spec.geometry.keys, self.inputs.cu_seqlens_k
        of_key, of_value = self.memory[1:3]
        return (
            view(of_key, spec.steps(of_key), keys, offsets),
            view(of_value, spec.steps(of_value), keys, offsets),
        )

    def _flag(self) -> Any:
        assert self.memory.flag is not None  # else nothing is repeated
        return self.memory.flag

    def _scratch(self) -> BackwardScratch:
        packed, memory = self.prepared.spec.packed, self.memory
        slot = dq_accumulate.packed_slot if packed else dq_accumulate.dense_slot
        lengths = self.prepared.lengths
        splits = sourced(lengths.numbers)[5] if lengths.splits > 1 else None
        return BackwardScratch(slot, memory.dq_accumulate, memory.flag, memory.semaphores, splits)

    def _semaphore_of(self, spec: CallSpec) -> tuple[Any, Any]:
        """What `begin` finds the last tile of keys of a tile of queries by."""
        if not self.prepared.lengths.in_key_order:
            return None, None
        keys = spec.inputs(self.inputs)[1]
        return keys, mask_argument(self.variant)

    def _forward(self, spec: CallSpec) -> SavedForward:
        inputs, statistics = self.inputs, self.memory[4:7]
        return SavedForward(
            *spec.inputs(inputs),
            spec.rows(self.passed.grad_output, inputs),
            *(None if numbers is None else spec.numbers(numbers, inputs) for numbers in statistics),
        )

    def _rules(self) -> Any:
        changes = rules(self.inputs, self.variant)
        if not self.prepared.kind.planned:
            return changes
        return changes._replace(mask=changes.mask._replace(tile_range=nonfinite.every_tile))
