"""Linear attention forward on Hopper: chunk by chunk along the rows, the state in registers.

Consumers, of four warps each, keep float32 sums of key features times 64 channels of values; which
those are, program.py says. Other warps map queries and keys (features.py). For a chunk
of 64 rows, Q and K its features, V its values, S and z the sums before it:

    output = (Q S + tril(Q Kᵀ) V) / (Q z + rows of tril(Q Kᵀ))        S += Kᵀ V, z += Σ K

Source: Katharopoulos et al. 2020, sections 3.2 and 3.3; chunks as in Hua et al. 2022, section 3.3.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

# Without `from __future__ import annotations`: aggregates read theirs as types.

from typing import Any, NamedTuple

from saccade.gpu.hopper.pipeline import (
    Ring,
    as_operand,
    fence_async_shared,
    here,
    in_stages,
    make_barriers,
    make_ring_in,
    mbarrier,
    settle,
    store,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.language import aggregate, gl, gluon
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.features import map_features
from saccade.ops.linear_attention.hopper.program import (
    BLOCK,
    channel_of,
    chunks_of,
    head_of,
    keep_nonfinite,
    keep_sums,
    start_sums,
    state_number,
    tile_of_values,
)
from saccade.ops.linear_attention.triton.chunk_scan import divisor_of


class LinearForwardMeta(NamedTuple):
    """What is known of the call, and how the kernel runs, when it is compiled."""

    HEADS_PER_QUERY: int
    HEADS_PER_KEY: int
    HEADS_PER_VALUE: int
    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCKS: int
    TILES: int
    SEGMENTS: int
    BOTTOM_RIGHT: bool
    FEATURE_MAP: str
    SCALE: Any
    NORMALIZE: str
    STAGES: int
    OUTPUT_STAGES: int
    CONSUMER_REGISTERS: int
    MAPPER_REGISTERS: int


@gluon.jit(do_not_specialize=["eps"])
def linear_forward(
    query_desc, key_desc, value_desc, output_desc, kept, before, after, sizes, eps,
    META: gl.constexpr,
):  # fmt: skip
    """One program: all rows of two blocks of values, or of one segment of them.

    before, after: states (Sums) that the segment starts from and ends with, or None. So many
    (HEADS_PER_QUERY, …) output heads share one of queries, keys, values and states (GROUP).
    """
    rings = make_linear_rings(query_desc, META.BLOCKS, META.STAGES, META.OUTPUT_STAGES)
    gl.warp_specialize(
        [
            (consume, (
                output_desc, kept, before, after, sizes, eps, rings, META.GROUP, META.HEAD_DIM,
                META.VALUE_DIM, META.BLOCKS, META.TILES, META.SEGMENTS, META.BOTTOM_RIGHT,
                META.NORMALIZE, META.OUTPUT_STAGES, 0,
            )),
            (consume, (
                output_desc, kept, before, after, sizes, eps, rings, META.GROUP, META.HEAD_DIM,
                META.VALUE_DIM, META.BLOCKS, META.TILES, META.SEGMENTS, META.BOTTOM_RIGHT,
                META.NORMALIZE, META.OUTPUT_STAGES, 1,
            )),
            (map_features, (
                kept, before, after, sizes, rings, META.GROUP, META.HEAD_DIM, META.BLOCKS,
                META.TILES, META.SEGMENTS, META.BOTTOM_RIGHT, META.FEATURE_MAP, META.SCALE,
                META.NORMALIZE, True, 0,
            )),
            (map_features, (
                kept, before, after, sizes, rings, META.GROUP, META.HEAD_DIM, META.BLOCKS,
                META.TILES, META.SEGMENTS, META.BOTTOM_RIGHT, META.FEATURE_MAP, META.SCALE,
                META.NORMALIZE, True, 1,
            )),
            (produce, (
                query_desc, key_desc, value_desc, sizes, rings, META.HEADS_PER_QUERY,
                META.HEADS_PER_KEY, META.HEADS_PER_VALUE, META.BLOCKS, META.TILES, META.SEGMENTS,
                META.BOTTOM_RIGHT,
            )),
        ],
        [4, 4, 4, 1],
        [META.CONSUMER_REGISTERS, META.MAPPER_REGISTERS, META.MAPPER_REGISTERS, 24],
    )  # fmt: skip


# ---- loading ------------------------------------------------------------------------------------


@gluon.jit
def produce(
    query_desc, key_desc, value_desc, sizes, rings,
    HEADS_PER_QUERY: gl.constexpr, HEADS_PER_KEY: gl.constexpr, HEADS_PER_VALUE: gl.constexpr,
    BLOCKS: gl.constexpr, TILES: gl.constexpr, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
):  # fmt: skip
    """Load queries (if any), keys and values of chunk after chunk, as soon as there is room."""
    one = head_of(sizes, 0, BLOCKS, TILES, SEGMENTS)
    other = head_of(sizes, 1, BLOCKS, TILES, SEGMENTS)
    channel = channel_of(0, BLOCKS, TILES, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT)
    for iteration in range(0, chunks):
        position = first + iteration * ROWS
        rings.keys.acquire(iteration)  # consumers release all three together
        if query_desc is not None:
            row = position - shift
            load_blocks(
                rings.queries, iteration, query_desc, one, other, row, 0, HEADS_PER_QUERY, BLOCKS
            )
        load_blocks(rings.keys, iteration, key_desc, one, other, position, 0, HEADS_PER_KEY, BLOCKS)
        load_blocks(
            rings.values,
            iteration,
            value_desc,
            one,
            other,
            position,
            channel,
            HEADS_PER_VALUE,
            BLOCKS,
        )


@gluon.jit
def load_blocks(
    ring, iteration, desc, one, other, row, channel, HEADS_PER: gl.constexpr, BLOCKS: gl.constexpr
):  # fmt: skip
    """Load all blocks of an iteration: of one head and another, or of channels of one head."""
    ring.expect(iteration, desc)
    for block in gl.static_range(ring.memory.shape[0] // ring.full.shape[0]):
        if BLOCKS > 1:
            coordinates = [one[0], one[1] // HEADS_PER, row, channel + block * BLOCK]
        elif block == 0:
            coordinates = [one[0], one[1] // HEADS_PER, row, channel]
        else:
            coordinates = [other[0], other[1] // HEADS_PER, row, channel]
        ring.load_tile(iteration, block, desc, coordinates)


# ---- summing ------------------------------------------------------------------------------------


@gluon.jit
def consume(
    output_desc, kept, before, after, sizes, eps, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr,
    TILES: gl.constexpr, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    NORMALIZE: gl.constexpr, OUTPUT_STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 channels of the output, chunk by chunk."""
    batch, head = head_of(sizes, WHICH, BLOCKS, TILES, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT)
    number = state_number(sizes, batch, head, GROUP, SEGMENTS)
    channel = channel_of(WHICH, BLOCKS, TILES, SEGMENTS)
    there = batch < sizes.batches
    sums = start_sums(before, number, there, channel, HEAD_DIM, VALUE_DIM, BLOCKS)
    narrow_sums(sums, rings, WHICH, 0 * chunks)
    head_index = batch * sizes.heads + head
    writes = there & (tile_of_values(TILES, SEGMENTS) == 0)
    for iteration in range(0, chunks):
        products = start_products(sums, rings, iteration, WHICH)
        sums, found, total = fold_chunk(products, rings, iteration, NORMALIZE, WHICH)
        if NORMALIZE != "none":
            divisor = divisor_of(total, eps, NORMALIZE)
            found = found * gl.where(divisor == 0, 0.0, 1.0 / divisor)[:, None]
        query = first + iteration * ROWS - shift  # the row of the first of them
        position = row_of_output(sizes, batch, head, query, channel)
        store_output(output_desc, rings, position, found.to(output_desc.dtype), iteration, WHICH)
        if NORMALIZE != "none" and (WHICH == 0 or BLOCKS == 1):  # under the next products
            store_totals(kept.normaliser, sizes, head_index, query, writes, total)
    if kept.nonfinite is not None:
        keep_nonfinite(
            kept.nonfinite, sums, sizes, batch, head, there, BLOCKS, TILES, SEGMENTS, WHICH
        )
    if after is not None:
        writes = there & (head % GROUP == 0)
        keep_sums(after, sums, number, writes, channel, HEAD_DIM, VALUE_DIM)
    wait_for_stores()


