"""Groups: sequences of a call over pages that are computed together, planned once for all layers.

One by one, a short one costs far more in calls than in products. So pages of short ones are copied
side by side, padded to one length, and all are one problem. Where the result of single query rows
is not finite, hidden rows and padding are zeroed and it is computed again, so that nothing in them
can show; chunks of several rows are then left to the path of all others. Longer sequences with one
query row are read where they lie, if what they see does so in one piece.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from saccade.modifiers.evaluate import index_range, visible
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.cpu import block_mask, flash_tile
from saccade.ops.attention.cpu import host as attention_host
from saccade.ops.paged_attention.cpu.pages import (
    PageParts,
    parts_of,
    piece_strides,
    rows_follow,
    side_by_side,
    view_of,
)
from saccade.runtime.arguments import check_page_values
from saccade.runtime.spec import PagedInputs, Variant

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
        bias: 0 where keys are visible, -inf where hidden, for each query head of a kv head.
        blind: [batch, 1, 1], which sequences see nothing; None if none are.
        key_parts, value_parts: what is copied of pages.
    """

    sequences: list[int]
    kv_len: int
    rows: Int[Tensor, " batch"] | None
    bias: Float[Tensor, "batch 1 heads_per_kv_head kv_len"]
    blind: Bool[Tensor, "batch 1 1"] | None
    key_parts: PageParts
    value_parts: PageParts


class ViewedGroup(NamedTuple):
    """Longer sequences with one query row whose visible keys follow each other in memory.

    Attributes:
        rows: of the query; None: all of them.
        places: where each one's keys begin, a page and a slot in it, and how many they are.
    """

    sequences: list[int]
    rows: Int[Tensor, " batch"] | None
    places: list[tuple[int, int, int]]


class ChunkGroup(NamedTuple):
    """Short sequences with several query rows each, padded to equally many rows and keys; a row of
    padding is its sequence's last one again.

    Attributes:
        rows: of the packed query, for each padded row.
        real: which padded rows are none of padding.
        partial: [batch, 1, rows, kv_len].
        behind: [batch, 1, kv_len, 1], keys behind each sequence's end.
    """

    sequences: list[int]
    kv_len: int
    rows: Int[Tensor, " padded"]
    real: Int[Tensor, " rows"]
    partial: flash_tile.PartialTile
    behind: Bool[Tensor, "batch 1 kv_len 1"]
    key_parts: PageParts
    value_parts: PageParts


Groups = Sequence[PlannedGroup | ViewedGroup | ChunkGroup]

# Numbers of plans that are kept: 16 MiB in float32.
PLANNED = 2**22


def planned_groups(
    inputs: PagedInputs, variant: Variant, ends: list[int] | None, kind: Hashable = None
) -> Groups:
    """The groups of a call. The layers of a model ask for the same ones in every step, so they are
    remembered, by the lengths and pages themselves, which are checked while they are planned.

    kind: `kind_of` the call, where it is known.
    """
    if variant.score or inputs.query.shape[1] == 0:
        return []
    read = [inputs.page_table, inputs.kv_lens, *variant.mask_captured.tensors]
    if inputs.cu_seqlens_q is not None:
        read.append(inputs.cu_seqlens_q)
    kind = kind_of(inputs, variant, ends) if kind is None else kind
    return _planned.get(kind, read, lambda: _plan(inputs, variant, ends))


def kind_of(inputs: PagedInputs, variant: Variant, ends: list[int] | None) -> Hashable:
    """All that plans depend on beside the numbers in tensors."""
    query, captured = inputs.query, variant.mask_captured
    numbers = (tuple(captured.ints), tuple(map(float.hex, captured.floats)))
    sizes = query.shape, query.dtype, ends is None
    of_pages = [
        (pages.shape, pages.stride(), pages.dtype)
        for pages in (inputs.key_pages, inputs.value_pages)
    ]
    return (variant.mask, *numbers, *sizes, *of_pages)


def _plan(inputs: PagedInputs, variant: Variant, ends: list[int] | None) -> Groups:
    check_page_values(inputs)
    batch = inputs.kv_lens.shape[0]
    if ends is None:
        query_lens = [inputs.query.shape[2]] * batch
    else:
        query_lens = [end - start for start, end in itertools.pairwise(ends)]
    found: list[PlannedGroup | ViewedGroup | ChunkGroup] = []
    short = short_groups(inputs, variant, query_lens)
    for group in short:
        planned = _planned_group(inputs, variant, group, ends)
        if planned is None:
            return []
        found.append(planned)
    if products_take(inputs):
        others = {*range(batch)}.difference(*[group.sequences for group in short])
        places = {
            sequence: _place(inputs, variant, sequence)
            for sequence in sorted(others) if query_lens[sequence] == 1
        }  # fmt: skip
        viewed = {sequence: place for sequence, place in places.items() if place is not None}
        if viewed:
            rows = _rows(inputs, [*viewed], ends)
            found.append(ViewedGroup([*viewed], rows, [*viewed.values()]))
        if ends is not None:
            chunks = [
                _planned_chunks(inputs, variant, sequences, ends)
                for sequences in chunk_groups(inputs, query_lens)
            ]
            found += [group for group in chunks if group is not None]
    return found


