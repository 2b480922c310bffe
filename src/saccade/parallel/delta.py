"""The gated delta rule over ranks: each computes its rows, and states alone go between them.

A piece of rows maps the state before it to the one after it, by a matrix and a sum: each token
fades the state and takes from it what it says of the token's key. The rule itself computes both:
the sum as the state after a piece that starts from zeros, the matrix as what becomes of the unit
matrix where all values are 0.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops.delta_rule import api
from saccade.parallel.planner import Plan
from saccade.parallel.recurrence import (
    Piece,
    Route,
    Rows,
    TakenRows,
    agreed,
    check_initial,
    check_rows,
    check_tensors,
    groups_of,
    offsets_of,
    route_of,
    sizes_of,
    spread,
    summed_together,
    taken_twice,
    tied,
    tied_to_rows,
    wanted_gradients,
    whole_facts,
)
from saccade.parallel.recurrence_graph import COMPUTED, into_graph
from saccade.runtime.arguments import check_flag

TAKEN = {*api.DeltaOptions.__annotations__, "return_state", "reduce_gradients"}


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, plan: Plan, **options: Any
) -> Any:
    """`saccade.gated_delta_rule` of a sequence whose rows are dealt to ranks: a collective.

    Every rank of the plan's group calls it with its own rows (`Plan.shard`). Each rank finds what
    its rows do to a state, all exchange that, and each computes its rows from the state before
    them. Of the plan the rows count; its mask, method and sizes are those of attention layers.

    Args:
        query, key: [batch, key_heads, rows of this rank, head_dim].
        value: [batch, value_heads, rows of this rank, value_dim].
        beta: [batch, value_heads, rows of this rank].
        plan: of `plan`; its rows that follow one another on a rank are computed together, so the
            fewer chunks the better. Where no attention layers share it, that of `masks.window(0)`
            deals one piece to each rank.
        options: those of `saccade.gated_delta_rule`. decay is that of this rank's rows;
            initial_state is whole on every rank, and so is the last state that `return_state`
            asks for. reduce_gradients: whether gradients of initial_state are summed over ranks.

    Returns:
        output [batch, value_heads, rows of this rank, value_dim]; with `return_state` also the last
        state. Gradients are those of the sum of all ranks' losses.

    Raises:
        TypeError, ValueError, NotImplementedError: as `saccade.gated_delta_rule`, on every rank;
            where ranks differ, naming the difference.
        RuntimeError: where messages fail or time out, saying where each rank was last.

    Source: Yang et al. 2024 (Parallelizing Linear Transformers with the Delta Rule), section 3, for
    the matrix of several tokens.

    Examples:
        >>> plan = saccade.parallel.plan(masks.causal(), 64, 1)
        >>> query, key, value = torch.randn(3, 1, 4, 64, 16) / 4
        >>> rows = query, key, value, torch.rand(1, 4, 64)
        >>> output = saccade.parallel.gated_delta_rule(*rows, plan=plan)
        >>> torch.testing.assert_close(output, saccade.gated_delta_rule(*rows))
    """
    return _called("gated_delta_rule", (query, key, value, beta), plan, Rows(False), options)


def gated_delta_rule_varlen(
    query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *, plan: Plan, **options: Any
) -> Any:
    """`saccade.gated_delta_rule_varlen` of sequences whose rows are dealt to ranks: a collective.

    Args:
        query, key: [rows of this rank, key_heads, head_dim].
        value: [rows of this rank, value_heads, value_dim].
        beta: [rows of this rank, value_heads].
        plan: made from the offsets of the sequences.
        options: as in `gated_delta_rule`; states have one entry for each sequence.

    Returns:
        output [rows of this rank, value_heads, value_dim]; with `return_state` also the last
        states.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `gated_delta_rule`.

    Examples:
        >>> offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> plan = saccade.parallel.plan(None, offsets, 1, causal=True)
        >>> query, key, value = torch.randn(3, 12, 4, 16)
        >>> beta = torch.rand(12, 4)
        >>> saccade.parallel.gated_delta_rule_varlen(query, key, value, beta, plan=plan).shape
        torch.Size([12, 4, 16])
    """
    return _called("gated_delta_rule_varlen", (query, key, value, beta), plan, Rows(True), options)


class _Call(NamedTuple):
    """A checked call, and what its pieces do to a state."""

    tensors: tuple[Tensor, ...]  # query, key, value, beta
    decay: Tensor | None
    initial: Tensor | None
    options: dict[str, Any]  # of all calls of a piece
    transitions: _Transitions
    taken: TakenRows | None  # key, value, beta and decay


class _Transitions(NamedTuple):
    """What pieces do to a state: matrix · state + added.

    Each is [pieces, batch, heads, ...]; of packed pieces the batch is 1.
    """

    added: Tensor
    matrix: Tensor

    def flat(self) -> Tensor:
        """[pieces, numbers]."""
        return torch.cat([each.flatten(1) for each in self], 1)

    def unflat(self, rows: Tensor) -> _Transitions:
        """Transitions with these shapes, of [pieces, numbers]."""
        size = self.added.shape[1:].numel()
        added, matrix = rows.split([size, rows.shape[1] - size], 1)
        return _Transitions(
            added.unflatten(1, self.added.shape[1:]), matrix.unflatten(1, self.matrix.shape[1:])
        )


def _called(
    name: str, tensors: tuple[Tensor, ...], plan: Plan, rows: Rows, options: dict[str, Any]
) -> Any:
    if torch.compiler.is_compiling():
        return into_graph(name, tensors, plan, rows, options)
    return _computed(name, tensors, plan, rows, options)


def _computed(
    name: str, tensors: tuple[Tensor, ...], plan: Plan, rows: Rows, options: dict[str, Any]
) -> Any:
    call: _Call
    call, return_state, compared = agreed(
        name, plan, tensors[0], options, TAKEN,
        lambda given, return_state: _prepared(tensors, plan, rows, given, return_state),
    )  # fmt: skip
    route = route_of(plan, every=return_state)
    if not sum(route.counts):
        query, key, value, beta = call.tensors
        call = call._replace(tensors=(query, compared(key), value, beta))
    arrived = spread(plan, call.transitions.flat(), route.counts, compared)
    transitions = call.transitions.unflat(arrived)
    states = [
        _after(transitions, before, _entry(call.initial, piece.sequence, rows))
        for piece, before in zip(route.own, route.before, strict=True)
    ]
    output = tied(_outputs(call, route, states, rows), arrived)
    if not return_state:
        return output
    last = [
        _after(transitions, places, _entry(call.initial, sequence, rows))
        for sequence, places in enumerate(route.all_of)
    ]
    found = _stacked(last, call.transitions) if rows.packed else last[0]
    return output, call.transitions.added.new_zeros(
        _states_shape(call, route)
    ) if found is None else found


def _states_shape(call: _Call, route: Route) -> tuple[int, ...]:
    """Of the last states, where no sequence has rows nor a state before."""
    batch, *rest = call.transitions.added.shape[1:]
    return (max(batch, len(route.all_of)), *rest)


def _prepared(
    tensors: tuple[Tensor, ...], plan: Plan, rows: Rows, options: dict[str, Any],
    return_state: bool,
) -> tuple[_Call, dict[str, str], dict[str, Tensor]]:  # fmt: skip
    """Check a call by computing what this rank's pieces do to a state."""
    decay, initial = options.pop("decay", None), options.pop("initial_state", None)
    reduce = options.pop("reduce_gradients", True)
    check_flag("reduce_gradients", reduce)
    named = dict(zip(("query", "key", "value", "beta"), tensors, strict=True)) | {"decay": decay}
    check_rows(plan, named, rows)
    whole: dict[str, Tensor | None] = {"initial_state": initial}
    check_tensors(whole)
    of_whole, compared = whole_facts(whole)
    facts = {
        **of_whole,
        **sizes_of(named, rows),
        "device": tensors[0].device.type,
        "gradients of": wanted_gradients({**named, **whole}),
        "options": str({**options, "return_state": return_state, "reduce_gradients": reduce}),
    }
    if reduce:
        whole = summed_together(plan, whole)
    initial = whole["initial_state"]
    route = route_of(plan, every=return_state)
    if initial is not None:
        call: Any = api.gated_delta_rule_varlen if rows.packed else api.gated_delta_rule
        check_initial(call, tensors, decay, initial, plan, rows, options)
    taken = taken_twice(rows, tensors[0], (*tensors[1:], decay), route)
    found = _transitions(tensors, decay, route, rows, options, taken, initial is not None)
    of_rows = *tensors[1:], decay
    found = found._replace(added=tied_to_rows(found.added, of_rows, (initial,), route))
    return _Call(tensors, decay, initial, options, found, taken), facts, compared


