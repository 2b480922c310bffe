"""Plan: what masks that read captured tensors along rows let programs visit, found ahead.

Such a verdict costs as much as reading the tensor, so it is made once for a tile and not by every
program. A mask that reads a tensor along both rows and keys (block-sparse, dense) gets lists of
tiles, which are far smaller than that tensor; all others get one walk a tile: linear memory.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.tiles import ADDED, num_rows, wide
from saccade.kernels.visibility import WALK_SIZE, find_walk, judge_tiles

HIDDEN, EDGE, CLEAN = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["mask"])
def plan_walks(
    here, other, mask, walks, batch_step, head_step,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: the walk of one tile. `here` is the side that stands, as a View of no rows."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    walk = find_walk(mask, batch, head, tile * TILE, lengths, TILE, OTHER, OVER_KEYS, AT_ONCE)
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
    """One program: the tiles of one row of verdicts that are visited, clean ones first."""
    place = wide(tl.program_id(0))
    row = verdicts + place * num_tiles
    listed = 0
    for kind in tl.static_range(2, 0, -1):
        before = listed
        for base in range(0, num_tiles, AT_ONCE):
            tiles = base + tl.arange(0, AT_ONCE)
            verdict = tl.load(row + tiles, mask=tiles < num_tiles, other=0)
            chosen = (verdict == kind).to(tl.int32)
            number = listed + tl.cumsum(chosen, 0) - 1
            tl.store(lists + (place * num_tiles + number), tiles, mask=chosen > 0)
            listed += tl.sum(chosen, 0)
        tl.store(counts + (2 * place + 2 - kind), listed - before)
