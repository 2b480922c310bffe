"""Rings of wide linear attention: what the roles of scan_d256.py share in shared memory."""

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
