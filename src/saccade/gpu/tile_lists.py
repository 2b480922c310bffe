"""Tile lists: what masks that read captured tensors along rows let programs visit, found ahead.

Such a tile class costs as much as reading the tensor, so it is made once for a tile and not by
every program. A mask that reads a tensor along both rows and keys (block-sparse, dense) gets lists
of tiles in a dense call; they are smaller than that tensor. All others get one tile range a tile,
which is linear memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.tensor_view import num_rows, wide
from saccade.gpu.tile_ranges import TILE_RANGE_SIZE, classify_tiles, find_tile_range

HIDDEN, PARTIAL, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["mask"])
def find_tile_ranges(
    here, other, mask, tile_ranges, batch_step, head_step,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: the tile range of one tile. `here` is the side that stands, as a View of no
    rows."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    tile_range = find_tile_range(
        mask, batch, head, tile * TILE, lengths, TILE, OTHER, OVER_KEYS, AT_ONCE, 1
    )
    entry = tile_ranges + wide(batch * batch_step + head * head_step + slot * TILE_RANGE_SIZE)
    for number in tl.static_range(TILE_RANGE_SIZE):
        tl.store(entry + number, tile_range[number])


@triton.jit(do_not_specialize=["mask"])
def classify_pairs(
    here, other, mask, tile_classes, num_tiles, num_chunks,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: classes on CHUNK tiles of the other side, AT_ONCE together."""
    program = tl.program_id(0)
    position = program // num_chunks
    batch, head, tile, slot = here.find(position, here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    first = (program % num_chunks) * CHUNK
    row = wide((batch * here.data[1] + head) * tl.cdiv(lengths[0], TILE) + slot)
    for base in range(first, tl.minimum(first + CHUNK, num_tiles), AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        possible, certain = classify_tiles(
            mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        tile_class = tl.where(certain, FULL, tl.where(possible, PARTIAL, HIDDEN)).to(tl.int8)
        tl.store(tile_classes + (row * num_tiles + tiles), tile_class, mask=tiles < num_tiles)


@triton.jit
def list_tiles(tile_classes, lists, counts, num_tiles, AT_ONCE: tl.constexpr):
    """One program: the list of one row of classes."""
    position = wide(tl.program_id(0))
    listed = (position.to(tl.int32) * 0, position.to(tl.int32) * 0)
    for base in range(0, num_tiles, AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        tile_class = tl.load(
            tile_classes + (position * num_tiles + tiles), mask=tiles < num_tiles, other=0
        )
        row = lists + position * num_tiles
        listed = add_to_list(
            row, num_tiles, listed, tiles, tile_class != HIDDEN, tile_class == FULL
        )
    tl.store(counts + 2 * position, listed[0])
    tl.store(counts + 2 * position + 1, listed[1])


@triton.jit(do_not_specialize=["mask"])
def list_blocks(
    here, other, mask, lists, counts, num_tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The same with the classes made on the way, where few entries decide on a whole tile."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    position = wide((batch * here.data[1] + head) * tl.cdiv(lengths[0], TILE) + slot)
    listed = (slot * 0, slot * 0)
    for base in range(0, num_tiles, AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        possible, certain = classify_tiles(
            mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        row = lists + position * num_tiles
        listed = add_to_list(row, num_tiles, listed, tiles, possible, certain)
    tl.store(counts + 2 * position, listed[0])
    tl.store(counts + 2 * position + 1, listed[1])


@triton.jit
def add_to_list(row, size, listed, tiles, possible, certain):
    """List more tiles in a row of so many places: full ones from its front, partial tiles from its
    end.

    listed: how many full tiles and partial tiles stand there; the new numbers are given back.
    """
    full, partial = certain.to(tl.int32), (possible & (certain == 0)).to(tl.int32)
    tl.store(row + (listed[0] + tl.cumsum(full, 0) - 1), tiles, mask=full > 0)
    tl.store(row + (size - listed[1] - tl.cumsum(partial, 0)), tiles, mask=partial > 0)
    return listed[0] + tl.sum(full, 0), listed[1] + tl.sum(partial, 0)
