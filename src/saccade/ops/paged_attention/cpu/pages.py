"""Pages as dense rows: what lies in one piece is read there, and the rest is copied, in as few goes
as there are pieces of memory.
"""

from __future__ import annotations

import bisect
import math
import threading
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.runtime.spec import PagedInputs


class Scratch(threading.local):
    """Memory that copies go to, one after the other: fresh memory costs more than the copying.
    Each thread has its own."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}
        self._last: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory under a name; what was there before is overwritten."""
        last = self._last.get(name)
        if last is not None and last.shape == shape and last.dtype == dtype:
            return last
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            with torch.inference_mode(False):  # it may be written outside of that mode too
                memory = torch.empty(size, dtype=dtype, device="cpu")
            self._memory[name, dtype] = memory
        last = self._last[name] = memory[:size].view(shape)
        return last


# ---- sequences side by side ----------------------------------------------------------------------

_copies = Scratch()  # of groups of sequences, which are copied at once


class PageParts(NamedTuple):
    """What is copied of pages so that sequences lie side by side.

    Attributes:
        numbers: of pieces of memory that hold a page's rows of one head, sequence after sequence
            and head after head; of pages, where their rows are no such pieces.
        pieces: how many there are; 0: numbers are those of pages.
    """

    numbers: Int[Tensor, " parts"]
    pieces: int


def view_of(
    pages: Tensor, page: int, slot: int, count: int
) -> Float[Tensor, "1 kv_heads rows dim"]:
    """Rows that follow each other in adjacent pages, from a slot of a page on."""
    _, heads, page_size, dim = pages.shape
    of_page, of_head, of_slot, of_channel = pages.stride()
    return pages.as_strided(
        (1, heads, count, dim),
        (0, of_head, of_page if page_size == 1 else of_slot, of_channel),
        pages.storage_offset() + page * of_page + slot * of_slot,
    )


def piece_strides(pages: Tensor) -> tuple[int, int] | None:
    """How far apart pages are, and heads, in pieces of memory that hold a page's rows of a head;
    None where these are no such pieces."""
    _, _, page_size, dim = pages.shape
    of_page, of_head, of_slot, of_channel = pages.stride()
    size = page_size * dim
    if of_channel != 1 or (page_size > 1 and of_slot != dim) or of_page % size or of_head % size:
        return None
    return of_page // size, of_head // size


def parts_of(
    pages: Float[Tensor, "num_pages kv_heads page_size dim"], table: Int[Tensor, "batch pages"]
) -> PageParts:
    """What to copy of a table's pages. Each piece is copied in one go."""
    strides = piece_strides(pages)
    if strides is None:
        return PageParts(table.flatten(), 0)
    of_page, of_head = strides
    num_pages, heads = pages.shape[:2]
    of_heads = torch.arange(heads, device="cpu").view(-1, 1) * of_head
    numbers = table.unsqueeze(1) * of_page + of_heads
    return PageParts(numbers.flatten(), (num_pages - 1) * of_page + (heads - 1) * of_head + 1)


def side_by_side(
    name: str,
    pages: Float[Tensor, "num_pages kv_heads page_size dim"],
    parts: PageParts,
    batch: int,
    kv_len: int,
) -> Float[Tensor, "batch kv_heads keys dim"]:
    """The rows of all sequences, side by side and padded to one length, in the memory that the
    last call of that name wrote to."""
    _, heads, page_size, dim = pages.shape
    numbers = parts.numbers
    if parts.pieces:
        size = page_size * dim
        copied = _copies.take(name, (numbers.numel(), size), pages.dtype)
        pieces = pages.as_strided((parts.pieces, size), (size, 1))
        torch.index_select(pieces, 0, numbers, out=copied)
        rows = copied.view(batch, heads, -1, dim)
    else:
        copied = _copies.take(name, (heads, numbers.numel(), page_size, dim), pages.dtype)
        torch.index_select(pages.transpose(0, 1), 1, numbers, out=copied)
        rows = copied.view(heads, batch, -1, dim).transpose(0, 1)
    return rows.narrow(2, 0, kv_len)


# ---- pages as a few dense pieces ----------------------------------------------------------------
# Adjacent pages whose rows follow each other in memory are one view, and nothing is copied. Where
# pages are scattered, or hold other numbers than products take, a piece at a time is copied:
# small enough to stay in the cache, from which the product then reads it.

# Rows that are copied at once. At this length copying costs next to nothing beside the product
# (2 x 4 MiB in float32 for 8 heads of 128 channels), and merging one more piece does not either.
COPIED_ROWS = 1024


class Piece(NamedTuple):
    """Adjacent rows start … stop - 1 of a sequence; `view`: they are read where they lie."""

    start: int
    stop: int
    view: bool


