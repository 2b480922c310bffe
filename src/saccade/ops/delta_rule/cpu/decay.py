"""Decay within chunks: the factors between tokens, and the gradient of decay.

A factor is e to a sum of decay over the tokens between two others. Sums are never taken apart
again: e^{G_i} · e^{−G_j} would leave the range of float32, and its gradient, all that rows take
less all that keys give, would be a small difference of large sums. Two forms hold to that:

- one decay a head: the factors of all pairs of a chunk, from differences of sums in float64;
- one a channel, where a factor for each pair and channel would be too many: halves within halves.
  A pair lies in two neighbouring runs of 2^n tokens, and its factor is the later token's, from the
  start of its run, times the earlier one's, to the end of its run. Both are at most 1. Sums over
  runs of 2^(n+1) are those over 2^n with the neighbour's whole sum added, and gradients go back
  the same way.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

# e^-1000 is 0 in float64, too, so no factor changes; -inf would make a difference of sums NaN.
LEAST = -1000.0


class Runs(NamedTuple):
    """Sums of decay within runs of equal length, [count, chunks, rows, channels]."""

    length: int
    until: Tensor  # from the start of its run to each token, this one included
    after: Tensor  # from behind each token to the end of its run


class ChunkDecay:
    """Factors of decay within chunks: until a token, from behind it, and of the whole chunk.

    until, after: [count, chunks, rows, channels]; whole: [count, chunks, channels, 1]. Channels
    are 1 where all share their decay.
    """

    until: Tensor
    after: Tensor
    whole: Tensor

    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Products of each row with the keys until it, with factors: [count, chunks, rows, keys].

        Zero where the key comes later.
        """
        raise NotImplementedError

    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of rows and keys, from those of their products; notes those of decay."""
        raise NotImplementedError

    def gradient(self, until: Tensor, after: Tensor, whole: Tensor) -> Tensor:
        """The gradient of decay, from gradients of the three factors' exponents."""
        raise NotImplementedError


class NoDecay(ChunkDecay):
    """Nothing fades."""

    def __init__(self, like: Tensor) -> None:
        self.until = self.after = like.new_ones(1, 1, 1, 1)
        self.whole = self.until

    @override
    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        return (rows @ keys.mT).tril_()

    @override
    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        return grads @ keys, grads.mT @ rows


class HeadDecay(ChunkDecay):
    """One decay a head and token, [count, chunks, rows]."""

    def __init__(self, decay: Tensor, wide: torch.dtype) -> None:
        total = decay.double().clamp_(min=LEAST).cumsum(-1)
        last = total[..., -1:]
        gap = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(wide)
        later = torch.ones(gap.shape[-2:], dtype=torch.bool, device=gap.device).triu_(1)
        self.factors = gap.masked_fill_(later, -torch.inf).exp_()
        self.until = total.exp().to(wide).unsqueeze(-1)
        self.after = (last - total).exp().to(wide).unsqueeze(-1)
        self.whole = last.exp().to(wide).unsqueeze(-1)
        self.crossing: Tensor | None = None

    @override
    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        return (rows @ keys.mT).mul_(self.factors)

    @override
    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        crossing = grads * pairs
        self.crossing = crossing if self.crossing is None else self.crossing.add_(crossing)
        grads = grads * self.factors
        return grads @ keys, grads.mT @ rows

    @override
    def gradient(self, until: Tensor, after: Tensor, whole: Tensor) -> Tensor:
        """A token's decay is in the factors of pairs that it lies between: only those are added."""
        assert self.crossing is not None
        before = torch.nn.functional.pad(self.crossing, (1, 0))[..., :-1].cumsum(-1)
        found = before.tril_().sum(-2, dtype=torch.float64)
        found += until.squeeze(-1).double().flip(-1).cumsum(-1).flip(-1)
        after = torch.nn.functional.pad(after.squeeze(-1).double(), (1, 0))[..., :-1]
        found += after.cumsum(-1)
        return found.add_(whole.squeeze(-1))


