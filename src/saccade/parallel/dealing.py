"""Dealing: which rows each rank holds, so that all have as many rows and as much work.

Rows are cut into chunks of one length, a few for each rank, which are dealt in two ways. In rounds,
every rank gets one chunk a round, the rank with least work so far the heaviest: under a causal mask
two rounds deal the first chunk with the last. By swaps, ranks begin with rows that lie together,
and the busiest rank changes a chunk with the least busy one until work is even: under documents
most rows stay beside the keys that they see. Either way rows are even, whatever the mask. More
chunks balance better and part more rows from their keys, so the fewest are taken that balance well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.parallel.work import RowWork

ROUNDS = (1, 2, 4, 8, 16, 32)
MOST_CHUNKS = 2048  # or two for each rank
BALANCED = 0.03  # of the mean, beyond which more chunks are tried
ACCEPTED = 0.1  # of rows that lie together, where they send fewer keys
MOST_SWAPS = 1024  # and ranks among which chunks are swapped: each takes a look at all
ALIGNMENTS = (128, 64, 32, 16, 8, 4, 2, 1)
ROWS_OF_ALIGNMENT = 32  # chunks have at least so many times the rows that they are aligned to


class Deal(NamedTuple):
    """Chunks of rows and the rank that holds each.

    Attributes:
        edges: int64 [chunks + 1], the first row of each chunk, and the length.
        owners: int64 [chunks].
        work: float64 [ranks], pairs.
    """

    edges: Tensor
    owners: Tensor
    work: Tensor

    @property
    def imbalance(self) -> float:
        """How much more than the mean the busiest rank has to do: 0.02 is 2 %."""
        return imbalance(self.work)

    def rows_of(self, rank: int) -> Tensor:
        """The rows that a rank holds, ascending."""
        parts = [
            torch.arange(int(self.edges[chunk]), int(self.edges[chunk + 1]))
            for chunk in (self.owners == rank).nonzero().flatten().tolist()
        ]
        return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def imbalance(work: Tensor) -> float:
    """How much more than the mean the largest number is, as a part of the mean."""
    mean = float(work.mean())
    return float(work.max()) / mean - 1 if mean else 0.0


def deals(work: RowWork, ranks: int) -> list[Deal]:
    """Ways to deal all rows: in rounds, and by swaps and not cut at all where that is even too."""
    rounds = _fewest_chunks(work, ranks, _in_rounds)
    found = [rounds]
    if ranks < len(rounds.owners) and ranks <= MOST_SWAPS:
        swaps = _fewest_chunks(work, ranks, _by_swaps)
        found += [swaps] if swaps.imbalance <= max(BALANCED, rounds.imbalance) else []
        edges = _edges(work.length, ranks)
        uncut = Deal(edges, torch.arange(ranks), work.until(edges).diff())
        found += [uncut] if uncut.imbalance <= ACCEPTED else []
    return found


def _fewest_chunks(
    work: RowWork, ranks: int, dealt: Callable[[Tensor, int, int], tuple[Tensor, Tensor]]
) -> Deal:
    """Dealt with as few chunks as balance well, or those that balance best."""
    best: Deal | None = None
    for rounds in ROUNDS:
        if rounds > 2 and rounds * ranks > MOST_CHUNKS:
            break
        edges = _edges(work.length, ranks * rounds)
        found = Deal(edges, *dealt(work.until(edges).diff(), rounds, ranks))
        if best is None or found.imbalance < best.imbalance:
            best = found
        if best.imbalance <= BALANCED or rounds * ranks >= work.length:
            break
    assert best is not None
    return best


def work_of(work: RowWork, edges: Tensor, owners: Tensor, ranks: int) -> Tensor:
    """The pairs of each rank."""
    of_chunks = work.until(edges).diff()
    return torch.zeros(ranks, dtype=torch.float64).index_add_(0, owners, of_chunks)


def _in_rounds(weights: Tensor, rounds: int, ranks: int) -> tuple[Tensor, Tensor]:
    """One chunk for each rank in each round, the heaviest chunks first."""
    order = weights.argsort(descending=True, stable=True).view(rounds, ranks)
    owners = torch.zeros(ranks * rounds, dtype=torch.int64)
    totals = torch.zeros(ranks, dtype=torch.float64)
    for chunks in order:
        chosen = totals.argsort(stable=True)
        owners[chunks] = chosen
        totals[chosen] += weights[chunks]
    return owners, totals


def _by_swaps(weights: Tensor, rounds: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Chunks that lie together, but for swaps between the busiest rank and the least busy one."""
    held = torch.arange(ranks * rounds).view(ranks, rounds)
    totals = weights.view(ranks, rounds).sum(1)
    for _ in range(MOST_SWAPS):
        busy, idle = int(totals.argmax()), int(totals.argmin())
        gap = float(totals[busy] - totals[idle])
        if imbalance(totals) <= BALANCED:
            break
        gains = weights[held[busy]][:, None] - weights[held[idle]]
        best = int((gains - gap / 2).abs().argmin())
        gain = float(gains.flatten()[best])
        if not 0 < gain < gap:
            break
        one, other = best // rounds, best % rounds
        chunk = int(held[busy, one])
        held[busy, one] = held[idle, other]
        held[idle, other] = chunk
        totals[busy] -= gain
        totals[idle] += gain
    owners = torch.empty(ranks * rounds, dtype=torch.int64)
    owners[held.flatten()] = torch.arange(ranks).repeat_interleave(rounds)
    return owners, totals


def _edges(length: int, chunks: int) -> Tensor:
    """The first rows of chunks of about one length, at multiples that suit kernels' tiles."""
    fits = (each for each in ALIGNMENTS if length >= chunks * each * ROWS_OF_ALIGNMENT)
    unit = next(fits, 1)
    edges = torch.arange(chunks + 1) * length // chunks
    edges = (edges + unit // 2) // unit * unit
    edges[-1] = length
    return edges
