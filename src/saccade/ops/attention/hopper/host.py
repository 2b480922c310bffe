"""Attention by Hopper kernels: what is prepared for a call on GPUs of capability 9.0.

Once for calls that are alike but for their lengths, then, with less to do, for those of the same
lengths, as in `saccade.ops.attention.triton.host`. Which kernels a backward pass starts is in
`saccade.ops.attention.hopper.gradients`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import Box, aligned, descriptor, readable, width_of
from saccade.gpu.kernel_args import (
    Geometry,
    brings_three,
    changes_scores,
    mask_functions,
    rules,
    signature,
    tensors_of,
    there_are,
)
from saccade.gpu.launcher import (
    Launch,
    compile_ahead,
    compile_side_by_side,
    current_device,
    next_width,
)
from saccade.gpu.planning import NO_PLAN, Planner, TileLists
from saccade.gpu.recording import Lengths, PassFamily, RecordedPass, tensors_in
from saccade.gpu.signature import sourced
from saccade.ops.attention.hopper import backward_d256, configs, nonfinite
from saccade.ops.attention.hopper.backward import BackwardMeta, attention_backward
from saccade.ops.attention.hopper.backward_d256 import attention_backward_keys
from saccade.ops.attention.hopper.backward_lengths import BackwardLengths
from saccade.ops.attention.hopper.configs import backward_problem, kernel_problem
from saccade.ops.attention.hopper.dq_accumulate import (
    attention_backward_add_splits,
    attention_backward_begin,
    attention_backward_end,
)
from saccade.ops.attention.hopper.forward import ForwardMeta, attention_forward
from saccade.ops.attention.hopper.gradients import (
    QUERY_PASS,
    SUM_TILE,
    BackwardInputs,
    BackwardMemory,
    HopperBackwardCall,
)
from saccade.ops.attention.triton import host as triton_host
from saccade.ops.attention.triton.backward_dq import attention_backward_queries
from saccade.ops.attention.triton.call_spec import (
    CallSpec,
    laid_numbers,
    lengths_of,
    numbers_of,
    remembered,
    results_memory,
    results_to_come,
)
from saccade.ops.attention.triton.recorded_forward import RecordedForward, Tensors
from saccade.runtime.spec import Gradients, Inputs, KernelConfig, Results, Variant, in_order_of

Forward = Callable[[Inputs, Variant], Results]
Plan = Callable[[Inputs, Variant], TileLists]
NAMES = ("HEADS_PER_KV_HEAD", "HEAD_DIM", "VALUE_DIM")  # of constants of all calls


class HopperForward:
    """The forward pass of calls that are alike but for their lengths, prepared."""

    def __init__(self, inputs: Inputs, variant: Variant):
        self.spec = CallSpec.of(inputs, tensor_view.packed_program)
        self.problem = kernel_problem(inputs, variant)
        self.planned = variant.mask != "" and mask_functions(variant.mask).spans_read > 0
        self.alone = brings_three(inputs, variant) and not self.planned
        self.launches: dict[configs.KernelSchedule, Launch] = {}
        self.families: dict[configs.KernelSchedule, PassFamily] = {}
        self.compiled: set[Any] = set()  # forms of its kernel that were, beside those that plan

    def __call__(self, inputs: Inputs, variant: Variant) -> Results:
        """All results of a call like the one that was prepared."""
        inputs = aligned(inputs)  # copies may lie otherwise
        return self._of_lengths(inputs, variant)(inputs, variant)

    def of_layout(self, inputs: Inputs, variant: Variant) -> Forward:
        """The pass of calls that lie as these and capture no tensor."""
        of_lengths = self._of_lengths(inputs, variant)
        again_by, memory = of_lengths.recorded, of_lengths.memory
        brought, override = tensors_in(inputs), configs.OVERRIDE

        def forward(inputs: Inputs, variant: Variant) -> Results:
            written = again_by.again(brought(inputs)) if configs.OVERRIDE is override else None
            return self(inputs, variant) if written is None else memory.results(written, inputs)

        return forward

    def _of_lengths(self, inputs: Inputs, variant: Variant) -> HopperRecordedForward:
        query, key, value, _, _, offsets, *_ = inputs
        lengths = (  # as `lengths_of`, in the way of every call
            self, query.shape, key.shape, query.stride(), key.stride(), value.stride(),
            None if offsets is None else offsets.shape, configs.OVERRIDE,
            configs.ends_align(inputs),  # which packed calls of equal lengths may do or not
        )  # fmt: skip
        found = _lengths.get(lengths)
        if found is None:
            found = remembered(
                _lengths, lengths, lambda: HopperRecordedForward(self, inputs, variant)
            )
        return found

    def launch(self, chosen: configs.KernelSchedule) -> Launch:
        """The kernel by a schedule."""
        found = self.launches.get(chosen)
        if found is not None:
            return found
        options = {"num_warps": 4, "num_stages": chosen.stages, "launch_pdl": True}
        if chosen.programs > 1:
            options["maxnreg"] = chosen.launch_registers
        constants = {name: self.spec.constants[name] for name in NAMES}
        constants |= {
            "CONSUMERS": chosen.consumers,
            "STAGES": chosen.stages,
            "QUERY_STAGES": chosen.query_stages,
            "CONSUMER_REGISTERS": chosen.consumer_registers,
            "PRODUCER_REGISTERS": chosen.producer_registers,
            "OVERLAP_SOFTMAX": chosen.overlap_softmax,
            "MAX_OF": chosen.max_of,
            "SKIP_MASKED_TILE": chosen.skip_masked_tile,
        }
        found = self.launches[chosen] = Launch(
            attention_forward, constants, options, meta=ForwardMeta
        )
        return found


class HopperRecordedForward(RecordedForward):
    """That of Hopper's kernel."""

    def __init__(self, prepared: HopperForward, inputs: Inputs, variant: Variant):
        self.prepared, self.spec, self.alone = prepared, prepared.spec, prepared.alone
        self.compiled = prepared.compiled
        problem, spec, geometry = prepared.problem, self.spec, Geometry.of(inputs)
        kv_len, ends_align = inputs.key.shape[-2], configs.ends_align(inputs)
        self.schedule = chosen = configs.choose(problem._replace(kv_len=kv_len, aligned=ends_align))
        tile = chosen.query_tile
        self.planner = None
        if prepared.planned:
            sizes = tile, chosen.kv_tile
            self.planner = Planner(inputs, variant, geometry, sizes, over_keys=True)
        self.memory = results_memory(inputs, variant)
        written, queries = self.memory.there_are(), geometry.queries
        heads = configs.heads_at_once(
            problem.masked, queries.heads * queries.sequences, queries.slots(tile),
            spec.multiprocessors, spec.constants["HEADS_PER_KV_HEAD"],
            2 * (problem.head_width + problem.value_width) * geometry.lengths()[1],
        )  # fmt: skip
        order = tile_scheduler.order_of(queries, tile, heads)
        self.numbers = (
            *order, queries.batch, *numbers_of(inputs[:3]), *laid_numbers(written)
        )  # fmt: skip
        self.programs = min(order[0], chosen.programs * spec.multiprocessors)
        lengths = Lengths(self.numbers, (self.programs,), written)
        family = prepared.families.setdefault(chosen, PassFamily())
        self.recorded = RecordedPass(inputs.query, family, lengths)

    @functools.cached_property
    def launch(self) -> Launch:
        """The kernel; calls that go step by step need it."""
        return self.prepared.launch(self.schedule).of(self.numbers)

    def _counters(self, device: torch.device) -> Tensors:
        return (tile_scheduler.counter_of(device),)

    def _arguments(
        self, inputs: Inputs, variant: Variant, written: Tensors, plan: TileLists, counters: Tensors
    ) -> tuple[Any, ...]:
        (counter,) = counters
        numbers, chosen = sourced(self.launch.numbers), self.schedule
        output, lse, residual, largest = self.memory.placed(written)
        assert output is not None and lse is not None
        moved = (*inputs[:3], output)
        spec = self.spec.sourced(numbers[3:], (*inputs[:3], *written))
        packed, widths = spec.packed, [width_of(rows.shape[-1]) for rows in moved]
        sides = (
            (configs.ROWS, widths[0]), (chosen.kv_tile, widths[1]), (chosen.kv_tile, widths[2]),
            (configs.ROWS, widths[3] // chosen.output_parts),
        )  # fmt: skip
        return (
            *(
                descriptor(rows, Box.of(spec.layout(rows), packed, *side))
                for rows, side in zip(moved, sides, strict=True)
            ),
            *spec.inputs(inputs),
            spec.rows(output, inputs),
            spec.numbers(lse, inputs),
            None if residual is None else spec.rows(residual, inputs),
            None if largest is None else spec.numbers(largest, inputs),
            tile_scheduler.with_gluon_search(rules(inputs, variant, plan.argument())),
            inputs.sinks,
            tile_scheduler.TileOrder(
                tensor_view.packed_origin if packed else tensor_view.dense_origin,
                counter if chosen.grid == "dynamic" else None,
                numbers[0],
                numbers[1],
                numbers[2],
                counter,
            ),
        )


_lengths: dict[Any, HopperRecordedForward] = {}
_forwards: dict[Any, HopperForward] = {}


def prepared(inputs: Inputs, variant: Variant, config: KernelConfig) -> Forward:
    """The forward pass of calls like this one; call it with inputs of any lengths."""
    key = signature(inputs, variant)
    return remembered(_forwards, key, lambda: HopperForward(inputs, variant))


def forward(inputs: Inputs, variant: Variant, config: KernelConfig) -> Results:
    """All results; see `saccade.attention`."""
    return prepared(inputs, variant, config)(inputs, variant)


# ---- the backward pass ------------------------------------------------------------------------


def backward(
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    saved: Results,
    grad_output: Tensor,
    grad_lse: Tensor | None,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> Gradients:
    """Gradients of the inputs, and of the wanted tensors that the score captured."""
    if deterministic and wanted_tables:
        triton_host.refuse_unordered(variant, wanted_tables)
    output, lse, residual, _ = saved
    inputs, grad_output = aligned(inputs), readable(in_order_of(grad_output, output))
    passed = BackwardInputs(output, residual, lse, grad_output, grad_lse)
    wants_tables = len(wanted_tables) > 0
    like = *signature(inputs, variant), wants_tables, deterministic, configs.BACKWARD_OVERRIDE
    key = (
        *like, *lengths_of(inputs), output.stride(), lse.stride(), grad_output.stride(),
        None if residual is None else residual.stride(),
        None if grad_lse is None else grad_lse.stride(),
    )  # fmt: skip
    prepared = _backwards.get(key)
    if prepared is None:
        kind = remembered(
            _kinds, like, lambda: HopperBackward(inputs, variant, deterministic, wants_tables)
        )
        prepared = remembered(
            _backwards, key, lambda: BackwardOfLengths(kind, inputs, variant, passed)
        )
    return prepared(inputs, variant, config, passed, wanted_tables, deterministic)


class Repeated(NamedTuple):
    """Triton kernels for what is done once more, because of NaN."""

    queries: Launch
    keys: Launch

    @staticmethod
    def of(spec: CallSpec, call: tuple[Inputs, Variant]) -> Repeated:
        """Those of calls of any lengths: they need not have the best tiles."""
        queries = nonfinite.attention_backward_nan_safe_queries
        keys = nonfinite.attention_backward_nan_safe_keys
        return Repeated(
            spec.launch(queries, "backward_queries", call, None, short=False),
            spec.launch(keys, "backward_keys", call, None, short=False),
        )


def compile_backward(
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> None:
    """Begin to compile the backward pass of a call whose forward pass is still to run."""
    wants_tables = len(wanted_tables) > 0
    like = *signature(inputs, variant), wants_tables, deterministic, configs.BACKWARD_OVERRIDE
    if (*like, *wanted_tables) in _ahead or aligned(inputs) is not inputs:
        return

    def start() -> None:
        kind = remembered(
            _kinds, like, lambda: HopperBackward(inputs, variant, deterministic, wants_tables)
        )
        output, lse, residual, _ = results_to_come(inputs, variant)
        passed = BackwardInputs(output, residual, lse, output, None)
        prepared = BackwardOfLengths(kind, inputs, variant, passed)
        memory = prepared.make_memory(inputs, variant, output.device)
        HopperBackwardCall(prepared, inputs, variant, passed, memory).run()
        if wanted_tables:
            rest = prepared.by_triton(inputs, variant, config, passed, deterministic, memory)
            for position in wanted_tables:
                rest.table(position, rest.known(), config)

    device = current_device(inputs.query)
    remembered(_ahead, (*like, *wanted_tables), lambda: compile_ahead(start, device))


class HopperBackward:
    """What backward passes share that are alike but for their lengths."""

    def __init__(self, inputs: Inputs, variant: Variant, deterministic: bool, wants_tables: bool):
        self.spec = spec = CallSpec.of(inputs, tensor_view.packed_program)
        call = inputs, variant
        self.problem = problem = backward_problem(inputs, variant, deterministic)
        self.alone = brings_three(inputs, variant)
        self.planned = variant.mask != "" and mask_functions(variant.mask).spans_read > 0
        self.nan_safe = variant.mask != "" or spec.packed
        self.rest = inputs.sinks is not None or wants_tables
        self.ordered, self.apart = configs.ordered(problem), configs.apart(problem)
        self.by_triton = self.nan_safe or self.ordered or self.rest  # whether some kernels are
        self.widths = problem.head_width, problem.value_width
        self.scored = changes_scores(variant)
        self.rows_of_starts = 2 if self.scored else 1  # of two numbers of each row
        self.residual = triton_host.residual_launch(spec, call) if self.scored else None
        self.factor = 1.0 if self.scored else 1.0 / variant.scale
        self.launches: dict[Any, tuple[Launch, Launch, Launch, Launch]] = {}
        self.compiled: set[Any] = set()  # what was compiled, side by side, before it was started
        self.families: dict[Any, PassFamily] = {}  # of passes, by the kernels that they start
        self.again = Repeated.of(spec, call) if self.nan_safe else None
        self.query_launch = None
        if self.apart:
            self.query_launch = Launch(
                backward_d256.attention_backward_queries,
                {
                    **{name: spec.constants[name] for name in NAMES},
                    "STAGES": QUERY_PASS.stages,
                    "NAN_SAFE": self.nan_safe,
                    "CONSUMER_REGISTERS": QUERY_PASS.consumer_registers,
                    "PRODUCER_REGISTERS": QUERY_PASS.producer_registers,
                },
                OPTIONS,
                BackwardMeta,
            )

    def own_launches(
        self, chosen: configs.BackwardSchedule, splits: int
    ) -> tuple[Launch, Launch, Launch, Launch]:
        """The kernels that are Hopper's own, in the order of `BackwardLaunches`, by a schedule, and
        by how many programs share the query heads of a kv head."""
        key = chosen._replace(at_once_mb=0), splits  # the former is a matter of order
        found = self.launches.get(key)
        if found is not None:
            return found
        constants = self.spec.constants
        values = {"VALUE_DIM": constants["VALUE_DIM"]}
        rows = {"QUERY_TILE": chosen.query_tile, "HEAD_WIDTH": self.widths[0]}
        of_begin = {
            "VALUE_WIDTH": next_width(constants["VALUE_DIM"]), "KV_TILE": configs.BACKWARD_KV_TILE,
        }  # fmt: skip
        of_main = {
            **{name: constants[name] for name in NAMES},
            "HEADS_PER_KV_HEAD": constants["HEADS_PER_KV_HEAD"] // splits,
            "STAGES": chosen.stages,
            "NAN_SAFE": self.nan_safe,
            "CONSUMER_REGISTERS": chosen.consumer_registers,
            "PRODUCER_REGISTERS": chosen.producer_registers,
        }
        of_end = {"HEAD_DIM": constants["HEAD_DIM"], "NAN_SAFE": self.nan_safe}
        of_sums = {
            "HEAD_DIM": constants["HEAD_DIM"],
            "HEAD_WIDTH": next_width(constants["HEAD_DIM"]),
            "VALUE_WIDTH": next_width(constants["VALUE_DIM"]),
            "KV_TILE": SUM_TILE,
        }
        kernel = attention_backward_keys if self.apart else attention_backward
        found = self.launches[key] = (
            Launch(attention_backward_begin, {**values, **rows, **of_begin}, OPTIONS),
            Launch(kernel, of_main, OPTIONS, BackwardMeta),
            Launch(attention_backward_end, {**rows, **of_end}, OPTIONS),
            Launch(attention_backward_add_splits, {**values, **of_sums}, OPTIONS),
        )
        return found

    def queries_launch(self, inputs: Inputs, variant: Variant) -> Launch | None:
        """Triton's kernel for the gradients of queries, if there is one: in the ordered form up to
        128 channels, or for what is done once more."""
        if self.ordered and not self.apart:
            kernel, spec = attention_backward_queries, self.spec.at(inputs)
            return spec.launch(kernel, "backward_queries", (inputs, variant), None, CHAINED=False)
        return None if self.again is None else self.again.queries


OPTIONS = {"num_warps": 4, "num_stages": 1}


def nothing_planned(inputs: Inputs, variant: Variant) -> TileLists:
    """The plan of a mask that programs find their way in by themselves."""
    return NO_PLAN


class BackwardLaunches(NamedTuple):
    """The kernels of a backward pass; None where it has none."""

    lse_residual: Launch | None
    begin: Launch
    main: Launch
    end: Launch
    add_splits: Launch
    query_pass: Launch | None
    nan_safe_keys: Launch | None
    queries: Launch | None
    # What plans for programs that stand at keys, at queries, and at those of the query pass.
    planner: Plan
    over_keys: Plan
    over_keys_apart: Plan


class BackwardOfLengths:
    """The backward pass of calls of the same lengths and strides."""

    def __init__(
        self, kind: HopperBackward, inputs: Inputs, variant: Variant, passed: BackwardInputs
    ):
        self.kind, self.new = kind, True
        self.queries = kind.queries_launch(inputs, variant)
        self.lengths = lengths = BackwardLengths(kind, inputs, passed, self.queries)
        self.kernels = (
            lengths.schedule._replace(at_once_mb=0),  # which is a matter of order
            lengths.splits, lengths.present, None if self.queries is None else self.queries.shared,
        )  # fmt: skip
        family = kind.families.setdefault(self.kernels, PassFamily())
        self.recorded = RecordedPass(inputs.query, family, lengths.of_pass())
        self.launches: BackwardLaunches | None = None  # of calls that go step by step

    @functools.cached_property
    def spec(self) -> CallSpec:
        """What the kernels share."""
        return self.kind.spec._replace(geometry=self.lengths.geometry)

    def _prepare(self, inputs: Inputs, variant: Variant) -> BackwardLaunches:
        kind, lengths, geometry = self.kind, self.lengths, self.lengths.geometry

        def of(launch: Launch | None) -> Any:
            return None if launch is None else launch.of(lengths.numbers, lengths.present)

        def planner(sizes: tuple[int, int], over_keys: bool) -> Plan:
            if not kind.planned:
                return nothing_planned
            return Planner(inputs, variant, geometry, sizes, over_keys)

        apart = QUERY_PASS.query_tile, QUERY_PASS.kv_tile
        sizes = apart
        if self.queries is not None:
            sizes = self.queries.constants["QUERY_TILE"], self.queries.constants["KV_TILE"]
        begin, main, end, add_splits = kind.own_launches(lengths.schedule, lengths.splits)
        return BackwardLaunches(
            of(kind.residual),
            of(begin),
            of(main),
            of(end),
            of(add_splits),
            of(kind.query_launch),
            of(kind.again and kind.again.keys),
            of(self.queries),
            planner((lengths.tile, lengths.schedule.kv_tile), False),
            planner(sizes, True),
            planner(apart, True),
        )

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
        if not self.kind.rest:
            known = inputs[:3] if self.kind.alone else tensors_of(inputs, variant)
            tensors = (*known, *there_are(passed))
            of_query, of_key, of_value = self.recorded(
                tensors, lambda: self._run(inputs, variant, passed)[:3]
            )
            return Gradients(of_query, of_key, of_value, None, {})
        memory = self._run(inputs, variant, passed)
        found = Gradients(memory.of_query, memory.of_key, memory.of_value, None, {})
        rest = self.by_triton(inputs, variant, config, passed, deterministic, memory)
        tables = {
            position: rest.table(position, rest.known(), config) for position in wanted_tables
        }
        return found._replace(sinks=rest.sinks(), tables=tables)

    def by_triton(
        self,
        inputs: Inputs,
        variant: Variant,
        config: KernelConfig,
        passed: BackwardInputs,
        deterministic: bool,
        memory: BackwardMemory,
    ) -> triton_host.TritonBackwardCall:
        """What gives gradients of sinks and tables, after all else."""
        row_lse, row_dot, lse_residual = memory[4:7]
        assert row_lse is not None and row_dot is not None
        results = triton_host.ForwardResults(*passed, row_lse, row_dot, lse_residual)
        spec = CallSpec.of(inputs)
        launches = triton_host.prepare(spec, inputs, variant, config, deterministic, results)
        return triton_host.TritonBackwardCall(inputs, variant, launches, results)

    def make_memory(self, inputs: Inputs, variant: Variant, device: torch.device) -> BackwardMemory:
        """Memory for all that a pass writes; what starts its kernels is there then."""
        if self.launches is None:
            self.launches = self._prepare(inputs, variant)
        layouts = self.lengths.memory
        made: Any = [None if layout is None else layout.on(device) for layout in layouts]
        return BackwardMemory(*made)

    def _run(self, inputs: Inputs, variant: Variant, passed: BackwardInputs) -> BackwardMemory:
        memory = self.make_memory(inputs, variant, inputs.query.device)
        call = HopperBackwardCall(self, inputs, variant, passed, memory)
        if self.new:
            self.new = False
            if self.kernels not in self.kind.compiled:
                compile_side_by_side(call.run, self.spec.device)
                self.kind.compiled.add(self.kernels)
        call.run()
        return memory


_kinds: dict[Any, HopperBackward] = {}
_ahead: dict[Any, bool] = {}  # kinds whose forward pass had their kernels compiled
_backwards: dict[Any, BackwardOfLengths] = {}
