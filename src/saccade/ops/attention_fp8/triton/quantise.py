"""Quantise: 16-bit rows as e4m3 numbers with scales, a block of rows of one head in each program.

`saccade.ops.attention_fp8.quantise` says what is computed. Two kernels do it, each of which has
programs of two kinds, so that there are always some that wait for no other: values, with sums of
keys; then keys and queries, which need the mean key. Values leave in tiles of their own, [channels,
keys] for each block of keys: a GPU multiplies e4m3 numbers only if those that are added up lie side
by side.

All of it waits for memory, so a thread loads 16 bytes at a time, and whether a number is nonfinite
is asked of a block's largest number, not of each.

Queries and keys are counted in units of 1 / UNIT, and sums of keys in units of 1 / SUM_UNIT, as
sums of channels or of keys, and keys without their mean, may leave float32 where scores do not.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false, reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.fp8_numbers import as_e4m3, as_e4m3_words
from saccade.gpu.language import is_hopper, tl, triton
from saccade.gpu.tensor_view import num_rows, row_pointers, store_numbers, wide
from saccade.ops.attention_fp8.triton.numbers import BLOCK, load_scale

LARGEST = tl.constexpr(448.0)
TINIEST = tl.constexpr(2.0**-118)  # of scales, which divide; UNIT times it is a normal number
# 128 channels are summed up, times 2 for what the mean adds; and 2^27 keys.
UNIT, SUM_UNIT = tl.constexpr(2.0**-8), tl.constexpr(2.0**-28)
ROWS_AT_ONCE, STEPS = tl.constexpr(32), tl.constexpr(4)  # of keys that are summed
PARTS_AT_ONCE = tl.constexpr(8)  # of sums that are added up
MOST_KEPT = tl.constexpr(128)  # channels whose matrices a program keeps; on Hopper: any number


class Blocks(NamedTuple):
    """Where a kernel writes what it makes of the blocks of rows: Views, or None."""

    numbers: Any  # e4m3: of rows, or of tiles [VALUE_DIM, BLOCK]
    scale: Any  # a number for each block; with SCALES "given" it is read, in any form
    largest: Any  # the size of each block's largest number, of queries and keys times UNIT


# ---- the transform -------------------------------------------------------------------------------


@triton.jit
def hashed(numbers):
    """32 bits that look random (`quantise.py` above has the same)."""
    bits = (numbers + 1).to(tl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA6B
    return (bits ^ (bits >> 13)) * 0xC2B2AE35


@triton.jit
def write_matrix(matrix, chunk, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The matrix of a chunk of WIDTH channels, each entry of which is UNIT, -UNIT or 0.

    An entry of a Hadamard matrix is negative where the indices have an odd number of bits in
    common.
    """
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    common = row & column & (SIZE - 1)
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = (common ^ (common >> 1)) & 1
    negative = common ^ (hashed(chunk * WIDTH + row) >> 31).to(tl.int32)
    entries = UNIT - 2.0 * UNIT * negative.to(tl.float32)
    entries = tl.where(row // SIZE == column // SIZE, entries, 0.0)
    place = chunk * WIDTH * WIDTH + row * WIDTH + column
    tl.store(matrix + place, entries.to(matrix.dtype.element_ty))


@triton.jit
def load_matrix(matrix, chunk, WIDTH: tl.constexpr):
    """The matrix of a chunk of channels."""
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    return tl.load(matrix + (chunk * WIDTH * WIDTH + row * WIDTH + column))


@triton.jit
def mixed(chunks, SIZE: tl.constexpr):
    """The last step of the transform: chunks of half a Hadamard matrix's channels become their sum
    and their difference, where a matrix is twice as wide as they are; and all get their size."""
    FACTOR: tl.constexpr = SIZE**-0.5
    found = ()
    if chunks[0].shape[-1] < SIZE:
        for pair in tl.static_range(len(chunks) // 2):
            left, right = chunks[2 * pair], chunks[2 * pair + 1]
            found = found + ((left + right) * FACTOR, (left - right) * FACTOR)  # noqa: RUF005
    else:
        for index in tl.static_range(len(chunks)):
            found = found + (chunks[index] * FACTOR,)  # noqa: RUF005
    return found


# ---- sums of keys --------------------------------------------------------------------------------


@triton.jit
def sum_keys(
    key, sums, program, SUM_ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """The sum of SUM_ROWS keys of a head, without what is nonfinite, times SUM_UNIT."""
    batch, head, part, _ = key.find(program, key.data, SUM_ROWS)
    length = num_rows(key, batch)
    end = tl.minimum((part + 1) * SUM_ROWS, length)
    channels = tl.arange(0, WIDTH)
    total = tl.zeros([ROWS_AT_ONCE, WIDTH], tl.float32)
    for start in range(part * SUM_ROWS, end, STEPS * ROWS_AT_ONCE):
        for step in tl.static_range(STEPS):
            rows = start + step * ROWS_AT_ONCE + tl.arange(0, ROWS_AT_ONCE)
            exists = (rows < length)[:, None]
            if HEAD_DIM != WIDTH:
                exists = exists & (channels < HEAD_DIM)[None, :]
            pointers = row_pointers(key, batch, head, rows[:, None], channels[None, :])
            keys = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
            total += tl.where(tl.abs(keys) < float("inf"), keys, 0.0) * SUM_UNIT
    here = (channels < HEAD_DIM) & (part * SUM_ROWS < length)
    tl.store(row_pointers(sums, batch, head, part, channels), tl.sum(total, 0), mask=here)


@triton.jit
def fp8_mean_keys(
    key, sums, matrix, mean, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    SUM_ROWS: tl.constexpr,
):  # fmt: skip
    """One program: UNIT times the transformed mean key of a head, from the sums of its parts;
    mean: [batch, heads, HEAD_DIM]."""
    heads = key.data[-2]
    batch, head = tl.program_id(0) // heads, tl.program_id(0) % heads
    length = num_rows(key, batch)
    parts, count = tl.cdiv(length, SUM_ROWS), tl.maximum(length, 1).to(tl.float32)
    found = ()
    for chunk in tl.static_range((HEAD_DIM + WIDTH - 1) // WIDTH):
        channels = chunk * WIDTH + tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], tl.float32)
        for start in range(0, parts, PARTS_AT_ONCE):
            part = start + tl.arange(0, PARTS_AT_ONCE)
            exists = (part < parts)[:, None] & (channels < HEAD_DIM)[None, :]
            pointers = row_pointers(sums, batch, head, part[:, None], channels[None, :])
            total += tl.sum(tl.load(pointers, mask=exists, other=0.0), 0)
        total = total / count
        if SIZE > 0:
            total = tl.sum(total[:, None] * load_matrix(matrix, chunk, WIDTH).to(tl.float32), 0)
        else:
            total = total * UNIT
        found = found + (total,)  # noqa: RUF005
    if SIZE > 0:
        found = mixed(found, SIZE)
    for chunk in tl.static_range(len(found)):
        channels = chunk * WIDTH + tl.arange(0, WIDTH)
        pointers = mean + wide(tl.program_id(0)) * HEAD_DIM + channels
        tl.store(pointers, found[chunk] * (1.0 / SUM_UNIT), mask=channels < HEAD_DIM)


@triton.jit
def load_mean(mean, number, chunk, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH channels of the mean key of a number."""
    channels = chunk * WIDTH + tl.arange(0, WIDTH)
    pointers = mean + wide(number) * HEAD_DIM + channels
    if is_hopper() and HEAD_DIM > MOST_KEPT:
        # Behind a condition that always holds, or each thread would copy what it wants to shared
        # memory ahead of a block. With fewer channels there are no registers for it.
        found = tl.zeros([WIDTH], tl.float32)
        if number >= 0:
            found = tl.load(pointers, mask=channels < HEAD_DIM, other=0.0)
    else:
        found = tl.load(pointers, mask=channels < HEAD_DIM, other=0.0)
    return found[None, :]


# ---- numbers and scales --------------------------------------------------------------------------


@triton.jit
def larger(left, right):
    """The larger of two numbers, or NaN if one is."""
    return tl.maximum(left, right, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def largest_of(chunks):
    """The size of the largest number of a tuple of tiles: inf or NaN, if one holds such."""
    sizes = tl.abs(chunks[0])
    for index in tl.static_range(1, len(chunks)):
        sizes = larger(sizes, tl.abs(chunks[index]))
    if is_hopper():
        largest = tl.reduce(tl.reduce(sizes, 1, larger), 0, larger)
    else:  # of rows first, Triton 3.6 fails to compile it for tensor memory (sm_100)
        largest = tl.reduce(tl.reshape(sizes, (sizes.shape[0] * sizes.shape[1],)), 0, larger)
    return largest


@triton.jit
def finite_size(tile):
    """The sizes of a tile's numbers, 0 of what is nonfinite."""
    sizes = tl.abs(tile)
    return tl.where(sizes < float("inf"), sizes, 0.0)


@triton.jit
def largest_finite(chunks):
    """The size of the largest finite number of a tuple of tiles."""
    sizes = finite_size(chunks[0])
    for index in tl.static_range(1, len(chunks)):
        sizes = tl.maximum(sizes, finite_size(chunks[index]))
    if is_hopper():
        largest = tl.max(tl.max(sizes, 1), 0)
    else:  # as in `largest_of`
        largest = tl.max(tl.reshape(sizes, (sizes.shape[0] * sizes.shape[1],)), 0)
    return largest


@triton.jit
def without_inf(chunks):
    """A tuple of tiles with NaN for inf, which e4m3 has not."""
    found = ()
    for index in tl.static_range(len(chunks)):
        found = found + (chunks[index] + chunks[index] * 0.0,)  # noqa: RUF005
    return found


@triton.jit
def scale_of(size, blocks, at, length, SCALES: tl.constexpr, UNIT: tl.constexpr):
    """What a block is divided by, or 0 where it is only looked at: its largest number's share of
    e4m3's, or the scale that is given. UNIT: what the block's numbers were multiplied by."""
    batch, head, tile = at
    unit, present = tl.full([], 0.0, tl.float32), tile * BLOCK < length
    if SCALES == "given":
        unit += load_scale(blocks.scale, batch, head, tile * BLOCK) * UNIT
    elif SCALES == "own":
        unit = tl.maximum(tl.div_rn(size, size * 0.0 + LARGEST), TINIEST * UNIT)
        unit = tl.where(size == 0, UNIT, unit)
        pointer = row_pointers(blocks.scale, batch, head, tile, 0)
        tl.store(pointer, unit * (1.0 / UNIT), mask=present)
    elif SCALES == "largest":
        tl.store(row_pointers(blocks.largest, batch, head, tile, 0), size, mask=present)
    return unit


# ---- queries and keys ----------------------------------------------------------------------------


@triton.jit
def load_matrices(matrix, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The matrices of all chunks of channels, for the blocks of a program; none, where rows are not
    transformed, or there are no registers to keep so many."""
    found = ()
    if SIZE > 0 and (HEAD_DIM <= MOST_KEPT or is_hopper()):
        for chunk in tl.static_range((HEAD_DIM + WIDTH - 1) // WIDTH):
            found = found + (load_matrix(matrix, chunk, WIDTH),)  # noqa: RUF005
    return found


@triton.jit
def load_transformed(
    view, at, length, matrix, matrices, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr,
):  # fmt: skip
    """UNIT times a block of rows, transformed, in float32: a tuple of tiles [BLOCK, WIDTH]. Rows
    past the end repeat the last one, which changes no scale; a block of no rows is 0."""
    batch, head, tile = at
    rows = tl.minimum(tile * BLOCK + tl.arange(0, BLOCK), length - 1)
    present = (rows >= tile * BLOCK)[:, None]
    loaded = ()
    for chunk in tl.static_range((HEAD_DIM + WIDTH - 1) // WIDTH):
        channels = chunk * WIDTH + tl.arange(0, WIDTH)
        pointers = row_pointers(view, batch, head, rows[:, None], channels[None, :])
        exists = present
        if HEAD_DIM % WIDTH != 0:
            exists = exists & (channels < HEAD_DIM)[None, :]
        loaded = loaded + (tl.load(pointers, mask=exists, other=0.0),)  # noqa: RUF005
    found = ()
    for chunk in tl.static_range(len(loaded)):
        if SIZE > 0:
            if len(matrices) > 0:  # noqa: SIM108 (known when compiling)
                entries = matrices[chunk]
            else:
                entries = load_matrix(matrix, chunk, WIDTH)
            found = found + (tl.dot(loaded[chunk], entries),)  # noqa: RUF005
        else:
            found = found + (loaded[chunk].to(tl.float32) * UNIT,)  # noqa: RUF005
    if SIZE > 0:
        found = mixed(found, SIZE)
    return found


@triton.jit
def quantise_block(
    view, blocks, program, matrix, matrices, mean, mean_heads, shift, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """A block of queries or keys of a head."""
    batch, head, tile, _ = view.find(program, view.data, BLOCK)
    length, at = num_rows(view, batch), (batch, head, tile)
    chunks = load_transformed(view, at, length, matrix, matrices, HEAD_DIM, WIDTH, SIZE)
    means = ()
    if mean is not None:
        number = batch * mean_heads + head // GROUP
        for chunk in tl.static_range(len(chunks)):
            means = means + (load_mean(mean, number, chunk, HEAD_DIM, WIDTH),)  # noqa: RUF005
        if shift is None:
            smoothed = ()
            for chunk in tl.static_range(len(chunks)):
                smoothed = smoothed + (chunks[chunk] - means[chunk],)  # noqa: RUF005
            chunks = smoothed
    size = largest_of(chunks)
    if shift is not None and SCALES != "largest":
        rows = tile * BLOCK + tl.arange(0, BLOCK)
        product = chunks[0] * means[0]
        for chunk in tl.static_range(1, len(chunks)):
            product += chunks[chunk] * means[chunk]
        product = tl.sum(product, 1) * (1.0 / (UNIT * UNIT))
        # A row that holds NaN gets NaN wherever it sees a key, whatever is added to its lse.
        counts = (tl.abs(product) < float("inf")) | (size < float("inf"))
        product = tl.where(counts, product, 0.0)
        store_numbers(shift, batch, head, rows, length, product)
    if (size < float("inf")) == 0:
        size = largest_finite(chunks)
        chunks = without_inf(chunks)
    unit = scale_of(size, blocks, at, length, SCALES, UNIT)
    if SCALES != "largest":
        store_rows(blocks.numbers, at, length, chunks, 1.0 / unit, HEAD_DIM, WIDTH)


@triton.jit
def store_rows(
    numbers, at, length, chunks, factor, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Write a block of rows times a factor as e4m3 numbers, but those past the end.

    Triton would have one layout for all that a kernel loads and stores of one shape: of 16 numbers
    a thread, for which loads of 16 bits then fetch each line twice. So stores have another shape.
    """
    batch, head, tile = at
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    for chunk in tl.static_range(len(chunks)):
        channels = chunk * WIDTH + tl.arange(0, WIDTH)
        exists = (rows < length)[:, None, None]
        if HEAD_DIM % WIDTH != 0:
            exists = exists & (channels < HEAD_DIM)[None, None, :]
        pointers = row_pointers(numbers, batch, head, rows[:, None, None], channels[None, None, :])
        # As bytes, since the interpreter gives e4m3 numbers no other shape.
        made = as_e4m3(chunks[chunk] * factor).to(tl.uint8, bitcast=True)
        tl.store(pointers.to(tl.pointer_type(tl.uint8)), made[:, None, :], mask=exists)


@triton.jit
def fp8_quantise_rows(
    view, blocks, matrix, mean, shift, mean_heads, num_blocks, at_once, GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr, SCALES: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One program: `at_once` blocks of queries or keys, of which it loads some ahead.

    blocks: Blocks. GROUP: heads that share a mean of `fp8_mean_keys`, if there are means. shift:
    where products of queries with these go; None for keys, which they are subtracted from. SCALES:
    "own" writes scales of blocks, "given" reads scales, and "largest" writes nothing but the size
    of each block's largest number.
    """
    first = tl.program_id(0) * at_once
    if shift is None:  # the keys that were summed last come first: the L2 still has them
        first = (tl.num_programs(0) - 1) * at_once - first
    matrices = load_matrices(matrix, HEAD_DIM, WIDTH, SIZE)
    for block in tl.range(first, tl.minimum(first + at_once, num_blocks), num_stages=STAGES):
        quantise_block(
            view, blocks, block, matrix, matrices, mean, mean_heads, shift, GROUP, HEAD_DIM, WIDTH,
            SIZE, SCALES,
        )  # fmt: skip


# ---- values --------------------------------------------------------------------------------------


# A thread that holds a product's result has keys 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16; of an
# operand of e4m3 numbers it has places 4t to 4t + 3. So a tile of values holds the keys of each 16
# in such an order that weights are an operand as they stand.


@triton.jit
def operand_key(place):
    """Which key of a block stands at a place of its tile."""
    return (place & ~15) | ((place & 2) << 2) | ((place & 12) >> 1) | (place & 1)


@triton.jit
def operand_place(key):
    """Where in its tile a key of a block stands."""
    return (key & ~15) | ((key & 6) << 1) | ((key & 8) >> 2) | (key & 1)


@triton.jit
def quantise_values(
    value, blocks, program, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    SCALES: tl.constexpr, AS_OPERAND: tl.constexpr,
):  # fmt: skip
    """A block of values of a head as a tile [VALUE_DIM, BLOCK] of e4m3 numbers; past the end they
    are 0.

    Keys of four neighbouring places are loaded into one thread, and change places with channels as
    four bytes together.
    """
    batch, head, tile, _ = value.find(program, value.data, BLOCK)
    length = num_rows(value, batch)
    if tile * BLOCK < length:
        channels, words = tl.arange(0, VALUE_WIDTH), tl.arange(0, BLOCK // 4)
        loaded = ()
        for byte in tl.static_range(4):
            place = words * 4 + byte
            rows = tile * BLOCK + (operand_key(place) if AS_OPERAND else place)
            exists = (rows < length)[:, None]
            if VALUE_DIM != VALUE_WIDTH:
                exists = exists & (channels < VALUE_DIM)[None, :]
            pointers = row_pointers(value, batch, head, rows[:, None], channels[None, :])
            loaded = loaded + (tl.load(pointers, mask=exists, other=0.0),)  # noqa: RUF005
        if SCALES != "none":
            numbers = ()
            for byte in tl.static_range(4):
                numbers = numbers + (loaded[byte].to(tl.float32),)  # noqa: RUF005
            size = largest_of(numbers)
            if (size < float("inf")) == 0:
                size = largest_finite(numbers)
                numbers = without_inf(numbers)
            unit = scale_of(size, blocks, (batch, head, tile), length, SCALES, 1.0)
            loaded = numbers
            if SCALES != "largest":
                factor = 1.0 / unit
                scaled = ()
                for byte in tl.static_range(4):
                    scaled = scaled + (numbers[byte] * factor,)  # noqa: RUF005
                loaded = scaled
        if SCALES != "largest":
            made = tl.trans(as_e4m3_words(loaded))  # [VALUE_WIDTH, BLOCK // 4]
            start = row_pointers(blocks.numbers, batch, head, tile, 0)
            start = start.to(tl.pointer_type(tl.int32))
            pointers = start + (channels[:, None] * (BLOCK // 4) + words[None, :])
            if VALUE_DIM == VALUE_WIDTH:
                tl.store(pointers, made)
            else:
                tl.store(pointers, made, mask=(channels < VALUE_DIM)[:, None])


@triton.jit
def fp8_quantise_values(
    value, of_value, key, sums, matrix, value_programs, sum_programs, VALUE_DIM: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    WIDTH: tl.constexpr, SIZE: tl.constexpr, SUM_ROWS: tl.constexpr, SCALES: tl.constexpr,
    AS_OPERAND: tl.constexpr,
):  # fmt: skip
    """One program: a block of values of a head, then of others the sum of SUM_ROWS of its keys, or
    the matrix of WIDTH channels, which other kernels will load.

    of_value: Blocks, whose numbers are tiles. SCALES: as in `fp8_quantise_rows`; "none": values are
    e4m3 numbers already. AS_OPERAND: keys stand where `operand_place` says. sums, matrix: None: not
    asked for.
    """
    program = tl.program_id(0)
    if program < value_programs:
        quantise_values(value, of_value, program, VALUE_DIM, VALUE_WIDTH, SCALES, AS_OPERAND)
    program -= value_programs
    if sums is not None:  # noqa: SIM102 (known when compiling)
        if (program >= 0) & (program < sum_programs):
            sum_keys(key, sums, program, SUM_ROWS, HEAD_DIM, HEAD_WIDTH)
    program -= sum_programs
    if matrix is not None:  # noqa: SIM102
        if program >= 0:
            write_matrix(matrix, program, WIDTH, SIZE)


@triton.jit
def load_values(
    tiles, batch, head, start, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    KV_TILE: tl.constexpr,
):  # fmt: skip
    """[VALUE_WIDTH, KV_TILE] of the values from row `start` on, which all lie in one block."""
    channels = tl.arange(0, VALUE_WIDTH)[:, None]
    if KV_TILE == BLOCK:  # noqa: SIM108 (known when compiling)
        first = 0
    else:  # a product with a constant is known to be its multiple: rows are loaded 16 at once
        first = start % BLOCK // KV_TILE * KV_TILE
    within = channels * BLOCK + (first + tl.arange(0, KV_TILE)[None, :])
    pointers = row_pointers(tiles, batch, head, start // BLOCK, within)
    if VALUE_DIM == VALUE_WIDTH:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=channels < VALUE_DIM, other=0.0)
    return found
