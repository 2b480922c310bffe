"""Attention by Triton kernels: forward and backward pass, as the operators start them on GPUs.

Calls of equal shapes, strides, dtypes and options are prepared once: configs chosen, kernels
compiled, strides worked out. After that a call allocates its results, wraps addresses into Views
and starts the kernels. Those of a backward pass, in their order:

    row statistics → keys (with queries, atomically) → NaN-safe keys        the fast form
    row statistics → queries → keys → NaN-safe keys                         equal bits each time
    residuals of the lse → …                                     where the caller changes scores
    … → one pass for each bias that wants a gradient

NaN-safe keys repeat, under a mask, what met NaN or inf; under a mask, in the second form, the
kernel for queries makes the row statistics itself.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.kernel_args import (
    Geometry,
    ReadFunctions,
    brings_three,
    changes_scores,
    rules,
    score_functions,
    signature,
    tensors_of,
    there_are,
    view,
)
from saccade.gpu.launcher import Launch, compile_ahead, compile_side_by_side, current_device
from saccade.gpu.pass_recorder import MemoryLayout, layout_of
from saccade.gpu.planning import Planner, TileLists
from saccade.gpu.recording import Lengths, PassFamily, RecordedPass, tensors_in
from saccade.gpu.signature import Number, Stride, sourced
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.backward_common import SavedForward, attention_row_statistics
from saccade.ops.attention.triton.backward_dbias import (
    attention_backward_bias,
    attention_backward_reads,
)
from saccade.ops.attention.triton.backward_dkdv import VERDICTS_AT_ONCE, attention_backward_keys
from saccade.ops.attention.triton.backward_dq import attention_backward_queries
from saccade.ops.attention.triton.backward_lse import attention_lse_residual
from saccade.ops.attention.triton.call_spec import (
    CallSpec,
    contiguous,
    gradients_to_come,
    laid_numbers,
    lengths_of,
    memory_like,
    numbers_of,
    remembered,
    results_memory,
    results_to_come,
    with_unit_channels,
)
from saccade.ops.attention.triton.forward import attention_forward
from saccade.ops.attention.triton.recorded_forward import RecordedForward, Tensors
from saccade.runtime.spec import (
    Gradients,
    Inputs,
    KernelConfig,
    Results,
    Variant,
    in_order_of,
)

Forward = Callable[[Inputs, Variant], Results]


class TritonForward:
    """The forward pass of calls that are alike but for their lengths, prepared."""

    def __init__(self, inputs: Inputs, variant: Variant, config: KernelConfig):
        self.spec, self.config = CallSpec.of(inputs), config
        self.families: dict[int, PassFamily] = {}  # by the kernel
        self.compiled: set[Any] = set()  # forms of its kernel that were, beside those that plan

    def __call__(self, inputs: Inputs, variant: Variant) -> Results:
        """All results of a call like the one that was prepared."""
        inputs = with_unit_channels(inputs)
        return self._of_lengths(inputs, variant)(inputs, variant)

    def of_layout(self, inputs: Inputs, variant: Variant) -> Forward:
        """The pass of calls that lie as these and capture no tensor."""
        if with_unit_channels(inputs) is not inputs:
            return self
        of_lengths = self._of_lengths(inputs, variant)
        again_by, memory, brought = of_lengths.recorded, of_lengths.memory, tensors_in(inputs)

        def forward(inputs: Inputs, variant: Variant) -> Results:
            written = again_by.again(brought(inputs))
            return self(inputs, variant) if written is None else memory.results(written, inputs)

        return forward

    def _of_lengths(self, inputs: Inputs, variant: Variant) -> TritonRecordedForward:
        key = self, *lengths_of(inputs)
        found = _lengths.get(key)
        if found is None:
            found = remembered(_lengths, key, lambda: TritonRecordedForward(self, inputs, variant))
        return found


class TritonRecordedForward(RecordedForward):
    """That of Triton's kernel."""

    def __init__(self, prepared: TritonForward, inputs: Inputs, variant: Variant):
        self.spec, call = prepared.spec.at(inputs), (inputs, variant)
        one_loop = configs.in_one_loop(self.spec.problem("forward", call))
        self.kernel = kernel = self.spec.launch(
            attention_forward, "forward", call, prepared.config, ONE_LOOP=one_loop
        )
        tiles = kernel.constants["QUERY_TILE"], kernel.constants["KV_TILE"]
        queries = self.spec.geometry.queries
        self.programs, self.compiled = queries.programs(tiles[0]), prepared.compiled
        planner = Planner(inputs, variant, self.spec.geometry, tiles, over_keys=True)
        self.planner = planner if planner.needed else None
        self.alone = brings_three(inputs, variant) and self.planner is None
        self.memory = results_memory(inputs, variant)
        written = self.memory.there_are()
        self.numbers = (queries.batch, *numbers_of(inputs[:3]), *laid_numbers(written))
        lengths = Lengths(self.numbers, (self.programs,), written)
        family = prepared.families.setdefault(kernel.shared, PassFamily())
        self.recorded = RecordedPass(inputs.query, family, lengths)

    @functools.cached_property
    def launch(self) -> Launch:
        """The kernel; calls that go step by step need it."""
        return self.kernel.of(self.numbers)

    def _arguments(
        self, inputs: Inputs, variant: Variant, written: Tensors, plan: TileLists, counters: Tensors
    ) -> tuple[Any, ...]:
        spec = self.spec.sourced(sourced(self.launch.numbers), (*inputs[:3], *written))
        output, lse, residual, largest = self.memory.placed(written)
        assert output is not None and lse is not None
        return (
            *spec.inputs(inputs),
            spec.rows(output, inputs),
            spec.numbers(lse, inputs),
            None if residual is None else spec.rows(residual, inputs),
            None if largest is None else spec.numbers(largest, inputs),
            rules(inputs, variant, plan.argument()),
            inputs.sinks,
        )


