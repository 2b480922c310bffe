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
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.modifiers.evaluate import index_range, visible
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.cpu import block_mask, flash_tile
from saccade.ops.attention.cpu import host as attention_host
from saccade.ops.attention.cpu.block_mask import Run, TileSizes
from saccade.ops.attention.cpu.segments import DenseProblem, check_ends, clear_padding
from saccade.runtime.arguments import check_page_values
from saccade.runtime.spec import KernelConfig, PagedInputs, Variant, empty_rows
from saccade.runtime.validation import computed_without


@computed_without
def forward(
    inputs: PagedInputs, variant: Variant, config: KernelConfig, batch_invariant: bool
) -> tuple[Tensor, Tensor]:
    """Output and lse; see `saccade.attention_paged`."""
    offsets = inputs.cu_seqlens_q
    if offsets is None and not batch_invariant and inputs.query.shape[2] == 1:
        found = _all_together(inputs, variant)
        if found is not None:
            return found
    output, lse = empty_rows(inputs.query, inputs.value_pages.shape[3], offsets is not None)
    ends = None if offsets is None else offsets.tolist()
    if ends is not None:
        check_ends("cu_seqlens_q", ends, inputs.query.shape[0])
        clear_padding(offsets, output)
        clear_padding(offsets, lse, dim=1, number=-torch.inf)
    dtype, scratch = _product_dtype(inputs), Scratch()
    done = set() if batch_invariant else _together(inputs, variant, ends, output, lse)
    if len(done) == inputs.kv_lens.shape[0]:
        return output, lse
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


def _all_together(inputs: PagedInputs, variant: Variant) -> tuple[Tensor, Tensor] | None:
    """The results of a call whose sequences are one group: nothing is put together from parts."""
    groups = planned_groups(inputs, variant, None)
    if len(groups) != 1 or groups[0].rows is not None:
        return None
    output, lse = _attend_planned(inputs, variant, groups[0], inputs.query.squeeze(2))
    return output.to(inputs.query.dtype), lse


def _together(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None, output: Tensor, lse: Tensor
) -> set[int]:
    """Compute sequences of one query row each by their plan; which ones those were."""
    done: set[int] = set()
    for group in planned_groups(inputs, variant, ends):
        rows = group.rows
        query = inputs.query if rows is None else inputs.query.index_select(0, rows)
        query = query.squeeze(2) if ends is None else query
        of_output, of_lse = _attend_planned(inputs, variant, group, query)
        if ends is not None:
            of_output, of_lse = of_output.squeeze(2), of_lse.squeeze(2).transpose(0, 1)
        _put(output, 0, rows, of_output)
        _put(lse, 0 if ends is None else 1, rows, of_lse)
        done.update(group.sequences)
    return done