def _transitions(
    tensors: tuple[Tensor, ...], decay: Tensor | None, route: Route, rows: Rows,
    options: dict[str, Any], taken: TakenRows | None, started: bool,
) -> _Transitions:  # fmt: skip
    """What the pieces that this rank sends do to a state; the first call checks all arguments.

    started: whether sequences begin with a state. Else nothing reads the matrices of their first
    pieces, which are 0.
    """
    sent = [route.own[number] for number in route.sent]
    added, matrices = [], []
    for pieces in groups_of(rows, (*tensors, decay), sent):
        query = rows.of_group(tensors[0].detach(), pieces)
        of_rows = *tensors[1:], decay
        key, value, beta, here = taken.sent if taken else rows.all_of_group(of_rows, pieces)
        still = key.detach()  # as queries: the outputs of these calls are not used
        if (query.shape, query.dtype, query.device) != (key.shape, key.dtype, key.device):
            still = query  # which is refused
        size = key.shape[-1]
        state = _one_call((still, key, value, beta), here, pieces, rows, None, options)[1]
        added.append(state)
        shape = (*state.shape[:2], size, size)
        if not any([started or route.before[route.own.index(piece)] for piece in pieces]):
            matrices.append(state.new_zeros(shape))
            continue
        # Laid out as kernels take them: a pass that copies nothing is recorded.
        unit = torch.eye(size, dtype=state.dtype, device=state.device).expand(shape).contiguous()
        zeros = value.new_zeros(size).expand(*value.shape[:-1], size)
        matrices.append(_one_call((still, key, zeros, beta), here, pieces, rows, unit, options)[1])
    found = []
    for parts in (added, matrices):
        joined = parts[0].unsqueeze(1) if len(parts) == 1 < len(sent) else torch.stack(parts)
        found.append(joined[: len(sent)])
    return _Transitions(*found)


