"""Linear attention over ranks: each computes its rows, and a state is all that goes between them.

What a piece of rows does to the state is its own sums, and the factor by which older ones fade.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.ops.linear_attention import api
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
    whole_numbers,
)
from saccade.parallel.recurrence_graph import COMPUTED, into_graph
from saccade.runtime.arguments import check_flag
from saccade.runtime.spec import LinearState

TAKEN = {*api.LinearOptions.__annotations__, "return_state", "reduce_gradients"}


def linear_attention(
    query: Tensor, key: Tensor, value: Tensor, *, plan: Plan, **options: Any
) -> Any:
    """`saccade.linear_attention` of a sequence whose rows are dealt to ranks: a collective.

    Every rank of the plan's group calls it with its own rows (`Plan.shard`). Each rank finds the
    sums of its rows, all exchange them, and each computes its rows from the state before them. Of
    the plan the rows count; its mask, method and sizes are those of attention layers beside.

    Args:
        query: [batch, query_heads, rows of this rank, head_dim].
        key: [batch, key_heads, rows of this rank, head_dim].
        value: [batch, value_heads, rows of this rank, value_dim].
        plan: of `plan`; its rows that follow one another on a rank are computed together, so the
            fewer chunks the better. Where no attention layers share it, that of `masks.window(0)`
            deals one piece to each rank.
        options: those of `saccade.linear_attention`, but for key_lengths. decay for each row is
            that of this rank's rows; constant decay and initial_state are whole on every rank.
            With `return_state` the last state is whole on every rank, too.
            reduce_gradients: whether gradients of constant decay and of initial_state are summed
            over ranks, as in `attention`.

    Returns:
        output [batch, heads, rows of this rank, value_dim]; with `return_state` also a
        `LinearState`. Gradients are those of the sum of all ranks' losses.

    Raises:
        TypeError, ValueError, NotImplementedError: as `saccade.linear_attention`, on every rank;
            where ranks differ, naming the difference.
        RuntimeError: where messages fail or time out, saying where each rank was last.

    Source: Sun et al. 2024, "Linear attention sequence parallelism", section 3.

    Examples:
        >>> plan = saccade.parallel.plan(masks.causal(), 64, 1)
        >>> query, key, value = torch.randn(3, 1, 4, 64, 16)
        >>> output = saccade.parallel.linear_attention(query, key, value, plan=plan)
        >>> torch.testing.assert_close(output, saccade.linear_attention(query, key, value))
    """
    return _called("linear_attention", (query, key, value), plan, Rows(False), options)


def linear_attention_varlen(
    query: Tensor, key: Tensor, value: Tensor, *, plan: Plan, **options: Any
) -> Any:
    """`saccade.linear_attention_varlen` of sequences whose rows are dealt to ranks: a collective.

    Args:
        query: [rows of this rank, query_heads, head_dim].
        key: [rows of this rank, key_heads, head_dim].
        value: [rows of this rank, value_heads, value_dim].
        plan: made from the offsets of the sequences.
        options: as in `linear_attention`; states have one entry for each sequence.

    Returns:
        output [rows of this rank, heads, value_dim]; with `return_state` also a `LinearState`.

    Raises:
        TypeError, ValueError, NotImplementedError, RuntimeError: as `linear_attention`.

    Examples:
        >>> offsets = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> plan = saccade.parallel.plan(None, offsets, 1, causal=True)
        >>> query, key, value = torch.randn(3, 12, 4, 16)
        >>> saccade.parallel.linear_attention_varlen(query, key, value, plan=plan).shape
        torch.Size([12, 4, 16])
    """
    return _called("linear_attention_varlen", (query, key, value), plan, Rows(True), options)


class _Call(NamedTuple):
    """A checked call, and what its pieces do to a state."""

    tensors: tuple[Tensor, Tensor, Tensor]
    decay: Tensor | None
    initial: LinearState | None
    causal: bool
    options: dict[str, Any]  # of both calls of a piece
    transitions: _Transitions
    taken: TakenRows | None  # key, value and decay by row


class _Transitions(NamedTuple):
    """What pieces do to a state: [pieces, batch, heads, ...], of packed pieces a batch of 1.

    Attributes:
        kv, key_sum: their own sums.
        log_scale: of both; None where features have no scale.
        log_decay: by which older sums fade; None: they do not.
    """

    kv: Tensor
    key_sum: Tensor
    log_scale: Tensor | None
    log_decay: Tensor | None

    def flat(self) -> Tensor:
        """[pieces, numbers]."""
        return torch.cat([each.flatten(1) for each in self if each is not None], 1)

    def unflat(self, rows: Tensor) -> _Transitions:
        """Transitions with these shapes, of [pieces, numbers]."""
        sizes = [each.shape[1:].numel() for each in self if each is not None]
        parts = iter(rows.split(sizes, 1))
        found: list[Any] = [
            None if each is None else next(parts).unflatten(1, each.shape[1:]) for each in self
        ]
        return _Transitions(*found)

    def picked(self, arrived: Tensor, places: list[int]) -> _Transitions:
        """Those of some pieces, of all that came."""
        first = places[0] if places else 0
        if places == [*range(first, first + len(places))]:  # as they lie
            return self.unflat(arrived.narrow(0, first, len(places)))
        index = whole_numbers(tuple(places), arrived.device)
        return self.unflat(arrived.index_select(0, index))


def _called(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], plan: Plan, rows: Rows,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    if torch.compiler.is_compiling():
        return into_graph(name, tensors, plan, rows, options)
    return _computed(name, tensors, plan, rows, options)


def _computed(
    name: str, tensors: tuple[Tensor, Tensor, Tensor], plan: Plan, rows: Rows,
    options: dict[str, Any],
) -> Any:  # fmt: skip
    call: _Call
    call, return_state, compared = agreed(
        name, plan, tensors[0], options, TAKEN,
        lambda given, return_state: _prepared(tensors, plan, rows, given, return_state),
    )  # fmt: skip
    route = _route(plan, call.causal, return_state)
    if not sum(route.counts):
        query, key, value = call.tensors
        call = call._replace(tensors=(query, compared(key), value))
    arrived = spread(plan, call.transitions.flat(), route.counts, compared)
    states = _states_before(call, route, arrived, rows)
    output = _outputs(call, route, states, rows)
    output = tied(output, arrived)
    if not return_state:
        return output
    return output, _last_state(call, route, arrived, rows)


def _route(plan: Plan, causal: bool, return_state: bool) -> Route:
    """Rows that see later keys need the sums of all."""
    return route_of(plan, every=return_state or not causal)


def _prepared(
    tensors: tuple[Tensor, Tensor, Tensor], plan: Plan, rows: Rows, options: dict[str, Any],
    return_state: bool,
) -> tuple[_Call, dict[str, str], dict[str, Tensor]]:  # fmt: skip
    """Check a call by computing what this rank's pieces do to a state."""
    query, key, value = tensors
    decay, initial = options.pop("decay", None), options.pop("initial_state", None)
    causal, reduce = options.pop("causal", True), options.pop("reduce_gradients", True)
    check_flag("causal", causal)
    check_flag("reduce_gradients", reduce)
    named = {"query": query, "key": key, "value": value}
    check_rows(plan, named, rows)
    by_row = isinstance(decay, Tensor) and decay.dim() > 1
    if by_row:
        check_rows(plan, {"decay": decay}, rows)
    if initial is not None and not isinstance(initial, LinearState):
        raise TypeError(f"initial_state: got {type(initial).__name__}, takes a LinearState")
    check_tensors({"decay": decay, **_parts_of(initial)})
    whole: dict[str, Tensor | None] = {"decay": None if by_row else decay}
    whole |= _parts_of(initial)
    of_whole, compared = whole_facts(whole)
    if initial is not None and initial.log_scale is not None:
        compared["initial_state.log_scale"] = initial.log_scale.detach()
    facts = {
        **of_whole,
        **sizes_of({**named, "decay": decay} if by_row else named, rows),
        "device": query.device.type,
        "gradients of": wanted_gradients({**named, "by row": decay, **whole}),
        "options": str({**options, "causal": causal, "return_state": return_state,
                        "reduce_gradients": reduce, "feature_map": _named(options)}),
    }  # fmt: skip
    if reduce:
        whole = summed_together(plan, whole)
    if not by_row:
        decay = whole["decay"]
    if initial is not None:
        kv, key_sum = whole["initial_state.kv"], whole["initial_state.key_sum"]
        assert kv is not None and key_sum is not None
        initial = initial._replace(kv=kv, key_sum=key_sum)
    route = _route(plan, causal, return_state)
    if initial is not None:
        call: Any = api.linear_attention_varlen if rows.packed else api.linear_attention
        check_initial(call, tensors, decay, initial, plan, rows, options)
    of_rows, constant = (key, value, decay if by_row else None), None if by_row else decay
    taken = taken_twice(rows, query, of_rows, route) if causal else None
    found = _transitions(tensors, decay, route, rows, options, taken)
    if initial is not None and initial.log_scale is None and found.log_scale is not None:
        initial = initial._replace(log_scale=found.log_scale.new_zeros(initial.kv.shape[:2]))
    kv = tied_to_rows(found.kv, of_rows, (constant, *(initial or ())[:2]), route)
    found = found._replace(kv=kv)
    return _Call(tensors, decay, initial, causal, options, found, taken), facts, compared