@gluon.jit
def row_of_output(sizes, batch, head, query, channel):
    """Where rows of the output go: nowhere, past the last batch entry, where none exist.

    A branch around the store makes ptxas crash, and a row before the first one is an illegal
    instruction.
    """
    return gl.where(query >= 0, batch, sizes.batches), head, gl.maximum(query, 0), channel


@gluon.jit
def store_output(output_desc, rings, position, done, iteration, WHICH: gl.constexpr):
    """Start to write 64 rows."""
    STAGES: gl.constexpr = rings.outputs.shape[0] // 2
    wait_for_stores(STAGES - 1)
    memory = rings.outputs.index(2 * (iteration % STAGES) + WHICH)
    memory.store(done)
    coordinates = [position[0], position[1], position[2], position[3]]
    store(output_desc, coordinates, memory.reshape(output_desc.block_type.shape))


@gluon.jit
def store_totals(normaliser, sizes, head_index, query, there, total):
    """Write each row's sum of scores."""
    query_len = sizes.query_len
    row = query + gl.arange(0, ROWS, total.type.layout)
    pointers = normaliser + (wide(head_index) * query_len + row)
    gl.store(pointers, total, mask=(row >= 0) & (row < query_len) & there)


@gluon.jit
def start_products(sums, rings, iteration, WHICH: gl.constexpr):
    """Start all products of a chunk that need nothing but what lies in memory: scores, what rows
    find in the sums so far, and the sums with the chunk added."""
    BLOCKS: gl.constexpr = len(sums)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH  # the first block of this head's features
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, mma_layout(BLOCK))
    origin = here(iteration - iteration)
    rings.wait_for_mapped(iteration)
    rings.values.wait(iteration)
    scores, found, added = nothing, nothing, ()
    for block in gl.static_range(BLOCKS):
        queries = rings.queries.tile_of(iteration, LEFT + block)
        keys = rings.keys.tile_of(iteration, LEFT + block)
        scores = warpgroup_mma(
            queries, keys.permute((1, 0)), scores, use_acc=block > 0, is_async=True
        )
    for block in gl.static_range(BLOCKS):
        queries = rings.queries.tile_of(iteration, LEFT + block)
        narrowed = rings.narrowed.index(origin + (BLOCKS * WHICH + block))
        found = warpgroup_mma(queries, narrowed, found, use_acc=block > 0, is_async=True)
    values = rings.values.tile_of(iteration, WHICH)
    for block in gl.static_range(BLOCKS):
        keys = rings.keys.tile_of(iteration, LEFT + block)
        token = warpgroup_mma(keys.permute((1, 0)), values, sums[block], is_async=True)
        added = added + (token,)  # noqa: RUF005
    return scores, found, added