def _one_call(
    tensors: tuple[Tensor, ...], decay: Tensor | None, pieces: list[Piece], rows: Rows,
    initial: Tensor | None, options: dict[str, Any],
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and last state of some pieces, by the public call."""
    common: dict[str, Any] = {
        **options, "decay": decay, "initial_state": initial, "return_state": True,
    }  # fmt: skip
    query, key, value, beta = tensors
    if not rows.packed:
        return api.gated_delta_rule(query, key, value, beta, **common)
    offsets = offsets_of(pieces, query.device)
    return api.gated_delta_rule_varlen(query, key, value, beta, offsets, **common)


def _after(arrived: _Transitions, places: list[int], initial: Tensor | None) -> Tensor | None:
    """[batch, heads, head_dim, value_dim]: a state after some pieces, one after another."""
    state = initial
    for place in places:
        added = arrived.added[place]
        state = added if state is None else arrived.matrix[place] @ state.to(added.dtype) + added
    return state


def _entry(state: Tensor | None, sequence: int, rows: Rows) -> Tensor | None:
    """The initial state of one sequence, in the shape of a batch."""
    return state if state is None or not rows.packed else state[sequence : sequence + 1]


def _outputs(call: _Call, route: Route, states: list[Tensor | None], rows: Rows) -> Tensor:
    """The rows of this rank."""
    outputs, places = [], iter(states)
    for pieces in groups_of(rows, (*call.tensors, call.decay), route.own):
        before = [next(places) for _ in pieces]
        initial = before[0] if len(before) == 1 and not rows.packed else None
        if len(before) > 1 or rows.packed:
            initial = _stacked(before, call.transitions)
        query, *others = call.tensors
        of_rows = *others, call.decay
        key, value, beta, here = (
            call.taken.own if call.taken else rows.all_of_group(of_rows, pieces)
        )
        there = rows.of_group(query, pieces), key, value, beta
        found = _one_call(there, here, pieces, rows, initial, call.options)[0]
        outputs.append(rows.ungrouped(found, pieces))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _stacked(states: list[Tensor | None], like: _Transitions) -> Tensor | None:
    """States of packed pieces; zeros for pieces that start from nothing; None if all do."""
    if all(state is None for state in states):
        return None
    nothing = like.added.new_zeros(like.added.shape[1:])
    return torch.cat([nothing if each is None else each.to(nothing.dtype) for each in states])


COMPUTED |= dict.fromkeys(("gated_delta_rule", "gated_delta_rule_varlen"), _computed)

__all__ = ["gated_delta_rule", "gated_delta_rule_varlen"]
