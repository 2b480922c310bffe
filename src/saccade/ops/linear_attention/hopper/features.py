"""Linear attention on Hopper, mapping: features take the place of queries and keys.

Products read their operands from shared memory, so features are put there, by warps that do nothing
else. They also keep the sum of key features, and find what each query's scores with it sum up to.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.features import exponential, relu
from saccade.gpu.hopper.pipeline import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from saccade.gpu.language import gl, gluon
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
    chunks_of,
    head_of,
    keys_there,
    state_number,
    sums_at,
    tile_of_values,
)

# The PTX below works on two bfloat16 in a register: the first is its lower half, the second its
# upper one. tests/ops/linear_attention/hopper/test_features.py compares it with plain Triton.
#
# e^x of the two numbers of $1, in float32.
#   shl, and   low, high = the numbers in float32, of which bfloat16 is the upper half
#   mul        … times log2 e
#   ex2        2 to the power of that
EXPONENTIALS = """\
    shl.b32 low, $1, 16;
    and.b32 high, $1, 0xffff0000;
    mul.f32 low, low, 0f3FB8AA3B;
    mul.f32 high, high, 0f3FB8AA3B;
    ex2.approx.ftz.f32 low, low;
    ex2.approx.ftz.f32 high, high;
"""
# As `features.elu_plus_one`, two numbers at a time: e^x in float32, the tangent in bfloat16, where
# it is rounded as its sum would be. The lesser of two rounded numbers is the lesser one rounded.
#   cvt        grown = e^x in bfloat16; the second number comes first, into the upper half
#   mov        one = 1, twice; tangent = 0, twice
#   max, add   tangent = max(x, 0) + 1
#   min.NaN    $0 = the lesser of both, or NaN if one is
ELU_PLUS_ONE = gl.constexpr(f"""{{
    .reg .b32 low, high, grown, tangent, one;
{EXPONENTIALS}    cvt.rn.bf16x2.f32 grown, high, low;
    mov.b32 one, 0x3f803f80;
    mov.b32 tangent, 0;
    max.bf16x2 tangent, $1, tangent;
    add.rn.bf16x2 tangent, tangent, one;
    min.NaN.bf16x2 $0, grown, tangent;
}}""")
# The same less a number c, 0 or 1, of which $2 has 1 − c twice, and $3 and $4 c each.
#   sub, cvt   grown = e^x − c
#   max, add   above = max(x, 0) + (1 − c)
#   min.NaN    $0 = the lesser of both, or NaN if one is
ELU = gl.constexpr(f"""{{
    .reg .b32 low, high, grown, above;
{EXPONENTIALS}    sub.f32 low, low, $3;
    sub.f32 high, high, $4;
    cvt.rn.bf16x2.f32 grown, high, low;
    mov.b32 above, 0;
    max.bf16x2 above, $1, above;
    add.rn.bf16x2 above, above, $2;
    min.NaN.bf16x2 $0, grown, above;
}}""")
# $0 = the bits of $1 where those of $2 are set: $2 is all ones for a number that is kept, else 0.
KEEP = gl.constexpr("and.b32 $0, $1, $2;")
# The lesser of 1 and each number of $2, in float32.
#   mov        slope = 1, twice
#   min.NaN    slope = the lesser of both, or NaN
#   and, shl   $1 = its upper half and $0 = its lower one, as the upper half of a float32
AT_MOST_ONE = gl.constexpr("""{
    .reg .b32 slope, high;
    mov.b32 slope, 0x3f803f80;
    min.NaN.bf16x2 slope, $2, slope;
    and.b32 high, slope, 0xffff0000;
    shl.b32 $0, slope, 16;
    mov.b32 $1, high;
}""")
# $0 = $1 in the lower half and $2 in the upper half, each rounded to the nearest bfloat16.
NARROW = gl.constexpr("cvt.rn.bf16x2.f32 $0, $2, $1;")
# $0, $1 = the lower and the upper half of $2, each as the upper half of a float32.
WIDEN = gl.constexpr("""{
    .reg .b32 high;
    and.b32 high, $2, 0xffff0000;
    shl.b32 $0, $2, 16;
    mov.b32 $1, high;
}""")


@gluon.jit
def map_features(
    kept, before, after, sizes, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, TILES: gl.constexpr,
    SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, FEATURE_MAP: gl.constexpr,
    SCALE: gl.constexpr, NORMALIZE: gl.constexpr, QUERIES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Put features in place of a block of keys, and of QUERIES; hidden keys have none, nor have
    queries that see nothing."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    batch, head = head_of(sizes, WHICH, BLOCKS, TILES, SEGMENTS)
    first, chunks, _ = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT)
    num_keys = keys_there(kept, sizes, batch)
    FIRST_CHANNEL: gl.constexpr = WHICH * BLOCK if BLOCKS == 2 else 0
    channels = FIRST_CHANNEL + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    inside = (channels < HEAD_DIM) & (batch < sizes.batches)
    at = state_number(sizes, batch, head, GROUP, SEGMENTS) * HEAD_DIM + channels
    key_sum = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, LAYOUT))
    parts = no_rows(LAYOUT)
    if before is not None:
        key_sum = gl.load(before.vector + at, mask=inside, other=0.0)
    for iteration in range(0, chunks):
        position = first + iteration * ROWS
        rows = position + gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))
        there = (rows >= 0) & (rows < num_keys)
        # All waits and branches come first: behind them ptxas mixes queries and keys.
        if QUERIES:
            rings.queries.wait(iteration)
        rings.keys.wait(iteration)
        if (position < 0) | (position + ROWS > num_keys):
            clear_hidden(rings, iteration, there, WHICH, LAYOUT)
        if QUERIES:
            map_queries(
                rings, iteration, (rows >= 0) & (num_keys > 0), key_sum, before is None,
                FEATURE_MAP, SCALE, NORMALIZE, WHICH, LAYOUT,
            )  # fmt: skip
        features = map_keys(
            rings, iteration, there, channels < HEAD_DIM, HEAD_DIM != BLOCKS * BLOCK, FEATURE_MAP,
            WHICH, LAYOUT,
        )  # fmt: skip
        rings.say_mapped(iteration)
        if QUERIES:
            key_sum += gl.sum(widened(features), 0)
        else:
            parts += sum_in_threads(widened(features), LAYOUT)
    if not QUERIES:  # without queries the sum is not needed before the end
        key_sum += gl.sum(parts, 0)
    if after is not None:
        writes = inside & (head % GROUP == 0) & (tile_of_values(TILES, SEGMENTS) == 0)
        gl.store(after.vector + at, key_sum, mask=writes)


@gluon.jit
def no_rows(LAYOUT: gl.constexpr):
    """Zeros, as many rows of them as `sum_in_threads` gives."""
    return gl.zeros([ROWS // 4, BLOCK], gl.float32, LAYOUT)


# The layout in which a thread adds up all of a column of such rows.
COLUMNS = gl.constexpr(gl.BlockedLayout([16, 1], [1, 32], [1, 4], [0, 1]))


@gluon.jit
def sum_over_threads(sums, memory):
    """The sum of such rows, one channel to a thread, through shared memory."""
    memory.store(sums)
    return gl.sum(memory.load(COLUMNS), 0)


@gluon.jit
def sum_in_threads(rows, LAYOUT: gl.constexpr):
    """Rows in float32 added up as far as a thread has them: every sixteenth of 64."""
    sums = gl.sum(rows.reshape([4, ROWS // 4, BLOCK]), 0)
    return gl.convert_layout(sums, LAYOUT)


@gluon.jit
def clear_hidden(rings, iteration, there, WHICH: gl.constexpr, LAYOUT: gl.constexpr):
    """Put zeros in values of hidden keys, as a product does not hide what is not finite (0 · NaN is
    NaN)."""
    rings.values.wait(iteration)
    values = rings.values.tile_of(iteration, WHICH)
    values.store(only(values.load(LAYOUT), there))


@gluon.jit
def map_queries(
    rings, iteration, seeing, key_sum, UNSTARTED: gl.constexpr, FEATURE_MAP: gl.constexpr,
    SCALE: gl.constexpr, NORMALIZE: gl.constexpr, WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Map a chunk's queries, and sum up their scores with all keys of chunks before it."""
    tile = rings.queries.tile_of(iteration, WHICH)
    features = mapped(tile.load(LAYOUT), FEATURE_MAP)
    if UNSTARTED:  # those that see nothing find 0, whatever they are
        features = only(features, seeing)
    if SCALE != 1.0:
        features = (widened(features) * SCALE).to(tile.dtype)
    tile.store(features)
    if NORMALIZE != "none":
        totals = gl.sum(widened(features) * key_sum[None, :], 1)
        rings.totals_of(iteration, WHICH).store(totals)


