"""Runs: rows of a rank that follow one another, and whose part of a call is a plain call.

A mask that looks at distances alone, causal or a window of earlier keys, needs no row numbers where
queries and keys end at the same row: a call aligned at the bottom right computes just that, by the
kernels that know such masks. A rank has few runs, and so few calls; of sequences laid end to end
those of several runs are one packed call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import masks
from saccade.masks import Mask
from saccade.modifiers.graph_constants import outside_graph
from saccade.modifiers.normal_form import by_distance, is_causal
from saccade.parallel.exchange import Routes
from saccade.parallel.local import Offsets, heads_first, rows_first
from saccade.parallel.planner import Plan
from saccade.parallel.work import needs
from saccade.runtime.dropout import Numbers
from saccade.runtime.spec import accumulate_dtype

MOST_PARTS = 4  # more calls would wait for one another more than a table of row numbers costs


class Part(NamedTuple):
    """A plain call: some rows of this rank against some of the keys that it needs.

    Attributes:
        query: the first row and how many, among this rank's.
        kv: the first key and how many, among those that the rank needs.
        mask: as the call takes it.
        offsets: of a packed call.
        numbers: what dropout calls rows and heads; None: nothing is dropped, or it is not said yet.
    """

    query: tuple[int, int]
    kv: tuple[int, int]
    mask: Mask
    offsets: Offsets | None
    numbers: Numbers | None = None


class _Run(NamedTuple):
    """Rows first to end of the whole, which see keys from kv_first to kv_end."""

    first: int
    end: int
    kv_first: int
    kv_end: int
    place: int  # of the first key among those that arrive


@outside_graph
def parts_of(plan: Plan, arrived: Tensor, device: torch.device) -> list[Part] | None:
    """The calls that compute this rank's rows; None where rows must be told their numbers.

    arrived: the keys that the rank needs, ascending.
    """
    if ("parts", device) not in plan.memory:
        plan.memory["parts", device] = _parts(plan, arrived, device)
    return plan.memory["parts", device]


def _parts(plan: Plan, arrived: Tensor, device: torch.device) -> list[Part] | None:
    key = plan.mask.key
    if not (key or plan.cu_seqlens is not None) or not len(plan.rows):
        return None
    if key and not (is_causal(key) or by_distance(key)):
        return None
    found = _runs(plan, arrived)
    if found is None:
        return None
    mask = masks.causal() if is_causal(key) else plan.mask.to(device)
    groups = [[run] for run in found] if plan.cu_seqlens is None else _joined(found)
    if len(groups) > MOST_PARTS:
        return None
    parts, first = [], 0
    for runs in groups:
        size = sum(run.end - run.first for run in runs)
        last = runs[-1]
        kv = runs[0].place, last.place + last.kv_end - last.kv_first - runs[0].place
        offsets = None
        if plan.cu_seqlens is not None:
            offsets = _offsets(runs, plan.cu_seqlens.long(), device)
        parts.append(Part((first, size), kv, mask, offsets))
        first += size
    return parts


def _runs(plan: Plan, arrived: Tensor) -> list[_Run] | None:
    """The runs of this rank's rows; None where one has not all keys up to its end, or others."""
    rows = plan.rows
    starts = torch.cat([rows[:1], rows[1:][rows.diff() != 1]])
    ends = torch.cat([rows[:-1][rows.diff() != 1], rows[-1:]]) + 1
    edges = torch.stack([starts, ends], 1).flatten()
    seen = needs(plan.whole_call, edges, plan.segments)[::2]
    found = []
    for first, end, of_run in zip(starts.tolist(), ends.tolist(), seen, strict=True):
        segments = of_run.nonzero().flatten()
        if not len(segments):
            return None
        kv_first, kv_end = int(plan.segments[segments[0]]), int(plan.segments[segments[-1] + 1])
        if plan.cu_seqlens is not None:
            offsets = plan.cu_seqlens
            kv_first = max(kv_first, int(offsets[offsets <= first].max()))
            if not plan.mask.key:
                kv_end = int(offsets[offsets >= end].min())
        if plan.mask.key:
            if kv_end > end:  # of later keys the call would know no distance
                return None
            kv_end = end
        place = int(torch.searchsorted(arrived, kv_first))
        last = place + kv_end - kv_first - 1
        if (
            last >= len(arrived)
            or int(arrived[place]) != kv_first
            or int(arrived[last]) != kv_end - 1
        ):
            return None
        found.append(_Run(first, end, kv_first, kv_end, place))
    return found