_forwards: dict[Any, TritonForward] = {}
_lengths: dict[Any, TritonRecordedForward] = {}


def prepared(inputs: Inputs, variant: Variant, config: KernelConfig) -> TritonForward:
    """The forward pass of calls like this one; call it with inputs of any lengths."""
    key = signature(inputs, variant), config
    return remembered(_forwards, key, lambda: TritonForward(inputs, variant, config))


def forward(inputs: Inputs, variant: Variant, config: KernelConfig) -> Results:
    """All results; see `saccade.attention`."""
    return prepared(inputs, variant, config)(inputs, variant)


# ---- the backward pass ------------------------------------------------------------------------

STATISTICS_TILE = 64
CHAINED = ("sm_90",)  # where kernels start before those ahead of them have ended
FEW_QUERIES = 64  # rows of queries that one program of the ordered form takes, about


class Launches(NamedTuple):
    """The kernels of the backward pass of calls like one another."""

    spec: CallSpec
    lse_residual: Launch | None  # None unless the caller changes scores
    statistics: Launch | None  # None where the queries' kernel makes them
    keys: Launch  # in the fast form: queries too
    nan_safe: Launch  # the same, for programs whose first attempt met NaN or inf
    queries: Launch | None  # None in the fast form
    over_queries: Planner  # for keys and NaN-safe
    over_keys: Planner  # for queries
    programs: Programs
    alone: bool  # whether calls have no tensors but query, key and value, and need no plan
    tables: dict[int, Launch]  # by position among the score's captured tensors
    numbers: tuple[int, ...]  # programs of keys, then as `CallSpec.sourced` takes them
    gradients: tuple[Callable[[], Tensor], ...]  # memory for those of query, key and value
    done: RecordedPass  # the whole pass, but for tables and sinks


class Programs(NamedTuple):
    """How many programs each kernel has."""

    lse_residual: int
    statistics: int
    keys: int
    nan_safe: int
    queries: int


class ForwardResults(NamedTuple):
    """What the forward pass gave, the gradients of it, and numbers of each row
    (`SavedForward`)."""

    output: Tensor
    residual: Tensor | None
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None
    row_lse: Tensor
    row_dot: Tensor
    lse_residual: Tensor | None


