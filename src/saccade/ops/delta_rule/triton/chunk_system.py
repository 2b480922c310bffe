"""The gated delta rule, pairs of a chunk: its triangular system solved, and what queries weigh.

With `update_i = beta_i · error_i`, state S before the chunk and G the sums of decay from its start,

    (I + A) update = beta ∘ (value − (e^G ∘ key) S)       A_ij = beta_i Σ key_i e^{G_i − G_j} key_j
    output = scale · (e^G ∘ query) S + P update           P_ij = scale Σ query_i e^{G_i − G_j} key_j

with j < i in A and j ≤ i in P, Σ over channels. Both, and T = (I + A)⁻¹, know nothing of S, so they
are made for all chunks side by side; T and P take memory, [CHUNK] numbers a row. The scans then
multiply T with the right-hand side as it stands (Yang et al. 2024 multiply it out, as W and U,
which is one product less in the scan, and takes head_dim + value_dim numbers a row instead).

T is made by T₂₁ = −T₂₂ A₂₁ T₁₁, which is substitution by blocks: no number in it is larger than
those of T, whatever the keys are. (A product of powers of A, as (I − A)(I + A²)(I + A⁴)…, cancels
numbers of 6,000 for equal keys and beta 1.) Half types begin with blocks of 2 rows, two products on
tensor cores for each size, exacter than T is held: for bfloat16 with numbers of A, which are what
rounding would change most, as sums of two in bfloat16; for float16 in three passes of tf32. Float32
begins with blocks of 16 by substitution, and is exact to its own rounding.

**Decay by channel** is a factor e^{G_i − G_j} that no channel has in common with another, and that
is no product of two numbers in range: e^{−G_j} is e^{100} after one strong token. But between two
rows any third one may stand as reference, G_i − G_r and G_r − G_j both being at most 0. So pairs
are told apart by the smallest block of 2, 4, 8, … rows that holds both: one then lies in its first
half and one in its second, and r is the last row of the first half. That is a factor for each row
and size of blocks, at most 1, and one product each: six for 64 rows, where blocks of 16 with pairs
of their own would take 16 exponentials for each number. Most chunks need none of that: where no
channel fades by more than e^60 between the chunk's middle row and any other, that row is reference
for all pairs, with factors above 1 on one side of it. Rounding is relative, so they are as exact.

What a scan asks of rows besides is made here as well: the lengths of queries and keys, and the
factors by which products of rows with states are multiplied (`Meeting`).
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.features import load_number
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import num_rows, row_pointers, store_numbers, store_tile, wide
from saccade.ops.delta_rule.triton.chunk_rows import (
    chunk_slot,
    last_sums,
    load_channels,
    load_sums,
    one_over_length,
    row_factors,
    store_channels,
)

MILD = tl.constexpr(60.0)  # e^60 times e^60 may overflow where nothing is asked; no factor does
MILD_OF_FLOAT16 = tl.constexpr(4.0)  # which keeps rows of length 1 away from its smallest numbers


class SystemMeta(NamedTuple):
    """What is known of the pairs of a chunk when their kernel is compiled."""

    GROUP: int  # value heads of a key head
    HEAD_DIM: int
    KEY_TILE: int  # channels at a time
    CHUNK: int
    LEVELS: int  # 2^LEVELS = CHUNK
    BY_CHANNEL: bool
    HEADS: int
    PACKED: bool
    PRECISION: str
    SOLVED: str  # how products of the system's inverse are computed


@triton.jit
def delta_system(
    query, key, factors, beta, decay, inverse, weights, meeting, lasts, faded, scale,
    META: tl.constexpr,
):  # fmt: skip
    """One program: T and P of one chunk of a value head.

    query, key, inverse, weights: Views; beta: a View of numbers. factors: Factors; decay: a Decay,
    or None. meeting: the `Meeting` of its rows, of which is written what there is. faded: rows that
    fade by channel, or None; they are written, too.
    """
    batch, head, chunk, _ = inverse.find(tl.program_id(0), inverse.data, META.CHUNK)
    key_head, start = head // META.GROUP, chunk * META.CHUNK
    slot = chunk_slot(inverse, batch, chunk, META.CHUNK, META.PACKED)
    number = wide(slot) * META.HEADS + head
    length = num_rows(inverse, batch)
    rows = tl.arange(0, META.CHUNK)
    exist = start + rows < length
    of_keys, of_queries = 1.0, 1.0
    if META.BY_CHANNEL:
        of_keys = row_factors(factors.key, batch, key_head, start, exist)
        of_queries = row_factors(factors.query, batch, key_head, start, exist)
    key_squares = tl.zeros([META.CHUNK], tl.float32)
    query_squares = tl.zeros([META.CHUNK], tl.float32)
    pairs = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    scores = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    own = tl.zeros([META.CHUNK], tl.float32)
    for first in range(0, META.HEAD_DIM, META.KEY_TILE):
        channels = first + tl.arange(0, META.KEY_TILE)
        keys = load_channels(key, batch, key_head, start, exist, channels, META.HEAD_DIM, False)
        queries = load_channels(
            query, batch, key_head, start, exist, channels, META.HEAD_DIM, False
        )
        if META.BY_CHANNEL:
            wide_keys = keys.to(tl.float32) * of_keys
            wide_queries = queries.to(tl.float32) * of_queries
            own += tl.sum(wide_queries * wide_keys, 1)
            sums = load_sums(decay, batch, head, start, exist, channels, META)
            write_faded(
                faded, lasts, number, wide_queries, wide_keys, decay, sums, batch, head, start,
                length, exist, channels, META,
            )  # fmt: skip
            gap, mild = from_middle(
                decay, sums, batch, head, start, length, exist, channels, keys.dtype, META
            )
            if mild:
                near = (wide_keys * tl.exp(-gap)).to(keys.dtype)
                left = tl.exp(gap)
                asking = (wide_keys * left).to(keys.dtype)
                pairs += tl.dot(asking, tl.trans(near), input_precision=META.PRECISION)
                asking = (wide_queries * left).to(keys.dtype)
                scores += tl.dot(asking, tl.trans(near), input_precision=META.PRECISION)
            else:
                for level in range(0, META.LEVELS):  # not unrolled, as registers are few
                    left = left_between(
                        decay, sums, batch, head, start, length, channels, level, META
                    )
                    near = (wide_keys * left).to(keys.dtype)
                    asking = (wide_queries * left).to(keys.dtype)
                    meet = pairs_of_level(rows, level)
                    found = tl.dot(near, tl.trans(near), input_precision=META.PRECISION)
                    pairs += tl.where(meet, found, 0.0)
                    found = tl.dot(asking, tl.trans(near), input_precision=META.PRECISION)
                    scores += tl.where(meet, found, 0.0)
        else:
            if factors.key is not None:
                key_squares += squares_of(keys)
                query_squares += squares_of(queries)
            pairs += tl.dot(keys, tl.trans(keys), input_precision=META.PRECISION)
            scores += tl.dot(queries, tl.trans(keys), input_precision=META.PRECISION)
    if META.BY_CHANNEL:
        scores = tl.where(rows[:, None] == rows[None, :], own[:, None], scores)
    else:
        if factors.key is not None:
            of_keys, of_queries = one_over_length(key_squares), one_over_length(query_squares)
            store_numbers(factors.key, batch, key_head, start + rows, length, of_keys)
            store_numbers(factors.query, batch, key_head, start + rows, length, of_queries)
            of_keys, of_queries = of_keys[:, None], of_queries[:, None]
            across = tl.trans(of_keys)
            pairs, scores = pairs * of_keys * across, scores * of_queries * across
        if decay is not None:
            left = left_between_rows(decay, batch, head, start, exist, rows, META)
            pairs, scores = pairs * left, scores * left
    beta_rows = load_number(beta, batch, head, start + rows, exist).to(tl.float32)
    if not META.BY_CHANNEL:
        write_meeting(
            meeting, lasts, number, of_queries, of_keys, beta_rows, decay, batch, head, start,
            length, rows, exist, scale, META,
        )  # fmt: skip
    earlier = rows[None, :] < rows[:, None]
    pairs = tl.where(earlier, pairs * beta_rows[:, None], 0.0)
    scores = tl.where(rows[None, :] <= rows[:, None], scores * scale, 0.0)
    store_tile(weights, batch, head, start, length, scores, META.CHUNK)
    # Substitution would carry NaN to earlier rows, as 0 · NaN is NaN.
    finite = tl.abs(tl.sum(tl.abs(pairs), 1)) < float("inf")
    late = tl.cumsum(tl.where(finite, 0, 1), 0)[:, None] > 0
    pairs = tl.where(late, 0.0, pairs)
    if META.SOLVED == "ieee":
        solved = unit_inverse(pairs, META.CHUNK)
    else:
        solved = inverse_by_blocks(pairs, META.CHUNK, META.LEVELS, META.SOLVED)
    solved = tl.where(late, float("nan"), solved)
    store_tile(inverse, batch, head, start, length, solved, META.CHUNK)


@triton.jit
def squares_of(rows):
    """The sum of each row's squares."""
    numbers = rows.to(tl.float32)
    return tl.sum(numbers * numbers, 1)


