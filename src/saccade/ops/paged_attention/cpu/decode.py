"""Short sequences over pages: those with one query row each, computed together.

One by one, such a sequence costs far more in calls than in products. So their pages are copied
side by side, padded to one length, and all are one problem. Where the result is not finite,
padding and hidden rows are zeroed and it is computed again, so that nothing in them can show.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from saccade.modifiers.evaluate import index_range, visible
from saccade.modifiers.expression import Coordinates
from saccade.ops.attention.cpu import flash_tile
from saccade.runtime.spec import PagedInputs, Variant

# Numbers of one sequence's keys and values up to which copying them costs less than calls do.
SHORT = 2**16
# Numbers that are copied at once: more would leave the cache of a processor.
COPIED = 2**20


class Group(NamedTuple):
    """Sequences that are computed together, and the longest of their lengths."""

    sequences: list[int]
    kv_len: int


def groups(inputs: PagedInputs, variant: Variant, query_lens: list[int]) -> list[Group]:
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


def attend(
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
    key = _rows(inputs.key_pages, table, group.kv_len)
    value = _rows(inputs.value_pages, table, group.kv_len)
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


def _rows(
    pages: Float[Tensor, "num_pages kv_heads page_size dim"],
    table: Int[Tensor, "batch pages"],
    kv_len: int,
) -> Float[Tensor, "batch kv_heads keys dim"]:
    """The rows of all sequences, side by side and padded to one length."""
    _, heads, page_size, dim = pages.shape
    chosen = pages.transpose(0, 1).index_select(1, table.flatten())
    rows = chosen.view(heads, len(table), table.shape[1] * page_size, dim).transpose(0, 1)
    return rows[:, :, :kv_len]
