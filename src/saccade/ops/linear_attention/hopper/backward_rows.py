"""Linear attention backward on Hopper, rows: they are loaded, and features take their place.

Products read their operands from shared memory, so features are put there, by warps that do nothing
else. They also find the numbers that a row has, and keep the sum of features before a chunk.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

# Without `from __future__ import annotations`: aggregates read theirs as types.

from typing import Any, NamedTuple

from saccade.gpu.features import LOG2_E, elu_plus_one, exponential, relu
from saccade.gpu.hopper.pipeline import (
    Ring,
    fence_async_shared,
    in_stages,
    make_barriers,
    make_ring_in,
    mbarrier,
    settle,
)
from saccade.gpu.language import aggregate, gl, gluon
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.features import (
    only,
    widened,
)
from saccade.ops.linear_attention.hopper.program import (
    BLOCK,
    GRADS,
    KEYS,
    OUTPUTS,
    QUERIES,
    VALUES,
    chunks_of,
    head_of,
    state_number,
)

# The mean slope of φ from which on 1 is taken from features. Below 0, e^x and e^x − 1 are rounded
# alike where x has a slope of 1/2; above 0 only what is less 1 is not rounded.
LEAST_SLOPE = gl.constexpr(0.4)


class RowNumbers(NamedTuple):
    """What each query row has, float32 [batch, heads, query_len]."""

    factors: Any  # 1 / divisor; None without a normaliser
    minus_delta: Any


# ---- positions -------------------------------------------------------------------------------


@gluon.jit
def position_of(first, chunks, iteration, BACKWARDS: gl.constexpr):
    """The first position of the chunk that is visited in an iteration."""
    if BACKWARDS:
        iteration = chunks - 1 - iteration
    return first + iteration * ROWS


@gluon.jit
def keys_seen(num_keys):
    """From which position on, and up to which one, keys are there to be seen."""
    return 0 * num_keys, num_keys


@gluon.jit
def queries_seeing(sizes, shift, num_keys, exists, STARTED: gl.constexpr):
    """From which position on, and up to which one, queries exist and see something: nothing before
    the first key, unless a state came before it (STARTED)."""
    begin, end = shift, shift + sizes.query_len
    if not STARTED:
        begin = gl.maximum(begin, 0)
        end = gl.where(num_keys > 0, end, begin)
    return begin, gl.where(exists, end, begin)


@gluon.jit
def within(bounds, position, ROWS_OF: gl.constexpr):
    """Which of 64 positions lie in such bounds, rows as in a layout."""
    positions = position + gl.arange(0, ROWS, ROWS_OF)
    return (positions >= bounds[0]) & (positions < bounds[1])


# ---- loading ------------------------------------------------------------------------------------


@gluon.jit
def produce(
    query_desc, grad_desc, key_desc, value_desc, output_desc, sizes, rings,
    HEADS_PER_QUERY: gl.constexpr, HEADS_PER_KEY: gl.constexpr, HEADS_PER_VALUE: gl.constexpr,
    BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    BACKWARDS: gl.constexpr,
):  # fmt: skip
    """Load the rows of chunk after chunk, as soon as there is room: those that are asked for."""
    one = head_of(sizes, 0, BLOCKS, 1, SEGMENTS)
    other = head_of(sizes, 1, BLOCKS, 1, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, BACKWARDS)
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, BACKWARDS)
        row = position - shift
        rings.tiles.acquire(iteration)
        rings.tiles.expect(iteration, query_desc)
        if key_desc is not None:
            load_pair(
                rings.tiles, iteration, KEYS, key_desc, one, other, position, HEADS_PER_KEY, BLOCKS
            )
        load_pair(
            rings.tiles, iteration, QUERIES, query_desc, one, other, row, HEADS_PER_QUERY, BLOCKS
        )
        load_pair(rings.tiles, iteration, GRADS, grad_desc, one, other, row, 1, BLOCKS)
        if output_desc is not None:
            load_pair(rings.tiles, iteration, OUTPUTS, output_desc, one, other, row, 1, BLOCKS)
        if value_desc is not None:
            load_pair(
                rings.tiles,
                iteration,
                VALUES,
                value_desc,
                one,
                other,
                position,
                HEADS_PER_VALUE,
                BLOCKS,
            )


@gluon.jit
def load_pair(
    tiles, iteration, WHAT: gl.constexpr, desc, one, other, row, HEADS_PER: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Load two tiles of a stage: of one head and another, or of channels of one head."""
    tiles.load_tile(iteration, 2 * WHAT, desc, [one[0], one[1] // HEADS_PER, row, 0])
    if BLOCKS == 1:
        tiles.load_tile(iteration, 2 * WHAT + 1, desc, [other[0], other[1] // HEADS_PER, row, 0])
    else:
        tiles.load_tile(iteration, 2 * WHAT + 1, desc, [one[0], one[1] // HEADS_PER, row, BLOCK])


@gluon.jit
def what_to_take(
    rings, bounds, position, iteration, WHAT: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCKS:
    gl.constexpr, WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What is to be taken from features: 1, or 0 where most are nearer to 0 than to 1 in the first
    chunk. Both mappers of a head look at all of it, before either changes it."""
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH
    rings.tiles.wait(iteration)
    seen = within(bounds, position, gl.SliceLayout(1, LAYOUT))
    total = 0.0
    for block in gl.static_range(BLOCKS):
        rows = widened(only(rings.tile_of(iteration, WHAT, LEFT + block).load(LAYOUT), seen))
        slope = gl.minimum(gl.exp2(rows * LOG2_E), 1.0) - LEAST_SLOPE
        channels = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
        slope = gl.where(seen[:, None] & (channels < HEAD_DIM)[None, :], slope, 0.0)
        total += gl.sum(gl.sum(slope, 1), 0)
    if BLOCKS == 2:
        rings.meet(iteration)
    return gl.where(total < 0, 0.0, 1.0)


@gluon.jit
def sum_at(
    sizes, batch, head, exists, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr, WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the sum of features of a block lies in memory, and what of it exists."""
    FIRST: gl.constexpr = WHICH * BLOCK if BLOCKS == 2 else 0
    channels = FIRST + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    number = state_number(sizes, batch, head, GROUP, SEGMENTS)
    return number * HEAD_DIM + channels, (channels < HEAD_DIM) & exists


@gluon.jit
def base_of(sizes, batch, head, shift):
    """Where a head's numbers begin, counted by position."""
    return wide(batch * sizes.heads + head) * sizes.query_len - shift


@gluon.jit
def numbers_at(numbers, base, queries, position, ROWS_OF: gl.constexpr):
    """Numbers of the queries at 64 positions, 0 where these see nothing."""
    rows = base + position + gl.arange(0, ROWS, ROWS_OF)
    return gl.load(numbers + rows, mask=within(queries, position, ROWS_OF), other=0.0)


@gluon.jit
def factors_at(per_row, base, queries, position, SCALE: gl.constexpr, ROWS_OF: gl.constexpr):
    """scale / divisor of the queries at 64 positions."""
    factor = gl.full([ROWS], SCALE, gl.float32, ROWS_OF)
    if per_row.factors is not None:
        factor = factor * numbers_at(per_row.factors, base, queries, position, ROWS_OF)
    return factor


@gluon.jit
def clear_hidden(
    rings, iteration, position, bounds, WHAT: gl.constexpr, WHICH, LAYOUT: gl.constexpr
):
    """Put zeros in hidden rows that stand beside features of 0, as a product does not hide what is
    not finite (0 · NaN is NaN)."""
    if (position < bounds[0]) | (position + ROWS > bounds[1]):
        rows = rings.tile_of(iteration, WHAT, WHICH)
        rows.store(only(rows.load(LAYOUT), within(bounds, position, gl.SliceLayout(1, LAYOUT))))


@gluon.jit
def mapped_wide(rows, FEATURE_MAP: gl.constexpr):
    """Rows in float32 through a feature map."""
    features = rows
    if FEATURE_MAP == "elu+1":
        features = elu_plus_one(rows, 0.0)
    elif FEATURE_MAP == "relu":
        features = relu(rows, 0.0)
    elif FEATURE_MAP == "exp":
        features = exponential(rows, 0.0)
    return features


# ---- shared memory -----------------------------------------------------------------------------


@aggregate
class SweepRings:
    """All that producer, mappers and consumers share in the backward pass of linear attention.

    A stage is two tiles of each kind of rows. Queries and keys are mapped where they lie; that they
    are, and that numbers stand beside them, is what `mapped` says."""

    tiles: Ring
    mapped: gl.shared_memory_descriptor  # a barrier for each stage
    shared: gl.shared_memory_descriptor  # two barriers: consumers wrote their sums, and read all
    numbers: gl.shared_memory_descriptor  # for each stage and mapper, 64 of each of five kinds
    parts: gl.shared_memory_descriptor  # for two iterations and each block, 64 numbers of two kinds
    narrowed: gl.shared_memory_descriptor  # sums: a tile for each consumer and block of them
    outputs: gl.shared_memory_descriptor  # a tile for each stage and consumer
    scratch: gl.shared_memory_descriptor  # for each mapper, sums of its threads' own rows
    thin: gl.shared_memory_descriptor  # eight columns each: see features.py

    @gluon.constexpr_function
    def __init__(self, tiles, mapped, shared, numbers, parts, narrowed, outputs, scratch, thin):
        self.tiles = tiles
        self.mapped = mapped
        self.shared = shared
        self.numbers = numbers
        self.parts = parts
        self.narrowed = narrowed
        self.outputs = outputs
        self.scratch = scratch
        self.thin = thin

    @gluon.jit
    def tile_of(self, iteration, what, block):
        """A tile of an iteration."""
        return self.tiles.tile_of(iteration, 2 * what + block)

    @gluon.jit
    def say_mapped(self, iteration):
        """One partition has mapped its part of an iteration."""
        fence_async_shared()
        mbarrier.arrive(self.mapped.index(self.tiles.stage(iteration)), count=1)

    @gluon.jit
    def wait_for_mapped(self, iteration):
        """Wait until all of an iteration is there, and mapped."""
        self.tiles.wait(iteration)
        mbarrier.wait(
            self.mapped.index(self.tiles.stage(iteration)), self.tiles.round(iteration) & 1
        )

    @gluon.jit
    def say_written(self, iteration):
        """One consumer has written what both read in an iteration."""
        mbarrier.arrive(self.shared.index(iteration * 0), count=1)

    @gluon.jit
    def wait_for_written(self, iteration):
        """Wait until both have."""
        mbarrier.wait(self.shared.index(iteration * 0), iteration & 1)

    @gluon.jit
    def say_read(self, iteration):
        """One consumer needs the sums of an iteration no more."""
        mbarrier.arrive(self.shared.index(iteration * 0 + 1), count=1)

    @gluon.jit
    def wait_for_read(self, iteration):
        """Wait until neither does."""
        mbarrier.wait(self.shared.index(iteration * 0 + 1), iteration & 1)

    @gluon.jit
    def meet(self, iteration):
        """Wait until both mappers have come here, which they do once."""
        mbarrier.arrive(self.shared.index(iteration * 0 + 2), count=1)
        mbarrier.wait(self.shared.index(iteration * 0 + 2), iteration * 0)

    @gluon.jit
    def numbers_of(self, iteration, which, spec):
        """Where an iteration's numbers of one kind are that one of the mappers put there."""
        return self.numbers.index(6 * (2 * self.tiles.stage(iteration) + which) + spec)

    @gluon.jit
    def parts_of(self, iteration, which, spec):
        """Where an iteration's numbers of one kind are that one of the consumers put there.

        They may be overwritten two iterations later: until then this consumer has waited for the
        other's numbers of the iteration between, which were written when these had been read.
        """
        return self.parts.index(4 * (iteration & 1) + 2 * which + spec)

    @gluon.jit
    def line_of(self, which):
        """Where a mapper puts G."""
        return self.thin.index(which)

    @gluon.jit
    def ones_of(self, which, block):
        """Where a consumer has its ones."""
        return self.thin.index(2 + 2 * which + block)

    @gluon.jit
    def factors_of(self, which):
        """Where a mapper puts a chunk's factors."""
        return self.thin.index(6 + which)

    @gluon.jit
    def wait_for_end(self, iteration):
        """Wait until both mappers have said that all iterations before this one are mapped."""
        mbarrier.wait(
            self.mapped.index(self.tiles.stage(iteration)), self.tiles.round(iteration) & 1
        )


@gluon.jit
def make_sweep_rings(
    desc, OPERANDS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    OUTPUT_STAGES: gl.constexpr, ONES: gl.constexpr = False,
):  # fmt: skip
    """Shared memory of a program of that pass, for so many operands.

    Without OUTPUT_STAGES there are no outputs, and without ONES no thin tiles; others stand in for
    them.
    """
    # Tiles are matrices here: what was reshaped can be multiplied and moved, but not loaded.
    ROWS: gl.constexpr = desc.block_type.shape[2]
    TILE: gl.constexpr = [ROWS, desc.block_type.shape[3]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, desc.dtype)
    tiles = make_ring_in(desc.dtype, in_stages(2 * OPERANDS * STAGES, TILE), LAYOUT, STAGES, 2, 1)
    mapped = make_barriers(STAGES, 2)
    shared = mapped
    if OUTPUT_STAGES > 0:
        shared = make_barriers(3, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    numbers = gl.allocate_shared_memory(gl.float32, [12 * STAGES, ROWS], PLAIN)
    parts = gl.allocate_shared_memory(gl.float32, [8, ROWS], PLAIN)
    narrowed = gl.allocate_shared_memory(desc.dtype, in_stages(2 * BLOCKS, TILE), LAYOUT)
    outputs = narrowed
    if OUTPUT_STAGES > 0:
        outputs = gl.allocate_shared_memory(desc.dtype, in_stages(2 * OUTPUT_STAGES, TILE), LAYOUT)
    scratch = gl.allocate_shared_memory(
        gl.float32, [2, ROWS // 4, ROWS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    )
    thin = narrowed
    if ONES:
        THIN: gl.constexpr = [8, ROWS]
        THIN_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(THIN, desc.dtype)
        thin = gl.allocate_shared_memory(desc.dtype, in_stages(8, THIN), THIN_LAYOUT)
    settle()
    return SweepRings(tiles, mapped, shared, numbers, parts, narrowed, outputs, scratch, thin)