class ChannelDecay(ChunkDecay):
    """A decay for each channel, [count, chunks, rows, channels]; rows: a power of two."""

    def __init__(self, decay: Tensor) -> None:
        decay = decay.clamp(min=LEAST)
        length, until, after, total = 1, decay, torch.zeros_like(decay), decay
        self.runs: list[Runs] = []
        rows = decay.shape[2]
        while length < rows:
            self.runs.append(Runs(length, until, after))
            until, after, sums = until.clone(), after.clone(), total.unflatten(2, (-1, 2))
            halves(until, length)[1].add_(sums[:, :, :, :1])
            halves(after, length)[0].add_(sums[:, :, :, 1:])
            total, length = sums.sum(3), 2 * length
        self.until, self.after = until.exp(), after.exp()
        self.whole = total.exp().mT
        self.crossing: list[tuple[Tensor, Tensor]] | None = None

    @override
    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        found = rows.new_zeros(*rows.shape[:3], rows.shape[2])
        found.diagonal(dim1=2, dim2=3).copy_((rows * keys).sum(-1))
        for runs in self.runs:
            later, earlier = _weighted(runs, rows, keys)
            _block(found, runs.length).copy_((later @ earlier.mT).permute(0, 1, 3, 4, 2))
        return found

    @override
    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = grads.diagonal(dim1=2, dim2=3).unsqueeze(-1)
        grad_rows, grad_keys = own * keys, own * rows
        crossing = []
        for runs in self.runs:
            later, earlier = _weighted(runs, rows, keys)
            block = _block(grads, runs.length).permute(0, 1, 4, 2, 3).contiguous()
            of_later, of_earlier = block @ earlier, block.mT @ later
            crossing.append((of_later * later, of_earlier * earlier))
            until, after = halves(runs.until, runs.length)[1], halves(runs.after, runs.length)[0]
            halves(grad_rows, runs.length)[1].add_(of_later.mul_(until.exp()))
            halves(grad_keys, runs.length)[0].add_(of_earlier.mul_(after.exp()))
        if self.crossing is None:
            self.crossing = crossing
        else:
            for sums, more in zip(self.crossing, crossing, strict=True):
                sums[0].add_(more[0])
                sums[1].add_(more[1])
        return grad_rows, grad_keys

    @override
    def gradient(self, until: Tensor, after: Tensor, whole: Tensor) -> Tensor:
        """Back from sums over long runs to those over short ones."""
        assert self.crossing is not None
        of_total = whole.mT
        for runs, (of_later, of_earlier) in zip(
            reversed(self.runs), reversed(self.crossing), strict=True
        ):
            first, second = halves(after, runs.length)[0], halves(until, runs.length)[1]
            sums = torch.stack([second.sum(3), first.sum(3)], 3)  # each half's, by the other
            of_total = of_total.unsqueeze(3).add(sums).flatten(2, 3)
            second.add_(of_later)
            first.add_(of_earlier)
        return until.add_(of_total)


def halves(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Runs of so many rows, the earlier and the later of each two: [.., pairs, length, dim]."""
    both = rows.unflatten(2, (-1, 2, length))
    return both[:, :, :, 0], both[:, :, :, 1]


def _weighted(runs: Runs, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of later runs and keys of earlier ones, with their factors."""
    later = halves(rows, runs.length)[1] * halves(runs.until, runs.length)[1].exp()
    earlier = halves(keys, runs.length)[0] * halves(runs.after, runs.length)[0].exp()
    return later, earlier


def _block(pairs: Tensor, length: int) -> Tensor:
    """Pairs of a later run's rows and an earlier run's keys, [count, chunks, rows, keys, runs]."""
    both = pairs.unflatten(3, (-1, 2, length)).unflatten(2, (-1, 2, length))
    return both.diagonal(dim1=2, dim2=5)[:, :, 1, :, 0]