@triton.jit
def write_meeting(
    meeting, lasts, number, of_queries, of_keys, beta_rows, decay, batch, head, start, length, rows,
    exist, scale, META: tl.constexpr,
):  # fmt: skip
    """Write what products of rows with states are multiplied by."""
    left, until = tl.zeros([META.CHUNK, 1], tl.float32) + 1.0, 1.0
    if decay is not None:
        high, low = load_sums(decay, batch, head, start, exist, rows, META)
        last_high, last_low = last_sums(decay, batch, head, start, length, rows, META)
        left, until = tl.exp(high + low), tl.exp((last_high - high) + (last_low - low))
        tl.store(lasts + number, tl.exp(last_high + last_low))
    numbers = tl.reshape(left * of_queries * scale, [META.CHUNK])
    store_numbers(meeting.asking, batch, head, start + rows, length, numbers)
    numbers = tl.reshape(left * of_keys * beta_rows[:, None], [META.CHUNK])
    store_numbers(meeting.asked, batch, head, start + rows, length, numbers)
    numbers = tl.reshape(left * 0.0 + until * of_keys, [META.CHUNK])
    store_numbers(meeting.kept, batch, head, start + rows, length, numbers)


@triton.jit
def write_faded(
    faded, lasts, number, queries, keys, decay, sums, batch, head, start, length, exist, channels,
    META: tl.constexpr,
):  # fmt: skip
    """Write rows as they meet the state before their chunk, and keys as they do the one behind;
    what that has left."""
    high, low = last_sums(decay, batch, head, start, length, channels, META)
    pointers = lasts + (number * META.HEAD_DIM + channels)
    tl.store(pointers, tl.exp(high + low), mask=channels < META.HEAD_DIM)
    left = tl.exp(sums[0] + sums[1])
    until = tl.exp((high[None, :] - sums[0]) + (low[None, :] - sums[1]))
    at = batch, head, start, exist, channels
    store_faded(faded.query, at, queries * left, META)
    store_faded(faded.key, at, keys * left, META)
    store_faded(faded.kept, at, keys * until, META)