@gluon.jit
def fold_chunk(products, rings, iteration, NORMALIZE: gl.constexpr, WHICH: gl.constexpr):
    """The sums with a chunk added, narrowed beside that; weighted sums and totals of its rows."""
    scores, found, added = products
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    BLOCKS: gl.constexpr = len(added)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH
    scores = warpgroup_mma_wait(2 * BLOCKS, deps=[scores])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
    column = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    scores = gl.where(row[:, None] >= column[None, :], scores, 0.0)
    total = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    if NORMALIZE != "none":
        total = gl.sum(scores, 1)
        for which in gl.static_range(2 if BLOCKS == 2 else 1):  # one for each mapper of this head
            total += rings.totals_of(iteration, LEFT + which).load(gl.SliceLayout(1, LAYOUT))
    values = rings.values.tile_of(iteration, WHICH)
    weights = as_operand(scores, values.dtype, LAYOUT)
    found = warpgroup_mma(weights, values, found, is_async=True)
    sums = settled(added, 1)
    narrow_sums(sums, rings, WHICH, here(iteration - iteration))
    found = warpgroup_mma_wait(0, deps=[found])
    rings.keys.release(iteration)  # and with them queries and values
    return sums, found, total


@gluon.jit
def settled(tokens, RUNNING: gl.constexpr):
    """Sums that were being added to, once no more than so many products run."""
    if len(tokens) == 1:
        sums = (warpgroup_mma_wait(RUNNING, deps=[tokens[0]]),)
    else:
        one, two = warpgroup_mma_wait(RUNNING, deps=[tokens[0], tokens[1]])
        sums = (one, two)
    return sums


