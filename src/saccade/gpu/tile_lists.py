"""Tile lists: what masks that read captured tensors along rows let programs visit, found ahead.

Such a verdict costs as much as reading the tensor, so it is made once for a tile and not by every
program. A mask that reads a tensor along both rows and keys (block-sparse, dense) gets lists of
tiles in a dense call; they are smaller than that tensor. All others get one walk a tile, which is
linear memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.tensor_view import ADDED, num_rows, wide
from saccade.gpu.tile_ranges import WALK_SIZE, find_walk, judge_tiles

HIDDEN, EDGE, CLEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["mask"])
def plan_walks(
    here, other, mask, walks, batch_step, head_step,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: the walk of one tile. `here` is the side that stands, as a View of no rows."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    walk = find_walk(mask, batch, head, tile * TILE, lengths, TILE, OTHER, OVER_KEYS, AT_ONCE, 1)
    entry = walks + wide(batch * batch_step + head * head_step + slot * WALK_SIZE)
    for number in tl.static_range(WALK_SIZE):
        tl.store(entry + number, walk[number])


@triton.jit(do_not_specialize=["mask"])
def judge_pairs(
    here, other, mask, verdicts, num_tiles, num_chunks,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: verdicts on CHUNK tiles of the other side, AT_ONCE together."""
    program = tl.program_id(0)
    place = program // num_chunks
    batch, head, tile, slot = here.find(place, here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    first = (program % num_chunks) * CHUNK
    row = wide((batch * (here.data[1] - ADDED) + head) * tl.cdiv(lengths[0], TILE) + slot)
    for base in range(first, tl.minimum(first + CHUNK, num_tiles), AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        possible, certain = judge_tiles(
            mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        verdict = tl.where(certain, CLEAN, tl.where(possible, EDGE, HIDDEN)).to(tl.int8)
        tl.store(verdicts + (row * num_tiles + tiles), verdict, mask=tiles < num_tiles)


@triton.jit
def list_tiles(verdicts, lists, counts, num_tiles, AT_ONCE: tl.constexpr):
    """One program: the list of one row of verdicts."""
    place = wide(tl.program_id(0))
    listed = (place.to(tl.int32) * 0, place.to(tl.int32) * 0)
    for base in range(0, num_tiles, AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        verdict = tl.load(verdicts + (place * num_tiles + tiles), mask=tiles < num_tiles, other=0)
        row = lists + place * num_tiles
        listed = add_to_list(row, num_tiles, listed, tiles, verdict != HIDDEN, verdict == CLEAN)
    tl.store(counts + 2 * place, listed[0])
    tl.store(counts + 2 * place + 1, listed[1])


@triton.jit(do_not_specialize=["mask"])
def list_blocks(
    here, other, mask, lists, counts, num_tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """The same with the verdicts made on the way, where few entries decide on a whole tile."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    place = wide((batch * (here.data[1] - ADDED) + head) * tl.cdiv(lengths[0], TILE) + slot)
    listed = (slot * 0, slot * 0)
    for base in range(0, num_tiles, AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        possible, certain = judge_tiles(
            mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        row = lists + place * num_tiles
        listed = add_to_list(row, num_tiles, listed, tiles, possible, certain)
    tl.store(counts + 2 * place, listed[0])
    tl.store(counts + 2 * place + 1, listed[1])


@triton.jit
def add_to_list(row, size, listed, tiles, possible, certain):
    """List more tiles in a row of so many places: clean ones from its front, edges from its end.

    listed: how many clean tiles and edges stand there; the new numbers are given back.
    """
    clean, edge = certain.to(tl.int32), (possible & (certain == 0)).to(tl.int32)
    tl.store(row + (listed[0] + tl.cumsum(clean, 0) - 1), tiles, mask=clean > 0)
    tl.store(row + (size - listed[1] - tl.cumsum(edge, 0)), tiles, mask=edge > 0)
    return listed[0] + tl.sum(clean, 0), listed[1] + tl.sum(edge, 0)
