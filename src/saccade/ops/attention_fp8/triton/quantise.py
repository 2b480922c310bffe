"""Quantise: 16-bit rows as e4m3 numbers with scales, a block of rows of one head in each program.

`saccade.ops.attention_fp8.quantise` says what is computed. Keys are read once more than that for
their mean. Values leave in tiles of their own, [channels, keys] for each block of keys: a GPU
multiplies e4m3 numbers only if those that are added up lie side by side.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false, reportAssignmentType=false
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import num_rows, row_pointers, store_numbers, wide
from saccade.ops.attention_fp8.triton.numbers import BLOCK, as_e4m3, load_scale

LARGEST = tl.constexpr(448.0)
TINIEST = tl.constexpr(1.1754943508222875e-38)  # of scales, which divide
SUMS_AT_ONCE = tl.constexpr(32)


# ---- means ---------------------------------------------------------------------------------------


@triton.jit
def fp8_key_sums(key, sums, HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr):
    """The sum of a block of keys, without what is nonfinite; `sums` is a View of rows of blocks."""
    batch, head, tile, _ = key.find(tl.program_id(0), key.data, BLOCK)
    rows, channels = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, HEAD_WIDTH)
    exists = (rows < num_rows(key, batch))[:, None] & (channels < HEAD_DIM)[None, :]
    pointers = row_pointers(key, batch, head, rows[:, None], channels[None, :])
    keys = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    total = tl.sum(tl.where(tl.abs(keys) < float("inf"), keys, 0.0), 0)
    here = (tile * BLOCK < num_rows(key, batch)) & (channels < HEAD_DIM)
    tl.store(row_pointers(sums, batch, head, tile, channels), total, mask=here)


@triton.jit
def fp8_key_means(
    key, sums, mean, matrix,
    HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """The transformed mean of a head's keys, from the sums of their blocks.

    Grid: batch entries × heads × chunks of WIDTH channels. matrix, SIZE: see `transformed`.
    """
    chunks: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    first = tl.program_id(0) % chunks * WIDTH
    row = tl.program_id(0) // chunks
    head, batch = row % key.data[-2], row // key.data[-2]
    length, channels = num_rows(key, batch), first + tl.arange(0, WIDTH)
    blocks, total = tl.cdiv(length, BLOCK), tl.zeros([WIDTH], tl.float32)
    for start in range(0, blocks, SUMS_AT_ONCE):
        block = start + tl.arange(0, SUMS_AT_ONCE)
        exists = (block < blocks)[:, None] & (channels < HEAD_DIM)[None, :]
        pointers = row_pointers(sums, batch, head, block[:, None], channels[None, :])
        total += tl.sum(tl.load(pointers, mask=exists, other=0.0), 0)
    found = total / tl.maximum(length, 1).to(tl.float32)
    if SIZE > 0:
        entries = load_matrix(matrix, first, WIDTH).to(tl.float32)
        found = tl.sum(found[:, None] * entries, 0) * (1.0 / tl.sqrt(SIZE * 1.0))
    tl.store(mean + wide(row) * HEAD_DIM + channels, found, mask=channels < HEAD_DIM)


# ---- the transform -------------------------------------------------------------------------------


@triton.jit
def hashed(numbers):
    """32 bits that look random (`quantise.py` above has the same)."""
    bits = (numbers + 1).to(tl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA6B
    return (bits ^ (bits >> 13)) * 0xC2B2AE35


@triton.jit
def fp8_transform(matrix, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """The orthogonal matrix times sqrt(SIZE), WIDTH × WIDTH entries for each chunk of channels, of
    which each program makes one.

    An entry of a Hadamard matrix is negative where the indices have an odd number of bits in
    common.
    """
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    common = row & column & (SIZE - 1)
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = (common ^ (common >> 1)) & 1
    negative = common ^ (hashed(tl.program_id(0) * WIDTH + row) >> 31).to(tl.int32)
    entries = tl.where(row // SIZE == column // SIZE, 1.0 - 2.0 * negative.to(tl.float32), 0.0)
    place = tl.program_id(0) * WIDTH * WIDTH + row * WIDTH + column
    tl.store(matrix + place, entries.to(matrix.dtype.element_ty))


@triton.jit
def load_matrix(matrix, first, WIDTH: tl.constexpr):
    """The matrix of the chunk of channels from `first` on."""
    place = tl.arange(0, WIDTH)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    return tl.load(matrix + first * WIDTH + place)


# ---- queries and keys ----------------------------------------------------------------------------


@triton.jit
def transformed(
    view, at, first, matrix, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr
):  # fmt: skip
    """WIDTH channels of a block of rows, transformed, in float32; SIZE 0: as they are."""
    batch, head, tile, _ = at
    rows, channels = tile * BLOCK + tl.arange(0, BLOCK), first + tl.arange(0, WIDTH)
    exists = (rows < num_rows(view, batch))[:, None] & (channels < HEAD_DIM)[None, :]
    pointers = row_pointers(view, batch, head, rows[:, None], channels[None, :])
    chunk = tl.load(pointers, mask=exists, other=0.0)
    if SIZE > 0:
        numbers = tl.dot(chunk, load_matrix(matrix, first, WIDTH)) * (1.0 / tl.sqrt(SIZE * 1.0))
    else:
        numbers = chunk.to(tl.float32)
    return numbers


@triton.jit
def mean_of(mean, at, first, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH channels of the transformed mean key."""
    channels = first + tl.arange(0, WIDTH)
    pointers = mean + wide(at[3]) * HEAD_DIM + channels
    return tl.load(pointers, mask=channels < HEAD_DIM, other=0.0)[None, :]