def _parts_of(initial: LinearState | None) -> dict[str, Tensor | None]:
    """The sums of an initial state, by name."""
    if initial is None:
        return {"initial_state.kv": None, "initial_state.key_sum": None}
    return {"initial_state.kv": initial.kv, "initial_state.key_sum": initial.key_sum}


def _named(options: dict[str, Any]) -> str:
    """Feature maps in words that are equal on all ranks."""
    maps = options.get("feature_map", "elu+1")
    pair = maps if isinstance(maps, tuple) else (maps,)
    return ", ".join(
        one if isinstance(one, str) else getattr(one, "__qualname__", type(one).__name__)
        for one in pair
    )


def _transitions(
    tensors: tuple[Tensor, Tensor, Tensor], decay: Tensor | None, route: Route, rows: Rows,
    options: dict[str, Any], taken: TakenRows | None,
) -> _Transitions:  # fmt: skip
    """What the pieces that this rank sends do to a state; the first call checks all arguments."""
    sent = [route.own[number] for number in route.sent]
    nothing = tensors[0].detach().narrow(rows.dim, 0, 0)  # a state takes no gradient to queries
    by_row = decay if decay is not None and decay.dim() > 1 else None
    states = []
    for pieces in groups_of(rows, (*tensors, by_row), sent):
        of_rows = *tensors[1:], by_row
        key, value, found = taken.sent if taken else rows.all_of_group(of_rows, pieces)
        here = decay if found is None else found
        query = rows.of_group(nothing, pieces)
        states.append(_one_call(query, key, value, pieces, rows, here, None, options)[1])
    parts: Any = zip(*states, strict=True)
    kv, key_sum, log_scale = (
        None if part[0] is None else _of_pieces(part, len(sent)) for part in parts
    )
    assert kv is not None and key_sum is not None
    return _Transitions(kv, key_sum, log_scale, _faded(decay, sent, rows, key_sum))


