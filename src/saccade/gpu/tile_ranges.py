"""Tile ranges: which tiles a program visits, and which of them need the mask.

A program stands at one tile of query rows and walks along tiles of keys, or the other way round.
Tiles that are wholly visible ("clean") run without mask arithmetic; others ("edges") select pair by
pair; tiles that are hidden are not visited, but for those in holes between others of a walk that
no list guides. A walk is six whole numbers:

    first, num_left, jump     edge number i is tile first + i, from num_left on tile jump + i
    num_edges, clean_first, num_clean

Loops ask for the tile after the one at hand, so that a list is read well ahead of what it leads to.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.gpu.tensor_view import wide

# ---- extremes ------------------------------------------------------------------------------------
# The smallest and largest entry of a captured tensor over the rows of a tile.
#
# Composed verdicts on whole tiles call these functions. Indices past the last one of a tile read
# the last one again, which changes no extreme.


@triton.jit
def bounds(entries):
    """Entries as a lower and an upper bound; NaN is all numbers, of which `in_order` knows."""
    if entries.dtype == tl.int1:
        numbers = entries.to(tl.int32)
        low, high = numbers, numbers
    elif entries.dtype.is_floating():
        numbers = entries.to(tl.float32)
        low = tl.where(numbers != numbers, float("-inf"), numbers)
        high = tl.where(numbers != numbers, float("inf"), numbers)
    else:
        whole = entries if entries.dtype == tl.int64 else entries.to(tl.int32)
        low, high = whole, whole
    return low, high


@triton.jit
def in_order(low, high):
    """The bounds of entries; where any was NaN, or they are infinite to both sides, both NaN."""
    if low.dtype.is_floating():
        anything = (low == float("-inf")) & (high == float("inf"))
        low = tl.where(anything, float("nan"), low)
        high = tl.where(anything, float("nan"), high)
    return low, high


@triton.jit
def along(table, index, DIM: tl.constexpr):
    """Where the entry nearest to an index lies along one dimension, in elements."""
    inside = tl.minimum(tl.maximum(index, 0), table[1][DIM] - 1)
    return wide(inside) * table[2][DIM]


@triton.jit
def along_one(table, offset, DIM: tl.constexpr, low, high, TILE: tl.constexpr):
    """Smallest and largest entry between two indices that lie less than TILE apart: [tiles]."""
    index = tl.minimum(low[:, None] + tl.arange(0, TILE)[None, :], high[:, None])
    lows, highs = bounds(tl.load(table[0] + (offset + along(table, index, DIM))))
    return in_order(tl.min(lows, 1), tl.max(highs, 1))


@triton.jit
def along_two(
    table, offset,
    DIM_A: tl.constexpr, low_a, high_a, TILE_A: tl.constexpr,
    DIM_B: tl.constexpr, low_b, high_b, TILE_B: tl.constexpr,
):  # fmt: skip
    """The same along two dimensions."""
    index_a = tl.minimum(low_a[:, None] + tl.arange(0, TILE_A)[None, :], high_a[:, None])
    index_b = tl.minimum(low_b[:, None] + tl.arange(0, TILE_B)[None, :], high_b[:, None])
    places = along(table, index_a, DIM_A)[:, :, None] + along(table, index_b, DIM_B)[:, None, :]
    lows, highs = bounds(tl.load(table[0] + (offset + places)))
    return in_order(tl.min(tl.min(lows, 2), 1), tl.max(tl.max(highs, 2), 1))


@triton.jit
def along_two_blocks(
    table, offset,
    DIM_A: tl.constexpr, low_a, high_a, TILE_A: tl.constexpr,
    DIM_B: tl.constexpr, low_b, high_b, TILE_B: tl.constexpr,
):  # fmt: skip
    """The same where whole blocks of rows share an index: there are few, so they come in turn."""
    places = along(table, low_a, DIM_A) + along(table, low_b, DIM_B)
    lows, highs = bounds(tl.load(table[0] + (offset + places)))
    for a in range(0, tl.max(high_a - low_a, 0) + 1):
        for b in range(0, tl.max(high_b - low_b, 0) + 1):
            place_a = along(table, tl.minimum(low_a + a, high_a), DIM_A)
            place_b = along(table, tl.minimum(low_b + b, high_b), DIM_B)
            low, high = bounds(tl.load(table[0] + (offset + (place_a + place_b))))
            lows, highs = tl.minimum(lows, low), tl.maximum(highs, high)
    return in_order(lows, highs)


WALK_SIZE = tl.constexpr(6)


class Mask(NamedTuple):
    """Which pairs are visible, and which tiles to visit."""

    visible: Any  # bools for a tile of pairs, from (batch, head, rows, rows, shift, data), or None
    judge: Any  # possible and certain for whole tiles, from their first and last rows, or None
    walk: Any  # everything, found, planned or listed
    tile: Any  # next_in_range or next_in_list
    data: tuple[Any, ...] = ()  # what the mask captured
    plan: tuple[Any, ...] = ()  # what was planned ahead, see gpu/tile_lists.py


# ---- verdicts ---------------------------------------------------------------------------------


@triton.jit
def judge_tiles(
    mask, batch, head, start, lengths, tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Which tiles of the other side can hold a visible pair, and which are clean: [tiles].

    lengths: of the side that the program stands on, and of the other side.
    """
    return judge_spans(mask, batch, head, start, lengths, tiles, OTHER, TILE, OTHER, OVER_KEYS)