@triton.jit
def smoothed(
    view, at, first, matrix, mean, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, SUBTRACT: tl.constexpr,
):  # fmt: skip
    """WIDTH channels of a block of rows, transformed, and of keys less their mean."""
    numbers = transformed(view, at, first, matrix, HEAD_DIM, WIDTH, SIZE)
    if mean is not None and SUBTRACT:
        exists = (at[2] * BLOCK + tl.arange(0, BLOCK) < num_rows(view, at[0]))[:, None]
        numbers = tl.where(exists, numbers - mean_of(mean, at, first, HEAD_DIM, WIDTH), 0.0)
    return numbers


@triton.jit
def largest_of(numbers):
    """The size of the largest number of a tile that is finite."""
    sizes = tl.abs(numbers)
    return tl.max(tl.max(tl.where(sizes < float("inf"), sizes, 0.0), 1), 0)


@triton.jit
def in_units(numbers, scale):
    """Numbers over their scale as e4m3; what is nonfinite becomes NaN."""
    units = tl.div_rn(numbers, numbers * 0.0 + scale)
    units = tl.minimum(tl.maximum(units, -LARGEST), LARGEST)
    return as_e4m3(tl.where(tl.abs(numbers) < float("inf"), units, float("nan")))


@triton.jit
def scale_of(largest, scale, batch, head, tile, SCALES: tl.constexpr):
    """The scale of a block: of its own largest number, or the one that is given."""
    if SCALES == "own":
        found = tl.maximum(tl.div_rn(largest, LARGEST + largest * 0.0), TINIEST)
    else:
        found = load_scale(scale, batch, head, tile * BLOCK)
    return found


