"""Gradients by portable kernels: which kernels a backward pass starts, and in which order.

row_dot → keys (with queries, atomically)         the fast form
row_dot → keys, queries                           the ordered form: equal bits every time
… → one pass for each bias that wants a gradient
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kernels.compose import score_functions
from saccade.kernels.launch import Launch, Pointer
from saccade.portable.arguments import (
    all_aligned,
    number_strides,
    row_strides,
    rules,
    signature,
    view,
)
from saccade.portable.backward import attention_backward_keys
from saccade.portable.backward_bias import attention_backward_bias
from saccade.portable.backward_queries import attention_backward_queries
from saccade.portable.kind import Kind, on_device, remembered, with_unit_channels
from saccade.portable.pairs import Forward
from saccade.portable.planning import Plan, Planner
from saccade.portable.row_dot import attention_row_dot
from saccade.problem import Config, Gradients, Inputs, Variant, empty_gradients

ROW_DOT_TILE = 64


class Launches(NamedTuple):
    """The kernels of a backward pass of one kind."""

    kind: Kind
    row_dot: Launch
    keys: Launch  # in the fast form: queries too
    careful: Launch  # the same, for programs whose first attempt met NaN or inf
    queries: Launch | None  # None in the fast form
    over_queries: Planner  # for keys and careful
    over_keys: Planner  # for queries


class Results(NamedTuple):
    """What the forward pass gave, and the gradients of it."""

    output: Tensor
    lse: Tensor
    grad_output: Tensor
    grad_lse: Tensor | None
    row_dot: Tensor


_launches: dict[Any, Launches] = {}


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
    refuse_missing_derivative(variant)
    inputs = with_unit_channels(inputs)
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    results = Results(output, lse, grad_output, grad_lse, torch.empty_like(lse))
    kept_strides = (output.stride(), grad_output.stride(), lse.stride())
    kept_strides += (None if grad_lse is None else grad_lse.stride(),)
    key = (signature(inputs, variant), config, kept_strides, deterministic)
    launches = remembered(_launches, key, lambda: _prepare(inputs, variant, config, deterministic))
    call = _Call(inputs, variant, launches.kind, results)
    with on_device(launches.kind.device):
        return call.run(launches, wanted_tables, config)


def refuse_missing_derivative(variant: Variant) -> None:
    """Refuse a score that says nothing of its derivative."""
    if variant.score and score_functions(variant.score).derivatives[0] is None:
        raise NotImplementedError(
            "score: one of its functions has no derivative; give one with "
            "saccade.scores.function(derivative=…) to train through it"
        )


def _prepare(inputs: Inputs, variant: Variant, config: Config, deterministic: bool) -> Launches:
    kind, call = Kind.of(inputs), (inputs, variant)
    constants = {name: kind.constants[name] for name in ("VALUE_DIM", "VALUE_WIDTH")}
    row_dot = Launch(
        attention_row_dot,
        {**constants, "QUERY_TILE": ROW_DOT_TILE},
        {"num_warps": 4, "num_stages": 1},
    )
    ordered = deterministic or ordered_is_faster(kind)
    which = "backward_keys" if ordered else "backward_shared"
    keys, careful = (
        kind.launch(attention_backward_keys, which, call, config.backward, CAREFUL=careful)
        for careful in (False, True)
    )
    queries = None
    if ordered:
        queries = kind.launch(attention_backward_queries, "backward_queries", call, config.backward)
    sizes = [
        (launch.constants["QUERY_TILE"], launch.constants["KV_TILE"])
        for launch in (keys, queries or keys)
    ]
    over_queries = Planner(inputs, variant, kind.geometry, sizes[0], over_keys=False)
    over_keys = Planner(inputs, variant, kind.geometry, sizes[1], over_keys=True)
    return Launches(kind, row_dot, keys, careful, queries, over_queries, over_keys)


FEW_QUERIES = 64  # rows of queries that one program of the ordered form takes, about


def ordered_is_faster(kind: Kind) -> bool:
    """Whether a second pass for the queries costs less than atomic additions.

    It does (on an H200) unless there are so few queries that their pass would leave most of the
    GPU idle while the keys, which are many, could fill it.
    """
    queries, keys = (extent.programs(FEW_QUERIES) for extent in kind.geometry)
    return 2 * queries >= kind.multiprocessors or keys < kind.multiprocessors


class _Call(NamedTuple):
    """One backward pass under way."""

    inputs: Inputs
    variant: Variant
    kind: Kind
    results: Results

    def run(self, launches: Launches, wanted: Sequence[int], config: Config) -> Gradients:
        gradients = empty_gradients(self.inputs)
        queries = self.kind.geometry.queries
        launches.row_dot(
            queries.programs(ROW_DOT_TILE),
            self.kind.device,
            self._aligned(),
            self._row_dot_arguments,
        )
        if launches.queries is None:
            gradients = self._shared(launches, gradients)
        else:
            self._keys(launches, gradients, None)
            self._queries(launches.queries, launches.over_keys, gradients)
        tables = {place: self._table(place, config) for place in wanted}
        return gradients._replace(sinks=self._sinks(), tables=tables)

    def _row_dot_arguments(self, pointer: Pointer) -> tuple[Any, ...]:
        results = self.results
        grad_lse = results.grad_lse
        return (
            self._rows(pointer, results.output),
            self._rows(pointer, results.grad_output),
            self._numbers(pointer, results.lse),
            None if grad_lse is None else self._numbers(pointer, grad_lse),
            self._numbers(pointer, results.row_dot),
        )

    def _shared(self, launches: Launches, gradients: Gradients) -> Gradients:
        """The fast form: gradients of queries add up in float32, in whatever order."""
        like = gradients.query
        total = torch.zeros(like.shape, dtype=torch.float32, device=like.device)
        self._keys(launches, gradients, total)
        return gradients._replace(query=like.copy_(total))

    def _keys(self, launches: Launches, gradients: Gradients, total: Tensor | None) -> None:
        plan = launches.over_queries(self.inputs, self.variant, self._aligned())
        keys, offsets = self.kind.geometry.keys, self.inputs.cu_seqlens_k
        programs = keys.programs(launches.keys.constants["KV_TILE"])
        verdicts = None
        if self.variant.mask:
            verdicts = torch.empty(programs, dtype=torch.int32, device=gradients.key.device)

        def arguments(pointer: Pointer) -> tuple[Any, ...]:
            of_queries = None if total is None else self._rows(pointer, total)
            of_keys, of_values = (
                view(pointer, rows, self._strides(rows), keys, offsets)
                for rows in (gradients.key, gradients.value)
            )
            of_programs = None if verdicts is None else pointer(verdicts)
            given = self._forward(pointer)
            return given, of_keys, of_values, of_queries, self._rules(pointer, plan), of_programs

        aligned = self._aligned()
        launches.keys(programs, self.kind.device, aligned, arguments)
        if self.variant.mask:
            launches.careful(programs, self.kind.device, aligned, arguments)

    def _queries(self, launch: Launch, planner: Planner, gradients: Gradients) -> None:
        plan = planner(self.inputs, self.variant, self._aligned())

        def arguments(pointer: Pointer) -> tuple[Any, ...]:
            of_queries = self._rows(pointer, gradients.query)
            return self._forward(pointer), of_queries, self._rules(pointer, plan)

        programs = self.kind.geometry.queries.programs(launch.constants["QUERY_TILE"])
        launch(programs, self.kind.device, self._aligned(), arguments)

    def _sinks(self) -> Tensor | None:
        """A sink's weight times minus row_dot, over all rows that it joins."""
        sinks = self.inputs.sinks
        if sinks is None:
            return None
        lse, row_dot = self.results.lse, self.results.row_dot
        of_head = sinks.float().view(-1, 1) if self.kind.packed else sinks.float().view(1, -1, 1)
        rows = -(of_head - lse).exp() * row_dot
        return rows.sum(1 if self.kind.packed else (0, 2)).to(sinks.dtype)

    def _table(self, place: int, config: Config) -> Tensor:
        table = self.variant.score_captured.tensors[place]
        total = torch.empty(table.shape, dtype=torch.float32, device=table.device)
        call = self.inputs, self.variant
        launch = self.kind.launch(attention_backward_bias, "backward_bias", call, config.backward)
        number = bias_number(self.variant.score, place)
        queries = self.kind.geometry.queries

        def arguments(pointer: Pointer) -> tuple[Any, ...]:
            return (
                self._forward(pointer),
                pointer(total),
                tuple(table.shape),
                (queries.batch, queries.heads),
                rules(self.inputs, self.variant, pointer, after=number + 1),
            )

        batches, heads, rows, keys = table.shape
        query_tile, kv_tile = (launch.constants[name] for name in ("QUERY_TILE", "KV_TILE"))
        programs = batches * heads * -(-rows // query_tile) * -(-keys // kv_tile)
        launch(programs, self.kind.device, False, arguments)
        return total.to(table.dtype)

    # ---- arguments that several kernels take ---------------------------------------------------

    def _strides(self, rows: Tensor) -> tuple[int, int, int]:
        return row_strides(rows, self.kind.packed)

    def _rows(self, pointer: Pointer, rows: Tensor) -> Any:
        queries, offsets = self.kind.geometry.queries, self.inputs.cu_seqlens_q
        return view(pointer, rows, self._strides(rows), queries, offsets)

    def _numbers(self, pointer: Pointer, numbers: Tensor) -> Any:
        queries, offsets = self.kind.geometry.queries, self.inputs.cu_seqlens_q
        strides = number_strides(numbers, self.kind.packed)
        return view(pointer, numbers, strides, queries, offsets)

    def _forward(self, pointer: Pointer) -> Forward:
        results = self.results
        return Forward(
            *self.kind.inputs(pointer, self.inputs),
            self._rows(pointer, results.grad_output),
            self._numbers(pointer, results.lse),
            self._numbers(pointer, results.row_dot),
        )

    def _rules(self, pointer: Pointer, plan: Plan) -> Any:
        return rules(self.inputs, self.variant, pointer, plan.argument(pointer))

    def _aligned(self) -> bool:
        results = self.results
        more = () if results.grad_lse is None else (results.grad_lse,)
        of_forward = results.output, results.lse, results.grad_output
        return all_aligned(self.inputs, self.variant, *of_forward, *more)


def bias_number(score: str, place: int) -> int:
    """Which function of a score captured the tensor at a place."""
    from saccade import expressions

    for number, leaf in enumerate(expressions.leaves(expressions.parse(score))):
        if ("t", place) in leaf.slots:
            return number
    raise ValueError(f"place: got {place}, takes that of a tensor that {score!r} captured")