_specs: dict[Any, CallSpec] = {}
_launches: dict[Any, Launches] = {}
_compiled: dict[Any, bool] = {}  # kinds of calls whose kernels were compiled, side by side
_ahead: dict[Any, bool] = {}  # and of those whose forward pass had it begun


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
        refuse_unordered(variant, wanted_tables)
    inputs = with_unit_channels(inputs)
    output, lse, residual, _ = saved
    grad_output = in_order_of(grad_output, output)
    like = *signature(inputs, variant), config
    key = (
        *like, *lengths_of(inputs), deterministic,
        output.stride(), None if residual is None else residual.stride(),
        grad_output.stride(), lse.stride(),
        None if grad_lse is None else grad_lse.stride(),
    )  # fmt: skip
    launches = _launches.get(key)
    new = launches is None
    if launches is None:
        spec = remembered(_specs, like, lambda: CallSpec.of(inputs)).at(inputs)
        numbers = lse, lse, lse if changes_scores(variant) else None  # so laid
        results = ForwardResults(output, residual, lse, grad_output, grad_lse, *numbers)
        prepared = functools.partial(prepare, spec, inputs, variant, config, deterministic, results)
        launches = remembered(_launches, key, prepared)

    def call() -> TritonBackwardCall:
        return TritonBackwardCall.of(inputs, variant, launches, saved, grad_output, grad_lse)

    def run() -> Gradients:
        return call().run(wanted_tables, config)

    if new:
        kind = *like, deterministic, *wanted_tables
        start = functools.partial(_start, call, wanted_tables, config)
        remembered(_compiled, kind, lambda: compile_side_by_side(start, launches.spec.device))
    if wanted_tables or inputs.sinks is not None:  # whose gradients PyTorch has a part in
        return run()
    tensors = tensors_of(inputs, variant)
    tensors = (*tensors, output, lse, grad_output, *there_are((residual, grad_lse)))
    of_query, of_key, of_value = launches.done(tensors, lambda: run()[:3])
    return Gradients(of_query, of_key, of_value, None, {})


def _start(
    call: Callable[[], TritonBackwardCall], wanted_tables: Sequence[int], config: KernelConfig
) -> None:
    call().start(wanted_tables, config)


def compile_backward(
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    wanted_tables: Sequence[int],
    deterministic: bool,
) -> None:
    """Begin to compile the backward pass of a call whose forward pass is still to run."""
    kind = *signature(inputs, variant), config, deterministic, *wanted_tables
    if kind in _ahead or with_unit_channels(inputs) is not inputs:
        return

    def call() -> TritonBackwardCall:
        saved = results_to_come(inputs, variant)
        output, lse, residual, _ = saved
        numbers = lse, lse, lse if changes_scores(variant) else None
        results = ForwardResults(output, residual, lse, output, None, *numbers)
        spec = CallSpec.of(inputs)
        launches = prepare(spec, inputs, variant, config, deterministic, results)
        return TritonBackwardCall.of(inputs, variant, launches, saved, output, None)

    start = functools.partial(_start, call, wanted_tables, config)
    remembered(_ahead, kind, lambda: compile_ahead(start, current_device(inputs.query)))


def refuse_unordered(variant: Variant, wanted_tables: Sequence[int]) -> None:
    """Refuse gradients whose sums have no fixed order, where the same bits are asked for."""
    reads = score_functions(variant.score).reads
    if any(position in reads and not reads[position].as_bias for position in wanted_tables):
        raise NotImplementedError(
            "deterministic: the gradient of a tensor that a score reads otherwise than "
            "saccade.scores.bias does is summed in no fixed order; takes deterministic=False, "
            "implementation='cpu' or 'reference', or a detached tensor"
        )


