"""Linear attention backward on Hopper: what the ones of elu + 1 add, apart from elu.

Features of queries φ̂ = (elu + 1) · f, f = scale / divisor, have a mean far from 0, so less 1 their
rounding counts for less. With R' = Σ elu · f gradᵀ over the rows behind a chunk,

    R = R' + 1 ⊗ G          G = Σ f grad, a number for each channel of values

and what 1 ⊗ G adds to gradients is one number times a vector, for each row:

    grad_value   s · (G + Σ seen in the chunk of f grad)     s = Σ over channels of φ(key)
    grad_key     value · G + Σ seen in the chunk of f · (value · grad − δ), in all channels

Where rows are far below 0 nothing is taken from features (`what_to_take`); f is 0 here then.

Sums over 64 rows or channels are products of eight columns. Eight hold a number as it is rounded
and what it lacks then, in turn, a quarter each: so their sum is the number, to sixteen bits.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.gpu.hopper.pipeline import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.program import (
    ACROSS,
    BLOCK,
    GRADS,
    KEYS,
    LINE,
    ONES,
    VALUES,
    sums_at,
)

THIN = gl.constexpr(8)  # columns of such a product
THIN_SUMS = gl.constexpr(mma_layout(8))


@gluon.jit
def no_sums():
    """Sums of eight columns to begin with."""
    return gl.zeros([ROWS, THIN], gl.float32, THIN_SUMS)


@gluon.jit
def summed(columns):
    """What eight columns sum up to, for each row of a result."""
    sums = gl.sum(columns, 1)
    return gl.convert_layout(sums, gl.SliceLayout(1, mma_layout(BLOCK)))


@gluon.jit
def put_ones(rings, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, WHICH: gl.constexpr):
    """Put ones where products find them, for those channels of keys that exist."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    for block in gl.static_range(BLOCKS):
        channels = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
        eighths = gl.full([THIN, BLOCK], 1.0 / THIN, gl.float32, LAYOUT)
        eighths = gl.where((channels < HEAD_DIM)[None, :], eighths, 0.0)
        rings.ones_of(WHICH, block).store(eighths.to(gl.bfloat16))
    fence_async_shared()


@gluon.jit
def start_sizes(rings, iteration, BLOCKS: gl.constexpr, LEFT: gl.constexpr, WHICH: gl.constexpr):
    """Start to sum up the features of each key."""
    sizes = no_sums()
    for block in gl.static_range(BLOCKS):
        keys, ones = rings.tile_of(iteration, KEYS, LEFT + block), rings.ones_of(WHICH, block)
        sizes = warpgroup_mma(keys, ones.permute((1, 0)), sizes, use_acc=block > 0, is_async=True)
    return sizes


@gluon.jit
def add_to_line(line, rings, iteration, WHICH: gl.constexpr):
    """G with the chunk's queries, of 64 channels of values; what a chunk's keys find in the G
    before that, and that itself, are left as numbers."""
    before = gl.sum(line, 1)
    rings.numbers_of(iteration, WHICH, LINE).store(before)
    column = gl.arange(0, THIN, gl.SliceLayout(0, THIN_SUMS))
    narrow, factors = rings.line_of(WHICH), rings.factors_of(WHICH)
    narrow.permute((1, 0)).store(in_pairs(before[:, None], column[None, :]))
    put_factors(rings, iteration, WHICH)
    fence_async_shared()
    values, grads = rings.tile_of(iteration, VALUES, WHICH), rings.tile_of(iteration, GRADS, WHICH)
    across = warpgroup_mma(values, narrow.permute((1, 0)), no_sums(), use_acc=False, is_async=True)
    line = warpgroup_mma(grads.permute((1, 0)), factors.permute((1, 0)), line, is_async=True)
    line, across = warpgroup_mma_wait(0, deps=[line, across])
    rings.numbers_of(iteration, WHICH, ACROSS).store(gl.sum(across, 1))
    return line


@gluon.jit
def keep_line(line, rings, chunks, WHICH: gl.constexpr):
    """Leave G as it is after all chunks."""
    rings.parts_of(0 * chunks, WHICH, 0).store(gl.sum(line, 1))
    rings.say_mapped(chunks)


@gluon.jit
def put_factors(rings, iteration, WHICH: gl.constexpr):
    """Put the factors of a chunk's queries where products find them."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    numbers = rings.numbers_of(iteration, WHICH, ONES).load(gl.SliceLayout(0, LAYOUT))
    column = gl.arange(0, THIN, gl.SliceLayout(1, LAYOUT))
    rings.factors_of(WHICH).store(in_pairs(numbers[None, :], column[:, None]))


@gluon.jit
def in_pairs(numbers, column):
    """Numbers as eight columns of a product."""
    quarter = numbers * 0.25
    high = quarter.to(gl.bfloat16)
    low = (quarter - high.to(gl.float32)).to(gl.bfloat16)
    return gl.where((column & 1) == 0, high, low)


@gluon.jit
def start_line(
    before, number, exists, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    BLOCKS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """G to begin with. It may be anything, as R' is R less 1 ⊗ G: the mean over channels of keys,
    which leaves the least."""
    VALUE_BLOCK: gl.constexpr = WHICH if BLOCKS == 2 else 0
    line = no_sums()
    if before is not None:
        sums = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(1, mma_layout(BLOCK)))
        for block in gl.static_range(BLOCKS):
            position, inside = sums_at(
                number, exists, VALUE_BLOCK, block * BLOCK, HEAD_DIM, VALUE_DIM, True
            )  # fmt: skip
            sums += gl.sum(gl.load(before.matrix + position, mask=inside, other=0.0), 1)
        part = gl.convert_layout(sums / (HEAD_DIM * THIN), gl.SliceLayout(1, THIN_SUMS))
        line = line + part[:, None]
    return line


@gluon.jit
def without_line(sums, HEAD_DIM: gl.constexpr):
    """R' of the R that a segment starts from, with the same G."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    line = gl.sum(sums[0], 0)
    for block in gl.static_range(1, len(sums)):
        line += gl.sum(sums[block], 0)
    line = (line / HEAD_DIM)[None, :]
    rest = ()
    for block in gl.static_range(len(sums)):
        channels = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
        rest = rest + (sums[block] - gl.where(channels < HEAD_DIM, line, 0.0),)  # noqa: RUF005
    return rest


@gluon.jit
def with_line(sums, rings, iteration, WHICH: gl.constexpr):
    """R, of R' and the G that a turn would find."""
    rings.wait_for_end(iteration)
    line = rings.parts_of(0 * iteration, WHICH, 0).load(gl.SliceLayout(0, mma_layout(BLOCK)))
    whole = ()
    for block in gl.static_range(len(sums)):
        whole = whole + (sums[block] + line[None, :],)  # noqa: RUF005
    return whole
