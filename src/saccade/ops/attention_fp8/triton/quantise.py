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
def fp8_key_means(key, sums, mean, HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr):
    """The mean of a head's keys from the sums of their blocks. Grid: batch entries × heads."""
    head, batch = tl.program_id(0) % key.data[-2], tl.program_id(0) // key.data[-2]
    length, channels = num_rows(key, batch), tl.arange(0, HEAD_WIDTH)
    blocks, total = tl.cdiv(length, BLOCK), tl.zeros([HEAD_WIDTH], tl.float32)
    for first in range(0, blocks, SUMS_AT_ONCE):
        block = first + tl.arange(0, SUMS_AT_ONCE)
        exists = (block < blocks)[:, None] & (channels < HEAD_DIM)[None, :]
        pointers = row_pointers(sums, batch, head, block[:, None], channels[None, :])
        total += tl.sum(tl.load(pointers, mask=exists, other=0.0), 0)
    found = total / tl.maximum(length, 1).to(tl.float32)
    tl.store(mean + wide(tl.program_id(0)) * HEAD_DIM + channels, found, mask=channels < HEAD_DIM)


# ---- queries and keys ----------------------------------------------------------------------------


@triton.jit
def hashed(numbers):
    """32 bits that look random (`quantise.py` above has the same)."""
    bits = (numbers + 1).to(tl.uint32) * 0x9E3779B1
    bits = (bits ^ (bits >> 15)) * 0x85EBCA6B
    return (bits ^ (bits >> 13)) * 0xC2B2AE35


