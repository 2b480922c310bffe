"""Cuts: into how many parts an item of a schedule was cut, and which programs computed them.

What `schedule.begin` answers for a program, these answer for an item. A program that merges asks
before partial results are there, and need not be told by those that compute them.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.tensor_view import ADDED
from saccade.ops.paged_attention.triton.split_kv import (
    CUTS_IN_GRID,
    HEADS,
    PROGRAMS,
    count_at_once,
    own_parts,
    share_out,
)

# ---- items: (schedule, query, key, group, index) → parts (0: it was not cut), the first program --


@triton.jit
def cut_of_shares(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """By `equal_shares` of a line of few items."""
    programs = schedule.data[PROGRAMS] - ADDED
    all_units, all_items = count_at_once(schedule, query, key, 0, TOKENS, KV_TILE, AT_ONCE)
    line, share, own, up, own_most = share_out(
        all_units, all_items, programs, LEAST, LONG, True, AT_ONCE == 1
    )
    if AT_ONCE == 1:
        units, items, before = all_units, all_items, line * 0
    else:
        units, items = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
        before = tl.sum(tl.where(tl.arange(0, AT_ONCE) < group, line, 0), 0)
    parts, own_share = own_parts(units, up, own_most)
    start = before + index * tl.where(own, parts, units)
    first = tl.where(own, start, start // share)
    begun = tl.where(own, own_share + 1, (first + 1) * share - start)  # by the first program
    share = tl.where(own, own_share, share)
    parts = tl.where(begun < units, 1 + tl.cdiv(units - begun, share), 0)
    return tl.where(index < items, parts, 0).to(tl.int32), first.to(tl.int32)


@triton.jit
def cut_of_item(
    schedule, query, key, group, index, TOKENS: tl.constexpr, KV_TILE: tl.constexpr,
    AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr, CUTS: tl.constexpr,
):  # fmt: skip
    """By `fixed_cuts`."""
    cuts, heads = schedule.data[CUTS_IN_GRID] - ADDED, schedule.data[HEADS] - ADDED
    units, items = schedule.count(schedule, query, key, group, TOKENS, KV_TILE)
    parts = tl.cdiv(units, tl.maximum(tl.cdiv(units, CUTS), LEAST))
    return tl.where((items > 0) & (parts > 1), parts, 0), (group * heads + index) * cuts
