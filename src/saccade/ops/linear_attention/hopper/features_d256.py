"""Wide linear attention on Hopper, mapping: features take the place of rows, for scan_d256.py.

One partition loads rows and maps all that a program multiplies as features: all channels of queries
and of keys, or the 128 that the program has of one of them. It keeps the sum of features and, of
the output, finds what each query's scores with it sum up to. A chunk is loaded when consumers are
done with the one two iterations before. They are so later than the chunk between is mapped, so a
warp that only loads would take registers and wait as long.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

# Without `from __future__ import annotations`: aggregates read theirs as types.

from saccade.gpu.hopper.pipeline import (
    Ring,
    fence_async_shared,
    in_stages,
    make_barriers,
    make_ring_in,
    mbarrier,
    reinterpreted,
    settle,
)
from saccade.gpu.language import aggregate, gl, gluon
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.backward_rows import (
    base_of,
    factors_at,
    keys_seen,
    mapped_wide,
    numbers_at,
    position_of,
    queries_seeing,
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
from saccade.ops.linear_attention.triton.chunk_scan import GRAD_KEY, GRAD_QUERY, OUTPUT

PIECE, PIECES = gl.constexpr(16), gl.constexpr(4)  # rows that are mapped at once; of a chunk


@gluon.jit
def map_inner(
    descs, per_row, kept, before, after, sizes, rings,
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
        base = base_of(sizes, batch, head, shift)
        position = position_of(first, chunks, 0, True)
        factor = factors_at(per_row, base, queries, position, SCALE, EACH_ONCE)
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
            factor = factors_at(per_row, base, queries, position - ROWS, SCALE, EACH_ONCE)
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
                in_thread = gl.reshape(widened(features), [PIECE // ADJACENT, ADJACENT, WIDTH])
                in_thread = gl.sum(in_thread, 0)
                part = in_thread if piece == 0 else part + in_thread
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
        writes = inside & (head % GROUP == 0) & (tile_of_values(TILES, SEGMENTS) == 0)
        gl.store(after.vector + at, key_sum, mask=writes)


@gluon.jit
def map_outer(
    descs, per_row, kept, before, after, sizes, rings,
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
    base = base_of(sizes, batch, head, shift)
    position = position_of(first, chunks, 0, BACKWARDS)
    factor = factors_at(per_row, base, queries, position, SCALE, EACH_ONCE)
    minus_delta = numbers_at(per_row.minus_delta, base, queries, position, EACH_ONCE)
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
        factor = factors_at(per_row, base, queries, later, SCALE, EACH_ONCE)
        minus_delta = numbers_at(per_row.minus_delta, base, queries, later, EACH_ONCE)
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
        load_source(
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
def load_source(
    descs, rings, iteration, batch, head, position, shift, channel, BACKWARDS: gl.constexpr,
    HEADS_PER_OPERAND: gl.constexpr,
):  # fmt: skip
    """Load the rows that gradients are of, if there are any, when those of the chunk before are
    read, for which this waits."""
    source_desc = descs[3]
    if source_desc is not None:
        row = position
        if not BACKWARDS:
            row = position - shift
        rings.source.acquire(iteration)
        rings.source.expect(iteration, source_desc)
        for which in gl.static_range(2):
            at = [batch, head // HEADS_PER_OPERAND[3], row, channel + which * BLOCK]
            rings.source.load_tile(iteration, which, source_desc, at)


# ---- shared memory -----------------------------------------------------------------------------


# ---- smem d256 -----------------------------------------------------------------------------------
# What the roles of scan_d256.py share in shared memory.

# Kinds of numbers beside a chunk: 64 each.
MINUS_DELTA, FACTOR = gl.constexpr(0), gl.constexpr(1)  # of each query


@aggregate
class WideRings:
    """All that producer, mapper and consumers share.

    A stage is a chunk of a, b and c (scan_d256.py), mapped where they lie; that they are, and
    that numbers stand beside them, is what `mapped` says."""

    a: Ring  # [rows, inner channels]; its release is that of b and c too
    b: Ring
    c: Ring  # [rows, channels of both consumers]
    source: Ring  # one stage: the rows that a gradient is of, a tile for each consumer
    mapped: gl.shared_memory_descriptor  # a barrier for each stage
    totals: gl.shared_memory_descriptor  # four parts of each row's sum of scores, for each stage
    numbers: gl.shared_memory_descriptor  # two kinds for each stage
    sums: gl.shared_memory_descriptor  # of features of c, for each stage
    narrowed: gl.shared_memory_descriptor  # half of the sums of each consumer
    outputs: gl.shared_memory_descriptor  # a tile for each consumer

    @gluon.constexpr_function
    def __init__(self, a, b, c, source, mapped, totals, numbers, sums, narrowed, outputs):
        self.a = a
        self.b = b
        self.c = c
        self.source = source
        self.mapped = mapped
        self.totals = totals
        self.numbers = numbers
        self.sums = sums
        self.narrowed = narrowed
        self.outputs = outputs

    @gluon.jit
    def wait(self, iteration):
        """Wait until an iteration has been loaded."""
        self.a.wait(iteration)
        self.b.wait(iteration)
        self.c.wait(iteration)

    @gluon.jit
    def say_mapped(self, iteration):
        """All of an iteration is mapped."""
        fence_async_shared()
        mbarrier.arrive(self.mapped.index(self.a.stage(iteration)), count=1)

    @gluon.jit
    def wait_for_mapped(self, iteration):
        """Wait until all of an iteration is there, and mapped."""
        self.wait(iteration)
        mbarrier.wait(self.mapped.index(self.a.stage(iteration)), self.a.round(iteration) & 1)

    @gluon.jit
    def parts_of(self, iteration):
        """An iteration's totals, [parts, rows]."""
        PARTS: gl.constexpr = self.totals.shape[0] // self.a.full.shape[0]
        SHAPE: gl.constexpr = in_stages(self.a.full.shape[0], [PARTS, self.totals.shape[1]])
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        parts = reinterpreted(self.totals, gl.float32, SHAPE, LAYOUT)
        return parts.index(self.a.stage(iteration))

    @gluon.jit
    def part_of(self, iteration, which):
        """One part of an iteration's totals."""
        PARTS: gl.constexpr = self.totals.shape[0] // self.a.full.shape[0]
        return self.totals.index(PARTS * self.a.stage(iteration) + which)

    @gluon.jit
    def numbers_of(self, iteration, spec):
        """Where an iteration's numbers of one kind are."""
        return self.numbers.index(2 * self.a.stage(iteration) + spec)

    @gluon.jit
    def sum_of(self, iteration):
        """The sum of features of c over the chunks visited before."""
        return self.sums.index(self.a.stage(iteration))


