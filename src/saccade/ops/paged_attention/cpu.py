"""Attention over pages on the CPU: one sequence after the other, tile by tile, piece by piece.

Short sequences with one query row each are computed together. Any other sequence is a dense problem
whose keys come in pieces: what a tile of query rows visits is planned as in a dense call, each
rectangle is computed by the same inner tiles, and partial results merge by their lse in the order
of the keys.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.modifiers.evaluate import index_range, visible
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.cpu import block_mask, flash_tile
from saccade.ops.attention.cpu import host as attention_host
from saccade.ops.attention.cpu.block_mask import Run, TileSizes
from saccade.ops.attention.cpu.segments import DenseProblem, check_ends, clear_padding
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows
from saccade.runtime.validation import computed_without


@computed_without
def forward(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    offsets = inputs.cu_seqlens_q
    output, lse = empty_rows(inputs.query, inputs.value_pages.shape[3], offsets is not None)
    ends = None if offsets is None else offsets.tolist()
    if ends is not None:
        check_ends("cu_seqlens_q", ends, inputs.query.shape[0])
        clear_padding(offsets, output)
        clear_padding(offsets, lse, dim=1, number=-torch.inf)
    dtype, scratch = _product_dtype(inputs), Scratch()
    done = set() if batch_invariant else _together(inputs, variant, ends, output, lse)
    for sequence, kv_len in enumerate(inputs.kv_lens.tolist()):
        if sequence in done:
            continue
        if ends is None:
            at, query = sequence, inputs.query[sequence]
            of_output, of_lse = output[at], lse[at]
        else:
            at = slice(ends[sequence], ends[sequence + 1])
            query = inputs.query[at].transpose(0, 1)
            of_output, of_lse = output[at].transpose(0, 1), lse[:, at]
        if query.shape[:2].numel() == 0:
            continue
        query = query.unsqueeze(0).to(dtype)
        if batch_invariant:
            query = query.contiguous()
        dense = _dense(query, inputs, variant, config, sequence, kv_len)
        pages = PageReader.of(inputs, sequence, kv_len, dtype, batch_invariant, scratch)
        found = attention_host.attend(dense, partial(_pieces, dense, pages))
        of_output.copy_(found[0].squeeze(0))
        of_lse.copy_(found[1].squeeze(0))
    return output, lse


def prepared(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> Callable[[PagedInputs, Variant], tuple[Tensor, Tensor]]:
    """`forward` for calls like this one; nothing needs preparing."""
    return lambda inputs, variant: forward(inputs, variant, config, batch_invariant)


def _together(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None, output: Tensor, lse: Tensor
) -> set[int]:
    """Compute short sequences of one query row each together; which ones those were."""
    if ends is None:
        query_lens = [inputs.query.shape[2]] * inputs.query.shape[0]
    else:
        query_lens = [end - start for start, end in itertools.pairwise(ends)]
    done: set[int] = set()
    for group in short_groups(inputs, variant, query_lens):
        rows = group.sequences if ends is None else [ends[each] for each in group.sequences]
        query = inputs.query[rows]
        found = attend_group(inputs, variant, group, query if ends else query.squeeze(2))
        if found is None:
            break
        of_output, of_lse = (each.unsqueeze(2) for each in found)
        if inputs.sinks is not None:
            of_output, of_lse = attention_host.add_sinks(of_output, of_lse, inputs.sinks)
        if ends is None:
            output[rows], lse[rows] = of_output.to(output.dtype), of_lse
        else:
            output[rows] = of_output.squeeze(2).to(output.dtype)
            lse[:, rows] = of_lse.squeeze(2).transpose(0, 1)
        done |= set(group.sequences)
    return done


def _product_dtype(inputs: PagedInputs) -> torch.dtype:
    """What products are computed in: half precision and eight bits are widened.

    Half-precision products are slow on a CPU, and eight bits with a scale do not fit into sixteen.
    """
    if inputs.query.dtype == torch.float16 or (
        inputs.quantised and inputs.query.dtype != torch.float64
    ):
        return torch.float32
    return inputs.query.dtype


def _pieces(
    dense: DenseProblem, pages: PageReader, run: Run
) -> Iterator[tuple[DenseProblem, tuple[int, int]]]:
    """The problem with the keys and values of each piece of a run, and which rows they are."""
    for piece in pages.pieces(run.start, run.stop):
        key, value = pages.rows(piece)
        there = dense._replace(key=key, value=value, first_kv=piece.start)
        yield there, (piece.start, piece.stop)


def _dense(
    query: Tensor,
    inputs: PagedInputs,
    variant: Variant,
    config: KernelConfig,
    sequence: int,
    kv_len: int,
) -> DenseProblem:
    """One sequence as a dense problem; its keys are put in piece by piece."""
    sizes = TileSizes(
        batch=1,
        heads=query.shape[1],
        query_len=query.shape[2],
        kv_len=kv_len,
        first_batch=sequence,
        query_tile=config.query_tile or block_mask.QUERY_TILE,
        kv_tile=config.kv_tile or block_mask.KV_TILE,
    )
    return DenseProblem(
        query, inputs.key_pages[:1], inputs.value_pages[:1], inputs.sinks, None, variant, sizes
    )


# ---- short sequences with one query row each, computed together ----------------------------------
# One by one, such a sequence costs far more in calls than in products. So their pages are copied
# side by side, padded to one length, and all are one problem. Where the result is not finite,
# padding and hidden rows are zeroed and it is computed again, so that nothing in them can show.

# Numbers of one sequence's keys and values up to which copying them costs less than calls do.
SHORT = 2**16
# Numbers that are copied at once: more would leave the cache of a processor.
COPIED = 2**20


class Group(NamedTuple):
    """Sequences that are computed together, and the longest of their lengths."""

    sequences: list[int]
    kv_len: int


def short_groups(inputs: PagedInputs, variant: Variant, query_lens: list[int]) -> list[Group]:
    """The short sequences of a call with one query row, in groups that are copied at once.

    Fewer than two are left to the path of all others, and so are score changes and pages of
    numbers that products do not take.
    """
    query, key_pages = inputs.query, inputs.key_pages
    if variant.score or key_pages.dtype != query.dtype or query.dtype == torch.float16:
        return []
    of_row = key_pages.shape[1] * (key_pages.shape[3] + inputs.value_pages.shape[3])
    lens = inputs.kv_lens.tolist()
    short = [
        sequence
        for sequence, rows in enumerate(query_lens)
        if rows == 1 and 0 < lens[sequence] * of_row <= SHORT
    ]
    if len(short) < 2 or 0 in (query.shape[-1], inputs.value_pages.shape[3]):
        return []
    short.sort(key=lens.__getitem__)  # neighbours in a group need little padding
    found: list[Group] = []
    for sequence in short:
        kv_len = lens[sequence]
        if found and (len(found[-1].sequences) + 1) * kv_len * of_row <= COPIED:
            found[-1] = Group([*found[-1].sequences, sequence], kv_len)
        else:
            found.append(Group([sequence], kv_len))
    return found


def attend_group(
    inputs: PagedInputs, variant: Variant, group: Group, query: Float[Tensor, "batch heads dim"]
) -> tuple[Tensor, Tensor] | None:
    """Output [batch, heads, value_dim] and lse [batch, heads] of a group's query rows.

    None if heads see unlike keys: there is then no one set of rows to zero.
    """
    chosen = torch.tensor(group.sequences, device="cpu")
    lens = inputs.kv_lens[chosen].long()
    at = Coordinates(
        batch=chosen.view(-1, 1, 1, 1),
        head=index_range(0, query.shape[1], 1),
        query_row=index_range(0, 1, 2),
        kv_row=index_range(0, group.kv_len, 3),
        shift=(lens - 1).view(-1, 1, 1, 1),
    )
    seen = visible(variant.mask, variant.mask_captured, at) & (at.kv_row < lens.view(-1, 1, 1, 1))
    if seen.shape[1] > 1:
        return None
    pages = -(-group.kv_len // inputs.page_size)
    table = inputs.page_table[chosen, :pages].long()
    first_rows = torch.arange(pages, device="cpu") * inputs.page_size
    table = table.where(first_rows < lens.unsqueeze(1), 0)
    key = _side_by_side(inputs.key_pages, table, group.kv_len)
    value = _side_by_side(inputs.value_pages, table, group.kv_len)
    partial = flash_tile.partial(seen, query.dtype)

    def computed() -> tuple[Tensor, Tensor]:
        output, lse = flash_tile.forward(
            query.unsqueeze(2), key, value, variant.scale, partial, False
        )
        if partial.blind is not None:
            output = output.masked_fill(partial.blind.unsqueeze(-1), 0)
        return output.squeeze(2), lse.squeeze(2)

    output, lse = computed()
    if not bool(output.sum().isfinite()):
        hidden = ~seen.view(len(chosen), 1, group.kv_len, 1)
        key.masked_fill_(hidden, 0)
        value.masked_fill_(hidden, 0)
        output, lse = computed()
    return output, lse


def _side_by_side(
    pages: Float[Tensor, "num_pages kv_heads page_size dim"],
    table: Int[Tensor, "batch pages"],
    kv_len: int,
) -> Float[Tensor, "batch kv_heads keys dim"]:
    """The rows of all sequences, side by side and padded to one length."""
    _, heads, page_size, dim = pages.shape
    length = table.shape[1] * page_size
    if pages.is_contiguous():  # a head's part of a page is copied in one go
        parts = table.unsqueeze(1) * heads + torch.arange(heads, device="cpu").view(-1, 1)
        chosen = pages.flatten(0, 1).index_select(0, parts.flatten())
        rows = chosen.view(len(table), heads, length, dim)
    else:  # as `PagedCache` has them, all pages of a head together, that is as fast
        chosen = pages.transpose(0, 1).index_select(1, table.flatten())
        rows = chosen.view(heads, len(table), length, dim).transpose(0, 1)
    return rows[:, :, :kv_len]


# ---- pages as a few dense pieces ----------------------------------------------------------------
# Adjacent pages whose rows follow each other in memory are one view, and nothing is copied. Where
# pages are scattered, or hold other numbers than products take, a piece at a time is copied:
# small enough to stay in the cache, from which the product then reads it.

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
        if not 0 <= kv_len <= inputs.page_table.shape[1] * size:  # not checked with the call
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
        inputs = self.inputs
        if piece.view:
            return self._view(inputs.key_pages, piece), self._view(inputs.value_pages, piece)
        return (
            self._copy("key", inputs.key_pages, inputs.key_scales, piece),
            self._copy("value", inputs.value_pages, inputs.value_scales, piece),
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