@gluon.jit
def narrow_sums(sums, rings, WHICH: gl.constexpr, origin):
    """Put the sums where products find them. origin: 0."""
    for block in gl.static_range(len(sums)):
        memory = rings.narrowed.index(origin + (len(sums) * WHICH + block))
        memory.store(sums[block].to(memory.dtype))
    fence_async_shared()


# ---- shared memory -----------------------------------------------------------------------------


@aggregate
class LinearRings:
    """All that producer and consumers of linear attention share; a stage is two tiles.

    Queries and keys are mapped where they lie; that they are, and that totals stand beside them,
    is what `mapped` says. Keys are released with queries and values."""

    queries: Ring
    keys: Ring
    values: Ring
    mapped: gl.shared_memory_descriptor  # a barrier for each stage of keys
    totals: gl.shared_memory_descriptor  # [2 · stages, rows]
    narrowed: gl.shared_memory_descriptor  # sums: a tile for each consumer and block of keys
    outputs: gl.shared_memory_descriptor  # a tile for each stage and consumer

    @gluon.constexpr_function
    def __init__(self, queries, keys, values, mapped, totals, narrowed, outputs):
        self.queries = queries
        self.keys = keys
        self.values = values
        self.mapped = mapped
        self.totals = totals
        self.narrowed = narrowed
        self.outputs = outputs

    @gluon.jit
    def say_mapped(self, iteration):
        """One partition has mapped its part of an iteration's queries and keys."""
        fence_async_shared()
        mbarrier.arrive(self.mapped.index(self.keys.stage(iteration)), count=1)

    @gluon.jit
    def wait_for_mapped(self, iteration):
        """Wait until all of an iteration's queries and keys are mapped."""
        mbarrier.wait(self.mapped.index(self.keys.stage(iteration)), self.keys.round(iteration) & 1)

    @gluon.jit
    def totals_of(self, iteration, which):
        """Where an iteration's totals are that one of the mappers found."""
        return self.totals.index(2 * self.keys.stage(iteration) + which)


@gluon.jit
def make_linear_rings(
    desc, BLOCKS: gl.constexpr, STAGES: gl.constexpr, OUTPUT_STAGES: gl.constexpr
):  # fmt: skip
    """Shared memory of a program of linear attention, whose consumers are two.

    Without OUTPUT_STAGES there are neither outputs nor queries; others stand in for them.
    """
    # Tiles are matrices here: what was reshaped can be multiplied and moved, but not loaded.
    ROWS: gl.constexpr = desc.block_type.shape[2]
    TILE: gl.constexpr = [ROWS, desc.block_type.shape[3]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, desc.dtype)
    keys = make_ring_in(desc.dtype, in_stages(2 * STAGES, TILE), LAYOUT, STAGES, 2, 1)
    values = make_ring_in(desc.dtype, in_stages(2 * STAGES, TILE), LAYOUT, STAGES, 0, 1)
    mapped = make_barriers(STAGES, 2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    totals = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], PLAIN)
    narrowed = gl.allocate_shared_memory(desc.dtype, in_stages(2 * BLOCKS, TILE), LAYOUT)
    queries, outputs = keys, narrowed
    if OUTPUT_STAGES > 0:
        queries = make_ring_in(desc.dtype, in_stages(2 * STAGES, TILE), LAYOUT, STAGES, 0, 1)
        outputs = gl.allocate_shared_memory(desc.dtype, in_stages(2 * OUTPUT_STAGES, TILE), LAYOUT)
    settle()
    return LinearRings(queries, keys, values, mapped, totals, narrowed, outputs)
