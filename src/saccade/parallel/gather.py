"""Gather: each rank gets the keys and values that its rows see, and attends to them.

Nothing is merged, so a rank computes as one process would: rows that follow one another by a plain
call (`runs.py`), others by one call whose mask reads their numbers. Keys of the second half of the
heads are on their way while the first half is computed, forwards, and their gradients backwards.
Where every rank holds all keys that it needs, as of documents that lie whole on ranks, there is no
message.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.modifiers.graph_constants import constants, outside_graph
from saccade.modifiers.modifier import ShardRange
from saccade.parallel.exchange import Routes, Sending, spans_of
from saccade.parallel.local import LocalCall, heads_of, joined, numbers_of, rows_first
from saccade.parallel.planner import Plan
from saccade.parallel.runs import Cut, Divided, Part, parts_of
from saccade.runtime.dropout import Numbers


def attend(call: LocalCall) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows."""
    plan, (_, query_heads, kv_heads, head_dim, _, _) = call.plan, call.plan.sizes
    device = call.query.device
    routes = constants(_routes(plan, device))
    arrived = plan.routes.arrived
    parts = None if call.score.key else constants(parts_of(plan, arrived, device))
    ranges = [(0, len(arrived))] if parts is None else [part.kv for part in parts]
    if plan.sends_nothing:
        call = call._replace(key=call.compared(call.key))
        keys = _own_keys(call, routes, ranges)
        (queries,) = _queries(call, [(0, query_heads)], parts)
        return _attend(call, queries, keys, heads_of(0, query_heads, query_heads), parts)
    groups = 2 if kv_heads % 2 == 0 else 1
    spans = _spans(plan)
    sent: list[Sending] = []
    for some in joined(call.key, call.value).chunk(groups, 1):
        rows, compared = rows_first(some), None if sent else call.compared
        sent.append(
            Sending(plan, rows, routes.send, routes.receive, "keys", spans, compared=compared)
        )
    size, found = query_heads // groups, []
    queries = _queries(call, [(number * size, size) for number in range(groups)], parts)
    for number, message in enumerate(sent):
        keys: Any = Cut.apply(message.wait(), routes, ranges, head_dim)
        heads = heads_of(number * size, size, query_heads)
        found.append(_attend(call, queries[number], keys, heads, parts))
    return _beside(found, 1)


@outside_graph
def _routes(plan: Plan, device: torch.device) -> Routes:
    """The routes of a plan, with indices on a device."""
    known = plan.memory.get(("routes", device))
    if known is None:
        known = plan.memory["routes", device] = plan.routes.to(device)
    return known


@outside_graph
def _spans(plan: Plan) -> list[tuple[int, int] | None]:
    """Which of the rows that go to each rank follow one another."""
    known = plan.memory.get("spans")
    if known is None:
        known = plan.memory["spans"] = spans_of(plan.routes.send)
    return known


def _queries(
    call: LocalCall, heads: list[tuple[int, int]], parts: list[Part] | None
) -> list[tuple[Tensor, ...]]:
    """The queries of each part, for each of several heads."""
    rows = [(0, call.query.shape[2])] if parts is None else [part.query for part in parts]
    if len(heads) == len(rows) == 1:
        return [(call.query,)]
    found: Any = Divided.apply(call.query, heads, rows)
    return [found[first : first + len(rows)] for first in range(0, len(found), len(rows))]


def _own_keys(
    call: LocalCall, routes: Routes, ranges: Sequence[tuple[int, int]]
) -> tuple[Tensor, ...]:
    """Keys and values of each part, all of them this rank's own."""
    picks, rows = routes.send[call.plan.rank], (call.key, call.value)
    if len(picks) < len(call.plan.rows):  # some rows are seen by none
        rows = tuple(each.index_select(2, picks) for each in rows)
    if list(ranges) == [(0, len(picks))]:
        return rows
    return tuple(each.narrow(2, first, size) for first, size in ranges for each in rows)


def _attend(
    call: LocalCall, queries: Sequence[Tensor], keys: Sequence[Tensor], heads: ShardRange,
    parts: list[Part] | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Output and lse of some heads, from the keys and values of each part."""
    sinks = None if call.sinks is None else call.sinks.narrow(0, heads.start, heads.size)
    if parts is None:
        arrived = call.plan.routes.arrived
        mask, score = call.mask_of(arrived, "gather"), call.score_of(arrived, "gather")
        mask, score = call.of_heads(mask, score, heads)
        numbers = _numbers(call, None, heads.start)
        return call.attend(queries[0], keys[0], keys[1], mask, score, sinks, numbers)
    found, places = [], range(len(parts))
    for place, part, some, key, value in zip(
        places, parts, queries, keys[::2], keys[1::2], strict=True
    ):
        numbers = _numbers(call, place, heads.start)
        if part.offsets is None:
            found.append(call.attend(some, key, value, part.mask, call.score, sinks, numbers))
            continue
        rows = [each.squeeze(0).transpose(0, 1) for each in (some, key, value)]
        output, lse = call.attend_packed(rows, part.offsets, part.mask, call.score, sinks, numbers)
        found.append((output.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)))
    return _beside(found, 2)


def _numbers(call: LocalCall, place: int | None, first_head: int) -> Numbers | None:
    """What dropout calls the rows of a part, or all rows, of the heads from one on."""
    if call.seed is None:
        return None
    return constants(_numbers_on(call.plan, place, first_head, call.query.device))


@outside_graph
def _numbers_on(plan: Plan, place: int | None, first_head: int, device: torch.device) -> Numbers:
    name = "dropout", place, first_head, device
    known = plan.memory.get(name)
    if known is None:
        rows, kv_rows, offsets = plan.rows, plan.routes.arrived, None
        parts = None if place is None else parts_of(plan, kv_rows, device)
        if parts is not None and place is not None:
            part = parts[place]
            rows, kv_rows = rows.narrow(0, *part.query), kv_rows.narrow(0, *part.kv)
            offsets = part.offsets
        known = numbers_of(plan, first_head, rows, kv_rows, offsets).to(device)
        plan.memory[name] = known
    return known


def _beside(found: Sequence[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
    """Outputs and lses of several calls along a dimension."""
    if len(found) == 1:
        return found[0]
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs, dim), torch.cat(lses, dim)