def _planned_group(
    inputs: PagedInputs, variant: Variant, group: Group, ends: list[int] | None
) -> PlannedGroup | None:
    """The plan of one group; None where heads see unlike keys: no one set of rows is hidden."""
    sequences, kv_len = group
    lens, table, heads = inputs.kv_lens, inputs.page_table, inputs.query.shape[1]
    chosen = torch.tensor(sequences, device="cpu")
    if len(sequences) < lens.shape[0]:
        lens, table = lens[chosen], table[chosen]
    seen = _seen(variant, chosen, lens, heads, kv_len)
    if seen.shape[1] > 1:
        return None
    if not variant.mask:  # each of these has a key
        bias, blind = torch.where(seen, 0.0, -torch.inf).to(inputs.query.dtype), None
    else:
        bias, blind = flash_tile.partial(seen, inputs.query.dtype)
    of_kv_head = heads // inputs.key_pages.shape[1]
    return PlannedGroup(
        sequences, kv_len, _rows(inputs, sequences, ends), bias.expand(-1, -1, of_kv_head, -1),
        blind, *_all_parts(inputs, table, kv_len),
    )  # fmt: skip


def _planned_chunks(
    inputs: PagedInputs, variant: Variant, sequences: list[int], ends: list[int]
) -> ChunkGroup | None:
    """The plan of sequences with several query rows; None where heads see unlike keys."""
    chosen = torch.tensor(sequences, device="cpu")
    lens, table = inputs.kv_lens.long()[chosen], inputs.page_table[chosen]
    starts = torch.tensor([ends[each] for each in sequences], device="cpu").view(-1, 1)
    counts = torch.tensor(
        [ends[each + 1] - ends[each] for each in sequences], device="cpu"
    ).view(-1, 1)  # fmt: skip
    kv_len, of_chunk = int(lens.max()), torch.arange(int(counts.max()), device="cpu")
    chunk_rows = of_chunk.minimum(counts - 1)
    at = Coordinates(
        batch=chosen.view(-1, 1, 1, 1),
        head=index_range(0, inputs.query.shape[1], 1),
        query_row=chunk_rows[:, None, :, None],
        kv_row=index_range(0, kv_len, 3),
        shift=(lens.view(-1, 1) - counts).view(-1, 1, 1, 1),
    )
    there = at.kv_row < lens.view(-1, 1, 1, 1)
    seen = visible(variant.mask, variant.mask_captured, at) & there if variant.mask else there
    if seen.shape[1] > 1:
        return None
    seen = seen.expand(-1, -1, of_chunk.numel(), -1)
    return ChunkGroup(
        sequences, kv_len, (starts + chunk_rows).flatten(),
        (of_chunk < counts).flatten().nonzero().flatten(),
        flash_tile.partial(seen, inputs.query.dtype), ~there.transpose(2, 3),
        *_all_parts(inputs, table, kv_len),
    )  # fmt: skip


