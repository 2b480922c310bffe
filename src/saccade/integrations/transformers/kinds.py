"""Kinds: the masks that transformers composes, each as a mask of saccade for given rows."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from saccade import masks

Visible = masks.Mask | None  # None: everything is


@dataclass(frozen=True)
class Rows:
    """Which positions the rows of a call stand at.

    Attributes:
        query_len, kv_len: rows of the call.
        query_offset, kv_offset: the positions of the first rows.
        device: where captured tensors lie.
        positions: [batch, length] positions within each packed sequence, where there are some.
    """

    query_len: int
    kv_len: int
    query_offset: int
    kv_offset: int
    device: torch.device
    positions: Tensor | None = None

    @property
    def shift(self) -> int:
        """How many keys stand before the first query row's own."""
        return self.query_offset - self.kv_offset

    @property
    def align(self) -> str | None:
        """The alignment of saccade's masks that puts rows where they stand, if one does."""
        if self.shift == self.kv_len - self.query_len:
            return "bottom_right"
        return "top_left" if self.shift == 0 else None

    def of_queries(self, table: Tensor) -> Tensor:
        """The columns of [batch, positions] that belong to the query rows."""
        return table[:, self.query_offset : self.query_offset + self.query_len]

    def of_keys(self, table: Tensor) -> Tensor:
        """The columns of [batch, positions] that belong to the key rows."""
        return table[:, self.kv_offset : self.kv_offset + self.kv_len]


@masks.function
def _reaching(batch, head, query_row, kv_row, shift, left, right):
    place = query_row + shift
    return (kv_row >= place - left) & (kv_row <= place + right)


@masks.function
def _shown(batch, head, query_row, kv_row, table):
    return masks.take(table, batch, kv_row)


def reaching(rows: Rows, left: int | None, right: int | None) -> Visible:
    """Every row sees so many keys before its own place and so many after it (None: all).

    Returns:
        None where that hides nothing, and the plainest mask otherwise: causal rather than a window
        that reaches back to the first key.
    """
    furthest = rows.query_len + rows.kv_len + abs(rows.shift)  # no pair is further apart
    cuts_left = left is not None and rows.shift + rows.query_len - 1 - left > 0
    cuts_right = right is not None and rows.shift + right < rows.kv_len - 1
    if not cuts_left and not cuts_right:
        return None
    if not cuts_left and right == 0 and rows.align is not None:
        return masks.causal(rows.align)
    left = left if cuts_left and left is not None else furthest
    right = right if cuts_right and right is not None else furthest
    if rows.align is not None:
        return masks.window(left, right, rows.align)
    return _reaching(rows.shift, left, right)


def padding(rows: Rows, real: Tensor) -> Visible:
    """Only keys that are no padding are visible.

    Args:
        real: bool [batch, positions]; positions behind its end are padding.
    """
    missing = rows.kv_offset + rows.kv_len - real.shape[1]
    if missing > 0:
        real = torch.nn.functional.pad(real, (0, missing))
    real = rows.of_keys(real.to(device=rows.device, dtype=torch.bool))
    kv_len, numbers = rows.kv_len, real.int()
    # one transfer from the device for all three
    counts, firsts, lasts = torch.stack(
        [numbers.sum(1), numbers.argmax(1), kv_len - 1 - numbers.flip(1).argmax(1)]
    ).tolist()
    if all(count == kv_len for count in counts):
        return None
    spans = [
        (0, 0) if c == 0 else (f, e + 1) for c, f, e in zip(counts, firsts, lasts, strict=True)
    ]
    if any(stop - start != count for (start, stop), count in zip(spans, counts, strict=True)):
        return _shown(real)
    starts, stops = torch.tensor(spans, dtype=torch.int32, device=rows.device).unbind(1)
    before = None if not any(start for start, _ in spans) else ~masks.key_lengths(starts)
    behind = None if all(stop == kv_len for _, stop in spans) else masks.key_lengths(stops)
    return conjunction([before, behind])


def same(rows: Rows, ids: Tensor) -> masks.Mask:
    """Rows see the keys that have their own number, of [batch, positions]."""
    ids = ids.to(rows.device)
    return masks.documents(rows.of_queries(ids).contiguous(), rows.of_keys(ids).contiguous())


def chunked(rows: Rows, chunk_size: int, left_padding: Tensor) -> masks.Mask:
    """Rows see the keys of their own chunk, counted from each sequence's first token.

    Args:
        left_padding: [batch], how many tokens come before it.
    """
    end = max(rows.query_offset + rows.query_len, rows.kv_offset + rows.kv_len)
    positions = rows.positions
    if positions is None:
        positions = torch.arange(end, device=rows.device)[None]
    starts = left_padding.to(rows.device)[:, None]
    return same(rows, torch.div(positions - starts, chunk_size, rounding_mode="floor"))


def blockwise(rows: Rows, block_sequence_ids: Tensor) -> masks.Mask:
    """Rows see the keys of their own block, of [batch, positions]; -1 belongs to none."""
    # Numbers below 0 are nobody's: a query's and a key's must not be equal.
    ids = block_sequence_ids.to(rows.device)
    query_ids, kv_ids = rows.of_queries(ids), rows.of_keys(ids)
    return masks.documents(query_ids.where(query_ids >= 0, -1), kv_ids.where(kv_ids >= 0, -2))


def conjunction(parts: Iterable[Visible]) -> Visible:
    """What all parts show; None stands for everything."""
    hiding = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, hiding) if hiding else None


def disjunction(parts: Iterable[Visible]) -> Visible:
    """What any part shows."""
    given = list(parts)
    if any(part is None for part in given):
        return None
    return functools.reduce(operator.or_, [part for part in given if part is not None])
