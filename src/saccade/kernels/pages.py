"""Pages: the rows of a sequence that lie in the pages of a pool, as kernels read them.

A View of pages has strides of page, head and slot. Row j of sequence b lies in the page that the
table names at [b, j // PAGE_SIZE], in slot j % PAGE_SIZE. Source: PagedAttention (Kwon et al.
2023), section 4.1.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.tiles import ADDED, wide

# A View's data for pages: table, how far apart its sequences are, lengths.


@triton.jit
def paged(batch, strides, STEP: tl.constexpr, data):
    """No first row's place, as rows lie apart; and how many rows there are."""
    return wide(0), tl.maximum(tl.load(data[2] + batch), 0)


@triton.jit
def find_page(
    view, batch, start, length,
    ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr,
):  # fmt: skip
    """The pages of ROWS adjacent rows: one for all where tiles fit into pages, as start is a
    multiple of ROWS, else a column of them.

    Loops look a tile's pages up while they work on the tile before. Looked up in the same step
    they would keep Triton (3.6) from loading more than one tile ahead.
    """
    table = view.data[0] + wide(batch) * (view.data[1] - ADDED)
    if PAGE_SIZE % ROWS == 0:
        page = tl.load(table + start // PAGE_SIZE, mask=start < length, other=0)
    else:
        rows = start + tl.arange(0, ROWS)[:, None]
        page = tl.load(table + rows // PAGE_SIZE, mask=rows < length, other=0)
    return page


@triton.jit
def slots_of(page, start, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where rows lie: (pages, the first slot, slots counted from it)."""
    rows = tl.arange(0, ROWS)[:, None]
    if PAGE_SIZE % ROWS == 0:
        first, slots = start % PAGE_SIZE, rows
    else:
        first, slots = 0, (start + rows) % PAGE_SIZE
    return page, first, slots


@triton.jit
def slot_pointers(view, head, place, channels):
    """Addresses of slots × channels."""
    page, first, slots = place
    base = view.ptr + (
        wide(page) * view.strides[0] + wide(head) * view.strides[1] + wide(first) * view.step
    )
    return base + (wide(slots) * view.step + channels)


@triton.jit
def load_slots(
    view, head, place, exists, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    """Rows of DIM channels, widened to WIDTH by zeros. Unless WHOLE, those that do not exist are 0.

    exists: a column of truths. What behind a sequence's end lies in a page is never read.
    """
    channels = tl.arange(0, WIDTH)[None, :]
    pointers = slot_pointers(view, head, place, channels)
    if WHOLE:
        if DIM == WIDTH:
            return tl.load(pointers)
        return tl.load(pointers, mask=channels < DIM, other=0.0)
    if DIM != WIDTH:
        exists = exists & (channels < DIM)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def load_scales(view, head, place, exists, ROWS: tl.constexpr):
    """The float32 factor of each row, 1 for those that do not exist."""
    scales = tl.load(slot_pointers(view, head, place, 0), mask=exists, other=1.0)
    return tl.reshape(scales, (ROWS,)).to(tl.float32)


@triton.jit
def as_numbers(tile, DTYPE: tl.constexpr):
    """A tile of pages in the dtype of products; bytes that no GPU converts are float8_e4m3fn."""
    if tile.dtype == tl.uint8:
        # e4m3 has float16's layout but for a shorter mantissa and a bias of 7 instead of 15.
        bits = tile.to(tl.uint16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        numbers = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), numbers).to(DTYPE)
    return tile.to(DTYPE)
