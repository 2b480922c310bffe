"""Wide linear attention on Hopper, mapping: features take the place of rows, for scan_d256.py.

One partition loads rows and maps all that a program multiplies as features: all channels of queries
and of keys, or the 128 that the program has of one of them. It keeps the sum of features and, of
the output, finds what each query's scores with it sum up to. A chunk is loaded when consumers are
done with the one two turns before, which they are later than the chunk between is mapped: a warp
that only loads would take registers and wait as long.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.backward_rows import (
    factors_at,
    keys_seen,
    mapped_wide,
    numbers_at,
    position_of,
    queries_seeing,
    unit_of,
    within,
)
from saccade.ops.linear_attention.hopper.features import mapped, only, widened
from saccade.ops.linear_attention.hopper.program import (
    BLOCK,
    channel_of,
    chunks_of,
    head_of,
    keys_there,
    state_number,
    tile_of_values,
)
from saccade.ops.linear_attention.hopper.smem import FACTOR, MINUS_DELTA
from saccade.ops.linear_attention.triton.chunk import GRAD_KEY, GRAD_QUERY, OUTPUT

PIECE, PIECES = gl.constexpr(16), gl.constexpr(4)  # rows that are mapped at once; of a chunk


@gluon.jit
def map_inner(
    descs, given, kept, before, after, sizes, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILES: gl.constexpr, SEGMENTS: gl.constexpr,
    PASS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, STARTED: gl.constexpr,
    FEATURE_MAP: gl.constexpr, SCALE: gl.constexpr, NORMALIZE: gl.constexpr,
    HEADS_PER_OPERAND: gl.constexpr,
):  # fmt: skip
    """Put features in place of a and b: queries and keys of the output, keys and queries of
    grad_value. Each warp has 64 channels, and scores' sums are left in parts of as many."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps() // 4, 4], [1, 0])
    EACH_ONCE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    BACKWARDS: gl.constexpr = PASS != OUTPUT
    WIDTH: gl.constexpr = rings.b.memory.shape[2]
    ADJACENT: gl.constexpr = gl.num_warps()  # rows that as many threads have
    batch, head = head_of(sizes, 0, 2, TILES, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, BACKWARDS)
    exists = batch < sizes.batches
    channel = channel_of(0, 2, TILES, SEGMENTS)
    num_keys = keys_there(kept, sizes, batch)
    keys = keys_seen(num_keys)
    queries = queries_seeing(sizes, shift, num_keys, exists, STARTED)
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    inside = (channels < HEAD_DIM) & exists
    at = state_number(sizes, batch, head, GROUP, SEGMENTS) * HEAD_DIM + channels
    key_sum = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, LAYOUT))
    if PASS == OUTPUT:
        if before is not None:
            key_sum = gl.load(before.vector + at, mask=inside, other=0.0)
    else:
        unit = unit_of(sizes, batch, head, shift)
        position = position_of(first, chunks, 0, True)
        factor = factors_at(given, unit, queries, position, SCALE, EACH_ONCE)
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, BACKWARDS)
        load_chunk(
            descs,
            rings,
            iteration,
            batch,
            head,
            position,
            shift,
            channel,
            BACKWARDS,
            HEADS_PER_OPERAND,
        )
        if PASS == OUTPUT:
            clear_hidden(rings.c, iteration, position, keys)
        else:
            clear_hidden(rings.c, iteration, position, queries)
            rings.numbers_of(iteration, FACTOR).store(factor)
            # Asked for early, as nothing hides how long it takes.
            factor = factors_at(given, unit, queries, position - ROWS, SCALE, EACH_ONCE)
        rings.b.wait(iteration)
        b, a = rings.b.at(iteration), rings.a.at(iteration)
        rows, part = b.slice(0, PIECE, dim=0).load(LAYOUT), 0.0
        for piece in gl.static_range(PIECES):
            tile = b.slice(piece * PIECE, PIECE, dim=0)
            # Loaded ahead: other warps keep shared memory busy.
            if piece + 1 < PIECES:
                ahead = b.slice((piece + 1) * PIECE, PIECE, dim=0).load(LAYOUT)
            else:
                rings.a.wait(iteration)
                ahead = a.slice(0, PIECE, dim=0).load(LAYOUT)
            if PASS == OUTPUT:
                features = mapped(rows, FEATURE_MAP)
                there = piece_within(keys, position, piece, LAYOUT)
            else:
                features = mapped_wide(widened(rows), FEATURE_MAP)
                factors = rings.numbers_of(iteration, FACTOR).slice(piece * PIECE, PIECE, dim=0)
                factors = factors.load(gl.SliceLayout(1, LAYOUT))
                features = (features * factors[:, None]).to(tile.dtype)
                there = piece_within(queries, position, piece, LAYOUT)
            if HEAD_DIM != WIDTH:  # what TMA found there is 0, and e⁰ is not
                features = gl.where((channels < HEAD_DIM)[None, :], features, 0.0)
            features = only(features, there)
            tile.store(features)
            if PASS == OUTPUT:  # each thread sums up its own rows, until the chunk ends
                own = gl.reshape(widened(features), [PIECE // ADJACENT, ADJACENT, WIDTH])
                own = gl.sum(own, 0)
                part = own if piece == 0 else part + own
            rows = ahead
        for piece in gl.static_range(PIECES):
            tile = a.slice(piece * PIECE, PIECE, dim=0)
            if piece + 1 < PIECES:
                ahead = a.slice((piece + 1) * PIECE, PIECE, dim=0).load(LAYOUT)
            features = mapped(rows, FEATURE_MAP)
            if PASS == OUTPUT:
                if before is None:  # those that see nothing find 0, whatever they are
                    features = only(features, piece_within(queries, position, piece, LAYOUT))
                if SCALE != 1.0:
                    features = (widened(features) * SCALE).to(tile.dtype)
            tile.store(features)
            if PASS == OUTPUT and NORMALIZE != "none":
                parts = gl.reshape(widened(features) * key_sum[None, :], [PIECE, 4, WIDTH // 4])
                totals = gl.permute(gl.sum(parts, 2), (1, 0))
                rings.parts_of(iteration).slice(piece * PIECE, PIECE, dim=1).store(totals)
            rows = ahead
        rings.say_mapped(iteration)
        if PASS == OUTPUT:
            key_sum += gl.convert_layout(gl.sum(part, 0), gl.SliceLayout(0, LAYOUT))
    if PASS == OUTPUT and after is not None:
        mine = inside & (head % GROUP == 0) & (tile_of_values(TILES, SEGMENTS) == 0)
        gl.store(after.vector + at, key_sum, mask=mine)


@gluon.jit
def map_outer(
    descs, given, kept, before, after, sizes, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, TILES: gl.constexpr, SEGMENTS: gl.constexpr,
    PASS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, STARTED: gl.constexpr,
    FEATURE_MAP: gl.constexpr, SCALE: gl.constexpr, NORMALIZE: gl.constexpr,
    HEADS_PER_OPERAND: gl.constexpr,
):  # fmt: skip
    """Put features in place of c: keys of grad_query, queries of grad_key. Their sum over chunks
    before stands beside them, and so do the numbers that queries have."""
    LAYOUT: gl.constexpr = gl.BlockedLayout(
        [1, 8], [2 * gl.num_warps(), 16 // gl.num_warps()], [1, gl.num_warps()], [1, 0]
    )
    EACH_ONCE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    BACKWARDS: gl.constexpr = PASS != GRAD_QUERY
    WIDTH: gl.constexpr = rings.c.memory.shape[2]
    batch, head = head_of(sizes, 0, 2, TILES, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, BACKWARDS)
    exists = batch < sizes.batches
    channel = channel_of(0, 2, TILES, SEGMENTS)
    num_keys = keys_there(kept, sizes, batch)
    keys = keys_seen(num_keys)
    queries = queries_seeing(sizes, shift, num_keys, exists, STARTED)
    channels = gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))
    channels = channel + channels
    inside = (channels < HEAD_DIM) & exists
    at = state_number(sizes, batch, head, GROUP, SEGMENTS) * HEAD_DIM + channels
    total = gl.zeros([WIDTH], gl.float32, gl.SliceLayout(0, LAYOUT))
    if before is not None:
        total = gl.load(before.vector + at, mask=inside, other=0.0)
    unit = unit_of(sizes, batch, head, shift)
    position = position_of(first, chunks, 0, BACKWARDS)
    factor = factors_at(given, unit, queries, position, SCALE, EACH_ONCE)
    minus_delta = numbers_at(given.minus_delta, unit, queries, position, EACH_ONCE)
    load_chunk(
        descs,
        rings,
        0 * chunks,
        batch,
        head,
        position,
        shift,
        channel,
        BACKWARDS,
        HEADS_PER_OPERAND,
    )
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, BACKWARDS)
        later = position + ROWS
        if BACKWARDS:
            later = position - ROWS
        rings.wait(iteration)
        rings.numbers_of(iteration, FACTOR).store(factor)
        rings.numbers_of(iteration, MINUS_DELTA).store(minus_delta)
        rings.sum_of(iteration).store(total)
        # Asked for early, as nothing hides how long it takes.
        factor = factors_at(given, unit, queries, later, SCALE, EACH_ONCE)
        minus_delta = numbers_at(given.minus_delta, unit, queries, later, EACH_ONCE)
        tile = rings.c.at(iteration)
        if PASS == GRAD_QUERY:
            clear_hidden(rings.b, iteration, position, keys)
            features = mapped(tile.load(LAYOUT), FEATURE_MAP)
            features = only(features, within(keys, position, gl.SliceLayout(1, LAYOUT)))
        else:
            clear_hidden(rings.b, iteration, position, queries)
            features = mapped_wide(widened(tile.load(LAYOUT)), FEATURE_MAP)
            factors = rings.numbers_of(iteration, FACTOR).load(gl.SliceLayout(1, LAYOUT))
            features = (features * factors[:, None]).to(tile.dtype)
            features = only(features, within(queries, position, gl.SliceLayout(1, LAYOUT)))
        tile.store(features)
        rings.say_mapped(iteration)
        if iteration + 1 < chunks:
            load_chunk(
                descs, rings, iteration + 1, batch, head, later, shift, channel, BACKWARDS,
                HEADS_PER_OPERAND
            )  # fmt: skip
        load_own(
            descs,
            rings,
            iteration,
            batch,
            head,
            position,
            shift,
            channel,
            BACKWARDS,
            HEADS_PER_OPERAND,
        )
        if PASS == GRAD_KEY:
            deltas = rings.numbers_of(iteration, MINUS_DELTA).load(gl.SliceLayout(1, LAYOUT))
            total += gl.sum(widened(features) * deltas[:, None], 0)
        else:
            total += gl.sum(widened(features), 0)
    if PASS == GRAD_KEY and after is not None:
        gl.store(after.vector + at, total, mask=inside)


@gluon.jit
def piece_within(bounds, position, piece, LAYOUT: gl.constexpr):
    """Which rows of a piece of a chunk lie in such bounds."""
    positions = position + (piece * PIECE + gl.arange(0, PIECE, gl.SliceLayout(1, LAYOUT)))
    return (positions >= bounds[0]) & (positions < bounds[1])


@gluon.jit
def clear_hidden(ring, iteration, position, bounds):
    """Put zeros in hidden rows that stand beside features of 0, as a product does not hide what is
    not finite (0 · NaN is NaN)."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps() // 4, 4], [1, 0])
    if (position < bounds[0]) | (position + ROWS > bounds[1]):
        ring.wait(iteration)
        for piece in gl.static_range(PIECES):
            rows = ring.at(iteration).slice(piece * PIECE, PIECE, dim=0)
            rows.store(only(rows.load(LAYOUT), piece_within(bounds, position, piece, LAYOUT)))


# ---- loading ------------------------------------------------------------------------------------


@gluon.jit
def load_chunk(
    descs, rings, iteration, batch, head, position, shift, channel, BACKWARDS: gl.constexpr,
    HEADS_PER_OPERAND: gl.constexpr,
):  # fmt: skip
    """Load the rows of a chunk, as soon as there is room."""
    row, other = position - shift, position  # of a, and of b and c
    if BACKWARDS:
        row, other = position, position - shift
    a_desc, b_desc, c_desc, _ = descs
    rings.a.acquire(iteration)
    rings.b.expect(iteration, b_desc)
    rings.b.load_tile(iteration, 0, b_desc, [batch, head // HEADS_PER_OPERAND[1], other, 0])
    rings.a.expect(iteration, a_desc)
    rings.a.load_tile(iteration, 0, a_desc, [batch, head // HEADS_PER_OPERAND[0], row, 0])
    rings.c.expect(iteration, c_desc)
    rings.c.load_tile(iteration, 0, c_desc, [batch, head // HEADS_PER_OPERAND[2], other, channel])


@gluon.jit
def load_own(
    descs, rings, iteration, batch, head, position, shift, channel, BACKWARDS: gl.constexpr,
    HEADS_PER_OPERAND: gl.constexpr,
):  # fmt: skip
    """Load the rows that gradients are of, if there are any, when those of the chunk before are
    read. Who asks waits so long."""
    own_desc = descs[3]
    if own_desc is not None:
        row = position
        if not BACKWARDS:
            row = position - shift
        rings.own.acquire(iteration)
        rings.own.expect(iteration, own_desc)
        for which in gl.static_range(2):
            at = [batch, head // HEADS_PER_OPERAND[3], row, channel + which * BLOCK]
            rings.own.load_tile(iteration, which, own_desc, at)