@triton.jit
def fp8_quantise_rows(
    view, numbers, scale, largest, matrix, mean, mean_heads, shift,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows of a head. WIDTH channels at a time.

    matrix, mean: of `fp8_transform` and `fp8_key_means`, or None. shift: where products of queries
    with the mean go; None for keys, which it is subtracted from. SCALES: "own" writes scales of
    blocks, "given" reads scales, and "largest" writes nothing but the size of each block's largest
    number (to `largest`, a View of blocks).
    """
    SUBTRACT: tl.constexpr = shift is None
    CHUNKS: tl.constexpr = (HEAD_DIM + WIDTH - 1) // WIDTH
    batch, head, tile, _ = view.find(tl.program_id(0), view.data, BLOCK)
    at = (batch, head, tile, batch * mean_heads + head // HEADS_PER_KV_HEAD)
    present = tile * BLOCK < num_rows(view, batch)
    size = tl.full([], 0.0, tl.float32)
    if CHUNKS == 1:
        only = smoothed(view, at, 0, matrix, mean, HEAD_DIM, WIDTH, SIZE, SUBTRACT)
        size = largest_of(only)
    elif SCALES != "given":
        for index in tl.range(0, CHUNKS, num_stages=1):
            size = tl.maximum(size, largest_of(smoothed(
                view, at, index * WIDTH, matrix, mean, HEAD_DIM, WIDTH, SIZE, SUBTRACT
            )))  # fmt: skip
    if SCALES == "largest":
        tl.store(row_pointers(largest, batch, head, tile, 0), size, mask=present)
    else:
        unit = scale_of(size, scale, batch, head, tile, SCALES)
        if SCALES == "own":
            tl.store(row_pointers(scale, batch, head, tile, 0), unit, mask=present)
        product = tl.zeros([BLOCK], tl.float32)
        if CHUNKS == 1:
            product = store_chunk(numbers, at, 0, only, unit, mean, product, HEAD_DIM, SUBTRACT)
        else:
            for index in tl.range(0, CHUNKS, num_stages=1):
                chunk = smoothed(
                    view, at, index * WIDTH, matrix, mean, HEAD_DIM, WIDTH, SIZE, SUBTRACT
                )
                product = store_chunk(
                    numbers, at, index * WIDTH, chunk, unit, mean, product, HEAD_DIM, SUBTRACT
                )
        if shift is not None:
            rows = tile * BLOCK + tl.arange(0, BLOCK)
            store_numbers(shift, batch, head, rows, num_rows(view, batch), product)


@triton.jit
def store_chunk(
    numbers, at, first, chunk, unit, mean, product, HEAD_DIM: tl.constexpr, SUBTRACT: tl.constexpr
):  # fmt: skip
    """Write channels of a block of rows, but those past the end; add up products with the mean."""
    batch, head, tile, _ = at
    WIDTH: tl.constexpr = chunk.shape[1]
    rows, channels = tile * BLOCK + tl.arange(0, BLOCK), first + tl.arange(0, WIDTH)
    exists = (rows < num_rows(numbers, batch))[:, None] & (channels < HEAD_DIM)[None, :]
    pointers = row_pointers(numbers, batch, head, rows[:, None], channels[None, :])
    tl.store(pointers, in_units(chunk, unit), mask=exists)
    if mean is not None and not SUBTRACT:
        finite = tl.where(tl.abs(chunk) < float("inf"), chunk, 0.0)
        product += tl.sum(finite * mean_of(mean, at, first, HEAD_DIM, WIDTH), 1)
    return product


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
def fp8_transpose_values(
    value, tiles, scale, largest,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, SCALES: tl.constexpr,
    AS_OPERAND: tl.constexpr,
):  # fmt: skip
    """One program: a block of values of a head as a tile [VALUE_DIM, BLOCK] of e4m3 numbers.

    tiles: a View whose rows are blocks of VALUE_DIM · BLOCK numbers; past the end they are 0.
    SCALES: as in `fp8_quantise_rows`; "none": values are e4m3 numbers already. AS_OPERAND: keys
    stand where `operand_place` says.
    """
    batch, head, tile, _ = value.find(tl.program_id(0), value.data, BLOCK)
    length = num_rows(value, batch)
    present = tile * BLOCK < length
    places = tl.arange(0, BLOCK)
    rows = tile * BLOCK + (operand_key(places) if AS_OPERAND else places)
    channels = tl.arange(0, VALUE_WIDTH)
    exists = (rows < length)[:, None] & (channels < VALUE_DIM)[None, :]
    pointers = row_pointers(value, batch, head, rows[:, None], channels[None, :])
    values = tl.load(pointers, mask=exists, other=0.0)
    if SCALES == "none":
        made = values
    else:
        wide_values = values.to(tl.float32)
        size = largest_of(wide_values)
        if SCALES == "largest":
            tl.store(row_pointers(largest, batch, head, tile, 0), size, mask=present)
            unit = size
        else:
            unit = scale_of(size, scale, batch, head, tile, SCALES)
            if SCALES == "own":
                tl.store(row_pointers(scale, batch, head, tile, 0), unit, mask=present)
        made = in_units(wide_values, unit)
    if SCALES != "largest":
        within = channels[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
        here = present & (channels < VALUE_DIM)[:, None]
        pointers = row_pointers(tiles, batch, head, tile, within)
        tl.store(pointers, tl.trans(made), mask=here)


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
