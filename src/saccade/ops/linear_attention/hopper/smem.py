"""Rings of linear attention: what the roles of its kernels share in shared memory.

Heads of more than 128 channels have others, at the end.
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.core import _aggregate as aggregate

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


@aggregate
class LinearRings:
    """All that producer and consumers of linear attention share; a stage is two tiles.

    Queries and keys are mapped where they lie; that they are, and that totals stand beside them,
    is what `mapped` says. Who releases keys releases queries and values with them."""

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
        """One partition has mapped its part of a turn's queries and keys."""
        fence_async_shared()
        mbarrier.arrive(self.mapped.index(self.keys.stage(iteration)), count=1)

    @gluon.jit
    def wait_for_mapped(self, iteration):
        """Wait until all of a turn's queries and keys are mapped."""
        mbarrier.wait(self.mapped.index(self.keys.stage(iteration)), self.keys.round(iteration) & 1)

    @gluon.jit
    def totals_of(self, iteration, which):
        """Where a turn's totals are that one of the mappers found."""
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


@aggregate
class SweepRings:
    """All that producer, mappers and consumers share in the backward pass of linear attention.

    A stage is two tiles of each kind of rows. Queries and keys are mapped where they lie; that they
    are, and that numbers stand beside them, is what `mapped` says."""

    tiles: Ring
    mapped: gl.shared_memory_descriptor  # a barrier for each stage
    shared: gl.shared_memory_descriptor  # two barriers: consumers wrote their sums, and read all
    numbers: gl.shared_memory_descriptor  # for each stage and mapper, 64 of each of five kinds
    parts: gl.shared_memory_descriptor  # for two turns and each block, 64 numbers of two kinds
    narrowed: gl.shared_memory_descriptor  # sums: a tile for each consumer and block of them
    outputs: gl.shared_memory_descriptor  # a tile for each stage and consumer
    scratch: gl.shared_memory_descriptor  # for each mapper, sums of its threads' own rows
    thin: gl.shared_memory_descriptor  # eight columns each: see elu_correction.py

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
        """A tile of a turn."""
        return self.tiles.tile_of(iteration, 2 * what + block)

    @gluon.jit
    def say_mapped(self, iteration):
        """One partition has mapped its part of a turn."""
        fence_async_shared()
        mbarrier.arrive(self.mapped.index(self.tiles.stage(iteration)), count=1)

    @gluon.jit
    def wait_for_mapped(self, iteration):
        """Wait until all of a turn is there, and mapped."""
        self.tiles.wait(iteration)
        mbarrier.wait(
            self.mapped.index(self.tiles.stage(iteration)), self.tiles.round(iteration) & 1
        )

    @gluon.jit
    def say_written(self, iteration):
        """One consumer has written what both read in a turn."""
        mbarrier.arrive(self.shared.index(iteration * 0), count=1)

    @gluon.jit
    def wait_for_written(self, iteration):
        """Wait until both have."""
        mbarrier.wait(self.shared.index(iteration * 0), iteration & 1)

    @gluon.jit
    def say_read(self, iteration):
        """One consumer needs the sums of a turn no more."""
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
        """Where a turn's numbers of one kind are that one of the mappers put there."""
        return self.numbers.index(6 * (2 * self.tiles.stage(iteration) + which) + spec)

    @gluon.jit
    def parts_of(self, iteration, which, spec):
        """Where a turn's numbers of one kind are that one of the consumers put there. Who puts
        those of the next turn but one there has waited for the other's of the turn between, which
        were written when this turn's had been read."""
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
        """Wait until both mappers have said that all turns before this one are mapped."""
        mbarrier.wait(
            self.mapped.index(self.tiles.stage(iteration)), self.tiles.round(iteration) & 1
        )


@gluon.jit
def make_sweep_rings(
    desc, KINDS: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr,
    OUTPUT_STAGES: gl.constexpr, ONES: gl.constexpr = False,
):  # fmt: skip
    """Shared memory of a program of that pass, for so many kinds of rows.

    Without OUTPUT_STAGES there are no outputs, and without ONES no thin tiles; others stand in for
    them.
    """
    # Tiles are matrices here: what was reshaped can be multiplied and moved, but not loaded.
    ROWS: gl.constexpr = desc.block_type.shape[2]
    TILE: gl.constexpr = [ROWS, desc.block_type.shape[3]]
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for(TILE, desc.dtype)
    tiles = make_ring_in(desc.dtype, in_stages(2 * KINDS * STAGES, TILE), LAYOUT, STAGES, 2, 1)
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