@triton.jit
def judge_spans(
    mask, batch, head, start, lengths, tiles, num_rows,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """The same of so many rows of the other side from the first of each tile on: more than a tile
    only where the mask reads no captured tensor along rows."""
    length, other_length = lengths
    low = start + tl.arange(0, 1)
    high = tl.minimum(low + TILE, length) - 1
    exists = tiles * OTHER < other_length
    other_low = tl.where(exists, tiles * OTHER, 0)  # tiles past the end are judged as the first
    other_high = tl.minimum(other_low + num_rows, other_length) - 1
    if OVER_KEYS:
        possible, certain = mask.judge(
            batch, head, low, high, other_low, other_high, other_length - length, mask.data,
            TILE, OTHER,
        )  # fmt: skip
        whole = exists & (other_low + num_rows <= other_length)
    else:
        possible, certain = mask.judge(
            batch, head, other_low, other_high, low, high, length - other_length, mask.data,
            OTHER, TILE,
        )  # fmt: skip
        whole = exists & (other_low + num_rows <= other_length) & (start + TILE <= length)
    return possible & exists, certain & whole


@triton.jit
def find_walk(
    mask, batch, head, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Judge all tiles, AT_ONCE together: visit from the first to the last that is possible, with
    one stretch of clean tiles among them. HEADS: so many heads, from `head` on, share a tile.

    Each place of AT_ONCE keeps its own extremes, as a reduction takes longer than a verdict.
    """
    hull = (0, tl.cdiv(lengths[1], OTHER))
    return find_walk_in(
        mask, batch, head, start, lengths, hull, TILE, OTHER, OVER_KEYS, AT_ONCE, HEADS
    )


@triton.jit
def find_walk_in(
    mask, batch, head, start, lengths, hull,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The same, where no tile before hull[0] or from hull[1] on is possible."""
    at_once = tl.arange(0, AT_ONCE)
    firsts, ends = at_once * 0 + hull[1], at_once * 0
    clean_firsts, clean_ends, cleans = firsts, ends, ends
    for base in range(hull[0], hull[1], AT_ONCE):
        tiles = base + at_once
        possible, certain = judge_heads(
            mask, batch, head, start, lengths, tiles, TILE, OTHER, OVER_KEYS, HEADS
        )
        firsts = tl.minimum(firsts, tl.where(possible, tiles, hull[1]))
        ends = tl.where(possible, tiles + 1, ends)
        clean_firsts = tl.minimum(clean_firsts, tl.where(certain, tiles, hull[1]))
        clean_ends = tl.where(certain, tiles + 1, clean_ends)
        cleans += certain.to(tl.int32)
    first, end = tl.min(firsts, 0), tl.max(ends, 0)
    clean_first, clean_end = tl.min(clean_firsts, 0), tl.max(clean_ends, 0)
    # Where clean tiles have holes between them, look once more for the end of the first stretch.
    num_judged = tl.where(tl.sum(cleans, 0) < clean_end - clean_first, clean_end, 0)
    for base in range(clean_first, num_judged, AT_ONCE):
        tiles = base + at_once
        _, certain = judge_heads(
            mask, batch, head, start, lengths, tiles, TILE, OTHER, OVER_KEYS, HEADS
        )
        clean_end = tl.minimum(clean_end, tl.min(tl.where(certain, clean_end, tiles), 0))
    end = tl.maximum(first, end)
    clean_first = tl.minimum(clean_first, end)
    clean_end = tl.maximum(clean_end, clean_first)
    num_left = clean_first - first
    num_edges = num_left + end - clean_end
    return first, num_left, clean_end - num_left, num_edges, clean_first, clean_end - clean_first


@triton.jit
def judge_heads(
    mask, batch, head, start, lengths, tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`judge_tiles` for as many heads as share a tile: possible for one, certain for all."""
    possible, certain = judge_tiles(
        mask, batch, head, start, lengths, tiles, TILE, OTHER, OVER_KEYS
    )
    for number in range(1, HEADS):
        other_possible, other_certain = judge_tiles(
            mask, batch, head + number, start, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        possible, certain = possible | other_possible, certain & other_certain
    return possible, certain


# ---- a mask's walk: (mask, batch, head, slot, start, lengths) → six whole numbers ---------------


@triton.jit
def everything(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Nothing is hidden: only a tile that lengths cut short is an edge."""
    num_clean = lengths[1] // OTHER
    if not OVER_KEYS:  # key rows past the end must be hidden from every query
        num_clean = tl.where(start + TILE <= lengths[0], num_clean, 0)
    num_edges = tl.cdiv(lengths[1], OTHER) - num_clean
    return num_clean, num_edges, 0, num_edges, 0, num_clean


FOUND_AT_ONCE = tl.constexpr(32)  # one for each thread of a warp, which then waits for no other


@triton.jit
def found(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Found by the program itself: the mask reads no captured tensor along rows.

    Whole spans of tiles are judged first, so that a window on a long side finds itself at once.
    Short sides need no such help, but are not spared it: a reduction behind a condition is
    miscompiled (see `offline.machine_code.guarded_reductions`).
    """
    count = tl.cdiv(lengths[1], OTHER)
    span = tl.cdiv(count, FOUND_AT_ONCE)
    tiles = tl.arange(0, FOUND_AT_ONCE) * span
    possible, _ = judge_spans(
        mask, batch, head, start, lengths, tiles, span * OTHER, TILE, OTHER, OVER_KEYS
    )
    first = tl.min(tl.where(possible, tiles, count), 0)
    end = tl.minimum(tl.max(tl.where(possible, tiles + span, 0), 0), count)
    return find_walk_in(
        mask, batch, head, start, lengths, (first, end), TILE, OTHER, OVER_KEYS, FOUND_AT_ONCE, 1
    )


@triton.jit
def planned(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Read from a plan: walks [batch or 1, heads or 1, slots, WALK_SIZE]."""
    place = batch * mask.plan[1] + head * mask.plan[2] + slot * WALK_SIZE
    entry = mask.plan[0] + wide(place)
    return (
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2),
        tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5),
    )  # fmt: skip


@triton.jit
def listed(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Read from lists [batch or 1, heads or 1, slots, tiles]: clean tiles from the front of a row,
    edges from its end on. `num_left` is where the last place of a row is."""
    place = wide(batch * mask.plan[2] + head * mask.plan[3] + slot * 2)
    num_clean, num_edges = tl.load(mask.plan[1] + place), tl.load(mask.plan[1] + place + 1)
    num_tiles = tl.cdiv(lengths[1], OTHER)
    return place // 2 * num_tiles, num_tiles - 1, 0, num_edges, 0, num_clean


@triton.jit
def next_in_range(mask, walk, index, CLEAN: tl.constexpr):
    """The tile that clean tile (or edge) number `index` of a walk is."""
    if CLEAN:  # noqa: SIM108
        tile = walk[4] + index
    else:
        tile = index + tl.where(index < walk[1], walk[0], walk[2])
    return tile


@triton.jit
def next_in_list(mask, walk, index, CLEAN: tl.constexpr):
    """The same, where tiles are listed; 0 where the list has no such number."""
    if CLEAN:
        count, place = walk[5], index
    else:
        count, place = walk[3], walk[1] - index
    listed = (index >= 0) & (index < count)
    return tl.load(mask.plan[0] + (walk[0] + place), mask=listed, other=0)


@triton.jit
def first_and_end(walk):
    """The first tile of a walk that no list guides, and the one after its last: it visits all
    between them."""
    first = tl.minimum(walk[0].to(tl.int32), walk[4])
    return first, first + walk[3] + walk[5]


@triton.jit
def is_outside_of_clean(walk, tile):
    """Whether one of its tiles is an edge."""
    return (tile < walk[4]) | (tile >= walk[4] + walk[5])


@triton.jit
def next_of_both(mask, walk, index):
    """The tile that comes as number `index` of a whole walk, edges first, then clean ones."""
    edge = mask.tile(mask, walk, index, False)
    clean = mask.tile(mask, walk, index - walk[3], True)
    return tl.where(index < walk[3], edge, clean)


@triton.jit
def if_present(walk, present):
    """A walk, or none at all for a program that has no rows.

    No kernel returns early: Triton (3.6 to 3.9) forgets constants inside nested arguments there.
    """
    return (
        walk[0], walk[1], walk[2],
        tl.where(present, walk[3], 0), walk[4], tl.where(present, walk[5], 0),
    )  # fmt: skip


# With care, tiles are visited in parts of so many rows: fewer registers for the rare case.
CAREFUL_ROWS = tl.constexpr(16)


@triton.jit
def careful_start(mask, walk, index, TILE: tl.constexpr):
    """The first row of part number `index` of all tiles of a walk."""
    number = index // (TILE // CAREFUL_ROWS)
    part = index - number * (TILE // CAREFUL_ROWS)
    clean = mask.tile(mask, walk, number, True)
    tile = tl.where(number < walk[5], clean, mask.tile(mask, walk, number - walk[5], False))
    return tile * TILE + part * CAREFUL_ROWS


@triton.jit
def careful_parts(walk, TILE: tl.constexpr):
    """How many parts there are."""
    return (walk[5] + walk[3]) * (TILE // CAREFUL_ROWS)