def _all_parts(
    inputs: PagedInputs, table: Int[Tensor, "batch pages"], kv_len: int
) -> tuple[PageParts, PageParts]:
    """What is copied of keys and of values; behind a sequence's end it is any page."""
    table = table[:, : -(-kv_len // inputs.page_size)].long()
    table = table.clamp(0, inputs.key_pages.shape[0] - 1)
    of_keys = parts_of(inputs.key_pages, table)
    if piece_strides(inputs.value_pages) == piece_strides(inputs.key_pages):
        return of_keys, of_keys
    return of_keys, parts_of(inputs.value_pages, table)


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
    if kv_len == 0 or not all(map(rows_follow, pages)):
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


def _numbers(groups: Groups) -> int:
    total = 2**8
    for each in groups:
        if isinstance(each, ViewedGroup):
            continue
        bias = each.bias if isinstance(each, PlannedGroup) else each.partial.bias
        parts = each.key_parts.numbers.numel() + each.value_parts.numbers.numel()
        total += bias.numel() + parts
    return total


_planned: block_mask.Remembered[Groups] = block_mask.Remembered(PLANNED, _numbers)


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
    if len(short) * max([lens[sequence] for sequence in short]) * of_row <= COPIED:
        return [Group(short, max([lens[sequence] for sequence in short]))]
    short.sort(key=lens.__getitem__)  # neighbours in a group need little padding
    found: list[list[int]] = [[]]
    for sequence in short:
        if (len(found[-1]) + 1) * lens[sequence] * of_row > COPIED:
            found.append([])
        found[-1].append(sequence)
    return [Group(sorted(sequences), lens[sequences[-1]]) for sequences in found if sequences]


def chunk_groups(inputs: PagedInputs, query_lens: list[int]) -> list[list[int]]:
    """The short sequences of a call with several query rows, in groups of two or more that are
    computed at once: of alike sizes, as padding is computed too."""
    key_pages = inputs.key_pages
    of_row = key_pages.shape[1] * (key_pages.shape[3] + inputs.value_pages.shape[3])
    lens = inputs.kv_lens.tolist()
    short = [
        sequence
        for sequence, rows in enumerate(query_lens)
        if 1 < rows <= block_mask.QUERY_TILE and 0 < lens[sequence] * of_row <= SHORT
    ]
    short.sort(key=lambda sequence: (lens[sequence], query_lens[sequence]))
    found: list[list[int]] = [[]]
    for sequence in short:
        group, kv_len = [*found[-1], sequence], lens[sequence]
        padded = len(group) * max([query_lens[each] for each in group]) * kv_len
        pairs = sum([query_lens[each] * lens[each] for each in group])
        fits = padded <= min(2 * pairs, block_mask.PAIRS_TOGETHER)
        if fits and len(group) * kv_len * of_row <= COPIED:
            found[-1] = group
        else:
            found.append([sequence])
    return [sorted(group) for group in found if len(group) > 1]


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
        shift=(lens.long() - 1).view(-1, 1, 1, 1),
    )
    return visible(variant.mask, variant.mask_captured, at) & (at.kv_row < lens.view(-1, 1, 1, 1))


def attend_group(
    inputs: PagedInputs,
    variant: Variant,
    group: PlannedGroup,
    query: Float[Tensor, "batch heads *one dim"],
) -> tuple[Tensor, Tensor]:
    """Output [batch, heads, 1, value_dim] and lse [batch, heads, 1] of a group's query rows."""
    batch = len(group.sequences)
    key = side_by_side("key", inputs.key_pages, group.key_parts, batch, group.kv_len)
    value = side_by_side("value", inputs.value_pages, group.value_parts, batch, group.kv_len)

    def computed() -> tuple[Tensor, Tensor]:
        return flash_tile.forward_rows(query, key, value, variant.scale, group.bias, group.blind)

    output, lse = computed()
    if not math.isfinite(output.sum().item()):
        hidden = group.bias[:, :, :1].isneginf().transpose(2, 3)
        key.masked_fill_(hidden, 0)
        value.masked_fill_(hidden, 0)
        output, lse = computed()
    return output, lse


def attend_chunks(
    inputs: PagedInputs, variant: Variant, group: ChunkGroup, output: Tensor, lse: Tensor
) -> bool:
    """Compute sequences with several query rows and write their results; False if they are not
    finite, so that something hidden may show, or if sinks need sums that an lse has no room for."""
    batch = len(group.sequences)
    key = side_by_side("key", inputs.key_pages, group.key_parts, batch, group.kv_len)
    value = side_by_side("value", inputs.value_pages, group.value_parts, batch, group.kv_len)
    key.masked_fill_(group.behind, 0)
    value.masked_fill_(group.behind, 0)
    query = inputs.query.index_select(0, group.rows).unflatten(0, (batch, -1)).transpose(1, 2)
    found, of_lse = flash_tile.forward(
        query, key, value, variant.scale, group.partial, causal=False
    )
    if not math.isfinite(found.sum().item()):
        return False
    if inputs.sinks is not None:
        if attention_host.loses_sums(of_lse):
            return False
        found, of_lse = attention_host.add_sinks(found, of_lse, inputs.sinks)
    rows = group.rows.index_select(0, group.real)
    found = found.transpose(1, 2).flatten(0, 1).index_select(0, group.real)
    of_lse = of_lse.transpose(0, 1).flatten(1, 2).index_select(1, group.real)
    output.index_copy_(0, rows, found.to(output.dtype))
    lse.index_copy_(1, rows, of_lse.to(lse.dtype))
    return True


def attend_views(
    inputs: PagedInputs,
    variant: Variant,
    group: ViewedGroup,
    query: Float[Tensor, "batch heads *one dim"],
) -> tuple[Tensor, Tensor]:
    """`attend_group` for sequences that are read where they lie, one after the other."""
    found = [
        flash_tile.forward_rows(
            row,
            view_of(inputs.key_pages, *place),
            view_of(inputs.value_pages, *place),
            variant.scale,
            None,
        )
        for row, place in zip(query.split(1), group.places, strict=True)
    ]
    outputs, lses = zip(*found, strict=True)
    return torch.cat(outputs), torch.cat(lses)


def attend_planned(
    inputs: PagedInputs,
    variant: Variant,
    group: PlannedGroup | ViewedGroup,
    query: Float[Tensor, "batch heads *one dim"],
) -> tuple[Tensor, Tensor] | None:
    """Output [batch, heads, 1, value_dim] and lse [batch, heads, 1] of a group; None if sinks need
    sums that an lse has no room for."""
    if isinstance(group, ViewedGroup):
        output, lse = attend_views(inputs, variant, group, query)
    else:
        output, lse = attend_group(inputs, variant, group, query)
    if inputs.sinks is None:
        return output, lse
    if attention_host.loses_sums(lse):
        return None
    return attention_host.add_sinks(output, lse, inputs.sinks)