def _of_pieces(parts: Sequence[Tensor], pieces: int) -> Tensor:
    """[pieces, batch, heads, ...], of one call for all, whose entries they are, or of one each."""
    if len(parts) == 1 < pieces:
        return parts[0].unsqueeze(1)
    return torch.stack(list(parts))[:pieces]


def _one_call(
    query: Tensor, key: Tensor, value: Tensor, pieces: list[Piece], rows: Rows,
    decay: Tensor | None, initial: LinearState | None, options: dict[str, Any],
) -> tuple[Tensor, LinearState]:  # fmt: skip
    """Output and last state of some rows of pieces, by the public call."""
    common: dict[str, Any] = {
        **options, "decay": decay, "initial_state": initial, "return_state": True,
    }  # fmt: skip
    if not rows.packed:
        return api.linear_attention(query, key, value, **common)
    offsets = [offsets_of(pieces, query.device) * bool(each.shape[0]) for each in (query, key)]
    call: Any = api.linear_attention_varlen
    return call(query, key, value, *offsets, **common)


def _faded(decay: Tensor | None, pieces: list[Piece], rows: Rows, key_sum: Tensor) -> Tensor | None:
    """[pieces, batch, heads]: the logarithm of what each piece leaves of an older state."""
    if decay is None:
        return None
    shape = key_sum.shape[1:3]
    if decay.dim() == 1:
        found = [piece.size * decay.to(key_sum.dtype).expand(shape) for piece in pieces]
    else:
        wide = decay.to(key_sum.dtype)
        found = [rows.of(wide, piece).sum(rows.dim).expand(shape) for piece in pieces]
    return torch.stack(found) if found else key_sum.new_zeros(0, *shape)


