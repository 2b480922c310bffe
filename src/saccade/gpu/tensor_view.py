"""Tensor view: the only place where a kernel turns (batch, head, row) into addresses.

A View is a tensor as a kernel sees it: its memory, and functions that know where a sequence and
its rows live (`position`) and which tile of which sequence a program works on (`find`).
Channels have stride 1.

Packed sequences lie back to back. Their View's data are offsets, sequences, heads and tokens. The
offsets were not checked: reading them would make the host wait. So what stands there is moved to
between 0 and the number of tokens where it is loaded, and a sequence that would end before it
begins has no rows. Then no offset leads out of a tensor, and offsets that descend only make results
that mean nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import is_hopper, tl, triton
from saccade.gpu.online_softmax import sum_of_rows

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false


@triton.jit
def nothing_ahead(view, batch, start, length, ROWS: tl.constexpr):
    """Of rows that follow each other in memory nothing is read ahead, to know where they are."""
    return (start * 0,)


@triton.jit
def side_by_side(
    view, ahead, batch, head, start, channels, ROWS: tl.constexpr, SPARING: tl.constexpr
):
    """Addresses of ROWS such rows from `start` on × channels."""
    return tile_pointers(view, batch, head, start, channels, ROWS, SPARING)


@triton.jit
def no_padding(view, number, rows, channels, DIM: tl.constexpr):
    """Behind the rows of dense sequences there is nothing to fill; see `fill_padding`."""


class View(NamedTuple):
    """A tensor as a kernel argument: rows of channels, by batch entry (or sequence) and head."""

    ptr: Any
    strides: tuple[int, int]  # batch, head
    step: Any  # tl.constexpr, from row to row: addresses within a tile then cost next to nothing
    position: Any  # dense or packed: where a sequence lives
    find: Any  # dense_program, packed_program, …: what a program works on
    data: tuple[Any, ...]  # what the functions need
    ahead: Any = nothing_ahead  # or pages_ahead (paged_view.py): what is read a tile ahead
    rows: Any = side_by_side  # or in_pages: where they are then
    pad: Any = no_padding  # or fill_padding (below): what becomes of rows of no sequence


@triton.jit
def wide(number):
    """A whole number with 64 bits, which a product of a row and a stride may need."""
    return tl.cast(number, tl.int64)


# ---- dense: every sequence has the same length. data: length, heads ---------------------------


@triton.jit
def dense(batch, strides, STEP: tl.constexpr, data):
    """The first row's place (in elements), and how many rows there are."""
    return wide(batch) * strides[0], data[0]


