"""The gated delta rule, rows of a chunk: what kernels load of them, and how far the state faded.

Decay is held as its sums from a chunk's first token on, in two parts: float32, and in float16 what
rounding took. A difference of two sums is then as exact as its own size says, whatever stood before
it: at 64 tokens of −100 the sum alone is off by 2e-4, and so would be all factors of tokens behind
them. Row r has the sum up to and with its own decay. In kernels a `Decay` is None where the state
does not fade.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.features import load_number
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import first_slot, num_rows, row_pointers, tile_pointers, wide

STRONGEST = tl.constexpr(-10000.0)  # a logarithm whose exponential is 0, and which sums up
NORM_EPS = tl.constexpr(1e-6)  # as runtime/delta_spec.py has it


class Decay(NamedTuple):
    """Sums of decay from the chunk's first token on, for each row, or each row and channel."""

    high: Any  # View of float32
    low: Any  # View of float16


class Faded(NamedTuple):
    """Rows that fade by channel as they meet states, one for each value head; else None."""

    query: Any  # View of e^G ∘ query, divided by its length where that is asked for
    key: Any  # of e^G ∘ key
    kept: Any  # of e^{G_last − G} ∘ key


class Meeting(NamedTuple):
    """What products of a chunk's rows with states are multiplied by, where all channels fade alike:
    Views of numbers, one for each row of each value head."""

    asking: Any  # of queries: scale · e^G / length
    asked: Any  # of keys that ask: beta · e^G / length
    kept: Any  # of keys that are written: e^{G_last − G} / length


class Factors(NamedTuple):
    """What rows of queries and keys are multiplied by to have length 1; None: nothing."""

    query: Any  # View of numbers
    key: Any


# ---- before the chunks -----------------------------------------------------------------------