class PageReader(NamedTuple):
    """Where one sequence's rows lie.

    Attributes:
        page_numbers: the sequence's pages, in order.
        run_ends: the rows at which runs of adjacent pages end, the last being the length or more.
        dtype: what products are computed in.
        fixed: always copy, in pieces that start at multiples of COPIED_ROWS.
    """

    inputs: PagedInputs
    page_numbers: list[int]
    run_ends: list[int]
    dtype: torch.dtype
    fixed: bool
    scratch: Scratch

    @staticmethod
    def of(
        inputs: PagedInputs,
        sequence: int,
        kv_len: int,
        dtype: torch.dtype,
        fixed: bool,
        scratch: Scratch,
    ) -> PageReader:
        """The pages of one sequence."""
        size, most = inputs.page_size, inputs.key_pages.shape[0]
        if not 0 <= kv_len <= inputs.page_table.shape[1] * size:  # not checked with the call
            takes = f"0 to {inputs.page_table.shape[1] * size}"
            raise ValueError(f"kv_lens: got {kv_len}, takes {takes}")
        numbers = inputs.page_table[sequence, : -(-kv_len // size)].tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < most:
            got = min(numbers) if min(numbers) < 0 else max(numbers)
            raise ValueError(f"page_table: got page {got}, takes 0 to {most - 1}")
        joined = all(rows_follow(pages) for pages in (inputs.key_pages, inputs.value_pages))
        ends = [
            index * size
            for index in range(1, len(numbers))
            if not joined or numbers[index] != numbers[index - 1] + 1
        ]
        return PageReader(inputs, numbers, [*ends, len(numbers) * size], dtype, fixed, scratch)

    def pieces(self, start: int, stop: int) -> Iterator[Piece]:
        """Cut a range of rows into views as long as they come, and copies."""
        viewable = not self.fixed and self.inputs.key_pages.dtype == self.dtype
        while start < stop:
            run_end = self.run_ends[bisect.bisect_right(self.run_ends, start)]
            next_start = min((start // COPIED_ROWS + 1) * COPIED_ROWS, stop)
            view = viewable and run_end >= next_start
            if view:
                next_start = min(run_end, stop)
            yield Piece(start, next_start, view)
            start = next_start

    def rows(self, piece: Piece) -> tuple[Tensor, Tensor]:
        """The piece's keys and values, [1, kv_heads, rows, dim]."""
        inputs = self.inputs
        if piece.view:
            return self._viewed(inputs.key_pages, piece), self._viewed(inputs.value_pages, piece)
        return (
            self._copy("key", inputs.key_pages, inputs.key_scales, piece),
            self._copy("value", inputs.value_pages, inputs.value_scales, piece),
        )

    def numbers(self, kv_len: int) -> tuple[Tensor, Tensor, Tensor | None]:
        """All keys, [1, kv_heads, rows, dim], and values, these without their scales; and the
        scales, [1, kv_heads, rows], if there are any."""
        inputs, piece = self.inputs, Piece(0, kv_len, False)
        if kv_len == 0:
            key, value = (
                rows.new_empty(1, rows.shape[1], 0, rows.shape[3], dtype=self.dtype)
                for rows in (inputs.key_pages, inputs.value_pages)
            )
            return key, value, None
        key = self._copy("key", inputs.key_pages, inputs.key_scales, piece)
        value = self._copy("value", inputs.value_pages, None, piece)
        if inputs.value_scales is None:
            return key, value, None
        scales = inputs.value_scales[self.page_numbers].transpose(0, 1).flatten(1)[:, :kv_len]
        return key, value, scales.to(self.dtype).unsqueeze(0)

    def _viewed(self, pages: Tensor, piece: Piece) -> Float[Tensor, "1 kv_heads rows dim"]:
        index, slot = divmod(piece.start, pages.shape[2])
        return view_of(pages, self.page_numbers[index], slot, piece.stop - piece.start)

    def _copy(
        self, name: str, pages: Tensor, scales: Tensor | None, piece: Piece
    ) -> Float[Tensor, "1 kv_heads rows dim"]:
        _, heads, page_size, dim = pages.shape
        first = piece.start // page_size
        numbers = self.page_numbers[first : -(-piece.stop // page_size)]
        chosen = self._chosen(pages, numbers).transpose(0, 1)
        copied = self.scratch.take(name, (heads, len(numbers), page_size, dim), self.dtype)
        copied.copy_(chosen)
        if scales is not None:
            of_rows = scales[numbers].transpose(0, 1)
            copied.mul_(of_rows.to(self.dtype).unsqueeze(-1))
        skipped = piece.start - first * page_size
        rows = copied.view(1, heads, len(numbers) * page_size, dim)
        rows = rows[:, :, skipped : skipped + piece.stop - piece.start]
        return rows.contiguous() if self.fixed else rows  # one alignment whatever the page size

    def _chosen(self, pages: Tensor, numbers: list[int]) -> Tensor:
        """Some of the pages, in order: a view where they are adjacent."""
        first, count = numbers[0], len(numbers)
        if numbers[-1] - first == count - 1 and numbers == list(range(first, first + count)):
            return pages[first : first + count]
        # PyTorch selects numbers of eight bits only as whole ones.
        bits = pages.view(torch.int8) if pages.dtype == torch.float8_e4m3fn else pages
        memory = self.scratch.take("chosen", (count, *pages.shape[1:]), bits.dtype)
        torch.index_select(bits, 0, torch.tensor(numbers, device="cpu"), out=memory)
        return memory.view(pages.dtype)


def rows_follow(pages: Tensor) -> bool:
    """Whether the rows of adjacent pages lie at equal distances."""
    return pages.shape[2] == 1 or pages.stride(0) == pages.shape[2] * pages.stride(2)