# ---- smem d256 -----------------------------------------------------------------------------------
# What the roles of scan_d256.py share in shared memory.

# Kinds of numbers beside a chunk: 64 each.
MINUS_DELTA, FACTOR = gl.constexpr(0), gl.constexpr(1)  # of each query


@aggregate
class WideRings:
    """All that producer, mapper and consumers share.

    A stage is a chunk of a, b and c (scan_d256.py), mapped where they lie; that they are, and
    that numbers stand beside them, is what `mapped` says."""

    a: Ring  # [rows, inner channels]; who releases it releases b and c
    b: Ring
    c: Ring  # [rows, channels of both consumers]
    own: Ring  # one stage: the rows that a gradient is of, a tile for each consumer
    mapped: gl.shared_memory_descriptor  # a barrier for each stage
    totals: gl.shared_memory_descriptor  # four parts of each row's sum of scores, for each stage
    numbers: gl.shared_memory_descriptor  # two kinds for each stage
    sums: gl.shared_memory_descriptor  # of features of c, for each stage
    narrowed: gl.shared_memory_descriptor  # half of the sums of each consumer
    outputs: gl.shared_memory_descriptor  # a tile for each consumer

    @gluon.constexpr_function
    def __init__(self, a, b, c, own, mapped, totals, numbers, sums, narrowed, outputs):
        self.a = a
        self.b = b
        self.c = c
        self.own = own
        self.mapped = mapped
        self.totals = totals
        self.numbers = numbers
        self.sums = sums
        self.narrowed = narrowed
        self.outputs = outputs

    @gluon.jit
    def wait(self, iteration):
        """Wait until a turn has been loaded."""
        self.a.wait(iteration)
        self.b.wait(iteration)
        self.c.wait(iteration)

    @gluon.jit
    def say_mapped(self, iteration):
        """All of a turn is mapped."""
        fence_async_shared()
        mbarrier.arrive(self.mapped.index(self.a.stage(iteration)), count=1)

    @gluon.jit
    def wait_for_mapped(self, iteration):
        """Wait until all of a turn is there, and mapped."""
        self.wait(iteration)
        mbarrier.wait(self.mapped.index(self.a.stage(iteration)), self.a.round(iteration) & 1)

    @gluon.jit
    def parts_of(self, iteration):
        """A turn's totals, [parts, rows]."""
        PARTS: gl.constexpr = self.totals.shape[0] // self.a.full.shape[0]
        SHAPE: gl.constexpr = in_stages(self.a.full.shape[0], [PARTS, self.totals.shape[1]])
        LAYOUT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
        parts = reinterpreted(self.totals, gl.float32, SHAPE, LAYOUT)
        return parts.index(self.a.stage(iteration))

    @gluon.jit
    def part_of(self, iteration, which):
        """One part of a turn's totals."""
        PARTS: gl.constexpr = self.totals.shape[0] // self.a.full.shape[0]
        return self.totals.index(PARTS * self.a.stage(iteration) + which)

    @gluon.jit
    def numbers_of(self, iteration, spec):
        """Where a turn's numbers of one kind are."""
        return self.numbers.index(2 * self.a.stage(iteration) + spec)

    @gluon.jit
    def sum_of(self, iteration):
        """The sum of features of c over the chunks visited before."""
        return self.sums.index(self.a.stage(iteration))


@gluon.jit
def make_wide_rings(a_desc, c_desc, own_desc, STAGES: gl.constexpr):
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
    own = a
    if own_desc is None:
        totals = gl.allocate_shared_memory(gl.float32, [4 * STAGES, ROWS], PLAIN)
    else:
        own = make_ring_in(dtype, in_stages(2, TILE), OF_TILE, 1, 2, 1)
    mapped = make_barriers(STAGES, 1)
    numbers = gl.allocate_shared_memory(gl.float32, [2 * STAGES, ROWS], PLAIN)
    if own_desc is not None:
        totals = numbers
    sums = gl.allocate_shared_memory(gl.float32, [STAGES, OUTER[1]], PLAIN)
    OF_HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for(HALF, dtype)
    narrowed = gl.allocate_shared_memory(dtype, in_stages(2, HALF), OF_HALF)
    outputs = gl.allocate_shared_memory(dtype, in_stages(2, TILE), OF_TILE)
    settle()
    return WideRings(a, b, c, own, mapped, totals, numbers, sums, narrowed, outputs)
