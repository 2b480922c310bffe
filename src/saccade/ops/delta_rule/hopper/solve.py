"""The gated delta rule on Hopper, systems: what a chunk's pairs make, ahead of the scans.

The equations, and why the inverse is made by blocks, are in
`saccade.ops.delta_rule.triton.chunk_system`. Here the inverse has beta in its columns, so that
scans multiply errors as they are, and all stays in shared memory.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

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
from saccade.ops.delta_rule.hopper.blocks import inverses_of_16
from saccade.ops.delta_rule.hopper.rings import (
    ACROSS,
    BETA,
    HIGH,
    LOW,
    PAIRED,
    ROWS,
    SCORED,
    place_of,
)

LOWER, BELOW = gl.constexpr(0), gl.constexpr(2)  # of parts: two of the system, two of a product


@gluon.jit
def solve(
    beta, squares, kept, rings, HEADS: gl.constexpr, PACKED: gl.constexpr, KEEPS: gl.constexpr
):  # fmt: skip
    """Solve the systems of all chunks of a program's sequence and head, one after the other."""
    SQUARE: gl.constexpr = mma_layout(ROWS)
    batch, head, length, entry, first = place_of(beta, HEADS, PACKED)
    for chunk in range(0, (length + ROWS - 1) // ROWS):
        start = chunk * ROWS
        # Not computed ahead of the loop, where comparisons would be kept in registers.
        origin = here(start - start)
        row = origin + gl.arange(0, ROWS, gl.SliceLayout(1, SQUARE))[:, None]
        column = origin + gl.arange(0, ROWS, gl.SliceLayout(0, SQUARE))[None, :]
        rings.keys.wait(chunk)
        rings.queries.wait(chunk)
        keys, queries = rings.keys.at(chunk), rings.queries.at(chunk)
        rings.numbers.wait(chunk)  # after which nobody else looks at rows behind the end
        if PACKED:  # noqa: SIM102 (a constexpr first)
            if start + ROWS > length:
                rings.values.wait(chunk)
                clear_behind(rings, chunk, length - start)
        nothing = gl.zeros([ROWS, ROWS], gl.float32, SQUARE)
        scores = warpgroup_mma(queries, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
        gap = rings.down(chunk, HIGH, SQUARE) - rings.across(chunk, HIGH, SQUARE)
        gap = gap + (rings.down(chunk, LOW, SQUARE) - rings.across(chunk, ACROSS, SQUARE))
        left = gl.where(column <= row, gl.exp2(gap), 0.0)
        scores = warpgroup_mma_wait(0, deps=[scores])
        pairs = warpgroup_mma(keys, keys.permute((1, 0)), nothing, use_acc=False, is_async=True)
        rings.solved.acquire(chunk)
        scores = scores * left * rings.down(chunk, SCORED, SQUARE)
        at = batch, head, start, length, entry, first
        if KEEPS:
            wait_for_stores()
            keep_square(kept.weights, squares.weights, rings.weights_of(chunk), scores, at,
                        PACKED)  # fmt: skip
        else:
            rings.weights_of(chunk).store(scores.to(gl.bfloat16))
        pairs = warpgroup_mma_wait(0, deps=[pairs])
        # On the diagonal and above it nothing of this is used but that it is finite.
        pairs = pairs * left * rings.down(chunk, PAIRED, SQUARE)
        found = inverse(pairs, rings.parts, rings.solved.at(chunk), origin, row, column)
        if KEEPS:
            memory = rings.parts.index(origin + LOWER)
            keep_square(kept.inverse, squares.inverse, memory, found, at, PACKED)
        found = found * rings.across(chunk, BETA, SQUARE)
        rings.solved.at(chunk).store(found.to(gl.bfloat16))
        fence_async_shared()
        rings.keys.release(chunk)
        mbarrier.arrive(rings.solved.full.index(rings.solved.stage(chunk)), count=1)
    wait_for_stores()


@gluon.jit
def keep_square(desc, view, memory, square, at, PACKED: gl.constexpr):
    """Start to write the rows of a chunk, as many numbers each; none past the end."""
    batch, head, start, length, entry, first = at
    memory.store(square.to(gl.bfloat16))
    into = entry
    if PACKED:  # rows past the end are another sequence's: such a chunk goes nowhere by TMA
        into = gl.where(start + ROWS > length, 1, entry)
    store(desc, [into, head, first + start, 0], memory.reshape(desc.block_type.shape))
    if PACKED:  # noqa: SIM102 (a constexpr first)
        if start + ROWS > length:
            store_square(view, batch, head, start, length, square)


@gluon.jit
def store_square(view, batch, head, start, length, square):
    """Write the rows of a chunk that a sequence ends in; none past the end."""
    LAYOUT: gl.constexpr = mma_layout(ROWS)
    # Counted by numbers that serve nothing else, as in `tensor_view.tile_pointers`.
    row = gl.arange(ROWS, 2 * ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    first, _ = view.position(batch, view.strides, view.step, view.data)
    base = first + wide(head) * view.strides[1] + wide(start - ROWS) * view.step
    pointers = view.ptr + base + (row * view.step + column)
    gl.store(pointers, square.to(gl.bfloat16), mask=row - ROWS < length - start)


@gluon.jit
def clear_behind(rings, chunk, count):
    """Clear rows of keys and values from `count` on, which are another sequence's: its NaN would
    reach this one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    there = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None] < count
    keys = rings.keys.at(chunk)
    rows = keys.load(LAYOUT)
    keys.store(gl.where(there, rows, gl.zeros_like(rows)))
    for which in gl.static_range(2):
        values = rings.values.tile_of(chunk, which)
        rows = values.load(LAYOUT)
        values.store(gl.where(there, rows, gl.zeros_like(rows)))
    fence_async_shared()


@gluon.jit
def inverse(lower, parts, narrowed, origin, row, column):
    """The inverse of I − L, where L is what lies below the diagonal of `lower`.

    Blocks of 16 rows first; then D + D L D, D being all inverses of blocks so far, has those of
    blocks twice as large. Of its products only rows and columns are multiplied that give blocks
    below the diagonal in these, so that they are added to D as it stands. parts: room for L and for
    a product, each as two numbers; narrowed: for D. origin: 0.
    """
    LAYOUT: gl.constexpr = mma_layout(ROWS)
    high, low = two_parts(lower)
    parts.index(origin + LOWER).store(high)
    parts.index(origin + LOWER + 1).store(low)
    found = inverses_of_16(high, low)
    narrowed.store(found.to(gl.bfloat16))
    fence_async_shared()
    # Columns 0 to 15 and 32 to 47; behind the first, rows from 32 on belong to a later size.
    below = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    below = from_rows(parts, narrowed, below, origin, 0, 16)
    below = from_rows(parts, narrowed, below, origin, 32, 16)
    below = warpgroup_mma_wait(0, deps=[below])
    below = gl.where((column & 16) == 0, gl.where(column >> 5 == row >> 5, below, 0.0), 0.0)
    put_parts(below, parts, origin)
    found = by_blocks(parts, narrowed, found, origin, 16, 16)
    found = by_blocks(parts, narrowed, found, origin, 48, 16)
    found = warpgroup_mma_wait(0, deps=[found])
    narrowed.store(found.to(gl.bfloat16))
    fence_async_shared()
    below = gl.zeros([ROWS, ROWS], gl.float32, LAYOUT)
    below = from_rows(parts, narrowed, below, origin, 0, 32)
    below = warpgroup_mma_wait(0, deps=[below])
    put_parts(gl.where(column < 32, below, 0.0), parts, origin)
    found = by_blocks(parts, narrowed, found, origin, 32, 32)
    return warpgroup_mma_wait(0, deps=[found])


@gluon.jit
def from_rows(
    parts, narrowed, below, origin, FIRST: gl.constexpr, COUNT: gl.constexpr
):  # fmt: skip
    """Start to add the product of some columns of L, which are two parts, and rows of D."""
    rows = narrowed.slice(FIRST, COUNT, dim=0)
    for part in gl.static_range(2):
        left = parts.index(origin + LOWER + part).slice(FIRST, COUNT, dim=1)
        below = warpgroup_mma(left, rows, below, is_async=True)
    return below


@gluon.jit
def by_blocks(parts, narrowed, found, origin, FIRST: gl.constexpr, COUNT: gl.constexpr):
    """Start to add the product of some columns of D, and rows of L D, which are two parts."""
    blocks = narrowed.slice(FIRST, COUNT, dim=1)
    for part in gl.static_range(2):
        rows = parts.index(origin + BELOW + part).slice(FIRST, COUNT, dim=0)
        found = warpgroup_mma(blocks, rows, found, is_async=True)
    return found


@gluon.jit
def put_parts(below, parts, origin):
    """Put L D where products find it."""
    high, low = two_parts(below)
    parts.index(origin + BELOW).store(high)
    parts.index(origin + BELOW + 1).store(low)
    fence_async_shared()


@gluon.jit
def two_parts(tile):
    """Numbers as sums of two in bfloat16: 16 bits of them. The first is cut off, not rounded, as
    what is narrowed and widened again is narrowed number by number, at a quarter of the rate."""
    high = (tile.to(gl.int32, bitcast=True) & -65536).to(gl.float32, bitcast=True)
    return high.to(gl.bfloat16), (tile - high).to(gl.bfloat16)
