"""Tile ranges: which tiles a program visits, and which of them need the mask.

A program stands at one tile of query rows and visits tiles of keys, or the other way round. Full
tiles are wholly visible and run without mask arithmetic; partial tiles select pair by pair; hidden
tiles are not visited, but for those in holes between others where no list guides the program.

Loops ask for the tile after the one at hand, so that a list is read well ahead of what it leads to.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import wide

# ---- extremes ------------------------------------------------------------------------------------
# The smallest and largest entry of a captured tensor over the rows of a tile.
#
# Composed classes on whole tiles call these functions. Indices past the last one of a tile read
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
    """The smallest and largest entry between indices along two dimensions."""
    index_a = tl.minimum(low_a[:, None] + tl.arange(0, TILE_A)[None, :], high_a[:, None])
    index_b = tl.minimum(low_b[:, None] + tl.arange(0, TILE_B)[None, :], high_b[:, None])
    positions = along(table, index_a, DIM_A)[:, :, None] + along(table, index_b, DIM_B)[:, None, :]
    lows, highs = bounds(tl.load(table[0] + (offset + positions)))
    return in_order(tl.min(tl.min(lows, 2), 1), tl.max(tl.max(highs, 2), 1))


@triton.jit
def along_two_blocks(
    table, offset,
    DIM_A: tl.constexpr, low_a, high_a, TILE_A: tl.constexpr,
    DIM_B: tl.constexpr, low_b, high_b, TILE_B: tl.constexpr,
):  # fmt: skip
    """The extremes along two dimensions where blocks of rows share an index: few, taken in turn."""
    positions = along(table, low_a, DIM_A) + along(table, low_b, DIM_B)
    lows, highs = bounds(tl.load(table[0] + (offset + positions)))
    for a in range(0, tl.max(high_a - low_a, 0) + 1):
        for b in range(0, tl.max(high_b - low_b, 0) + 1):
            position_a = along(table, tl.minimum(low_a + a, high_a), DIM_A)
            position_b = along(table, tl.minimum(low_b + b, high_b), DIM_B)
            low, high = bounds(tl.load(table[0] + (offset + (position_a + position_b))))
            lows, highs = tl.minimum(lows, low), tl.maximum(highs, high)
    return in_order(lows, highs)


class TileRange(NamedTuple):
    """The tiles that a program visits: partial tiles around one stretch of full ones, or a list.

    Without a list, partial tile number i is tile first + i, and from number `num_left` on tile
    jump + i. Of a list, `first` is where its row lies, and `num_left` the last entry of that row.
    """

    first: Any
    num_left: Any  # partial tiles before the full ones
    jump: Any  # full tiles, and what lies before the first tile
    num_partial: Any
    first_full: Any
    num_full: Any


TILE_RANGE_SIZE = tl.constexpr(6)  # numbers of a TileRange


class Mask(NamedTuple):
    """Which pairs are visible, and which tiles to visit."""

    visible: Any  # bools for a tile of pairs, from (batch, head, rows, rows, shift, data), or None
    classify: Any  # possible and certain for whole tiles, from their first and last rows, or None
    tile_range: Any  # everything, found, planned or listed
    tile: Any  # next_in_range or next_in_list
    data: tuple[Any, ...] = ()  # what the mask captured
    plan: tuple[Any, ...] = ()  # what was planned ahead, see gpu/planning.py


# ---- classes ---------------------------------------------------------------------------------


@triton.jit
def classify_tiles(
    mask, batch, head, start, lengths, tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Which tiles of the other side can hold a visible pair, and which are full: [tiles].

    lengths: of the side that the program stands on, and of the other side.
    """
    return classify_spans(mask, batch, head, start, lengths, tiles, OTHER, TILE, OTHER, OVER_KEYS)


@triton.jit
def may_see(
    mask, batch, head, query_start, lengths, kv_index, QUERY_TILE: tl.constexpr,
    KV_TILE: tl.constexpr,
):  # fmt: skip
    """Whether any pair of one tile can be visible. lengths: of queries and of keys."""
    found = True
    if mask.classify is not None:
        tiles = kv_index + tl.arange(0, 1)
        possible, _ = classify_tiles(
            mask, batch, head, query_start, lengths, tiles, QUERY_TILE, KV_TILE, True
        )
        found = tl.max(possible.to(tl.int32), 0) > 0
    return found


