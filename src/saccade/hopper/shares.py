"""Shares: what a program gives to the gradients of queries, which sum over programs.

Each consumer multiplies half of a tile's share, its *part*, and TMA adds it to memory in float32.
Without turns, parts are added as they come. With turns they are added in the order of keys, from
the last ones to the first, which gives equal bits each time:

    a part's count    how many shares it holds; begin sets it to 0
    add               wait until the count says that all before are in memory; the first one writes
    the next add      wait until the sum is in memory; raise the count

Programs that stand at the last keys that a tile of queries sees come first in the order of numbers,
and take a number only when they can begin, so that who waits, waits for somebody who works. Under
a causal mask they are the first to get there, too: nobody has to wait for long.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.hopper.forward import as_matrix, mma_layout
from saccade.hopper.pipeline import (
    add,
    count_at,
    here,
    store,
    wait_for_stores,
    wait_for_sums,
    warpgroup_mma,
)
from saccade.hopper.schedule import tile_of
from saccade.hopper.weighing import ROWS


@gluon.jit
def multiply_grad_scores(rings, turn, WHICH: gl.constexpr):
    """Start this consumer's half of grad_scores · keys: half of the rows, or of the channels."""
    rings.grad_scores.wait(turn)
    grad_scores = rings.grad_scores.at(turn)
    keys = as_matrix(rings.keys.memory.index(here(turn - turn)))
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
def add_share(
    share_desc, rings, rules, scratch, at, walk, index, share, given, added, WHICH: gl.constexpr
):  # fmt: skip
    """Start to add a share of the gradients of queries to memory, in its turn if there are turns.

    In the order of registers, 16 bytes of each thread side by side, so that no two threads want
    the same bank of shared memory; `backward_rows.py` knows that order.

    given: turns as they were some time ago. added: the part that was added to before, whose turn
    is still to be given; the result is the one of this time.
    """
    memory = rings.shares[WHICH]
    numbers = gl.reshape(share, [4, 2, 8, share.shape[1] // 8, 4, 2])
    numbers = gl.permute(numbers, [3, 0, 2, 4, 1, 5])
    if scratch.turns is None:
        wait_for_stores()
    else:
        give_turn(scratch, added)
    memory.store(gl.reshape(numbers, memory.shape))
    part = part_of(rules, at, walk, index, WHICH)
    if scratch.turns is not None:
        before = turns_before(rings, rules, scratch, at, walk, index, WHICH)
        while given < before:
            given = count_at(scratch.turns + part)
        added = gl.where(before < 0, -1, part)
        if before == 0:
            store(share_desc, [part * memory.shape[0], 0], memory)
        elif before > 0:
            add(share_desc, [part * memory.shape[0], 0], memory)
    else:
        add(share_desc, [part * memory.shape[0], 0], memory)
    return added


@gluon.jit
def part_of(rules, at, walk, index, WHICH: gl.constexpr):
    """The part of the scratch that this consumer's share of a tile of queries is added to."""
    return (at[5] + tile_of(rules, walk, index)) * 2 + WHICH


@gluon.jit
def turns_before(rings, rules, scratch, at, walk, index, WHICH: gl.constexpr):
    """How many tiles of keys add to a tile of queries before this one; less than 0 if this one
    has nothing to add. The first one writes."""
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    QUERY_TILE: gl.constexpr = rings.queries.memory.shape[3]
    _, _, first_key, query_len, kv_len, _ = at
    last_row = tile_of(rules, walk, index) * QUERY_TILE + QUERY_TILE - 1
    last_tile = scratch.last_key(last_row, query_len, kv_len) // KV_TILE
    return last_tile - first_key // KV_TILE


@gluon.jit
def given_turns(rings, rules, scratch, at, walk, index, WHICH: gl.constexpr):
    """Ask how many have added to a tile of queries; long before it matters, as this takes long."""
    if scratch.turns is None:
        given = 0
    else:
        given = count_at(scratch.turns + part_of(rules, at, walk, index, WHICH))
    return given


@gluon.jit
def give_turn(scratch, added):
    """Say that what was added last is in memory; nothing is left to be said then."""
    wait_for_sums()
    if added >= 0:
        gl.atomic_add(scratch.turns + added, 1, sem="relaxed")
    return -1