@triton.jit
def delta_sums(
    decay, high, low, CHUNK: tl.constexpr, HEADS: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    """One program: the sums of decay of one chunk, AT_ONCE heads, whose channels all have the same.

    Heads of packed rows lie side by side in memory. high: its heads are so many of the others.
    """
    batch, group, chunk, _ = high.find(tl.program_id(0), high.data, CHUNK)
    rows = (chunk * CHUNK + tl.arange(0, CHUNK))[:, None]
    heads = (group * AT_ONCE + tl.arange(0, AT_ONCE))[None, :]
    exist = (rows < num_rows(high, batch)) & (heads < HEADS)
    at = wide(heads) * decay.strides[1]
    each = tl.load(row_pointers(decay, batch, 0, rows, at), mask=exist, other=0.0)
    at = wide(heads) * high.strides[1]
    store_sums(high, low, batch, 0, rows, at, exist, tl.cumsum(usable(each), 0))


@triton.jit
def delta_channel_sums(
    decay, high, low, CHUNK: tl.constexpr, CHANNELS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """`delta_sums` where channels have each their own, WIDTH at a time.

    A thread sums up a channel's rows one after the other, and asks for four at once.
    """
    batch, head, chunk, _ = high.find(tl.program_id(0), high.data, CHUNK)
    length = num_rows(high, batch)
    for left in range(0, CHANNELS, WIDTH):
        channels = left + tl.arange(0, WIDTH)
        total = tl.zeros([WIDTH], tl.float64)
        for row in range(chunk * CHUNK, (chunk + 1) * CHUNK, 4):
            at = batch, head, channels, channels < CHANNELS, length
            first, second = load_decay(decay, at, row), load_decay(decay, at, row + 1)
            third, fourth = load_decay(decay, at, row + 2), load_decay(decay, at, row + 3)
            total = add_row(high, low, at, row, total, first)
            total = add_row(high, low, at, row + 1, total, second)
            total = add_row(high, low, at, row + 2, total, third)
            total = add_row(high, low, at, row + 3, total, fourth)


@triton.jit
def load_decay(decay, at, row):
    """One row; at: batch entry, head, channels and which there are, the sequence's length."""
    batch, head, channels, exist, length = at
    pointers = row_pointers(decay, batch, head, row, channels)
    return tl.load(pointers, mask=exist & (row < length), other=0.0)


@triton.jit
def add_row(high, low, at, row, total, each):
    """The sums up to and with a row, which are written."""
    batch, head, channels, exist, length = at
    total += usable(each)
    store_sums(high, low, batch, head, row, channels, exist & (row < length), total)
    return total


@triton.jit
def usable(each):
    """Decay in float64. −inf less −inf would be NaN, which only NaN may be."""
    each = each.to(tl.float64)
    return tl.where(each < STRONGEST, STRONGEST, each)


@triton.jit
def store_sums(high, low, batch, head, rows, channels, exists, total):
    """Write sums in two parts, which lie alike."""
    rounded = total.to(tl.float32)
    rest = (total - rounded.to(tl.float64)).to(tl.float16)
    tl.store(row_pointers(high, batch, head, rows, channels), rounded, mask=exists)
    tl.store(row_pointers(low, batch, head, rows, channels), rest, mask=exists)


@triton.jit
def delta_norms(rows, factors, TILE: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """One program: 1 / length of some rows of one head."""
    batch, head, tile, _ = factors.find(tl.program_id(0), factors.data, TILE)
    at, channels = tile * TILE + tl.arange(0, TILE), tl.arange(0, WIDTH)
    exist = at < num_rows(factors, batch)
    pointers = row_pointers(rows, batch, head, at[:, None], channels[None, :])
    exists = exist[:, None] & (channels < DIM)[None, :]
    numbers = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    factor = one_over_length(tl.sum(numbers * numbers, 1))
    tl.store(row_pointers(factors, batch, head, at, 0), factor, mask=exist)


@triton.jit
def one_over_length(squares):
    """What rows are multiplied by to have length 1, from the sums of their squares."""
    return 1.0 / tl.sqrt_rn(squares + NORM_EPS)


# ---- a chunk ------------------------------------------------------------------------------------


@triton.jit
def chunk_slot(view, batch, chunk, CHUNK: tl.constexpr, PACKED: tl.constexpr):
    """Where in memory a chunk's state lies, among those of all chunks of all sequences."""
    if PACKED:
        slot = first_slot(view.data, batch, CHUNK) + chunk
    else:
        slot = batch * tl.cdiv(view.data[0], CHUNK) + chunk
    return slot


@triton.jit
def load_channels(
    view, batch, head, start, exist, channels, DIM: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Rows of a chunk from `start` on × channels, or turned over; 0 where there is nothing.

    What is loaded turned over may stand turned over on a product's left; what was computed may not
    (Triton 3.6 on Hopper).
    """
    if TRANSPOSED:
        channels_of, exists = channels[:, None], exist[None, :]
    else:
        channels_of, exists = channels[None, :], exist[:, None]
    if DIM // channels.shape[0] * channels.shape[0] != DIM:
        exists = exists & (channels_of < DIM)
    pointers = tile_pointers(
        view, batch, head, start, channels_of, exist.shape[0], True, TRANSPOSED
    )
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def row_factors(view, batch, head, start, exist):
    """The factor of each row: [rows, 1]; the number 1 where there are none."""
    factor = 1.0
    if view is not None:
        rows = start + tl.arange(0, exist.shape[0])
        factor = load_number(view, batch, head, rows, exist)[:, None]
    return factor


@triton.jit
def load_sums(decay, batch, head, start, exist, channels, META: tl.constexpr):
    """The two parts of the sums of a chunk's rows: [rows, 1], or [rows, channels] by channel."""
    if META.BY_CHANNEL:
        high = load_channels(decay.high, batch, head, start, exist, channels, META.HEAD_DIM, False)
        low = load_channels(decay.low, batch, head, start, exist, channels, META.HEAD_DIM, False)
    else:
        rows = start + tl.arange(0, exist.shape[0])
        high = load_number(decay.high, batch, head, rows, exist)[:, None]
        low = load_number(decay.low, batch, head, rows, exist)[:, None]
    return high, low.to(tl.float32)


@triton.jit
def last_sums(decay, batch, head, start, length, channels, META: tl.constexpr):
    """The two parts of the sums of a chunk's last row: numbers, or [channels] by channel; 0 of a
    sequence without rows."""
    row = tl.minimum(start + META.CHUNK, length) - 1
    if META.BY_CHANNEL:
        exists = (channels < META.HEAD_DIM) & (length > 0)
        high = tl.load(row_pointers(decay.high, batch, head, row, channels), exists, 0.0)
        low = tl.load(row_pointers(decay.low, batch, head, row, channels), exists, 0.0)
    else:
        high = tl.load(row_pointers(decay.high, batch, head, row, 0), length > 0, 0.0)
        low = tl.load(row_pointers(decay.low, batch, head, row, 0), length > 0, 0.0)
    return high, low.to(tl.float32)


@triton.jit
def left_of_state(lasts, number, channels, META: tl.constexpr):
    """What a chunk leaves of the state before it: a number, or [1, channels] by channel.

    lasts: memory of e^{G_last} for each chunk, head and (by channel) channel; None: 1. number: of
    the state among those of all chunks and heads.
    """
    found = 1.0
    if lasts is not None:
        if META.BY_CHANNEL:
            pointers = lasts + (wide(number) * META.HEAD_DIM + channels)
            found = tl.load(pointers, mask=channels < META.HEAD_DIM, other=0.0)[None, :]
        else:
            found = tl.load(lasts + number)
    return found


@triton.jit
def load_rows_of_state(view, batch, head, start, exist, channels, META: tl.constexpr):
    """Queries or keys as they meet a state: as they are, what they want still being in a `Meeting`;
    or, where they fade by channel, those of a value head that were multiplied before."""
    key_head = head if META.BY_CHANNEL else head // META.GROUP
    return load_channels(view, batch, key_head, start, exist, channels, META.HEAD_DIM, False)


@triton.jit
def load_across(view, batch, head, start, exist):
    """One number for each row, [1, rows]."""
    rows = start + tl.arange(0, exist.shape[0])
    return load_number(view, batch, head, rows, exist).to(tl.float32)[None, :]


@triton.jit
def load_factors(view, batch, head, start, exist, other, META: tl.constexpr):
    """What products of rows with a state want still, [1, rows] (`Meeting`); `other` by channel."""
    factor = other
    if not META.BY_CHANNEL:
        factor = load_across(view, batch, head, start, exist)
    return factor


# ---- states in memory --------------------------------------------------------------------------


@triton.jit
def state_pointers(
    memory, number, channels, values, META: tl.constexpr, TRANSPOSED: tl.constexpr = False
):
    """Addresses of a state [channels, values], or turned over, and what of it there is."""
    first = memory + wide(number) * (META.HEAD_DIM * META.VALUE_DIM)
    if TRANSPOSED:
        place = channels[None, :] * META.VALUE_DIM + values[:, None]
        exists = (channels < META.HEAD_DIM)[None, :] & (values < META.VALUE_DIM)[:, None]
    else:
        place = channels[:, None] * META.VALUE_DIM + values[None, :]
        exists = (channels < META.HEAD_DIM)[:, None] & (values < META.VALUE_DIM)[None, :]
    return first + place, exists


@triton.jit
def turned_state_pointers(memory, number, channels, values, META: tl.constexpr):
    """Addresses of a state that lies in memory as scans hold it, [values, channels], and what of it
    there is."""
    first = memory + wide(number) * (META.HEAD_DIM * META.VALUE_DIM)
    exists = (channels < META.HEAD_DIM)[None, :] & (values < META.VALUE_DIM)[:, None]
    return first + (values[:, None] * META.HEAD_DIM + channels[None, :]), exists


@triton.jit
def store_channels(view, batch, head, start, exist, channels, tile, DIM: tl.constexpr):
    """Write rows of a chunk × channels."""
    pointers = tile_pointers(view, batch, head, start, channels[None, :], exist.shape[0], True)
    exists = exist[:, None]
    if DIM // channels.shape[0] * channels.shape[0] != DIM:
        exists = exists & (channels < DIM)[None, :]
    tl.store(pointers, tile.to(view.ptr.dtype.element_ty), mask=exists)


@triton.jit
def store_turned(view, batch, head, start, exist, channels, tile, DIM: tl.constexpr):
    """Write rows of a chunk, given as channels × rows."""
    pointers = tile_pointers(
        view, batch, head, start, channels[:, None], exist.shape[0], True, True
    )
    exists = exist[None, :]
    if DIM // channels.shape[0] * channels.shape[0] != DIM:
        exists = exists & (channels < DIM)[:, None]
    tl.store(pointers, tile.to(view.ptr.dtype.element_ty), mask=exists)
