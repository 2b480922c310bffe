"""The gated delta rule on Hopper, gradients of rows, chunk by chunk: loads run ahead of products.

The equations are those of `saccade.ops.delta_rule.triton.gradients`. A program takes chunks of
value heads in turn. One warp loads, and two look at rows alone (gradient_rows.py). Two groups of
four warps each have 64 channels of keys, and of values. Of the gradients of pairs each makes one
square, of scores or of the system, for both of them: in shared memory, where products can read it
turned over, too.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.hopper.pipeline import (
    fence_async_shared,
    here,
    mbarrier,
    store,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.delta_rule.hopper.gradient_rings import (
    ASKED_FOR,
    BETA,
    CROSSING,
    ENDED,
    GRAD_STATE,
    GRADS,
    HIGH,
    KEYS,
    LEFT,
    LOW,
    OF_BETA,
    OF_COLUMNS,
    OF_KEYS,
    OF_QUERIES,
    OF_ROWS,
    PAIRS,
    QUERIES,
    SCORES,
    SINCE,
    SOLVED,
    STATE,
    SUMS,
    UNTIL,
    UPDATES,
    WRITTEN,
    chunk_at,
    make_gradient_rings,
    origin_of,
)
from saccade.ops.delta_rule.hopper.gradient_rows import load_chunks, look_at_rows
from saccade.ops.delta_rule.hopper.rings import BLOCK, ROWS, WIDTH

PIECE = gl.constexpr(32)  # channels of values of a state that are multiplied at once


class ChunkGradientMeta(NamedTuple):
    """What is known of the call, and how the kernel runs, when it is compiled."""

    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    PACKED: bool
    ADD_REGISTERS: int
    LOAD_REGISTERS: int


class RowDescriptors(NamedTuple):
    """Rows and states as TMA moves them, 64 channels at a time."""

    query: Any
    key: Any
    value: Any
    grad_output: Any
    updates: Any
    solved: Any
    states: Any  # turned over
    grad_states: Any
    grad_query: Any
    grad_key: Any
    grad_value: Any


class RowGradients(NamedTuple):
    """Views of gradients."""

    query: Any  # of a row for each value head
    key: Any
    value: Any
    beta: Any
    decay: Any  # None without decay


@gluon.jit(do_not_specialize=["scale", "chunks"])
def delta_chunk_gradients(
    descs, factors, beta, decay, grads, updates, scale, chunks, META: gl.constexpr,
):  # fmt: skip
    """One program: gradients of some of all chunks, of every value head.

    descs: RowDescriptors; factors: Factors, or None; beta: a View of numbers; decay: a Decay, or
    None; grads: RowGradients; updates: a View, which says where chunks are.
    """
    rings = make_gradient_rings(descs.key.dtype)
    gl.warp_specialize(
        [
            (add_chunks, (
                descs, grads, updates, scale, chunks, rings, META.HEAD_DIM, META.VALUE_DIM,
                META.PACKED, 0,
            )),
            (add_chunks, (
                descs, grads, updates, scale, chunks, rings, META.HEAD_DIM, META.VALUE_DIM,
                META.PACKED, 1,
            )),
            (look_at_rows, (
                factors, beta, decay, grads, updates, scale, chunks, rings, META.GROUP
            )),
            (load_chunks, (descs, updates, chunks, rings, META.GROUP, META.PACKED)),
        ],
        [4, 2, 1],
        [META.ADD_REGISTERS, META.LOAD_REGISTERS, META.LOAD_REGISTERS],
    )  # fmt: skip


@gluon.jit
def add_chunks(
    descs, grads, updates, scale, chunks, rings, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    PACKED: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Gradients of 64 channels of queries and keys, and of values, of chunk after chunk."""
    SQUARE: gl.constexpr = mma_layout(ROWS)
    turn = gl.program_id(0) * 0
    for number in range(gl.program_id(0), chunks, gl.num_programs(0)):
        at = chunk_at(updates, number)
        place = place_of_stores(updates, at, PACKED)
        origin = here(at[2] - at[2])  # a place in memory that is not known ahead of the loop
        rings.rows.wait(turn)
        found = start_pairs(rings, origin, WHICH)
        wait_for_stores()
        # What was stored last lay where keys and queries did.
        mbarrier.arrive(rings.keys.empty.index(0), count=1, pred=turn > 0)
        rings.numbers.wait(turn)
        rings.values.wait(turn)
        errors = rings.rows.memory.index(origin + (SOLVED + WHICH)).load(SQUARE).to(gl.float32)
        values = rings.values.memory.index(origin + WHICH)
        of_beta = gl.sum(errors * values.load(SQUARE).to(gl.float32), 1)
        errors = errors * rings.down(turn, BETA, SQUARE)
        put(descs.grad_value, grads.value, values, errors, at, place, VALUE_DIM, PACKED, WHICH)
        put_pairs(rings, turn, origin, found, at, grads.decay is not None, PACKED, WHICH)
        asking, asked, written, flow = by_states(
            rings, turn, origin, scale, grads.decay is not None, WHICH
        )
        rings.keys.wait(turn)
        if PACKED:  # noqa: SIM102 (a constexpr first)
            if at[2] + ROWS > at[3]:
                clear_behind(rings.keys.memory.index(origin + (KEYS + WHICH)), at[3] - at[2])
                clear_behind(rings.keys.memory.index(origin + (QUERIES + WHICH)), at[3] - at[2])
                fence_async_shared()
        keys = rings.keys.memory.index(origin + (KEYS + WHICH))
        ended = gl.sum(keys.load(SQUARE).to(gl.float32) * written, 1)
        asking, asked, written = by_pairs(rings, turn, origin, asking, asked, written, WHICH)
        alone = rings.alone.load(gl.SliceLayout(1, SQUARE))
        rings.pairs.release(turn)
        finish_rows(
            descs, grads, rings, turn, origin, (asking, asked, written),
            (of_beta, ended, flow, alone), at, place, HEAD_DIM, PACKED, WHICH,
        )  # fmt: skip
        turn += 1
    wait_for_stores()