def _joined(runs: list[_Run]) -> list[list[_Run]]:
    """Runs whose keys follow one another, together."""
    groups: list[list[_Run]] = []
    for run in runs:
        before = groups[-1][-1] if groups else None
        if before and run.place >= before.place + before.kv_end - before.kv_first:
            groups[-1].append(run)
        else:
            groups.append([run])
    return groups


def _offsets(runs: list[_Run], sequences: Tensor, device: torch.device) -> Offsets:
    """A packed call's offsets; keys between those of two runs are a sequence without queries."""
    queries, keys = [0], [0]
    base = runs[0].place
    for run in runs:
        if run.place - base > keys[-1]:
            queries.append(queries[-1])
            keys.append(run.place - base)
        inside = sequences[(sequences > run.first) & (sequences < run.end)].unique().tolist()
        before, kv_before = queries[-1], run.place - base
        queries += [before + row - run.first for row in [*inside, run.end]]
        keys += [kv_before + row - run.kv_first for row in [*inside, run.kv_end]]
    query, kv = (torch.tensor(each, dtype=torch.int32) for each in (queries, keys))
    longest = int(query.diff().max()), int(kv.diff().max())
    return Offsets(query.to(device), kv.to(device), *longest)


class Divided(torch.autograd.Function):
    """Queries of several calls, cut out of all; their gradients are written where they belong."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, query: Tensor, heads: Sequence[tuple[int, int]], rows: Sequence[tuple[int, int]]
    ) -> tuple[Tensor, ...]:
        ctx.like, ctx.heads, ctx.rows = torch.empty_like(query, device="meta"), heads, rows
        return tuple(query.narrow(1, *some).narrow(2, *part) for some in heads for part in rows)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        total = torch.empty_like(ctx.like, device=grads[0].device)
        ways = ((some, part) for some in ctx.heads for part in ctx.rows)
        for (some, part), grad in zip(ways, grads, strict=True):
            total.narrow(1, *some).narrow(2, *part).copy_(grad)
        return total, None, None


class Cut(torch.autograd.Function):
    """Keys and values of several calls, cut out of what arrived; their gradients are added once.

    Two gradients are added and rounded once; more are added in 32 bits.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, arrived: Tensor, routes: Routes, ranges: Sequence[tuple[int, int]], head_dim: int
    ) -> tuple[Tensor, ...]:
        ctx.shape, ctx.inverse = arrived.shape, routes.inverse
        ctx.ranges, ctx.head_dim = ranges, head_dim
        rows, found = arrived.index_select(0, routes.order), []
        for first, size in ranges:
            part = heads_first(rows.narrow(0, first, size))
            found += [part[..., :head_dim], part[..., head_dim:]]
        return tuple(found)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        dtype = grads[0].dtype
        wide = accumulate_dtype(dtype) if len(ctx.ranges) > 2 else dtype
        order = sorted(range(len(ctx.ranges)), key=lambda number: -ctx.ranges[number][1])
        total = grads[0].new_empty(ctx.shape, dtype=wide)
        for turn, number in enumerate(order):
            first, size = ctx.ranges[number]
            there = total.narrow(0, first, size)
            if turn == 0 and size < ctx.shape[0]:
                total.zero_()
            for channels, grad in zip(
                (slice(None, ctx.head_dim), slice(ctx.head_dim, None)),
                grads[2 * number : 2 * number + 2],
                strict=True,
            ):
                if turn:
                    there[..., channels].add_(rows_first(grad))
                else:
                    there[..., channels].copy_(rows_first(grad))
        return total.index_select(0, ctx.inverse).to(dtype), None, None, None