def _after(before: _Transitions, initial: LinearState | None) -> LinearState:
    """[batch, heads, ...]: a state after some pieces, one after another."""
    parts, weight = before, None  # the logarithm of each piece's weight, [pieces (+ 1), ...]
    if initial is None and len(parts.kv) == 1 and parts.log_scale is None:
        return LinearState(parts.kv[0], parts.key_sum[0])
    if initial is not None:
        first = _Transitions(
            initial.kv.unsqueeze(0), initial.key_sum.unsqueeze(0),
            None if initial.log_scale is None else initial.log_scale.unsqueeze(0),
            None if parts.log_decay is None else parts.log_decay.new_zeros(1, *parts.kv.shape[1:3]),
        )  # fmt: skip
        both: Any = zip(first, parts, strict=True)
        joined: list[Any] = [
            None if old is None else torch.cat([old.to(new.dtype), new]) for old, new in both
        ]
        parts = _Transitions(*joined)
    if parts.log_decay is not None:  # what comes behind each
        later = torch.nn.functional.pad(parts.log_decay.movedim(0, -1), (0, 1))[..., 1:]
        weight = later.flip(-1).cumsum(-1).flip(-1).movedim(-1, 0)
    unit = None
    if parts.log_scale is not None:
        scale = parts.log_scale.detach()
        weight = scale if weight is None else weight + scale
        unit = weight.detach().amax(0)
        weight = weight - unit.masked_fill(unit == -torch.inf, 0)
    if weight is None:
        return LinearState(parts.kv.sum(0), parts.key_sum.sum(0))
    factor = weight.exp().unsqueeze(-1)
    key_sum = (factor * parts.key_sum).sum(0)
    return LinearState((factor.unsqueeze(-1) * parts.kv).sum(0), key_sum, unit)


def _entry(state: LinearState | None, sequence: int, rows: Rows) -> LinearState | None:
    """The initial state of one sequence, in the shape of a batch."""
    if state is None or not rows.packed:
        return state
    found: list[Any] = [None if each is None else each[sequence : sequence + 1] for each in state]
    return LinearState(*found)


def _states_before(
    call: _Call, route: Route, arrived: Tensor, rows: Rows
) -> list[LinearState | None]:
    """The state that each piece of this rank starts from; where rows see all keys, the last."""
    found: list[LinearState | None] = []
    for piece, before in zip(route.own, route.before, strict=True):
        places = before if call.causal else route.all_of[piece.sequence]
        initial = _entry(call.initial, piece.sequence, rows)
        if places:
            initial = _after(call.transitions.picked(arrived, places), initial)
        found.append(initial)
    return found


def _outputs(call: _Call, route: Route, states: list[LinearState | None], rows: Rows) -> Tensor:
    """The rows of this rank."""
    query, key, value = call.tensors
    decay = call.decay if call.causal else None
    options = {**call.options, "causal": call.causal}
    if not call.causal:  # the last state has all keys
        key, value = key.narrow(rows.dim, 0, 0), value.narrow(rows.dim, 0, 0)
    by_row = decay if decay is not None and decay.dim() > 1 else None
    outputs, places = [], iter(states)
    for pieces in groups_of(rows, (query, key, value, by_row), route.own):
        before = [next(places) for _ in pieces]
        initial = before[0] if len(before) == 1 and not rows.packed else None
        if len(before) > 1 or rows.packed:
            initial = _stacked(before, call.transitions)
        of_rows = key, value, by_row
        keys, values, found = call.taken.own if call.taken else rows.all_of_group(of_rows, pieces)
        here, queries = decay if found is None else found, rows.of_group(query, pieces)
        found = _one_call(queries, keys, values, pieces, rows, here, initial, options)[0]
        outputs.append(rows.ungrouped(found, pieces))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def _stacked(states: list[LinearState | None], like: _Transitions) -> LinearState | None:
    """Initial states of packed pieces; zeros for pieces that start from nothing."""
    if all(state is None for state in states):
        return None
    shape = like.kv.shape[1:], like.key_sum.shape[1:]
    kv, key_sum = (like.kv.new_zeros(each) for each in shape)
    scale = None
    if like.log_scale is not None:
        scale = like.log_scale.new_full(like.log_scale.shape[1:], -torch.inf)
    nothing = LinearState(kv, key_sum, scale)
    parts: Any = zip(*(nothing if state is None else state for state in states), strict=True)
    found: list[Any] = [
        None if part[0] is None else torch.cat([each.to(like.kv.dtype) for each in part])
        for part in parts
    ]
    return LinearState(*found)


def _last_state(call: _Call, route: Route, arrived: Tensor, rows: Rows) -> LinearState:
    """The state of every sequence after its last key, on every rank."""
    found: list[LinearState | None] = []
    for sequence, places in enumerate(route.all_of):
        initial = _entry(call.initial, sequence, rows)
        found.append(_after(call.transitions.picked(arrived, places), initial))
    if not rows.packed:
        assert found[0] is not None
        return found[0]
    stacked = _stacked(found, call.transitions)
    return (
        stacked if stacked is not None else LinearState(*call.transitions.picked(arrived, [])[:2])
    )


COMPUTED |= dict.fromkeys(("linear_attention", "linear_attention_varlen"), _computed)

__all__ = ["linear_attention", "linear_attention_varlen"]
