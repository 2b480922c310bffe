"""The gated delta rule on Hopper, loading: rows by TMA, and what each of them is multiplied by.

One warp loads rows. Two others look at them: decay and beta, and lengths of queries and keys, give
the numbers that products of rows with one another and with states want (rings.py names them).
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import mbarrier, start_load
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import row_pointers, wide
from saccade.ops.delta_rule.hopper.rings import (
    ACROSS,
    ASKED,
    ASKING,
    BETA,
    BLOCK,
    HIGH,
    KEPT,
    LEFT,
    LOW,
    PAIRED,
    ROWS,
    SCORED,
    WIDTH,
    place_of,
)
from saccade.ops.delta_rule.triton.chunk_rows import NORM_EPS, chunk_slot

LOG2_E = gl.constexpr(1.4426950408889634)
PIECE = gl.constexpr(16)  # channels that are measured at once


@gluon.jit
def produce(
    query_desc, key_desc, value_desc, beta, rings, GROUP: gl.constexpr, HEADS: gl.constexpr,
    PACKED: gl.constexpr,
):  # fmt: skip
    """Load rows of chunk after chunk, as soon as there is room."""
    _, head, length, entry, first = place_of(beta, HEADS, PACKED)
    for chunk in range(0, (length + ROWS - 1) // ROWS):
        row = first + chunk * ROWS
        rings.keys.acquire(chunk)  # all are released together
        load_whole(rings.keys, chunk, key_desc, [entry, head // GROUP, row, 0])
        load_whole(rings.queries, chunk, query_desc, [entry, head // GROUP, row, 0])
        rings.values.expect(chunk, value_desc)
        for which in gl.static_range(2):
            rings.values.load_tile(chunk, which, value_desc, [entry, head, row, which * BLOCK])


@gluon.jit
def load_whole(ring, chunk, desc, coordinates):
    """Start to fill the stage of a chunk, whose tiles are matrices."""
    ready = ring.full.index(ring.stage(chunk))
    mbarrier.expect(ready, desc.block_type.nbytes)
    start_load(desc, coordinates, ready, ring.at(chunk).reshape(desc.block_type.shape))


@gluon.jit
def measure(
    beta, decay, scale, meeting, factors, lasts, rings, GROUP: gl.constexpr, HEADS: gl.constexpr,
    PACKED: gl.constexpr, NORMALIZE: gl.constexpr, KEEPS: gl.constexpr,
):  # fmt: skip
    """Find the numbers of the rows of chunk after chunk, each row by a thread."""
    EACH: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    batch, head, length, _, _ = place_of(beta, HEADS, PACKED)
    ahead = load_numbers(beta, decay, batch, head, batch * 0, length, EACH)
    for chunk in range(0, (length + ROWS - 1) // ROWS):
        strength, high, low, last_high, last_low = ahead
        # Asked for early, as nothing else hides how long it takes.
        ahead = load_numbers(beta, decay, batch, head, (chunk + 1) * ROWS, length, EACH)
        rings.keys.wait(chunk)  # else others are still at the numbers that lie there
        of_keys = gl.full([ROWS], 1.0, gl.float32, EACH)
        of_queries = of_keys
        if NORMALIZE:
            rings.queries.wait(chunk)
            of_keys = lengths_of(rings.keys.at(chunk), EACH)
            of_queries = lengths_of(rings.queries.at(chunk), EACH)
            if PACKED:  # rows past the end are another sequence's
                exist = chunk * ROWS + gl.arange(0, ROWS, EACH) < length
                of_keys = gl.where(exist, of_keys, 1.0)
                of_queries = gl.where(exist, of_queries, 1.0)
        faded = gl.exp2(high + low)
        rings.numbers.tile_of(chunk, BETA).store(strength)
        rings.numbers.tile_of(chunk, HIGH).store(high)
        rings.numbers.tile_of(chunk, LOW).store(low)
        rings.numbers.tile_of(chunk, ACROSS).store(low - gl.log2(of_keys))
        rings.numbers.tile_of(chunk, PAIRED).store(0.0 - strength * of_keys)
        rings.numbers.tile_of(chunk, SCORED).store(scale * of_queries)
        rings.numbers.tile_of(chunk, ASKED).store(faded * of_keys)
        rings.numbers.tile_of(chunk, ASKING).store(faded * (scale * of_queries))
        until = gl.exp2((last_high - high) + (last_low - low))
        rings.numbers.tile_of(chunk, KEPT).store(until * of_keys)
        rings.numbers.tile_of(chunk, LEFT).store(of_keys * 0.0 + gl.exp2(last_high + last_low))
        mbarrier.arrive(rings.numbers.full.index(rings.numbers.stage(chunk)), count=1)
        if KEEPS:
            rows = chunk * ROWS + gl.arange(0, ROWS, EACH)
            exist = rows < length
            asking = faded * (scale * of_queries)
            store_numbers(meeting.asking, batch, head, rows, exist, asking)
            store_numbers(meeting.asked, batch, head, rows, exist, faded * of_keys * strength)
            store_numbers(meeting.kept, batch, head, rows, exist, until * of_keys)
            if NORMALIZE:  # the same for all value heads of a key head
                store_numbers(factors.key, batch, head // GROUP, rows, exist, of_keys)
                store_numbers(factors.query, batch, head // GROUP, rows, exist, of_queries)
            if decay is not None:
                number = wide(chunk_slot(beta, batch, chunk, ROWS, PACKED)) * HEADS + head
                gl.store(lasts + number, gl.exp2(last_high + last_low))


@gluon.jit
def store_numbers(view, batch, head, rows, exist, numbers):
    """Write a number for each row."""
    gl.store(row_pointers(view, batch, head, rows, 0), numbers, mask=exist)


@gluon.jit
def load_numbers(beta, decay, batch, head, start, length, LAYOUT: gl.constexpr):
    """beta and both parts of the sums of decay of a chunk's rows; both parts of the last sum. Rows
    past the end have beta 0, and the last sum."""
    rows = start + gl.arange(0, ROWS, LAYOUT)
    exist = rows < length
    strength = gl.load(row_pointers(beta, batch, head, rows, 0), mask=exist, other=0.0)
    strength = strength.to(gl.float32)
    high, low = strength * 0.0, strength * 0.0
    last_high, last_low = (start * 0).to(gl.float32), (start * 0).to(gl.float32)
    if decay is not None:
        last = gl.maximum(gl.minimum(start + ROWS, length) - 1, 0)
        high, low = sums_at(decay, batch, head, gl.minimum(rows, last), (rows >= 0) & (length > 0))
        last_high, last_low = sums_at(decay, batch, head, last, length > 0)
    return strength, high, low, last_high, last_low


@gluon.jit
def sums_at(decay, batch, head, rows, there):
    """Sums of decay in powers of 2, in two parts that are as exact."""
    high = gl.load(row_pointers(decay.high, batch, head, rows, 0), there, 0.0).to(gl.float64)
    low = gl.load(row_pointers(decay.low, batch, head, rows, 0), there, 0.0).to(gl.float64)
    total = (high + low) * LOG2_E
    rounded = total.to(gl.float32)
    return rounded, (total - rounded.to(gl.float64)).to(gl.float32)


@gluon.jit
def lengths_of(rows, LAYOUT: gl.constexpr):
    """1 / length of rows in shared memory, each found by one thread."""
    A_ROW: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [gl.num_warps(), 1], [1, 0])
    squares = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, A_ROW))
    for piece in gl.static_range(WIDTH // PIECE):
        numbers = rows.slice(piece * PIECE, PIECE, dim=1).load(A_ROW).to(gl.float32)
        squares += gl.sum(numbers * numbers, 1)
    return gl.convert_layout(gl.rsqrt(squares + NORM_EPS), LAYOUT)
