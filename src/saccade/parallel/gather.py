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

from saccade.modifiers.modifier import ShardRange
from saccade.parallel.exchange import Routes, Sending, spans_of
from saccade.parallel.local import LocalCall, heads_of, joined, rows_first
from saccade.parallel.runs import Cut, Divided, Part, parts_of


def attend(call: LocalCall) -> tuple[Tensor, Tensor]:
    """Output and lse of this rank's rows."""
    plan, (_, query_heads, kv_heads, head_dim, _, _) = call.plan, call.plan.sizes
    device = call.query.device
    routes = plan.memory.get(("routes", device))
    if routes is None:
        routes = plan.memory["routes", device] = plan.routes.to(device)
    parts = None if call.score.key else parts_of(plan, routes.arrived, device)
    ranges = [(0, len(routes.arrived))] if parts is None else [part.kv for part in parts]
    if plan.sends_nothing:
        keys = _own_keys(call, routes, ranges)
        (queries,) = _queries(call, [(0, query_heads)], parts)
        return _attend(call, queries, keys, heads_of(0, query_heads, query_heads), parts)
    groups = 2 if kv_heads % 2 == 0 else 1
    spans = plan.memory.get("spans")
    if spans is None:
        spans = plan.memory["spans"] = spans_of(plan.routes.send)
    sent = [
        Sending(plan, rows_first(some), routes.send, routes.receive, "keys", spans)
        for some in joined(call.key, call.value).chunk(groups, 1)
    ]
    size, found = query_heads // groups, []
    queries = _queries(call, [(number * size, size) for number in range(groups)], parts)
    for number, message in enumerate(sent):
        keys: Any = Cut.apply(message.wait(), routes, ranges, head_dim)
        heads = heads_of(number * size, size, query_heads)
        found.append(_attend(call, queries[number], keys, heads, parts))
    return _beside(found, 1)


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
        return call.attend(queries[0], keys[0], keys[1], *call.of_heads(mask, score, heads), sinks)
    found = []
    for part, some, key, value in zip(parts, queries, keys[::2], keys[1::2], strict=True):
        if part.offsets is None:
            found.append(call.attend(some, key, value, part.mask, call.score, sinks))
            continue
        rows = [each.squeeze(0).transpose(0, 1) for each in (some, key, value)]
        output, lse = call.attend_packed(rows, part.offsets, part.mask, call.score, sinks)
        found.append((output.transpose(0, 1).unsqueeze(0), lse.unsqueeze(0)))
    return _beside(found, 2)


def _beside(found: Sequence[tuple[Tensor, Tensor]], dim: int) -> tuple[Tensor, Tensor]:
    """Outputs and lses of several calls along a dimension."""
    if len(found) == 1:
        return found[0]
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs, dim), torch.cat(lses, dim)