def prepare(
    spec: CallSpec,
    inputs: Inputs,
    variant: Variant,
    config: KernelConfig,
    deterministic: bool,
    results: ForwardResults,
) -> Launches:
    """The kernels of a backward pass, chosen; none is compiled before it is started."""
    call, requested = (inputs, variant), config.backward
    ordered = deterministic or ordered_is_faster(spec)
    chained = {"CHAINED": ordered and spec.architecture in CHAINED}
    early = {"launch_pdl": True} if chained["CHAINED"] else {}
    which = "backward_keys" if ordered else "backward_shared"
    keys, nan_safe = (
        spec.launch(attention_backward_keys, which, call, requested, early, NAN_SAFE=c, **chained)
        for c in (False, True)
    )
    statistics, queries, which = None, None, "backward_queries"
    lse_residual = residual_launch(spec, call) if changes_scores(variant) else None
    if not (ordered and variant.mask):  # without a mask queries have no registers for them
        statistics = statistics_launch(spec, chained, lse_residual is not None)
    if ordered:
        early = early if statistics else {}
        queries = spec.launch(attention_backward_queries, which, call, requested, early, **chained)
    sizes = [
        (launch.constants["QUERY_TILE"], launch.constants["KV_TILE"])
        for launch in (keys, queries or keys)
    ]
    programs = programs_of(spec.geometry, lse_residual, sizes)
    gradients, batch = gradients_to_come(inputs), spec.geometry.queries.batch
    numbers = (programs.keys, batch, *numbers_of((*inputs[:3], *there_are(results))))
    numbers = (*numbers, *numbers_of(gradients))
    if not ordered:  # what gradients of queries are added up in
        numbers = *numbers, *inputs.query.shape, *contiguous(inputs.query.shape)
    present = results.grad_lse is not None, results.residual is not None, ordered
    started = lse_residual, statistics, queries, keys, nan_safe if variant.mask else None
    lengths = lengths_of_pass(started, programs, numbers, results.lse, gradients)
    over_queries = Planner(inputs, variant, spec.geometry, sizes[0], over_keys=False)
    return Launches(
        spec,
        lse_residual and lse_residual.of(numbers, present),
        statistics and statistics.of(numbers, present),
        keys.of(numbers, present),
        nan_safe.of(numbers, present),
        queries and queries.of(numbers, present),
        over_queries,
        Planner(inputs, variant, spec.geometry, sizes[1], over_keys=True),
        programs=programs,
        alone=brings_three(inputs, variant) and not over_queries.needed,
        tables={},
        numbers=numbers,
        gradients=tuple(memory_like(rows, results.lse.device) for rows in gradients),
        done=RecordedPass(inputs.query, family_of(spec, started, present), lengths),
    )