@triton.jit
def store_faded(view, at, tile, META: tl.constexpr):
    """Write rows of a chunk × channels of keys."""
    store_channels(view, at[0], at[1], at[2], at[3], at[4], tile, META.HEAD_DIM)


# ---- decay between two rows --------------------------------------------------------------------


@triton.jit
def left_between_rows(decay, batch, head, start, exist, rows, META: tl.constexpr):
    """e^{G_i − G_j} for each pair of rows; 1 where j > i, and in rows past the end."""
    high, low = load_sums(decay, batch, head, start, exist, rows, META)
    gap = (high - tl.trans(high)) + (low - tl.trans(low))
    # Rows past the end have sums of 0, from which e^{−G_j} would be left.
    return tl.exp(tl.where((rows[None, :] <= rows[:, None]) & exist[:, None], gap, 0.0))


@triton.jit
def from_middle(
    decay, sums, batch, head, start, length, exist, channels, DTYPE: tl.constexpr,
    META: tl.constexpr,
):  # fmt: skip
    """How much less than the chunk's middle row each row has decayed, channel by channel, as a
    logarithm; and whether that and its negative are so small, in all rows, that their exponentials
    are good factors of rows in DTYPE.

    Pairs then have the middle as reference, whichever side of it they lie on: one product each, and
    no pair loses anything, as a factor above 1 rounds like any other.
    """
    middle = tl.minimum(start + META.CHUNK // 2, length) - 1
    exists = (channels < META.HEAD_DIM) & (middle >= 0)
    high = tl.load(row_pointers(decay.high, batch, head, middle, channels), exists, 0.0)
    low = tl.load(row_pointers(decay.low, batch, head, middle, channels), exists, 0.0)
    gap = (sums[0] - high[None, :]) + (sums[1] - low.to(tl.float32)[None, :])
    gap = tl.where(exist[:, None], gap, 0.0)
    most: tl.constexpr = MILD_OF_FLOAT16 if tl.float16 == DTYPE else MILD
    # So asked, NaN is not mild: it may stand behind rows that it must not reach.
    beyond = tl.where(tl.abs(gap) <= most, 0, 1)
    return gap, tl.max(tl.max(beyond, 1), 0) == 0


@triton.jit
def left_between(decay, sums, batch, head, start, length, channels, level, META: tl.constexpr):
    """What is left between each row of a chunk and the reference of its block of 2 · 2^level rows,
    channel by channel: [rows, channels]."""
    rows = tl.arange(0, META.CHUNK)
    reference = start + ((rows >> (level + 1)) << (level + 1)) + (1 << level) - 1
    # Rows past the end, or whose reference lies there, meet none in its block.
    met = (reference < length) & (start + rows < length)
    exists = met[:, None] & (channels < META.HEAD_DIM)[None, :]
    at, of = reference[:, None], channels[None, :]
    high = tl.load(row_pointers(decay.high, batch, head, at, of), mask=exists, other=0.0)
    low = tl.load(row_pointers(decay.low, batch, head, at, of), mask=exists, other=0.0)
    gap = (sums[0] - high) + (sums[1] - low.to(tl.float32))
    behind = (((rows >> level) & 1) == 1)[:, None]
    return tl.exp(tl.where(exists, tl.where(behind, gap, -gap), 0.0))


@triton.jit
def pairs_of_level(rows, level):
    """Pairs of rows of one block of 2 · 2^level, the first in its second half, the other not."""
    first, second = rows[:, None] >> level, rows[None, :] >> level
    return (first > second) & ((first >> 1) == (second >> 1))


# ---- (I + A)⁻¹ ---------------------------------------------------------------------------------


@triton.jit
def inverse_by_blocks(lower, SIZE: tl.constexpr, LEVELS: tl.constexpr, PRECISION: tl.constexpr):
    """The inverse of I + lower, which is strictly lower triangular: [SIZE, SIZE], 2^LEVELS = SIZE.

    All blocks of a size lie in one matrix, whose other entries are 0: D the inverses of blocks so
    far, B what lies below the diagonal in blocks twice as large; then D − D B D has their inverses.

    What stands on the left of two products that are waited for apart must hold no constants: ptxas
    may write them to registers for the second product alone (`saccade.kernel_check.left_operands`).
    So what lies around blocks of 2 rows is a sum of each row times 0 for bfloat16, which no
    compiler knows to be 0.
    """
    rows = tl.arange(0, SIZE)
    diagonal = rows[:, None] == rows[None, :]
    around = 0.0
    if PRECISION == "bf16x2":
        around = tl.sum(tl.abs(lower), 1)[:, None] * 0.0  # lower is finite
    found = tl.where(diagonal, 1.0, tl.where(pairs_of_level(rows, 0), -lower, around))
    for level in tl.static_range(1, LEVELS):
        if PRECISION == "bf16x2":
            # What is multiplied on the left stays in registers, as it is; tf32 would be moved.
            below = tl.where(pairs_of_level(rows, level), -lower, 0.0)
            narrowed = found.to(tl.bfloat16)
            high, low = two_parts(below)
            high, low = two_parts(tl.dot(low, narrowed, tl.dot(high, narrowed)))
            found = tl.dot(narrowed, low, tl.dot(narrowed, high, found))
        else:
            below = tl.where(pairs_of_level(rows, level), lower, 0.0)
            below = tl.dot(below, found, input_precision=PRECISION)
            found -= tl.dot(found, below, input_precision=PRECISION)
    return found


@triton.jit
def two_parts(tile):
    """Numbers as sums of two in bfloat16: 16 bits of them."""
    high = tile.to(tl.bfloat16)
    return high, (tile - high.to(tl.float32)).to(tl.bfloat16)


@triton.jit
def unit_inverse(lower, SIZE: tl.constexpr):
    """The inverse of I + lower, which is strictly lower triangular: [SIZE, SIZE], 16, 32 or 64."""
    if SIZE == 16:
        found = tl.reshape(substituted(tl.reshape(lower, [16, 16, 1])), [16, 16])
    elif SIZE == 32:
        found = inverse_of_32(lower)
    else:
        first, below, second = quarters(lower, 32)
        # Four blocks of 16 side by side: as many steps as for one.
        one, of_first, two = quarters(first, 16)
        three, of_second, four = quarters(second, 16)
        blocks = tl.join(tl.join(one, three), tl.join(two, four))
        blocks = tl.reshape(substituted(tl.reshape(blocks, [16, 16, 4])), [16, 16, 2, 2])
        upper, under = tl.split(blocks)
        one, three = tl.split(upper)
        two, four = tl.split(under)
        first, second = merged(one, of_first, two, 16), merged(three, of_second, four, 16)
        found = merged(first, below, second, 32)
    return found


@triton.jit
def inverse_of_32(lower):
    """`unit_inverse` of 32 rows."""
    one, below, two = quarters(lower, 16)
    one, two = tl.split(substituted(tl.join(one, two)))
    return merged(one, below, two, 16)


@triton.jit
def substituted(lower):
    """The inverses of several I + lower [16, 16, several]: a row at a time, by those above it."""
    rows = tl.arange(0, 16)[:, None, None]
    unit = tl.where(rows == tl.arange(0, 16)[None, :, None], 1.0, 0.0)
    found = unit + lower * 0.0
    for row in tl.static_range(1, 16):
        entries = tl.sum(tl.where(rows == row, lower, 0.0), 0)  # [16, several]
        less = tl.sum(tl.expand_dims(entries, 1) * found, 0)
        found = tl.where(rows == row, unit - tl.expand_dims(less, 0), found)
    return found


@triton.jit
def quarters(tile, HALF: tl.constexpr):
    """Upper left, lower left and lower right of a square of 2 · HALF rows."""
    parts = tl.permute(tl.reshape(tile, [2, HALF, 2, HALF]), (1, 3, 0, 2))
    left, right = tl.split(parts)
    upper_left, lower_left = tl.split(left)
    _, lower_right = tl.split(right)
    return upper_left, lower_left, lower_right


@triton.jit
def merged(first, below, second, HALF: tl.constexpr):
    """The inverse of [[first⁻¹, 0], [below, second⁻¹]]."""
    corner = tl.dot(second, below, input_precision="ieee")
    corner = -tl.dot(corner, first, input_precision="ieee")
    left = tl.join(first, corner)
    right = tl.join(tl.zeros_like(second), second)
    parts = tl.permute(tl.join(left, right), (2, 0, 3, 1))
    return tl.reshape(parts, [2 * HALF, 2 * HALF])
