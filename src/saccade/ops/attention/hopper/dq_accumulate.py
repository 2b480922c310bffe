"""dQ accumulation: what a program gives to the gradients of queries, which sum over programs.

Each consumer multiplies half of a tile's share, its *part*, and TMA adds it to memory in float32.
Without turns, parts are added as they come. With turns they are added in the order of keys, from
the last ones to the first, which gives equal bits each time:

    a part's turn     twice the number of the tile of keys that adds next, and 1 while nobody has
    begin             sets it to the last tile of keys that may see the part's tile of queries
    add               wait for the turn; the first one writes
    the next add      wait until the sum is in memory; hand the turn to the tile of keys before

So the tiles of keys that add to a tile of queries must follow each other without a hole. Both sides
find them by the same classes of the mask; `modifiers/normal_form.py` says for which masks they do.

Programs that stand at the last keys that a tile of queries sees come first in the order of numbers,
and take a number only when they can begin, so that who waits, waits for somebody who works. They
visit tiles of queries from the first to the last, and so behind each other: nobody has to wait for
long.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.gpu.hopper.pipeline import (
    add,
    count_at,
    here,
    store,
    wait_for_stores,
    wait_for_sums,
    warpgroup_mma,
)
from saccade.gpu.hopper.tile_scheduler import is_partial, tile_of
from saccade.gpu.packing import ascend
from saccade.gpu.tile_ranges import first_and_end, is_partial_tile
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS, as_matrix

NEVER = gl.constexpr(1 << 30)  # a tile of keys behind all others


@gluon.jit
def multiply_grad_scores(rings, iteration, WHICH: gl.constexpr):
    """Start this consumer's half of grad_scores · keys: half of the rows, or of the channels."""
    rings.grad_scores.wait(iteration)
    grad_scores = rings.grad_scores.at(iteration)
    keys = as_matrix(rings.keys.memory.index(here(iteration - iteration)))
    if grad_scores.shape[1] > ROWS:
        grad_scores = grad_scores.slice(WHICH * ROWS, ROWS, dim=1)
        right = keys
    else:
        HALF: gl.constexpr = keys.shape[1] // 2
        right = keys.slice(WHICH * HALF, HALF, dim=1)
    WIDTH: gl.constexpr = right.shape[1]
    nothing = gl.zeros([ROWS, WIDTH], gl.float32, mma_layout(WIDTH))
    return warpgroup_mma(grad_scores.permute((1, 0)), right, nothing, use_acc=False, is_async=True)


@gluon.jit
def add_partial_dq(
    dq_desc, rings, rules, scratch, at, tile_range, index, partial_dq, semaphore, added, WHICH:
    gl.constexpr
):  # fmt: skip
    """Start to add a partial sum of the gradients of queries to memory, in its turn if there are
    turns.

    In the order of registers, 16 bytes of each thread side by side, so that no two threads want
    the same bank of shared memory; `preprocess.py` knows that order.

    given: the turn as it was some time ago. added: the part that was added to before, whose turn
    is still to be handed on; the result is the one of this time.
    """
    memory = rings.dq_accumulate[WHICH]
    numbers = gl.reshape(partial_dq, [4, 2, 8, partial_dq.shape[1] // 8, 4, 2])
    numbers = gl.permute(numbers, [3, 0, 2, 4, 1, 5])
    if scratch.semaphores is None:
        wait_for_stores()
    else:
        advance_semaphore(rings, scratch, at[2], added)
    memory.store(gl.reshape(numbers, memory.shape))
    part = part_of(rules, scratch, at, tile_range, index, WHICH)
    if scratch.semaphores is None:
        add(dq_desc, [part * memory.shape[0], 0], memory)
    else:
        # A tile range of no tiles visits one and has nothing to add: its turn has passed, as it
        # were.
        first, end = first_and_end(tile_range)
        mine = gl.where(first == end, NEVER, key_tile(rings, at[2]))
        while semaphore >> 1 > mine:
            semaphore = count_at(scratch.semaphores + part)
        added = gl.where(semaphore >> 1 == mine, part, -1)
        if semaphore >> 1 == mine:
            if semaphore & 1 == 1:
                store(dq_desc, [part * memory.shape[0], 0], memory)
            else:
                add(dq_desc, [part * memory.shape[0], 0], memory)
    return added


@gluon.jit
def part_of(rules, scratch, at, tile_range, index, WHICH: gl.constexpr):
    """The part of the scratch that this consumer's partial sum of a tile of queries is added to."""
    return (at[5] + query_tile_of(rules, scratch, tile_range, index)) * 2 + WHICH


@gluon.jit
def query_tile_of(rules, scratch, tile_range, index):
    """The tile of queries that is visited as number `index`: in their order if there are turns."""
    if scratch.semaphores is None:
        tile = tile_of(rules, tile_range, index)
    else:
        first, end = first_and_end(tile_range)
        tile = gl.where(first == end, 0, first + index)  # see `tile_of`
    return tile


@gluon.jit
def may_hide(scratch, tile_range, index, tile):
    """Whether pairs of the tile that is visited as number `index` may be hidden."""
    if scratch.semaphores is None:
        partial = is_partial(tile_range, index)
    else:
        partial = is_partial_tile(tile_range, tile)
    return partial


@gluon.jit
def may_wait(query, key):
    """Whether programs may wait for each other: turns are handed on among the tiles of a sequence,
    and packed sequences share none of theirs if their offsets ascend. Asked by one warp."""
    sound = gl.program_id(0) >= 0
    if len(query.data) > 2:  # packed
        lanes = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        sound = ascend(query.data, lanes) & ascend(key.data, lanes)
    return sound


@gluon.jit
def key_tile(rings, key_row):
    """The tile of keys that holds a row."""
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    return key_row // KV_TILE


@gluon.jit
def read_semaphore(rules, scratch, at, tile_range, index, WHICH: gl.constexpr):
    """Ask whose turn it is to add to a tile of queries; long before it matters, as this takes
    long."""
    if scratch.semaphores is None:
        semaphore = 0
    else:
        semaphore = count_at(
            scratch.semaphores + part_of(rules, scratch, at, tile_range, index, WHICH)
        )
    return semaphore


@gluon.jit
def advance_semaphore(rings, scratch, key_row, added):
    """Say that what was added last is in memory; nothing is left to be said then."""
    wait_for_sums()
    if added >= 0:
        following = key_tile(rings, key_row) - 1
        gl.atomic_xchg(scratch.semaphores + added, following * 2, sem="relaxed")
    return -1