def _attend_planned(
    inputs: PagedInputs,
    variant: Variant,
    group: PlannedGroup | ViewedGroup,
    query: Float[Tensor, "batch heads dim"],
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, 1, value_dim] and lse [batch, heads, 1] of a group."""
    if isinstance(group, ViewedGroup):
        output, lse = attend_views(inputs, variant, group, query)
    else:
        output, lse = attend_group(inputs, variant, group, query)
    output, lse = output.unsqueeze(2), lse.unsqueeze(2)
    if inputs.sinks is None:
        return output, lse
    return attention_host.add_sinks(output, lse, inputs.sinks)


def _put(results: Tensor, dim: int, rows: Tensor | None, found: Tensor) -> None:
    """Write some rows of results; None: all of them."""
    if rows is None:
        results.copy_(found)
    else:
        results.index_copy_(dim, rows, found.to(results.dtype))


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


# ---- sequences with one query row each, planned once for all layers ------------------------------
# One by one, a short one costs far more in calls than in products. So their pages are copied side
# by side, padded to one length, and all are one problem. Where its result is not finite, hidden
# rows and padding are zeroed and it is computed again, so that nothing in them can show. Longer
# ones are read where they lie, if what they see does so in one piece.

# Numbers of one sequence's keys and values up to which copying them costs less than calls do.
SHORT = 2**16
# Numbers that are copied at once: more would leave the cache of a processor.
COPIED = 2**20


class Group(NamedTuple):
    """Sequences that are computed together, and the longest of their lengths."""

    sequences: list[int]
    kv_len: int


class PlannedGroup(NamedTuple):
    """A group, what its rows see, and where that lies.

    Attributes:
        rows: of the query; None: all of them.
        partial: [batch, 1, 1, kv_len].
        key_parts, value_parts: which parts of pages are copied; see `_parts`.
    """

    sequences: list[int]
    kv_len: int
    rows: Int[Tensor, " batch"] | None
    partial: flash_tile.PartialTile
    key_parts: Int[Tensor, " parts"]
    value_parts: Int[Tensor, " parts"]


class ViewedGroup(NamedTuple):
    """Longer sequences with one query row whose visible keys follow each other in memory.

    Attributes:
        rows: of the query; None: all of them.
        places: where each one's keys begin, a page and a slot in it, and how many they are.
    """

    sequences: list[int]
    rows: Int[Tensor, " batch"] | None
    places: list[tuple[int, int, int]]


# Numbers of plans that are kept: 16 MiB in float32.
PLANNED = 2**22


def planned_groups(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None
) -> list[PlannedGroup | ViewedGroup]:
    """The groups of a call. The layers of a model ask for the same ones in every step, so they are
    remembered, by the lengths and pages themselves, which are checked while they are planned."""
    query, captured = inputs.query, variant.mask_captured
    if variant.score:
        return []
    numbers = (tuple(captured.ints), tuple(map(float.hex, captured.floats)))
    sizes = query.shape, query.dtype, ends is None
    of_pages = [
        (pages.shape, pages.dtype, pages.is_contiguous())
        for pages in (inputs.key_pages, inputs.value_pages)
    ]
    read = [inputs.page_table, inputs.kv_lens, *captured.tensors]
    if inputs.cu_seqlens_q is not None:
        read.append(inputs.cu_seqlens_q)
    return _planned.get(
        (variant.mask, *numbers, *sizes, *of_pages), read, lambda: _plan(inputs, variant, ends)
    )


def _plan(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None
) -> list[PlannedGroup | ViewedGroup]:
    check_page_values(inputs)
    batch = inputs.kv_lens.shape[0]
    if ends is None:
        query_lens = [inputs.query.shape[2]] * batch
    else:
        query_lens = [end - start for start, end in itertools.pairwise(ends)]
    found: list[PlannedGroup | ViewedGroup] = []
    short = short_groups(inputs, variant, query_lens)
    for sequences, kv_len in short:
        chosen = torch.tensor(sequences, device="cpu")
        lens = inputs.kv_lens[chosen].long()
        seen = _seen(variant, chosen, lens, inputs.query.shape[1], kv_len)
        if seen.shape[1] > 1:  # heads see unlike keys: there is no one set of rows to zero
            return []
        table = inputs.page_table[chosen, : -(-kv_len // inputs.page_size)].long()
        first_rows = torch.arange(table.shape[1], device="cpu") * inputs.page_size
        table = table.where(first_rows < lens.unsqueeze(1), 0)
        partial = flash_tile.partial(seen, inputs.query.dtype)
        of_keys = of_values = _parts(inputs.key_pages, table)
        if inputs.value_pages.is_contiguous() != inputs.key_pages.is_contiguous():
            of_values = _parts(inputs.value_pages, table)
        rows = _rows(inputs, sequences, ends)
        found.append(PlannedGroup(sequences, kv_len, rows, partial, of_keys, of_values))
    if products_take(inputs):
        others = {*range(batch)}.difference(*(group.sequences for group in short))
        places = {
            sequence: _place(inputs, variant, sequence)
            for sequence in sorted(others) if query_lens[sequence] == 1
        }  # fmt: skip
        viewed = {sequence: place for sequence, place in places.items() if place is not None}
        if viewed:
            rows = _rows(inputs, [*viewed], ends)
            found.append(ViewedGroup([*viewed], rows, [*viewed.values()]))
    return found


def _rows(inputs: PagedInputs, sequences: list[int], ends: list[int] | None) -> Tensor | None:
    """The query's rows of sequences that have one each; None where they are all rows in order."""
    rows = sequences if ends is None else [ends[each] for each in sequences]
    if rows == [*range(inputs.query.shape[0])]:
        return None
    return torch.tensor(rows, device="cpu")