def programs_of(
    geometry: Geometry, lse_residual: Launch | None, sizes: Sequence[tuple[int, int]]
) -> Programs:
    """How many programs each kernel has; sizes: tiles of that for keys, and of that for queries."""
    queries, of_keys = geometry.queries, geometry.keys.programs(sizes[0][1])
    return Programs(
        queries.programs(lse_residual.constants["QUERY_TILE"]) if lse_residual else 0,
        queries.programs(STATISTICS_TILE),
        of_keys,
        -(-of_keys // VERDICTS_AT_ONCE.value),
        queries.programs(sizes[1][0]),
    )


def statistics_launch(spec: CallSpec, chained: Mapping[str, bool], natural: bool) -> Launch:
    """The kernel for row statistics. natural: so is their lse."""
    sizes = {name: spec.constants[name] for name in ("VALUE_DIM", "VALUE_WIDTH")}
    sizes |= {"QUERY_TILE": STATISTICS_TILE, "NATURAL": natural, **chained}
    return spec.family(attention_row_statistics, sizes, {"num_warps": 4, "num_stages": 1})


def residual_launch(spec: CallSpec, call: tuple[Inputs, Variant]) -> Launch:
    """The kernel for residuals of the lse, which seldom looks at more than the lse: any tiles will
    do, if they fit."""
    config = configs.choose(spec.problem("backward_bias", call), None, configs.tuned())
    names = "HEADS_PER_KV_HEAD", "HEAD_DIM", "HEAD_WIDTH", "PRECISION"
    sizes = {name: spec.constants[name] for name in names}
    sizes |= {"QUERY_TILE": config.query_tile, "KV_TILE": config.kv_tile}
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return spec.family(attention_lse_residual, sizes, options)


Started = tuple[Launch | None, Launch | None, Launch | None, Launch, Launch | None]
"""Kernels in their order: for residuals, statistics, queries, keys, and the NaN-safe ones."""


def family_of(spec: CallSpec, started: Started, present: tuple[bool, ...]) -> PassFamily:
    """What passes share that start the same kernels."""
    key = present, *[None if launch is None else launch.shared for launch in started]
    return spec.families.setdefault(key, PassFamily())


def lengths_of_pass(
    started: Started, programs: Programs, numbers: tuple[int, ...],
    lse: Tensor, gradients: Sequence[Tensor],
) -> Lengths | None:  # fmt: skip
    """All that lengths decide of a pass in the ordered form; of another one it is not said."""
    lse_residual, _, queries, _, nan_safe = started
    if queries is None or not lse.is_contiguous():
        return None
    of_residual, of_statistics, of_keys, of_nan_safe, of_queries = programs
    in_order = of_residual, of_statistics, of_queries, of_keys, of_nan_safe
    memory = [layout_of(lse)] * (2 if lse_residual is None else 3)
    memory += [layout_of(gradient) for gradient in gradients]
    if nan_safe is not None:
        memory.append(MemoryLayout((of_keys,), (1,), torch.int32))  # verdicts
    pairs = zip(started, in_order, strict=True)
    return Lengths(numbers, tuple([count for launch, count in pairs if launch]), memory)


def ordered_is_faster(spec: CallSpec) -> bool:
    """Whether a second pass for the queries costs less than atomic additions.

    It does (on an H200) unless queries are so few that most of the GPU would idle in their pass.
    """
    queries, keys = (extent.programs(FEW_QUERIES) for extent in spec.geometry)
    return 2 * queries >= spec.multiprocessors or keys < spec.multiprocessors


class TritonBackwardCall(NamedTuple):
    """One backward pass under way."""

    inputs: Inputs
    variant: Variant
    launches: Launches
    results: ForwardResults
    written: tuple[Tensor, ...] = ()  # gradients of query, key and value, and `_shared`'s sum

    @staticmethod
    def of(
        inputs: Inputs, variant: Variant, launches: Launches, saved: Results, grad_output: Tensor,
        grad_lse: Tensor | None,
    ) -> TritonBackwardCall:  # fmt: skip
        """A pass with memory for all that it writes, where its results lie."""
        output, lse, residual, _ = saved
        statistics = torch.empty_like(lse), torch.empty_like(lse)
        of_lse = None if launches.lse_residual is None else torch.empty_like(lse)
        results = ForwardResults(output, residual, lse, grad_output, grad_lse, *statistics, of_lse)
        written = [memory() for memory in launches.gradients]
        if launches.queries is None:
            written.append(torch.zeros(inputs.query.shape, dtype=torch.float32, device=lse.device))
        return TritonBackwardCall(inputs, variant, launches, results, tuple(written))

    def run(self, wanted: Sequence[int], config: KernelConfig) -> Gradients:
        """Start every kernel of the pass; its results."""
        tables = self.start(wanted, config)
        of_query, of_key, of_value = self.written[:3]
        return Gradients(of_query, of_key, of_value, self.sinks(), tables)

    def start(self, wanted: Sequence[int], config: KernelConfig) -> dict[int, Tensor]:
        """Start every kernel of the pass; gradients of wanted tables."""
        launches, spec = self.launches, self.launches.spec
        of_query, of_key, of_value = self.written[:3]
        known, programs = self.known(), launches.programs
        if launches.lse_residual is not None:
            arguments = self._residual_arguments
            launches.lse_residual(programs.lse_residual, spec.device, known, arguments)
        if launches.statistics is not None:
            arguments = self._statistics_arguments
            launches.statistics(programs.statistics, spec.device, known, arguments)
        if launches.queries is None:
            self._shared(known, *self.written)
        else:
            self._queries(launches.queries, known, of_query)
            self._keys(known, of_key, of_value, None)
        return {position: self.table(position, known, config) for position in wanted}

    def known(self) -> tuple[Tensor, ...]:
        """The tensors that every kernel of the pass may read."""
        if self.launches.alone:
            return *self.inputs[:3], *there_are(self.results)
        return *tensors_of(self.inputs, self.variant), *there_are(self.results)

    def _residual_arguments(self) -> tuple[Any, ...]:
        spec, inputs, results = self._spec(), self.inputs, self.results
        assert results.lse_residual is not None
        return (
            *spec.inputs(inputs)[:2],
            spec.numbers(results.lse, inputs),
            spec.numbers(results.lse_residual, inputs),
            rules(inputs, self.variant),
            inputs.sinks,
        )

    def _statistics_arguments(self) -> tuple[Any, ...]:
        spec, inputs, results = self._spec(), self.inputs, self.results
        return (
            spec.rows(results.output, inputs),
            self._residual(spec),
            spec.rows(results.grad_output, inputs),
            spec.numbers(results.lse, inputs),
            None if results.grad_lse is None else spec.numbers(results.grad_lse, inputs),
            spec.numbers(results.row_lse, inputs),
            spec.numbers(results.row_dot, inputs),
        )

    def _shared(
        self, known: Sequence[Tensor], of_query: Tensor, of_key: Tensor, of_value: Tensor,
        total: Tensor,
    ) -> None:  # fmt: skip
        """The fast form: gradients of queries add up in float32, in whatever order."""
        self._keys(known, of_key, of_value, total)
        of_query.copy_(total)

    def _keys(
        self, known: Sequence[Tensor], of_key: Tensor, of_value: Tensor, total: Tensor | None
    ) -> None:
        launches, spec = self.launches, self.launches.spec
        plan, programs = launches.over_queries(self.inputs, self.variant), launches.programs.keys
        verdicts = None
        if self.variant.mask:
            verdicts = torch.empty(programs, dtype=torch.int32, device=of_key.device)

        def arguments() -> tuple[Any, ...]:
            spec, offsets = self._spec(), self.inputs.cu_seqlens_k
            keys = spec.geometry.keys
            return (
                self._forward(spec),
                view(of_key, spec.steps(of_key), keys, offsets),
                view(of_value, spec.steps(of_value), keys, offsets),
                None if total is None else spec.rows(total, self.inputs),
                self._rules(plan),
                verdicts,
                Number(programs, 0),
            )

        tensors = (*known, *there_are((of_key, of_value, total, verdicts)), *plan.tensors)
        launches.keys(programs, spec.device, tensors, arguments)
        if self.variant.mask:
            launches.nan_safe(launches.programs.nan_safe, spec.device, tensors, arguments)

    def _queries(self, launch: Launch, known: Sequence[Tensor], of_query: Tensor) -> None:
        plan = self.launches.over_keys(self.inputs, self.variant)
        inputs, results, grad_lse = self.inputs, self.results, self.results.grad_lse

        def arguments() -> tuple[Any, ...]:
            spec = self._spec()
            of_queries = self._forward(spec), spec.rows(of_query, inputs)
            changes = self._rules(plan)
            if self.launches.statistics is not None:
                return (*of_queries, changes, None, None, None, None)
            return (
                *of_queries, changes,
                spec.rows(results.output, inputs),
                self._residual(spec),
                spec.numbers(results.lse, inputs),
                None if grad_lse is None else spec.numbers(grad_lse, inputs),
            )  # fmt: skip

        tensors = (*known, of_query, *plan.tensors)
        launch(self.launches.programs.queries, self.launches.spec.device, tensors, arguments)

    def sinks(self) -> Tensor | None:
        """A sink's weight times minus row_dot, over all rows that it joins. Needs row_dot."""
        sinks = self.inputs.sinks
        if sinks is None:
            return None
        packed, lse, row_dot = self.launches.spec.packed, self.results.lse, self.results.row_dot
        of_head = sinks.float().view(-1, 1) if packed else sinks.float().view(1, -1, 1)
        of_lse = self.results.lse_residual
        weights = (of_head - lse).exp()
        if of_lse is not None:
            weights = weights * torch.exp2(-of_lse)
        rows = (-weights * row_dot).masked_fill(lse == -torch.inf, 0)
        return rows.sum(1 if packed else (0, 2)).to(sinks.dtype)

    def table(self, position: int, known: Sequence[Tensor], config: KernelConfig) -> Tensor:
        """The gradient of a tensor that the score captured. Needs the row statistics."""
        table = self.variant.score_captured.tensors[position]
        functions = score_functions(self.variant.score).reads.get(position)
        if functions is None:  # nothing that a score gives depends on it
            return torch.zeros_like(table)
        if not functions.as_bias:
            return self._entries(position, functions, known, config)
        spec, queries = self.launches.spec, self.launches.spec.geometry.queries
        total = torch.empty(table.shape, dtype=torch.float32, device=self.results.lse.device)
        launch = self.launches.tables.get(position)
        if launch is None:
            call = self.inputs, self.variant
            launch = spec.launch(attention_backward_bias, "backward_bias", call, config.backward)
            self.launches.tables[position] = launch

        def arguments() -> tuple[Any, ...]:
            return (
                self._forward(self._spec()),
                total,
                tuple(table.shape),
                (queries.batch, queries.heads),
                rules(self.inputs, self.variant, by=position),
            )

        batches, heads, rows, keys = table.shape
        query_tile, kv_tile = (launch.constants[name] for name in ("QUERY_TILE", "KV_TILE"))
        programs = batches * heads * -(-rows // query_tile) * -(-keys // kv_tile)
        launch(programs, spec.device, (*known, total), arguments)
        return total.to(table.dtype)

    def _entries(
        self, position: int, functions: ReadFunctions, known: Sequence[Tensor], config: KernelConfig
    ) -> Tensor:
        """The gradient of a tensor that is read otherwise than a bias is."""
        spec, table = self.launches.spec, self.variant.score_captured.tensors[position]
        total = torch.zeros(table.shape, dtype=torch.float32, device=self.results.lse.device)
        if total.numel() == 0:
            return total.to(table.dtype)
        launch = self.launches.tables.get(position)
        if launch is None:
            call = self.inputs, self.variant
            launch = spec.launch(
                attention_backward_reads, "backward_bias", call, config.backward,
                POSITION=functions.position, ALONG_QUERIES=functions.along_queries,
                ALONG_KEYS=functions.along_keys,
            )  # fmt: skip
            self.launches.tables[position] = launch

        def arguments() -> tuple[Any, ...]:
            return (
                self._forward(self._spec()),
                (total, tuple(total.shape), tuple(map(Stride, total.stride()))),
                rules(self.inputs, self.variant, by=position),
            )

        programs = spec.geometry.queries.programs(launch.constants["QUERY_TILE"])
        launch(programs, spec.device, (*known, total), arguments)
        return total.to(table.dtype)

    # ---- arguments that several kernels take ---------------------------------------------------

    def _spec(self) -> CallSpec:
        """The call's numbers, which know their places (see `Launch.of`): made once a kernel."""
        tensors = (*self.inputs[:3], *there_are(self.results), *self.written)
        return self.launches.spec.sourced(sourced(self.launches.numbers)[1:], tensors)

    def _forward(self, spec: CallSpec) -> SavedForward:
        inputs, results, of_lse = self.inputs, self.results, self.results.lse_residual
        return SavedForward(
            *spec.inputs(inputs),
            spec.rows(results.grad_output, inputs),
            spec.numbers(results.row_lse, inputs),
            spec.numbers(results.row_dot, inputs),
            None if of_lse is None else spec.numbers(of_lse, inputs),
        )

    def _residual(self, spec: CallSpec) -> Any:
        residual = self.results.residual
        return None if residual is None else spec.rows(residual, self.inputs)

    def _rules(self, plan: TileLists) -> Any:
        return rules(self.inputs, self.variant, plan.argument())