# ---- pairs --------------------------------------------------------------------------------------


@gluon.jit
def start_pairs(rings, origin, WHICH: gl.constexpr):
    """Start the products of all rows of gradients of outputs, or of `solved`, with all updates,
    over channels of values."""
    FIRST: gl.constexpr = SOLVED if WHICH else GRADS
    found = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(ROWS))
    for half in gl.static_range(2):
        left = rings.rows.memory.index(origin + (FIRST + half))
        right = rings.rows.memory.index(origin + (UPDATES + half)).permute((1, 0))
        found = warpgroup_mma(left, right, found, use_acc=half > 0, is_async=True)
    return found


@gluon.jit
def put_pairs(
    rings, turn, origin, found, at, DECAYS: gl.constexpr, PACKED: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Put gradients of pairs, below the diagonal, where products find them."""
    SQUARE: gl.constexpr = mma_layout(ROWS)
    row = origin + gl.arange(0, ROWS, gl.SliceLayout(1, SQUARE))[:, None]
    column = origin + gl.arange(0, ROWS, gl.SliceLayout(0, SQUARE))[None, :]
    left = gl.full([ROWS, ROWS], 1.0, gl.float32, SQUARE)
    if DECAYS:
        gap = rings.down(turn, HIGH, SQUARE) - rings.across(turn, HIGH, SQUARE)
        left = gl.exp2(gap + (rings.down(turn, LOW, SQUARE) - rings.across(turn, LOW, SQUARE)))
    found = warpgroup_mma_wait(0, deps=[found])
    rings.pairs.acquire(turn)
    if WHICH == 0:
        rings.alone.store(gl.sum(gl.where(row == column, found, 0.0), 1))
    # Selected, not multiplied by 0: rows past the end may be another sequence's NaN.
    below = column < row
    if PACKED:
        below = below & (row < at[3] - at[2])
    found = gl.where(below, found * left, 0.0)
    memory = rings.pairs.memory.index(origin + (2 * WHICH + ASKED_FOR))
    memory.store((found * rings.across(turn, OF_COLUMNS + WHICH, SQUARE)).to(gl.bfloat16))
    memory = rings.pairs.memory.index(origin + (2 * WHICH + WRITTEN))
    memory.store((found * rings.down(turn, OF_ROWS + WHICH, SQUARE)).to(gl.bfloat16))
    fence_async_shared()
    mbarrier.arrive(rings.pairs.full.index(0), count=1)


@gluon.jit
def by_pairs(rings, turn, origin, asking, asked, written, WHICH: gl.constexpr):
    """Gradients so far and by way of pairs, of 64 channels."""
    keys = rings.keys.memory.index(origin + (KEYS + WHICH))
    queries = rings.keys.memory.index(origin + (QUERIES + WHICH))
    squares = rings.pairs.memory
    rings.pairs.wait(turn)
    scores = squares.index(origin + (SCORES + ASKED_FOR))
    asking = warpgroup_mma(scores, keys, asking, is_async=True)
    pairs = squares.index(origin + (PAIRS + ASKED_FOR))
    asked = warpgroup_mma(pairs, keys, asked, is_async=True)
    scores = squares.index(origin + (SCORES + WRITTEN)).permute((1, 0))
    written = warpgroup_mma(scores, queries, written, is_async=True)
    pairs = squares.index(origin + (PAIRS + WRITTEN)).permute((1, 0))
    written = warpgroup_mma(pairs, keys, written, is_async=True)
    return warpgroup_mma_wait(0, deps=[asking, asked, written])


# ---- states -------------------------------------------------------------------------------------


@gluon.jit
def by_states(rings, turn, origin, scale, DECAYS: gl.constexpr, WHICH: gl.constexpr):
    """Gradients by way of states, of 64 channels: of queries, of keys that ask, and of keys that
    are written; the sum of products of both states."""
    SQUARE: gl.constexpr = mma_layout(BLOCK)
    rings.states.wait(turn)
    asking = start_by_state(rings, origin, GRADS, STATE + WHICH)
    asked = start_by_state(rings, origin, SOLVED, STATE + WHICH)
    written = start_by_state(rings, origin, UPDATES, GRAD_STATE + WHICH)
    flow = (turn * 0).to(gl.float32)
    if DECAYS:
        flow = flow_of(rings, origin, WHICH)
    asking, asked, written = warpgroup_mma_wait(0, deps=[asking, asked, written])
    rings.rows.release_loaded(turn)
    rings.states.release_loaded(turn)
    since = rings.down(turn, SINCE, SQUARE)
    asking, asked = asking * (since * scale), asked * (0.0 - since)
    return asking, asked, written * rings.down(turn, UNTIL, SQUARE), flow


@gluon.jit
def start_by_state(rings, origin, ROWS_OF: gl.constexpr, STATE_OF: gl.constexpr):
    """Start the product of rows with 64 channels of a state."""
    found = gl.zeros([ROWS, BLOCK], gl.float32, mma_layout(BLOCK))
    state = rings.states.memory.index(origin + STATE_OF)
    for half in gl.static_range(2):
        rows = rings.rows.memory.index(origin + (ROWS_OF + half))
        part = state.slice(half * BLOCK, BLOCK, dim=0)
        found = warpgroup_mma(rows, part, found, use_acc=half > 0, is_async=True)
    return found


@gluon.jit
def flow_of(rings, origin, WHICH: gl.constexpr):
    """The sum of products of a state and its gradient, of 64 channels."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    state = rings.states.memory.index(origin + (STATE + WHICH))
    gradient = rings.states.memory.index(origin + (GRAD_STATE + WHICH))
    total = gl.zeros([PIECE, BLOCK], gl.float32, LAYOUT)
    for piece in gl.static_range(WIDTH // PIECE):
        one = state.slice(piece * PIECE, PIECE, dim=0).load(LAYOUT).to(gl.float32)
        two = gradient.slice(piece * PIECE, PIECE, dim=0).load(LAYOUT).to(gl.float32)
        total += one * two
    return gl.sum(gl.sum(total, 1), 0)


# ---- what leaves --------------------------------------------------------------------------------


@gluon.jit
def finish_rows(
    descs, grads, rings, turn, origin, found, sums, at, place, HEAD_DIM: gl.constexpr,
    PACKED: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Write gradients of queries and keys, and hand on what is summed up of each row."""
    SQUARE: gl.constexpr = mma_layout(BLOCK)
    DOWN: gl.constexpr = gl.SliceLayout(1, SQUARE)
    asking, asked, written = found
    of_beta, ended, flow, alone = sums
    keys_memory = rings.keys.memory.index(origin + (KEYS + WHICH))
    keys = keys_memory.load(SQUARE).to(gl.float32)
    queries = rings.keys.memory.index(origin + (QUERIES + WHICH)).load(SQUARE).to(gl.float32)
    strength = rings.numbers.tile_of(turn, BETA).load(DOWN)
    of_keys = rings.numbers.tile_of(turn, OF_KEYS).load(DOWN)
    of_queries = rings.numbers.tile_of(turn, OF_QUERIES).load(DOWN)
    # Scores' factors of rows and of columns are what both rows of a pair alike want.
    of_queries_alone = alone * rings.numbers.tile_of(turn, OF_ROWS).load(DOWN)
    of_keys_alone = alone * rings.numbers.tile_of(turn, OF_COLUMNS).load(DOWN)
    lasts = rings.numbers.tile_of(turn, LEFT).load(DOWN)
    of_asked = gl.sum(keys * asked, 1) * of_keys
    crossing = strength * of_asked + gl.sum(queries * asking, 1) * of_queries
    crossing = crossing - gl.sum(keys * written, 1) * of_keys
    rows = origin + gl.arange(0, ROWS, DOWN)
    ended = ended * of_keys + gl.where(rows == 0, flow * lasts, 0.0)
    written = written + asked * strength[:, None] + of_queries_alone[:, None] * queries
    asking = asking + of_keys_alone[:, None] * keys
    wait_for_stores()  # of values
    rings.values.release(turn)
    results = rings.results.index(origin + WHICH)
    put(descs.grad_query, grads.query, results, asking, at, place, HEAD_DIM, PACKED, WHICH)
    put(descs.grad_key, grads.key, keys_memory, written, at, place, HEAD_DIM, PACKED, WHICH)
    rings.numbers.release(turn)
    rings.sums.acquire(turn)
    rings.sums.tile_of(turn, SUMS * WHICH + OF_BETA).store(of_beta + of_asked)
    rings.sums.tile_of(turn, SUMS * WHICH + CROSSING).store(crossing)
    rings.sums.tile_of(turn, SUMS * WHICH + ENDED).store(ended)
    mbarrier.arrive(rings.sums.full.index(rings.sums.stage(turn)), count=1)


@gluon.jit
def place_of_stores(updates, at, PACKED: gl.constexpr):
    """Where TMA writes the rows of a chunk: batch entry, head and row. A chunk that a packed
    sequence ends in goes nowhere, as rows past the end are another sequence's."""
    entry, row = origin_of(updates, at, PACKED)
    if PACKED:
        entry = gl.where(at[2] + ROWS > at[3], 1, entry)
    return entry, at[1], row


@gluon.jit
def put(
    desc, view, memory, tile, at, place, DIM: gl.constexpr, PACKED: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Start to write 64 channels of the rows of a chunk by way of shared memory."""
    memory.store(tile.to(gl.bfloat16))
    entry, head, row = place
    store(desc, [entry, head, row, WHICH * BLOCK], memory.reshape(desc.block_type.shape))
    if PACKED:  # noqa: SIM102 (a constexpr first)
        if at[2] + ROWS > at[3]:
            store_half(view, at, tile, DIM, WHICH)


@gluon.jit
def store_half(view, at, tile, DIM: gl.constexpr, WHICH: gl.constexpr):
    """Write 64 channels of the rows of a chunk that a sequence ends in; none past the end."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    batch, head, start, length = at
    # Counted by numbers that serve nothing else, as in `tensor_view.tile_pointers`.
    row = gl.arange(ROWS, 2 * ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = WHICH * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))[None, :]
    first, _ = view.position(batch, view.strides, view.step, view.data)
    base = first + wide(head) * view.strides[1] + wide(start - ROWS) * view.step
    inside = (row - ROWS < length - start) & (column < DIM)
    gl.store(view.ptr + base + (row * view.step + column), tile.to(gl.bfloat16), mask=inside)


@gluon.jit
def clear_behind(memory, count):
    """Clear rows from `count` on, which are another sequence's."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    there = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None] < count
    rows = memory.load(LAYOUT)
    memory.store(gl.where(there, rows, gl.zeros_like(rows)))