def _place(inputs: PagedInputs, variant: Variant, sequence: int) -> tuple[int, int, int] | None:
    """Where the keys lie that a sequence's one row sees, if all heads see one run of them."""
    pages, size = (inputs.key_pages, inputs.value_pages), inputs.page_size
    kv_len = int(inputs.kv_lens[sequence])
    if kv_len == 0 or not all(map(_rows_follow, pages)):
        return None
    chosen = torch.tensor([sequence], device="cpu")
    lens = inputs.kv_lens[chosen].long()
    seen = _seen(variant, chosen, lens, inputs.query.shape[1], kv_len)
    if seen.shape[1] > 1 or not bool(seen.any()):
        return None
    visible_rows = seen.flatten().nonzero().flatten()
    start, stop = int(visible_rows[0]), int(visible_rows[-1]) + 1
    first = start // size
    numbers = inputs.page_table[sequence, first : -(-stop // size)].tolist()
    adjacent = numbers == [*range(numbers[0], numbers[0] + len(numbers))]
    if len(visible_rows) != stop - start or not adjacent:
        return None
    return numbers[0], start - first * size, stop - start


def _numbers(groups: list[PlannedGroup | ViewedGroup]) -> int:
    return 2**8 + sum(
        each.partial.bias.numel() + each.key_parts.numel() + each.value_parts.numel()
        for each in groups if isinstance(each, PlannedGroup)
    )  # fmt: skip


_planned: block_mask.Remembered[list[PlannedGroup | ViewedGroup]] = block_mask.Remembered(
    PLANNED, _numbers
)


def products_take(inputs: PagedInputs) -> bool:
    """Whether products take the numbers of the pages as they are."""
    query = inputs.query
    fits = inputs.key_pages.dtype == query.dtype and query.dtype != torch.float16
    return fits and 0 not in (query.shape[-1], inputs.value_pages.shape[3])


def short_groups(inputs: PagedInputs, variant: Variant, query_lens: list[int]) -> list[Group]:
    """The short sequences of a call with one query row, in groups that are copied at once.

    Fewer than two are left to the path of all others, and so are score changes and pages of
    numbers that products do not take.
    """
    if variant.score or not products_take(inputs):
        return []
    key_pages = inputs.key_pages
    of_row = key_pages.shape[1] * (key_pages.shape[3] + inputs.value_pages.shape[3])
    lens = inputs.kv_lens.tolist()
    short = [
        sequence
        for sequence, rows in enumerate(query_lens)
        if rows == 1 and 0 < lens[sequence] * of_row <= SHORT
    ]
    if len(short) < 2:
        return []
    short.sort(key=lens.__getitem__)  # neighbours in a group need little padding
    found: list[Group] = []
    for sequence in short:
        kv_len = lens[sequence]
        if found and (len(found[-1].sequences) + 1) * kv_len * of_row <= COPIED:
            found[-1] = Group([*found[-1].sequences, sequence], kv_len)
        else:
            found.append(Group([sequence], kv_len))
    return [Group(sorted(sequences), kv_len) for sequences, kv_len in found]


def _seen(
    variant: Variant, chosen: Int[Tensor, " batch"], lens: Int[Tensor, " batch"], heads: int,
    kv_len: int,
) -> Bool[Tensor, "#batch #heads 1 #kv_len"]:  # fmt: skip
    """Which keys the one row of each sequence sees."""
    if not variant.mask:
        return torch.arange(kv_len, device="cpu") < lens.view(-1, 1, 1, 1)
    at = Coordinates(
        batch=chosen.view(-1, 1, 1, 1),
        head=index_range(0, heads, 1),
        query_row=index_range(0, 1, 2),
        kv_row=index_range(0, kv_len, 3),
        shift=(lens - 1).view(-1, 1, 1, 1),
    )
    return visible(variant.mask, variant.mask_captured, at) & (at.kv_row < lens.view(-1, 1, 1, 1))


def attend_group(
    inputs: PagedInputs,
    variant: Variant,
    group: PlannedGroup,
    query: Float[Tensor, "batch heads dim"],
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, value_dim] and lse [batch, heads] of a group's query rows."""
    batch, (bias, blind) = len(group.sequences), group.partial
    key = _side_by_side(inputs.key_pages, group.key_parts, batch, group.kv_len)
    value = _side_by_side(inputs.value_pages, group.value_parts, batch, group.kv_len)

    def computed() -> tuple[Tensor, Tensor]:
        output, lse = flash_tile.forward_rows(query, key, value, variant.scale, bias)
        if blind is not None:
            blind_rows = blind.squeeze(-1)
            output = output.masked_fill(blind_rows.unsqueeze(-1), 0)
            lse = lse.masked_fill(blind_rows, -torch.inf)
        return output, lse

    output, lse = computed()
    if not math.isfinite(output.sum().item()):
        hidden = bias.isneginf().view(batch, 1, group.kv_len, 1)
        key.masked_fill_(hidden, 0)
        value.masked_fill_(hidden, 0)
        output, lse = computed()
    return output, lse


def attend_views(
    inputs: PagedInputs,
    variant: Variant,
    group: ViewedGroup,
    query: Float[Tensor, "batch heads dim"],
) -> tuple[Tensor, Tensor]:
    """`attend_group` for sequences that are read where they lie, one after the other."""
    found = [
        flash_tile.forward_rows(
            row,
            _view(inputs.key_pages, *place),
            _view(inputs.value_pages, *place),
            variant.scale,
            None,
        )
        for row, place in zip(query.split(1), group.places, strict=True)
    ]
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def _view(pages: Tensor, page: int, slot: int, count: int) -> Float[Tensor, "1 kv_heads rows dim"]:
    """Rows that follow each other in adjacent pages, from a slot of a page on."""
    _, heads, page_size, dim = pages.shape
    of_page, of_head, of_slot, of_channel = pages.stride()
    return pages.as_strided(
        (1, heads, count, dim),
        (0, of_head, of_page if page_size == 1 else of_slot, of_channel),
        pages.storage_offset() + page * of_page + slot * of_slot,
    )


def _parts(
    pages: Float[Tensor, "num_pages kv_heads page_size dim"], table: Int[Tensor, "batch pages"]
) -> Int[Tensor, " parts"]:
    """What to copy: where pages are contiguous, the parts of single heads in their order (each is
    copied in one go), else the pages."""
    if not pages.is_contiguous():
        return table.flatten()
    heads = pages.shape[1]
    return (table.unsqueeze(1) * heads + torch.arange(heads, device="cpu").view(-1, 1)).flatten()


def _side_by_side(
    pages: Float[Tensor, "num_pages kv_heads page_size dim"],
    parts: Int[Tensor, " parts"],
    batch: int,
    kv_len: int,
) -> Float[Tensor, "batch kv_heads keys dim"]:
    """The rows of all sequences, side by side and padded to one length."""
    _, heads, page_size, dim = pages.shape
    length = -(-kv_len // page_size) * page_size
    if pages.is_contiguous():
        rows = pages.flatten(0, 1).index_select(0, parts).view(batch, heads, length, dim)
    else:  # as `PagedCache` has them, all pages of a head together, that is as fast
        chosen = pages.transpose(0, 1).index_select(1, parts)
        rows = chosen.view(heads, batch, length, dim).transpose(0, 1)
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
            return self._viewed(inputs.key_pages, piece), self._viewed(inputs.value_pages, piece)
        return (
            self._copy("key", inputs.key_pages, inputs.key_scales, piece),
            self._copy("value", inputs.value_pages, inputs.value_scales, piece),
        )

    def _viewed(self, pages: Tensor, piece: Piece) -> Float[Tensor, "1 kv_heads rows dim"]:
        index, slot = divmod(piece.start, pages.shape[2])
        return _view(pages, self.page_numbers[index], slot, piece.stop - piece.start)

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
