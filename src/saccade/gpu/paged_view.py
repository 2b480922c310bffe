"""Paged view: the rows of a sequence that lie in the pages of a pool, as kernels read them.

A View of pages has strides of page, head and slot. Row j of sequence b lies in the page that the
table names at [b, j // PAGE_SIZE], in slot j % PAGE_SIZE. Source: PagedAttention (Kwon et al.
2023), section 4.1.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import offset, packed_program_by_heads, wide

# A View's data for pages: table, how far apart its sequences are, lengths; how many rows the pages
# that it names for a sequence hold, and how many pages there are, both `as_limit`.


def as_limit(number: int) -> int:
    """A number as kernels take it, which count in 32 bits."""
    return min(number, LARGEST_LIMIT)


LARGEST_LIMIT = 2**30


@triton.jit
def paged(batch, strides, STEP: tl.constexpr, data):
    """No first row's place, as rows lie apart; and how many rows there are: no more than the table
    names pages for, whatever stands there."""
    return wide(0), tl.minimum(tl.maximum(tl.load(data[2] + batch), 0), data[3])


@triton.jit
def inside(page, data):
    """A page of the pool, whatever the table says: 0 or above is one comparison, unsigned."""
    last = data[4] - 1
    return tl.minimum(page.to(tl.uint32), last.to(tl.uint32)).to(tl.int32)


@triton.jit
def find_page(
    view, batch, start, length,
    ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The pages of ROWS adjacent rows: one for all where tiles fit into pages, as start is a
    multiple of ROWS, else a column of them. Unless WHOLE, some rows may lie past the end.
    """
    table = view.data[0] + wide(batch) * view.data[1]
    rows = tl.arange(0, ROWS)[:, None]
    if PAGE_SIZE % ROWS == 0:
        entries, exists = table + start // PAGE_SIZE, start < length
    elif ROWS % PAGE_SIZE == 0:  # then a tile begins with a page: what depends on rows is known
        entries, exists = table + start // PAGE_SIZE + rows // PAGE_SIZE, rows < length - start
    else:
        entries, exists = table + (start + rows) // PAGE_SIZE, start + rows < length
    if WHOLE:
        return inside(tl.load(entries), view.data)
    return inside(tl.load(entries, mask=exists, other=0), view.data)


@triton.jit
def slots_of(page, start, ROWS: tl.constexpr, PAGE_SIZE: tl.constexpr):
    """Where rows lie: (pages, the first slot, slots counted from it).

    Slots of one page are counted by numbers that serve nothing else (`tile_pointers`).
    """
    rows = tl.arange(0, ROWS)[:, None]
    if PAGE_SIZE % ROWS == 0:
        first, slots = start % PAGE_SIZE - ROWS, tl.arange(ROWS, 2 * ROWS)[:, None]
    elif ROWS % PAGE_SIZE == 0:
        first, slots = 0, rows % PAGE_SIZE
    else:
        first, slots = 0, (start + rows) % PAGE_SIZE
    return page, first, slots


@triton.jit
def slot_pointers(view, head, position, channels):
    """Addresses of slots × channels."""
    page, first, slots = position
    base = view.ptr + (
        wide(page) * view.strides[0] + wide(head) * view.strides[1] + wide(first) * view.step
    )
    return base + (wide(slots) * view.step + channels)


# ---- as the dense kernel reads them; data of their Views ends with the size of pages ------------

FEW_PAGES = tl.constexpr(8)  # of a tile: so many are looked up one by one


@triton.constexpr_function
def plain(number: int) -> int:
    """A constant, which under the interpreter may still be wrapped."""
    return number


