"""Work: what a mask asks of each row tile and who sees which keys, from intervals, without pairs.

`intervals.classify` says of a tile of pairs whether any is visible and whether all are. Coarse
tiles are classified all together, and those that are partly visible once more, eight by eight, so
that a million rows take a few million verdicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.masks import Mask
from saccade.modifiers import intervals
from saccade.modifiers.expression import Coordinates, mentions, parse
from saccade.modifiers.intervals import Span

SPLIT = 8  # fine tiles along each side of a coarse one
FINE_TILE = 128  # rows: what kernels take together, or more of very long sequences
MOST_COARSE_TILES = 1024
FEWEST_FINE_TILES = 1024
MOST_VERDICTS = 2**22  # at once: bounds the memory of a plan


class WholeCall(NamedTuple):
    """The mask and sizes of a call whose rows are dealt to ranks: as many keys as query rows."""

    mask: Mask
    length: int
    batch: int
    heads: int

    @property
    def distinct(self) -> tuple[int, int]:
        """Batch entries and heads that the mask may tell apart."""
        found = [any(mentions(parse(self.mask.key), [name])) for name in ("batch", "head")]
        return self.batch if found[0] else 1, self.heads if found[1] else 1

    @property
    def alike(self) -> float:
        """How many batch entries and heads each distinct one stands for."""
        batch, heads = self.distinct
        return self.batch * self.heads / max(batch * heads, 1)


class RowWork(NamedTuple):
    """The pairs that a kernel computes for each row tile, over all batch entries and heads."""

    tile: int
    length: int
    pairs: Tensor  # float64 [row tiles]

    def until(self, rows: Tensor) -> Tensor:
        """The pairs of all rows before some row numbers; within a tile rows are alike."""
        before = torch.cat([torch.zeros(1, dtype=torch.float64), self.pairs.cumsum(0)])
        index = (rows // self.tile).clamp_max(self.pairs.numel())
        inside = index.clamp_max(max(self.pairs.numel() - 1, 0))
        if not self.pairs.numel():
            return before[index]
        sizes = (self.length - inside * self.tile).clamp_max(self.tile)
        part = (rows - index * self.tile).double() / sizes
        return before[index] + torch.where(index == inside, part * self.pairs[inside], 0.0)


def row_work(call: WholeCall) -> RowWork:
    """The work of each row tile: the tiles of keys that it visits, in pairs."""
    length = call.length
    fine = min(max(_power_of_two(length // FEWEST_FINE_TILES), 1), FINE_TILE)
    while length > fine * SPLIT * MOST_COARSE_TILES:
        fine *= 2
    num_fine = -(-length // fine)
    if not call.mask.key or not length:
        sizes = (length - torch.arange(num_fine) * fine).clamp_max(fine)
        return RowWork(fine, length, sizes.double() * length * call.batch * call.heads)
    coarse = fine * SPLIT
    edges = torch.arange(0, length + coarse, coarse).clamp_max(length)
    keys = (edges[1:] - edges[:-1]).double()
    full_keys = torch.zeros(len(keys), dtype=torch.float64)  # of each coarse row
    partial: list[_Partial] = []
    for first, possible, certain in _strips(call, edges, edges):
        full_keys[first : first + certain.shape[2]] = certain.sum((0, 1)).double() @ keys
        rows, columns = (possible & ~certain).any(1).any(0).nonzero().unbind(1)
        partial.append(
            _Partial(torch.stack([rows + first, columns], 1), certain[:, :, rows, columns])
        )
    pairs = full_keys.repeat_interleave(SPLIT)
    for some in partial:
        for tiles, full in some.split(max(1, MOST_VERDICTS // _verdicts_of_a_tile(call))):
            rows = (tiles[:, :1] * SPLIT + torch.arange(SPLIT)).flatten()
            pairs.index_add_(0, rows, _partial_keys(call, tiles, full, fine).flatten())
    pairs *= call.alike
    sizes = (length - torch.arange(num_fine) * fine).clamp_max(fine)
    return RowWork(fine, length, pairs[:num_fine] * sizes)


class _Partial(NamedTuple):
    """Coarse tiles that some batch entry or head sees in part."""

    tiles: Tensor  # [tiles, 2]: their row and column
    full: Tensor  # [batch, heads, tiles]: for which batch entries and heads they are full

    def split(self, most: int) -> Iterator[_Partial]:
        """Some of them at a time."""
        return map(_Partial, self.tiles.split(most), self.full.split(most, 2))


def needs(call: WholeCall, query_edges: Tensor, kv_edges: Tensor) -> Tensor:
    """Whether any row between two edges may see any key between two others: bool [rows, keys]."""
    if not call.mask.key:
        some = (query_edges[1:] > query_edges[:-1])[:, None]
        return some & (kv_edges[1:] > kv_edges[:-1])
    found = [possible.any(1).any(0) for _, possible, _ in _strips(call, query_edges, kv_edges)]
    return torch.cat(found) if found else torch.zeros(0, len(kv_edges) - 1, dtype=torch.bool)


def _strips(
    call: WholeCall, query_edges: Tensor, kv_edges: Tensor
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """The first row range of each strip, and [batch or 1, heads or 1, rows, keys]: whether any pair
    is visible, and whether all are."""
    num_rows, num_keys = len(query_edges) - 1, len(kv_edges) - 1
    batch, heads = call.distinct
    each = max(1, MOST_VERDICTS // max(1, num_keys * batch * heads))
    kv_row = _between(kv_edges, (1, 1, 1, -1), "kv")
    some_keys = kv_edges[1:] > kv_edges[:-1]
    for first in range(0, num_rows, each):
        edges = query_edges[first : first + each + 1]
        at = _coordinates(call, _between(edges, (1, 1, -1, 1), "query"), kv_row)
        truth = intervals.classify(call.mask.key, call.mask.captured, at)
        some = (edges[1:] > edges[:-1])[:, None] & some_keys
        shape = batch, heads, *some.shape
        yield first, truth.possible.expand(shape) & some, truth.certain.expand(shape) & some


def _partial_keys(call: WholeCall, tiles: Tensor, full: Tensor, fine: int) -> Tensor:
    """How many keys each fine row of some coarse tiles visits there, [coarse tiles, SPLIT], summed
    over the batch entries and heads for which these are not full."""
    starts = tiles[:, :, None] * (fine * SPLIT) + torch.arange(SPLIT) * fine
    ends = (starts + fine).clamp_max(call.length)
    low = starts.clamp_max(call.length - 1)
    high = (ends - 1).maximum(low)
    shapes = (1, 1, -1, SPLIT, 1), (1, 1, -1, 1, SPLIT)
    query_row, kv_row = (
        Span(low[:, side].reshape(shape), high[:, side].reshape(shape), rows=name)
        for side, (shape, name) in enumerate(zip(shapes, ("query", "kv"), strict=True))
    )
    at = _coordinates(call, query_row, kv_row, dims=5)
    possible = intervals.classify(call.mask.key, call.mask.captured, at).possible
    visited = possible.expand(*call.distinct, len(tiles), SPLIT, SPLIT) & ~full[..., None, None]
    sizes = (ends - starts).clamp_min(0)[:, 1].double()
    return (visited.sum((0, 1)) * sizes[:, None, :]).sum(2)


def _coordinates(call: WholeCall, query_row: Span, kv_row: Span, dims: int = 4) -> Coordinates:
    batch, heads = call.distinct
    return Coordinates(
        batch=torch.arange(batch).view(-1, *[1] * (dims - 1)),
        head=torch.arange(heads).view(1, -1, *[1] * (dims - 2)),
        query_row=query_row,
        kv_row=kv_row,
        shift=0,
    )


def _between(edges: Tensor, shape: tuple[int, ...], name: str) -> Span:
    """The rows from each edge to the next; empty ranges stand for one row and count nothing."""
    low = edges[:-1].clamp_max(max(int(edges[-1]) - 1, 0))
    return Span(low.view(shape), (edges[1:] - 1).maximum(low).view(shape), rows=name)


def _verdicts_of_a_tile(call: WholeCall) -> int:
    """Verdicts, or copied entries of tables, that one coarse tile takes to be looked at again."""
    batch, heads = call.distinct
    return max(SPLIT**2 * batch * heads, 256)


def _power_of_two(number: int) -> int:
    return 1 << max(number.bit_length() - 1, 0) if number else 0