@gluon.jit
def map_keys(
    rings, iteration, there, inside, PARTLY: gl.constexpr, FEATURE_MAP: gl.constexpr,
    WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Map a chunk's keys; if PARTLY, some channels do not exist."""
    tile = rings.keys.tile_of(iteration, WHICH)
    features = mapped(tile.load(LAYOUT), FEATURE_MAP)
    if PARTLY:  # what TMA found there is 0, and e⁰ is not
        features = gl.where(inside[None, :], features, 0.0)
    features = only(features, there)
    tile.store(features)
    return features


@gluon.jit
def mapped(rows, FEATURE_MAP: gl.constexpr):
    """Rows through a feature map; see `saccade.gpu.features`."""
    if FEATURE_MAP == "elu+1":
        features = gl.inline_asm_elementwise(
            ELU_PLUS_ONE, "=r,r", [rows], dtype=gl.bfloat16, is_pure=True, pack=2
        )
    elif FEATURE_MAP == "elu":
        features = less(rows, gl.to_tensor(1.0))
    elif FEATURE_MAP == "relu":
        features = relu(rows.to(gl.float32), 0.0).to(rows.dtype)
    elif FEATURE_MAP == "exp":
        features = exponential(rows.to(gl.float32), 0.0).to(rows.dtype)
    else:
        gl.static_assert(FEATURE_MAP == "identity")
        features = rows
    return features


@gluon.jit
def in_channels(features, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, WHICH: gl.constexpr):
    """Features of a block, 0 in channels that a head has not: what TMA found there is 0, and e⁰ is
    not."""
    if HEAD_DIM != BLOCKS * BLOCK:
        FIRST: gl.constexpr = WHICH * BLOCK if BLOCKS == 2 else 0
        channels = FIRST + gl.arange(0, BLOCK, gl.SliceLayout(0, features.type.layout))
        features = gl.where((channels < HEAD_DIM)[None, :], features, 0.0)
    return features


@gluon.jit
def less(rows, taken):
    """Features of elu + 1 less a number, 0 or 1."""
    left = (1.0 - taken).to(gl.bfloat16)
    return gl.inline_asm_elementwise(
        ELU, "=r,r,r,r,r", [rows, left, taken], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def only(rows, there):
    """Rows of bfloat16, zeros where they are hidden: an instruction for two numbers, and no branch,
    which would keep ptxas from mixing what is before it with what is behind."""
    kept = gl.where(there, -1, 0).to(gl.int16)[:, None]
    return gl.inline_asm_elementwise(
        KEEP, "=r,r,r", [rows, kept], dtype=gl.bfloat16, is_pure=True, pack=2
    )


@gluon.jit
def widened(rows):
    """Rows of bfloat16 in float32: two instructions for two numbers, where LLVM takes three."""
    return gl.inline_asm_elementwise(
        WIDEN, "=r,=r,r", [rows], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def at_most_one(rows):
    """The lesser of 1 and rows of bfloat16, in float32: found before they are widened."""
    return gl.inline_asm_elementwise(
        AT_MOST_ONE, "=r,=r,r", [rows], dtype=gl.float32, is_pure=True, pack=2
    )


@gluon.jit
def narrowed(rows):
    """Rows of float32 in bfloat16, two at once: LLVM would move a selection behind this, and then
    select each half of what was narrowed."""
    return gl.inline_asm_elementwise(
        NARROW, "=r,r,r", [rows], dtype=gl.bfloat16, is_pure=True, pack=2
    )


# ---- elu + 1 less 1 ----------------------------------------------------------------------------
# What the ones of elu + 1 add to gradients of keys and values, apart from elu.
#
# Features of queries φ̂ = (elu + 1) · f, f = scale / divisor, have a mean far from 0, so less 1
# their rounding counts for less. With R' = Σ elu · f gradᵀ over the rows behind a chunk,
#
#     R = R' + 1 ⊗ G          G = Σ f grad, a number for each channel of values
#
# and what 1 ⊗ G adds to gradients is one number times a vector, for each row:
#
#     grad_value   s · (G + Σ seen in the chunk of f grad)     s = Σ over channels of φ(key)
#     grad_key     value · G + Σ seen in the chunk of f · (value · grad − δ), in all channels
#
# Where rows are far below 0 nothing is taken from features (`what_to_take`); f is 0 here then.
#
# Sums over 64 rows or channels are products of eight columns. Eight hold a number as it is rounded
# and what it lacks then, in turn, a quarter each: so their sum is the number, to sixteen bits.


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
    """R, of R' and the G that an iteration would find."""
    rings.wait_for_end(iteration)
    line = rings.parts_of(0 * iteration, WHICH, 0).load(gl.SliceLayout(0, mma_layout(BLOCK)))
    complete = ()
    for block in gl.static_range(len(sums)):
        complete = complete + (sums[block] + line[None, :],)  # noqa: RUF005
    return complete