@triton.jit
def transform(first, WIDTH: tl.constexpr, SIZE: tl.constexpr):
    """WIDTH × WIDTH entries of the orthogonal matrix from channel `first` on, times sqrt(SIZE).

    An entry of a Hadamard matrix is negative where the indices have an odd number of bits in
    common.
    """
    row, column = tl.arange(0, WIDTH)[:, None], tl.arange(0, WIDTH)[None, :]
    common = row & column & (SIZE - 1)
    common = common ^ (common >> 4)
    common = common ^ (common >> 2)
    common = (common ^ (common >> 1)) & 1
    negative = common ^ (hashed(first + row) >> 31).to(tl.int32)
    entries = 1.0 - 2.0 * negative.to(tl.float32)
    return tl.where(row // SIZE == column // SIZE, entries, 0.0)


@triton.jit
def load_chunk(view, at, first, mean, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """WIDTH channels of a block of rows and of the mean key, as they lie in memory."""
    batch, head, tile, mean_row = at
    rows, channels = tile * BLOCK + tl.arange(0, BLOCK), first + tl.arange(0, WIDTH)
    exists = (rows < num_rows(view, batch))[:, None] & (channels < HEAD_DIM)[None, :]
    pointers = row_pointers(view, batch, head, rows[:, None], channels[None, :])
    chunk = tl.load(pointers, mask=exists, other=0.0)
    mean_chunk = tl.zeros([WIDTH], tl.float32)
    if mean is not None:
        position = mean + wide(mean_row) * HEAD_DIM + channels
        mean_chunk = tl.load(position, mask=channels < HEAD_DIM, other=0.0)
    return chunk, mean_chunk


@triton.jit
def transformed(
    view, at, first, mean, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, SIZE: tl.constexpr,
    SUBTRACT: tl.constexpr,
):  # fmt: skip
    """WIDTH channels of a block of rows, transformed, and less the mean key if there is one and it
    is to SUBTRACT it; SIZE 0: not transformed."""
    chunk, mean_chunk = load_chunk(view, at, first, mean, HEAD_DIM, WIDTH)
    if SIZE > 0:
        matrix = transform(first, WIDTH, SIZE)
        normal = 1.0 / tl.sqrt(SIZE * 1.0)
        numbers = tl.dot(chunk, matrix.to(chunk.dtype)) * normal
        mean_chunk = tl.sum(mean_chunk[:, None] * matrix, 0) * normal
    else:
        numbers = chunk.to(tl.float32)
    if mean is not None and SUBTRACT:
        rows = at[2] * BLOCK + tl.arange(0, BLOCK)
        exists = (rows < num_rows(view, at[0]))[:, None]
        numbers = tl.where(exists, numbers - mean_chunk[None, :], 0.0)
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
    view, numbers, scale, largest, mean, mean_heads, shift,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr,
    SIZE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One program: a block of rows of a head. WIDTH channels at a time.

    mean: float32 [batch, mean_heads, head_dim], or None. shift: where products of queries with it
    go; None for keys, which it is subtracted from. SCALES: "own" writes scales of blocks, "given"
    reads scales, and "largest" writes nothing but the size of each block's largest number (to
    `largest`, a View of blocks).
    """
    SUBTRACT: tl.constexpr = shift is None
    batch, head, tile, _ = view.find(tl.program_id(0), view.data, BLOCK)
    at = (batch, head, tile, batch * mean_heads + head // HEADS_PER_KV_HEAD)
    present = tile * BLOCK < num_rows(view, batch)
    first_chunk = transformed(view, at, 0, mean, HEAD_DIM, WIDTH, SIZE, SUBTRACT)
    size = largest_of(first_chunk)
    if SCALES != "given":
        for first in tl.static_range(WIDTH, HEAD_DIM, WIDTH):
            chunk = transformed(view, at, first, mean, HEAD_DIM, WIDTH, SIZE, SUBTRACT)
            size = tl.maximum(size, largest_of(chunk))
    if SCALES == "largest":
        tl.store(row_pointers(largest, batch, head, tile, 0), size, mask=present)
    else:
        unit = scale_of(size, scale, batch, head, tile, SCALES)
        if SCALES == "own":
            tl.store(row_pointers(scale, batch, head, tile, 0), unit, mask=present)
        store_chunk(numbers, at, 0, in_units(first_chunk, unit), HEAD_DIM)
        for first in tl.static_range(WIDTH, HEAD_DIM, WIDTH):
            chunk = transformed(view, at, first, mean, HEAD_DIM, WIDTH, SIZE, SUBTRACT)
            store_chunk(numbers, at, first, in_units(chunk, unit), HEAD_DIM)
        if shift is not None:
            store_shift(view, at, mean, shift, HEAD_DIM, WIDTH)


@triton.jit
def store_chunk(numbers, at, first, chunk, HEAD_DIM: tl.constexpr):
    """Write channels of a block of rows; those past the end are not written."""
    batch, head, tile, _ = at
    rows, channels = tile * BLOCK + tl.arange(0, BLOCK), first + tl.arange(0, chunk.shape[1])
    exists = (rows < num_rows(numbers, batch))[:, None] & (channels < HEAD_DIM)[None, :]
    tl.store(
        row_pointers(numbers, batch, head, rows[:, None], channels[None, :]), chunk, mask=exists
    )


@triton.jit
def store_shift(view, at, mean, shift, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr):
    """What smoothing takes from the products of each query row: its product with the mean key."""
    batch, head, tile, _ = at
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.static_range(0, HEAD_DIM, WIDTH):
        chunk, mean_chunk = load_chunk(view, at, first, mean, HEAD_DIM, WIDTH)
        queries = chunk.to(tl.float32)
        queries = tl.where(tl.abs(queries) < float("inf"), queries, 0.0)
        total += tl.sum(queries * mean_chunk[None, :], 1)
    rows = tile * BLOCK + tl.arange(0, BLOCK)
    store_numbers(shift, batch, head, rows, num_rows(view, batch), total)


# ---- values --------------------------------------------------------------------------------------


@triton.jit
def fp8_transpose_values(
    value, tiles, scale, largest,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One program: a block of values of a head as a tile [VALUE_DIM, BLOCK] of e4m3 numbers.

    tiles: a View whose rows are blocks of VALUE_DIM · BLOCK numbers; past the end they are 0.
    SCALES: as in `fp8_quantise_rows`; "none": values are e4m3 numbers already.
    """
    batch, head, tile, _ = value.find(tl.program_id(0), value.data, BLOCK)
    length = num_rows(value, batch)
    present = tile * BLOCK < length
    rows, channels = tile * BLOCK + tl.arange(0, BLOCK), tl.arange(0, VALUE_WIDTH)
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
    within = channels * BLOCK + (start % BLOCK + tl.arange(0, KV_TILE)[None, :])
    pointers = row_pointers(tiles, batch, head, start // BLOCK, within)
    if VALUE_DIM == VALUE_WIDTH:
        found = tl.load(pointers)
    else:
        found = tl.load(pointers, mask=channels < VALUE_DIM, other=0.0)
    return found