@triton.jit
def dense_program(program, data, TILE: tl.constexpr):
    """Batch entry, head, tile and the slot for what was planned; the last tile comes first.

    Under a causal mask the last tile of query rows is the longest work, so it starts early.
    """
    tiles = tl.cdiv(data[0], TILE)
    tile = tiles - 1 - program % tiles
    head = (program // tiles) % data[1]
    return program // tiles // data[1], head, tile, tile


@triton.jit
def dense_origin(batch, data):
    """The coordinates of the first row for TMA: batch entry and row."""
    return batch, batch * 0


# ---- verbs ------------------------------------------------------------------------------------


@triton.jit
def num_rows(view, batch):
    """How many rows a batch entry (or sequence) has."""
    _, length = view.position(batch, view.strides, view.step, view.data)
    return length


@triton.jit
def row_pointers(view, batch, head, rows, channels):
    """Addresses of rows × channels: [rows, channels] from a column of rows and a row of channels,
    or the other way round."""
    first, _ = view.position(batch, view.strides, view.step, view.data)
    start = view.ptr + (first + wide(head) * view.strides[1])
    return start + (wide(rows) * view.step + channels)


@triton.jit
def load_rows(
    view, batch, head, rows, length,
    DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Rows of DIM channels, widened to WIDTH by zeros. Unless WHOLE, rows past the end are 0."""
    channels = tl.arange(0, WIDTH)[None, :]
    pointers = row_pointers(view, batch, head, rows[:, None], channels)
    if WHOLE:
        if DIM == WIDTH:
            return tl.load(pointers)
        return tl.load(pointers, mask=channels < DIM, other=0.0)
    exists = (rows < length)[:, None]
    if DIM != WIDTH:
        exists = exists & (channels < DIM)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def tile_pointers(
    view, batch, head, start, channels, ROWS: tl.constexpr, SPARING: tl.constexpr,
    TRANSPOSED: tl.constexpr = False,
):  # fmt: skip
    """`row_pointers` of ROWS adjacent rows, from a start that all threads share; rows lie side by
    side if TRANSPOSED.

    SPARING: rows are counted by numbers that serve nothing else. So the compiler sees that a
    thread's addresses differ by constants, and keeps one of them instead of all: fewer registers,
    and an addition more for each where they are used.
    """
    FIRST: tl.constexpr = ROWS if SPARING and is_hopper() else 0
    first, _ = view.position(batch, view.strides, view.step, view.data)
    base = view.ptr + (first + wide(head) * view.strides[1] + wide(start - FIRST) * view.step)
    rows = tl.expand_dims(tl.arange(FIRST, FIRST + ROWS), 0 if TRANSPOSED else 1)
    return base + (wide(rows) * view.step + channels)


@triton.jit
def load_tile(
    view, batch, head, start, length,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
    SPARING: tl.constexpr = False, ahead=None,
):  # fmt: skip
    """`load_rows` of ROWS adjacent rows, for loops that have no register to spare.

    ahead: what `view.ahead` found of them, where they may lie in pages.
    """
    rows, channels = tl.arange(0, ROWS)[:, None], tl.arange(0, WIDTH)[None, :]
    if ahead is None:
        pointers = tile_pointers(view, batch, head, start, channels, ROWS, SPARING)
    else:
        pointers = view.rows(view, ahead, batch, head, start, channels, ROWS, SPARING)
    if WHOLE:
        if DIM == WIDTH:
            return tl.load(pointers)
        return tl.load(pointers, mask=channels < DIM, other=0.0)
    exists = start + rows < length
    if DIM != WIDTH:
        exists = exists & (channels < DIM)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def store_rows(view, batch, head, rows, length, tile, DIM: tl.constexpr):
    """Write rows of DIM channels; rows past the end are not written."""
    channels = tl.arange(0, tile.shape[1])[None, :]
    pointers = row_pointers(view, batch, head, rows[:, None], channels)
    exists = (rows < length)[:, None]
    if tile.shape[1] != DIM:
        exists = exists & (channels < DIM)
    tl.store(pointers, tile.to(view.ptr.dtype.element_ty), mask=exists)


@triton.jit
def store_tile(view, batch, head, start, length, tile, DIM: tl.constexpr):
    """`store_rows` of adjacent rows."""
    rows, channels = tl.arange(0, tile.shape[0])[:, None], tl.arange(0, tile.shape[1])[None, :]
    pointers = tile_pointers(view, batch, head, start, channels, tile.shape[0], True)
    exists = start + rows < length
    if tile.shape[1] != DIM:
        exists = exists & (channels < DIM)
    tl.store(pointers, tile.to(view.ptr.dtype.element_ty), mask=exists)


@triton.jit
def pad_rows(view, number, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Write a number to all rows of DIM channels that belong to no sequence; each program some."""
    rows, channels = tl.arange(0, 16)[:, None], tl.arange(0, WIDTH)[None, :]
    view.pad(view, number, rows, channels, DIM)


@triton.jit
def pad_results(output, logsumexp, DIM: tl.constexpr, WIDTH: tl.constexpr):
    """Write to an output and its lse, behind the last sequence, what rows have that see nothing."""
    pad_rows(output, 0.0, DIM, WIDTH)
    pad_rows(logsumexp, float("-inf"), 1, 1)


@triton.jit
def add_rows(view, batch, head, rows, length, tile, DIM: tl.constexpr):
    """Add rows of DIM channels to memory, in whatever order programs come."""
    channels = tl.arange(0, tile.shape[1])[None, :]
    pointers = row_pointers(view, batch, head, rows[:, None], channels)
    exists = (rows < length)[:, None]
    if tile.shape[1] != DIM:
        exists = exists & (channels < DIM)
    tl.atomic_add(pointers, tile, mask=exists, sem="relaxed")


@triton.jit
def load_numbers(view, batch, head, rows, length, other):
    """One number a row; `other` past the end."""
    return tl.load(row_pointers(view, batch, head, rows, 0), mask=rows < length, other=other)


@triton.jit
def store_numbers(view, batch, head, rows, length, numbers):
    """Write one number a row."""
    pointers = row_pointers(view, batch, head, rows, 0)
    tl.store(pointers, numbers.to(view.ptr.dtype.element_ty), mask=rows < length)


@triton.jit
def nonfinite_rows(tile):
    """True for each row that holds NaN or inf."""
    return tl.max((tl.abs(tile.to(tl.float32)) < float("inf")).to(tl.int32) ^ 1, 1) > 0


@triton.jit
def any_nonfinite(tile, PRODUCT: tl.constexpr = False):
    """Whether a tile holds NaN or inf anywhere, as one truth for the whole program.

    A sum is enough to tell, and costs one addition an entry: neither NaN nor inf leaves it again.
    Should finite entries overflow it, work is done again for nothing. PRODUCT: the tile is a
    product, whose rows are summed in chains (online_softmax.py).
    """
    if PRODUCT and is_hopper():
        total = tl.sum(sum_of_rows(tile, True))
    else:
        total = tl.sum(tile.to(tl.float32))
    return (tl.abs(total) < float("inf")) == 0


@triton.jit
def without(rows, tile):
    """A tile whose nonfinite rows are 0: a product would carry NaN further, as 0 · NaN is NaN."""
    return tl.where(rows[:, None], tl.zeros_like(tile), tile)


# ---- packed sequences ----------------------------------------------------------------------------


@triton.jit
def offset(data, sequence):
    """The token that a sequence begins with, whatever stands in memory."""
    return tl.minimum(tl.maximum(tl.load(data[0] + sequence), 0), data[3])


@triton.jit
def packed(batch, strides, STEP: tl.constexpr, data):
    """The first row's place (in elements), and how many rows there are."""
    first = offset(data, batch)
    return wide(first) * STEP, tl.maximum(offset(data, batch + 1) - first, 0)


@triton.jit
def packed_origin(batch, data):
    """Where a packed sequence begins; all of them together are one batch entry."""
    return batch * 0, offset(data, batch)


@triton.jit
def first_slot(data, sequence, TILE: tl.constexpr):
    """The slot of a sequence's first tile; see `packed_program`."""
    return offset(data, sequence) // TILE + sequence


WAYS = tl.constexpr(8)  # parts that a search tells apart in a step: their loads wait together


@triton.jit
def packed_program(program, data, TILE: tl.constexpr):
    """Sequence, head, tile and slot. Sequence b owns the slots from offsets[b] // TILE + b on.

    That is at least one slot for each of its tiles, and no length need be known on the host. A
    slot past the end of its sequence gets a tile past its end, hence no rows. So does a slot past
    the end of all of them, which the last sequence owns.
    """
    sequences = data[1]
    slots = data[3] // TILE + sequences
    slot = slots - 1 - program % slots
    low, size = slot * 0, slot * 0 + sequences  # the sequence lies in low … low + size - 1
    while size > 1:
        size = tl.cdiv(size, WAYS)
        begun = slot * 0  # parts beside the first that begin at this slot or before it
        for way in tl.static_range(1, WAYS):
            position = tl.minimum(
                low + way * size, sequences
            )  # whose slots would begin past the end
            begun += (first_slot(data, position, TILE) <= slot).to(tl.int32)
        low += begun * size
    low = tl.minimum(low, sequences - 1)
    return low, program // slots, tl.maximum(slot - first_slot(data, low, TILE), 0), slot


LANES = tl.constexpr(32)  # parts that a search tells apart in a step: one for a thread of a warp


@triton.jit
def packed_program_by_heads(program, data, TILE: tl.constexpr):
    """What a program works on, with all heads of a slot one after the other: as rows of several
    heads lie side by side in memory, programs that run together read all of it.

    Not for Gluon, whose ranges have layouts.
    """
    sequences, heads = data[1], data[2]
    slots = data[3] // TILE + sequences
    slot = slots - 1 - program // heads
    low, size = slot * 0, slot * 0 + sequences
    while size > 1:
        size = tl.cdiv(size, LANES)
        positions = tl.minimum(low + tl.arange(0, LANES) * size, sequences)
        begun = (first_slot(data, positions, TILE) <= slot).to(tl.int32)
        low += tl.maximum(tl.sum(begun, 0) - 1, 0) * size  # the first part has always begun
    low = tl.minimum(low, sequences - 1)
    return low, program % heads, tl.maximum(slot - first_slot(data, low, TILE), 0), slot


@triton.jit
def ascend(data, lanes):
    """Whether no sequence ends before it begins, looked at by as many lanes as there are.

    Else slots are not each one sequence's: what waits for another one's turn would wait for ever.
    """
    sequences, wrong = data[1], lanes * 0
    for first in range(0, sequences, lanes.shape[0]):
        here = tl.minimum(first + lanes, sequences - 1)
        wrong = wrong | (offset(data, here + 1) < offset(data, here)).to(tl.int32)
    return tl.max(wrong, 0) == 0


# ---- padding: tokens behind the last offset, which no program works on --------------------------

MOST_FILLING = tl.constexpr(1 << 16)  # programs


@triton.jit
def fill_padding(view, number, rows, channels, DIM: tl.constexpr):
    """Write a number to all rows behind the last sequence: each program of the grid takes some.
    Mostly there are none, which costs a load that waits beside those of lengths.

    rows: a column of numbers from 0 on, of so many rows at a time; channels: a row of them.
    """
    tokens = view.data[3]
    begin, program = offset(view.data, view.data[1]), tl.program_id(0)
    begin = tl.where(program < MOST_FILLING, begin + program * rows.shape[0], tokens)
    step = tl.minimum(tl.num_programs(0), MOST_FILLING) * rows.shape[0]
    filling = ((rows + channels) * 0 + number).to(view.ptr.dtype.element_ty)
    for first in range(begin, tokens, step):
        for head in range(0, view.data[2]):
            position = view.ptr + (wide(head) * view.strides[1] + wide(first) * view.step)
            for channel in tl.static_range(0, DIM, channels.shape[1]):
                exist = (first + rows < tokens) & (channel + channels < DIM)
                pointers = position + (wide(rows) * view.step + (channel + channels))
                tl.store(pointers, filling, mask=exist)
