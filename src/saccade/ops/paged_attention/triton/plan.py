"""Plan of a call over pages: the tile range of each tile of query rows under a mask, in units of
work."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from saccade.gpu.tensor_view import num_rows, wide
from saccade.gpu.tile_ranges import TILE_RANGE_SIZE, everything, find_tile_range
from saccade.ops.paged_attention.triton.split_kv import GROUPS, PLAN_ROW, is_wanted


@triton.jit(do_not_specialize=["mask"])
def plan_pages(
    rows, key, mask, schedule, plan,
    TOKENS: tl.constexpr, TOKEN_TILE: tl.constexpr, KV_TILE: tl.constexpr,
    GROUP: tl.constexpr, HEADS_IN_TILE: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: one row of the plan (split_kv.py), and its units in front of all rows.

    rows: the query rows as a View of no memory, whose heads are those that the mask tells apart.
    HEADS: so many query heads share a tile and may see unlike things. CHAINED: the attention kernel
    is to start early, and waits for this one by itself.
    """
    if CHAINED:
        gdc_launch_dependents()
    group = tl.program_id(0)
    batch, head, tile, slot = rows.find(group, rows.data, TOKENS)
    query_len, kv_len = num_rows(rows, batch), num_rows(key, batch)
    start = tile * TOKENS
    exists = (start < query_len) & is_wanted(schedule, query_len)
    kv_len = tl.where(exists, kv_len, 0)
    lengths = (query_len, kv_len)
    if mask.classify is None:
        tile_range = everything(mask, batch, head, slot, start, lengths, TOKEN_TILE, KV_TILE, True)
    else:
        PARTS: tl.constexpr = (GROUP + HEADS_IN_TILE - 1) // HEADS_IN_TILE
        query_head = head // PARTS * GROUP + head % PARTS * HEADS_IN_TILE
        tile_range = find_tile_range(
            mask, batch, query_head, start, lengths, TOKEN_TILE, KV_TILE, True, AT_ONCE, HEADS
        )
    units = tl.where(exists, 1 + tile_range.num_partial + tile_range.num_full, 0)
    tl.store(plan + group, units)
    row = plan + schedule.data[GROUPS] + wide(group) * PLAN_ROW
    for number in tl.static_range(TILE_RANGE_SIZE):
        tl.store(row + number, tile_range[number])
    tl.store(row + TILE_RANGE_SIZE, batch)
    tl.store(row + TILE_RANGE_SIZE + 1, head)
    tl.store(row + TILE_RANGE_SIZE + 2, tile)
