"""Tensor view: the only place where a kernel turns (batch, head, row) into addresses.

A View is a tensor as a kernel sees it: its memory, and functions that know where a sequence and
its rows live (`position`) and which tile of which sequence a program works on (`find`).
Channels have stride 1.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import tl, triton
from saccade.gpu.online_softmax import sum_of_rows
from saccade.gpu.target import is_hopper


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
    """Behind the rows of dense sequences there is nothing to fill; see `packing.fill_padding`."""


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
    pad: Any = no_padding  # or fill_padding (packing.py): what becomes of rows of no sequence


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
    """The same of an output and its lse: what rows have that see nothing."""
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
