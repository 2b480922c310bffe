"""The gated delta rule on Hopper, gradients of rows: loads, and what there is of each row alone.

One warp loads tiles. Two others have a row a thread: they find what products of rows are multiplied
by, a chunk ahead, and write gradients of beta and decay, a chunk behind.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import mbarrier
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import row_pointers
from saccade.ops.delta_rule.hopper.gradient_rings import (
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
    QUERIES,
    SINCE,
    SOLVED,
    STATE,
    SUMS,
    UNTIL,
    UPDATES,
    chunk_at,
    origin_of,
)
from saccade.ops.delta_rule.hopper.load import load_numbers
from saccade.ops.delta_rule.hopper.rings import BLOCK, ROWS
from saccade.ops.delta_rule.triton.chunk_rows import chunk_slot


@gluon.jit
def load_chunks(
    descs, updates, chunks, rings, GROUP: gl.constexpr, PACKED: gl.constexpr
):  # fmt: skip
    """Load all tiles of a chunk, in the order in which there is room for them."""
    turn = gl.program_id(0) * 0
    for number in range(gl.program_id(0), chunks, gl.num_programs(0)):
        at = chunk_at(updates, number)
        batch, head, start, _ = at
        entry, row = origin_of(updates, at, PACKED)
        slot = chunk_slot(updates, batch, start // ROWS, ROWS, PACKED)
        rings.rows.acquire(turn)
        rings.rows.expect(turn, descs.updates)
        load_halves(rings.rows, turn, UPDATES, descs.updates, entry, head, row)
        load_halves(rings.rows, turn, SOLVED, descs.solved, entry, head, row)
        load_halves(rings.rows, turn, GRADS, descs.grad_output, entry, head, row)
        rings.states.acquire(turn)
        rings.states.expect(turn, descs.states)
        load_halves(rings.states, turn, STATE, descs.states, slot, head, 0)
        load_halves(rings.states, turn, GRAD_STATE, descs.grad_states, slot, head, 0)
        rings.values.acquire(turn)
        rings.values.expect(turn, descs.value)
        load_halves(rings.values, turn, 0, descs.value, entry, head, row)
        rings.keys.acquire(turn)
        rings.keys.expect(turn, descs.key)
        load_halves(rings.keys, turn, KEYS, descs.key, entry, head // GROUP, row)
        load_halves(rings.keys, turn, QUERIES, descs.query, entry, head // GROUP, row)
        turn += 1


@gluon.jit
def load_halves(ring, turn, which, desc, entry, head, row):
    """Start to load both halves of the channels of some rows."""
    for half in gl.static_range(2):
        ring.load_tile(turn, which + half, desc, [entry, head, row, half * BLOCK])


@gluon.jit
def look_at_rows(
    factors, beta, decay, grads, updates, scale, chunks, rings, GROUP: gl.constexpr
):  # fmt: skip
    """Find the numbers of the rows of chunk after chunk, and write what is summed up of them."""
    turn, each = gl.program_id(0) * 0, gl.num_programs(0)
    ahead = numbers_of(factors, beta, decay, updates, gl.program_id(0), GROUP)
    for number in range(gl.program_id(0), chunks, each):
        now = ahead
        ahead = numbers_of(factors, beta, decay, updates, gl.minimum(number + each, chunks - 1),
                           GROUP)  # fmt: skip
        rings.numbers.acquire(turn)
        put_numbers(rings, turn, now, scale)
        mbarrier.arrive(rings.numbers.full.index(rings.numbers.stage(turn)), count=1)
        if turn > 0:
            finish(grads, updates, rings, turn - 1, number - each)
        turn += 1
    finish(grads, updates, rings, turn - 1, gl.program_id(0) + (turn - 1) * each)


@gluon.jit
def numbers_of(factors, beta, decay, updates, number, GROUP: gl.constexpr):
    """What is in memory of each row of a chunk; 1 / length is 1 past the end, or of no matter."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    batch, head, start, length = chunk_at(updates, number)
    strength, high, low, last_high, last_low = load_numbers(
        beta, decay, batch, head, start, length, EACH
    )
    of_keys = gl.full([ROWS], 1.0, gl.float32, EACH)
    of_queries = of_keys
    if factors is not None:
        rows = start + gl.arange(0, ROWS, EACH)
        pointers = row_pointers(factors.key, batch, head // GROUP, rows, 0)
        of_keys = gl.load(pointers, mask=rows < length, other=1.0)
        pointers = row_pointers(factors.query, batch, head // GROUP, rows, 0)
        of_queries = gl.load(pointers, mask=rows < length, other=1.0)
    return strength, high, low, last_high, last_low, of_keys, of_queries


@gluon.jit
def put_numbers(rings, turn, found, scale):
    """Fill a stage with the numbers of each row."""
    strength, high, low, last_high, last_low, of_keys, of_queries = found
    rings.numbers.tile_of(turn, BETA).store(strength)
    rings.numbers.tile_of(turn, HIGH).store(high)
    rings.numbers.tile_of(turn, LOW).store(low)
    rings.numbers.tile_of(turn, OF_KEYS).store(of_keys)
    rings.numbers.tile_of(turn, OF_QUERIES).store(of_queries)
    rings.numbers.tile_of(turn, SINCE).store(gl.exp2(high + low))
    until = gl.exp2((last_high - high) + (last_low - low))
    rings.numbers.tile_of(turn, UNTIL).store(until)
    lasts = of_keys * 0.0 + gl.exp2(last_high + last_low)
    rings.numbers.tile_of(turn, LEFT).store(lasts)
    rings.numbers.tile_of(turn, OF_COLUMNS).store(scale * of_keys)
    rings.numbers.tile_of(turn, OF_COLUMNS + 1).store(0.0 - of_keys)
    rings.numbers.tile_of(turn, OF_ROWS).store(scale * of_queries)
    rings.numbers.tile_of(turn, OF_ROWS + 1).store(0.0 - strength * of_keys)


@gluon.jit
def finish(grads, updates, rings, turn, number):
    """Write gradients of beta and decay of the rows of a chunk."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    batch, head, start, length = chunk_at(updates, number)
    rows = start + gl.arange(0, ROWS, EACH)
    exist = rows < length
    rings.sums.wait(turn)
    of_beta = from_both(rings, turn, OF_BETA, EACH)
    crossing = gl.where(exist, from_both(rings, turn, CROSSING, EACH), 0.0)
    ended = gl.where(exist, from_both(rings, turn, ENDED, EACH), 0.0)
    rings.sums.release(turn)
    pointers = row_pointers(grads.beta, batch, head, rows, 0)
    gl.store(pointers, of_beta.to(grads.beta.ptr.dtype.element_ty), mask=exist)
    if grads.decay is not None:
        # A row's decay is between it and all before; it makes all behind it less, too.
        total = gl.associative_scan(crossing, 0, plus, reverse=True) + gl.sum(ended, 0)
        pointers = row_pointers(grads.decay, batch, head, rows, 0)
        gl.store(pointers, total.to(grads.decay.ptr.dtype.element_ty), mask=exist)


@gluon.jit
def plus(one, other):
    """A sum."""
    return one + other


@gluon.jit
def from_both(rings, turn, which, LAYOUT: gl.constexpr):
    """What both consumers have summed up of each row."""
    one = rings.sums.tile_of(turn, which).load(LAYOUT)
    return one + rings.sums.tile_of(turn, SUMS + which).load(LAYOUT)