@triton.jit
def classify_spans(
    mask, batch, head, start, lengths, tiles, num_rows,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Classes of so many rows of the other side from the first of each tile on: more than a tile
    only where the mask reads no captured tensor along rows."""
    length, other_length = lengths
    low = start + tl.arange(0, 1)
    high = tl.minimum(low + TILE, length) - 1
    exists = tiles * OTHER < other_length
    other_low = tl.where(exists, tiles * OTHER, 0)  # tiles past the end are classified as the first
    other_high = tl.minimum(other_low + num_rows, other_length) - 1
    if OVER_KEYS:
        possible, certain = mask.classify(
            batch, head, low, high, other_low, other_high, other_length - length, mask.data,
            TILE, OTHER,
        )  # fmt: skip
        whole = exists & (other_low + num_rows <= other_length)
    else:
        possible, certain = mask.classify(
            batch, head, other_low, other_high, low, high, length - other_length, mask.data,
            OTHER, TILE,
        )  # fmt: skip
        whole = exists & (other_low + num_rows <= other_length) & (start + TILE <= length)
    return possible & exists, certain & whole


@triton.jit
def find_tile_range(
    mask, batch, head, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """Classify all tiles, AT_ONCE together: visit from the first to the last that is possible, with
    one stretch of full tiles among them. HEADS: so many heads, from `head` on, share a tile.

    Each place of AT_ONCE keeps its own extremes, as a reduction takes longer than a tile class.
    """
    hull = (0, tl.cdiv(lengths[1], OTHER))
    return find_tile_range_in(
        mask, batch, head, start, lengths, hull, TILE, OTHER, OVER_KEYS, AT_ONCE, HEADS
    )


@triton.jit
def find_tile_range_in(
    mask, batch, head, start, lengths, hull,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    HEADS: tl.constexpr,
):  # fmt: skip
    """The tile range, where no tile before hull[0] or from hull[1] on is possible."""
    at_once = tl.arange(0, AT_ONCE)
    firsts, ends = at_once * 0 + hull[1], at_once * 0
    full_firsts, full_ends, full_counts = firsts, ends, ends
    for base in range(hull[0], hull[1], AT_ONCE):
        tiles = base + at_once
        possible, certain = classify_heads(
            mask, batch, head, start, lengths, tiles, TILE, OTHER, OVER_KEYS, HEADS
        )
        firsts = tl.minimum(firsts, tl.where(possible, tiles, hull[1]))
        ends = tl.where(possible, tiles + 1, ends)
        full_firsts = tl.minimum(full_firsts, tl.where(certain, tiles, hull[1]))
        full_ends = tl.where(certain, tiles + 1, full_ends)
        full_counts += certain.to(tl.int32)
    first, end = tl.min(firsts, 0), tl.max(ends, 0)
    full_first, full_end = tl.min(full_firsts, 0), tl.max(full_ends, 0)
    # Where full tiles have holes between them, look once more for the end of the first stretch.
    num_classified = tl.where(tl.sum(full_counts, 0) < full_end - full_first, full_end, 0)
    for base in range(full_first, num_classified, AT_ONCE):
        tiles = base + at_once
        _, certain = classify_heads(
            mask, batch, head, start, lengths, tiles, TILE, OTHER, OVER_KEYS, HEADS
        )
        full_end = tl.minimum(full_end, tl.min(tl.where(certain, full_end, tiles), 0))
    end = tl.maximum(first, end)
    full_first = tl.minimum(full_first, end)
    full_end = tl.maximum(full_end, full_first)
    num_left = full_first - first
    num_partial = num_left + end - full_end
    return TileRange(
        first, num_left, full_end - num_left, num_partial, full_first, full_end - full_first
    )


@triton.jit
def classify_heads(
    mask, batch, head, start, lengths, tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, HEADS: tl.constexpr,
):  # fmt: skip
    """`classify_tiles` for as many heads as share a tile: possible for one, certain for all."""
    possible, certain = classify_tiles(
        mask, batch, head, start, lengths, tiles, TILE, OTHER, OVER_KEYS
    )
    for number in range(1, HEADS):
        other_possible, other_certain = classify_tiles(
            mask, batch, head + number, start, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        possible, certain = possible | other_possible, certain & other_certain
    return possible, certain


# ---- a mask's tile range: (mask, batch, head, slot, start, lengths) → TileRange ----------


@triton.jit
def everything(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Nothing is hidden: only a tile that lengths cut short is a partial tile."""
    num_full = lengths[1] // OTHER
    if not OVER_KEYS:  # key rows past the end must be hidden from every query
        num_full = tl.where(start + TILE <= lengths[0], num_full, 0)
    num_partial = tl.cdiv(lengths[1], OTHER) - num_full
    return TileRange(num_full, num_partial, 0, num_partial, 0, num_full)


FOUND_AT_ONCE = tl.constexpr(32)  # one for each thread of a warp, which then waits for no other


@triton.jit
def found(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Found by the program itself: the mask reads no captured tensor along rows.

    Whole spans of tiles are classified first, so that a window on a long side finds itself at once.
    Short sides need no such help, but are not spared it: a reduction behind a condition is
    miscompiled (see `offline.machine_code.guarded_reductions`).
    """
    count = tl.cdiv(lengths[1], OTHER)
    span = tl.cdiv(count, FOUND_AT_ONCE)
    tiles = tl.arange(0, FOUND_AT_ONCE) * span
    possible, _ = classify_spans(
        mask, batch, head, start, lengths, tiles, span * OTHER, TILE, OTHER, OVER_KEYS
    )
    first = tl.min(tl.where(possible, tiles, count), 0)
    end = tl.minimum(tl.max(tl.where(possible, tiles + span, 0), 0), count)
    return find_tile_range_in(
        mask, batch, head, start, lengths, (first, end), TILE, OTHER, OVER_KEYS, FOUND_AT_ONCE, 1
    )


@triton.jit
def planned(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Read from a plan: tile ranges [batch or 1, heads or 1, slots, TILE_RANGE_SIZE]."""
    position = batch * mask.plan[1] + head * mask.plan[2] + slot * TILE_RANGE_SIZE
    entry = mask.plan[0] + wide(position)
    return load_tile_range(entry)


@triton.jit
def load_tile_range(entry):
    """A tile range from memory."""
    return TileRange(
        tl.load(entry), tl.load(entry + 1), tl.load(entry + 2),
        tl.load(entry + 3), tl.load(entry + 4), tl.load(entry + 5),
    )  # fmt: skip


@triton.jit
def listed(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """Read from lists [batch or 1, heads or 1, slots, tiles]: full tiles from the front of a row,
    partial tiles from its end on. `num_left` is where the last place of a row is."""
    position = wide(batch * mask.plan[2] + head * mask.plan[3] + slot * 2)
    num_full, num_partial = tl.load(mask.plan[1] + position), tl.load(mask.plan[1] + position + 1)
    num_tiles = tl.cdiv(lengths[1], OTHER)
    return TileRange(position // 2 * num_tiles, num_tiles - 1, 0, num_partial, 0, num_full)


@triton.jit
def next_in_range(mask, tile_range, index, FULL: tl.constexpr):
    """The tile that full tile (or partial tile) number `index` of a tile range is."""
    if FULL:
        tile = tile_range.first_full + index
    else:
        tile = index + tl.where(index < tile_range.num_left, tile_range.first, tile_range.jump)
    return tile


@triton.jit
def next_in_list(mask, tile_range, index, FULL: tl.constexpr):
    """The tile of a number in a list of tiles; 0 where the list has no such number."""
    if FULL:
        count, position = tile_range.num_full, index
    else:
        count, position = tile_range.num_partial, tile_range.num_left - index
    listed = (index >= 0) & (index < count)
    return tl.load(mask.plan[0] + (tile_range.first + position), mask=listed, other=0)


@triton.jit
def first_and_end(tile_range):
    """The first tile of a tile range that no list guides, and the one after its last: it visits all
    between them."""
    first = tl.minimum(tile_range.first.to(tl.int32), tile_range.first_full)
    return first, first + tile_range.num_partial + tile_range.num_full


@triton.jit
def is_partial_tile(tile_range, tile):
    """Whether one of its tiles is a partial tile."""
    return (tile < tile_range.first_full) | (tile >= tile_range.first_full + tile_range.num_full)


@triton.jit
def next_of_both(mask, tile_range, index):
    """The tile that comes as number `index` of a whole tile range, partial tiles first, then full
    ones."""
    partial = mask.tile(mask, tile_range, index, False)
    full = mask.tile(mask, tile_range, index - tile_range.num_partial, True)
    return tl.where(index < tile_range.num_partial, partial, full)


@triton.jit
def if_present(tile_range, present):
    """A tile range, or none at all for a program that has no rows.

    No kernel returns early: Triton (3.6 to 3.9) forgets constants inside nested arguments there.
    """
    return TileRange(
        tile_range.first, tile_range.num_left, tile_range.jump,
        tl.where(present, tile_range.num_partial, 0), tile_range.first_full,
        tl.where(present, tile_range.num_full, 0),
    )  # fmt: skip


# NaN-safe, tiles are visited in parts of so many rows: fewer registers for the rare case.
NAN_SAFE_ROWS = tl.constexpr(16)


@triton.jit
def nan_safe_start(mask, tile_range, index, TILE: tl.constexpr):
    """The first row of part number `index` of all tiles of a tile range."""
    number = index // (TILE // NAN_SAFE_ROWS)
    part = index - number * (TILE // NAN_SAFE_ROWS)
    full = mask.tile(mask, tile_range, number, True)
    tile = tl.where(
        number < tile_range.num_full,
        full,
        mask.tile(mask, tile_range, number - tile_range.num_full, False),
    )
    return tile * TILE + part * NAN_SAFE_ROWS


@triton.jit
def nan_safe_parts(tile_range, TILE: tl.constexpr):
    """How many parts there are."""
    return (tile_range.num_full + tile_range.num_partial) * (TILE // NAN_SAFE_ROWS)
