"""Pages: one sequence's keys and values as a few dense pieces.

Adjacent pages whose rows follow each other in memory are one view, and nothing is copied. Where
pages are scattered, or hold other numbers than products take, a piece of them at a time is copied:
small enough to stay in the cache, from which the product then reads it.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.runtime.spec import PagedInputs

# Rows that are copied at once. At this length copying costs next to nothing beside the product
# (2 x 4 MiB in float32 for 8 heads of 128 channels), and merging one more piece does not either.
COPIED_ROWS = 1024


class Scratch:
    """Memory that copies go to, one after the other: fresh memory costs more than the copying."""

    def __init__(self) -> None:
        self._memory: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Memory under a name; what was there before is overwritten."""
        size = math.prod(shape)
        memory = self._memory.get((name, dtype))
        if memory is None or memory.numel() < size:
            memory = self._memory[name, dtype] = torch.empty(size, dtype=dtype, device="cpu")
        return memory[:size].view(shape)


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
        if not 0 <= kv_len <= inputs.page_table.shape[1] * size:  # as nobody could look before
            takes = f"0 to {inputs.page_table.shape[1] * size}"
            raise ValueError(f"kv_lens: got {kv_len}, takes {takes}")
        numbers = inputs.page_table[sequence, : -(-kv_len // size)].tolist()
        if numbers and not 0 <= min(numbers) <= max(numbers) < most:
            got = min(numbers) if min(numbers) < 0 else max(numbers)
            raise ValueError(f"page_table: got page {got}, takes 0 to {most - 1}")
        joined = all(_rows_follow(pages) for pages in (inputs.key_pages, inputs.value_pages))
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
        given = self.inputs
        if piece.view:
            return self._view(given.key_pages, piece), self._view(given.value_pages, piece)
        return (
            self._copy("key", given.key_pages, given.key_scales, piece),
            self._copy("value", given.value_pages, given.value_scales, piece),
        )

    def _view(self, pages: Tensor, piece: Piece) -> Float[Tensor, "1 kv_heads rows dim"]:
        page_size = pages.shape[2]
        index, slot = divmod(piece.start, page_size)
        row_step = pages.stride(0) if page_size == 1 else pages.stride(2)
        first = pages[self.page_numbers[index], :, slot]  # [kv_heads, dim]
        heads, dim = first.shape
        return torch.as_strided(
            first,
            (1, heads, piece.stop - piece.start, dim),
            (0, first.stride(0), row_step, first.stride(1)),
            first.storage_offset(),
        )

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


def _rows_follow(pages: Tensor) -> bool:
    """Whether the rows of adjacent pages lie at equal distances."""
    return pages.shape[2] == 1 or pages.stride(0) == pages.shape[2] * pages.stride(2)