@triton.jit
def pages_ahead(view, batch, start, length, ROWS: tl.constexpr):
    """The pages of ROWS rows from `start` on, of which some may lie past the end.

    Few pages are numbers, each in one register of a thread; as a column, a thread would keep one
    for each of its rows. They are plain loads, a tile ahead of the keys that they lead to: Triton's
    pipeline would copy them through shared memory, and wait there for keys asked for before.
    """
    PAGE_SIZE: tl.constexpr = plain(view.data[5])
    TILE: tl.constexpr = plain(ROWS)
    if PAGE_SIZE % TILE == 0 or TILE % PAGE_SIZE != 0 or TILE > FEW_PAGES * PAGE_SIZE:
        pages = (find_page(view, batch, start, length, TILE, PAGE_SIZE, False),)
    else:
        entries = view.data[0] + wide(batch) * view.data[1] + start // PAGE_SIZE
        pages = ()
        for number in tl.static_range(TILE // PAGE_SIZE):
            exists = start + number * PAGE_SIZE < length
            page = inside(tl.load(entries + number, mask=exists, other=0), view.data)
            pages = pages + (page,)  # noqa: RUF005
    return pages


@triton.jit
def in_pages(view, pages, batch, head, start, channels, ROWS: tl.constexpr, SPARING: tl.constexpr):
    """Addresses of ROWS rows from `start`, a multiple of ROWS, on × channels."""
    PAGE_SIZE: tl.constexpr = plain(view.data[5])
    TILE: tl.constexpr = plain(ROWS)
    page = pages[0]
    for number in tl.static_range(1, len(pages)):
        # The compiler knows in which page a thread's row lies: nothing is left of this choice.
        page = tl.where(tl.arange(0, TILE)[:, None] < number * PAGE_SIZE, page, pages[number])
    position = slots_of(page, start, TILE, PAGE_SIZE)
    if PAGE_SIZE == TILE:  # what is taken from the first slot would be taken from each address
        position = (page, 0, tl.arange(0, TILE)[:, None])
    return slot_pointers(view, head, position, channels)


@triton.jit
def chunk_program(program, data, TILE: tl.constexpr):
    """`packed_program_by_heads`, where sequences of data[4] query rows or fewer have no rows."""
    batch, head, tile, slot = packed_program_by_heads(program, data, TILE)
    length = offset(data, batch + 1) - offset(data, batch)
    return batch, head, tl.where(length > data[4], tile, tl.cdiv(length, TILE)), slot


# ---- as the other kernels read them -------------------------------------------------------------


@triton.jit
def load_slots(
    view, head, position, exists, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    """Rows of DIM channels, widened to WIDTH by zeros. Unless WHOLE, those that do not exist are 0.

    exists: a column of truths. What behind a sequence's end lies in a page is never read.
    """
    channels = tl.arange(0, WIDTH)[None, :]
    pointers = slot_pointers(view, head, position, channels)
    if WHOLE:
        if DIM == WIDTH:
            return tl.load(pointers)
        return tl.load(pointers, mask=channels < DIM, other=0.0)
    if DIM != WIDTH:
        exists = exists & (channels < DIM)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def load_scales(view, head, position, exists, ROWS: tl.constexpr):
    """The float32 factor of each row, 0 for those that do not exist."""
    scales = tl.load(slot_pointers(view, head, position, 0), mask=exists, other=0.0)
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


# PTX of `as_halves` for float8_e4m3fn. $2 holds two pairs: bytes 0 and 1, bytes 2 and 3.
#   prmt   sorted = bytes 0, 2, 1, 3: the first of both pairs, then the second of both
#   mov    low = its lower half, the first ones; high = its upper half, the second ones
#   cvt    $0 = the first ones, $1 = the second ones, two float16 each
HALVES_OF_FP8: Any = tl.constexpr(
    """{ .reg .b32 sorted; .reg .b16 low, high;
    prmt.b32 sorted, $2, 0, 0x3120; mov.b32 {low, high}, sorted;
    cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; }"""
)
# PTX of `as_halves` for int8. The float16 from 1024 to 2047 count by their last ten bits, so the
# upper byte 0x64 beside a lower byte n is 1024 + n.
#   xor    biased = number + 128 in each of the four bytes, from 0 to 255
#   mov    less = -1152, twice in float16: what 1024 + (number + 128) is too large by
#   prmt   low = (byte 0, 0x64, byte 2, 0x64): the first ones as 1024 + biased, two float16
#   prmt   high = (byte 1, 0x64, byte 3, 0x64): the second ones
#   add    $0 = the first ones, $1 = the second ones; nothing is rounded
HALVES_OF_INT8: Any = tl.constexpr(
    """{ .reg .b32 biased, low, high, less;
    xor.b32 biased, $2, 0x80808080; mov.b32 less, 0xE480E480;
    prmt.b32 low, biased, 0x64646464, 0x4240; prmt.b32 high, biased, 0x64646464, 0x4341;
    add.rn.f16x2 $0, low, less; add.rn.f16x2 $1, high, less; }"""
)


@triton.jit
def as_halves(pairs, PTX: tl.constexpr):
    """Pairs of eight bits as two tiles of float16, which holds them exactly: the first of each
    pair, and the second. uint16 holds two float8_e4m3fn, int16 two int8.

    Pairs go through shared memory to where a product wants them as 16-bit numbers do; single
    bytes would go one by one. And e4m3 has an instruction that makes float16 of two, while each
    bfloat16 would be converted alone. PTX: the same for two pairs at once, in a quarter of the
    instructions.
    """
    FP8: tl.constexpr = pairs.dtype == tl.uint16
    if PTX:
        first, second = tl.inline_asm_elementwise(
            HALVES_OF_FP8 if FP8 else HALVES_OF_INT8, "=r,=r,r", [pairs],
            dtype=(tl.float16, tl.float16), is_pure=True, pack=2,
        )  # fmt: skip
    elif FP8:
        first = (pairs & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        second = (pairs >> 8).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:
        biased = pairs.to(tl.uint16, bitcast=True) ^ 0x8080
        first = ((biased & 0xFF) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
        second = ((biased >> 8) | 0x6400).to(tl.float16, bitcast=True) - 1152.0
    return first, second