@gluon.jit
def make_wide_rings(a_desc, c_desc, source_desc, STAGES: gl.constexpr):
    """Shared memory of a program, whose consumers are two.

    Where a pass has no rows of its own, others stand in for them.
    """
    # Tiles are matrices here: what was reshaped can be multiplied and moved, but not loaded.
    ROWS: gl.constexpr = a_desc.block_type.shape[2]
    INNER: gl.constexpr = [ROWS, a_desc.block_type.shape[3]]
    OUTER: gl.constexpr = [ROWS, c_desc.block_type.shape[3]]
    HALF: gl.constexpr = [OUTER[1] // 2, INNER[1] // 2]
    TILE: gl.constexpr = [ROWS, OUTER[1] // 2]
    dtype: gl.constexpr = a_desc.dtype
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(INNER, dtype)
    a = make_ring_in(dtype, in_stages(STAGES, INNER), LAYOUT, STAGES, 2, 1)
    b = make_ring_in(dtype, in_stages(STAGES, INNER), LAYOUT, STAGES, 0, 1)
    OF_C: gl.constexpr = gl.NVMMASharedLayout.get_default_for(OUTER, dtype)
    c = make_ring_in(dtype, in_stages(STAGES, OUTER), OF_C, STAGES, 0, 1)
    OF_TILE: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, dtype)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    source = a
    if source_desc is None:
        totals = gl.allocate_shared_memory(gl.float32, [4 * STAGES, ROWS], PLAIN)
    else:
        source = make_ring_in(dtype, in_stages(2, TILE), OF_TILE, 1, 2, 1)
    mapped = make_barriers(STAGES, 1)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], PLAIN)
    if source_desc is not None:
        totals = numbers
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, OUTER[1]], PLAIN)
    OF_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for(HALF, dtype)
    narrowed = gl.allocate_shared_memory(dtype, in_stages(2, HALF), OF_HALF)
    outputs = gl.allocate_shared_memory(dtype, in_stages(2, TILE), OF_TILE)
    settle()
    return WideRings(a, b, c, source, mapped, totals, numbers, sums, narrowed, outputs)
