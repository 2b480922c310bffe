"""Decay within chunks: the factors between tokens, and the gradient of decay.

A factor is e to a sum of decay over the tokens between two others. Factors are never taken apart:
e^{G_i} · e^{−G_j} would leave the range of float32, and its gradient, all that rows take less all
that keys give, would be a small difference of large sums. Two forms hold to that:

- one decay a head: the factors of all pairs of a chunk, from differences of sums in float64;
- one a channel, where a factor for each pair and channel would be too many: halves within halves.
  A pair lies in two neighbouring runs of 2^n tokens, and its factor is the later token's, from the
  start of its run, times the earlier one's, to the end of its run. Both are at most 1. Factors over
  runs of 2^(n+1) are those over 2^n, times the neighbour's whole factor in one half; gradients go
  back the same way.

Rows are what meets keys: keys themselves, and queries, [chunks, count, kinds, chunk, head_dim].
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from saccade.runtime.spec import LEAST_DECAY


class ChunkDecay:
    """Factors of decay within chunks: until a token, from behind it, and of the whole chunk.

    until, after: [chunks, count, chunk, channels]; whole: [chunks, count, channels, 1]. Channels
    are 1 where all share their decay.
    """

    until: Tensor
    after: Tensor
    whole: Tensor

    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        """Products of each row with the keys until it, faded: [chunks, count, kinds, chunk, chunk].

        Zero where the key comes later.
        """
        raise NotImplementedError

    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Gradients of rows and keys, from those of their products; notes that of decay."""
        raise NotImplementedError

    def gradient(self, until: Tensor, after: Tensor, whole: Tensor) -> Tensor:
        """The gradient of decay, from gradients of the three factors' exponents."""
        raise NotImplementedError


class NoDecay(ChunkDecay):
    """Nothing fades."""

    def __init__(self, like: Tensor) -> None:
        self.until = self.after = self.whole = like.new_ones(1, 1, 1, 1)

    @override
    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        return _products(rows, keys).tril_()

    @override
    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        return _through_products(grads, rows, keys)


class HeadDecay(ChunkDecay):
    """One decay a head and token, [chunks, count, chunk]."""

    def __init__(self, decay: Tensor, wide: torch.dtype) -> None:
        total = decay.double().clamp(min=LEAST_DECAY).cumsum(-1)  # float64 is the caller's own
        last = total[..., -1:]
        gap = (total.unsqueeze(-1) - total.unsqueeze(-2)).to(wide)
        self.factors = gap.exp_().tril_().unsqueeze(2)  # inf above the diagonal, before that
        self.until = total.exp().to(wide).unsqueeze(-1)
        self.after = (last - total).exp().to(wide).unsqueeze(-1)
        self.whole = last.exp().to(wide).unsqueeze(-1)
        self.crossing: Tensor | None = None

    @override
    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        return _products(rows, keys).mul_(self.factors)

    @override
    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        self.crossing = (grads * pairs).sum(2)
        return _through_products(grads * self.factors, rows, keys)

    @override
    def gradient(self, until: Tensor, after: Tensor, whole: Tensor) -> Tensor:
        """A token's decay is in the factors of pairs that it lies between: only those are added."""
        assert self.crossing is not None
        before = torch.nn.functional.pad(self.crossing, (1, 0))[..., :-1].cumsum(-1)
        found = before.tril_().sum(-2, dtype=torch.float64)
        found += until.sum(-1).double().flip(-1).cumsum(-1).flip(-1)
        after = torch.nn.functional.pad(after.sum(-1).double(), (1, 0))[..., :-1]
        return found.add_(after.cumsum(-1)).add_(whole.sum(-2))


def _products(rows: Tensor, keys: Tensor) -> Tensor:
    return (rows.flatten(2, 3) @ keys.mT).unflatten(2, rows.shape[2:4])


def _through_products(grads: Tensor, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    grads = grads.flatten(2, 3)
    return (grads @ keys).unflatten(2, rows.shape[2:4]), grads.mT @ rows.flatten(2, 3)


class Halves(NamedTuple):
    """Factors of each two neighbouring runs, [chunks, count, pairs of runs, length, channels]."""

    length: int
    until: Tensor  # in the later run, from its start to each token, this one included
    after: Tensor  # in the earlier run, from behind each token to its end


class ChannelDecay(ChunkDecay):
    """A decay for each channel, [chunks, count, chunk, channels]; chunks are powers of two long."""

    def __init__(self, decay: Tensor) -> None:
        until, length = decay.clamp(min=LEAST_DECAY).exp_(), 1
        after, total = torch.ones_like(until), until.clone()
        self.levels: list[Halves] = []
        while length < decay.shape[2]:
            earlier, later = halves(after, length)[0], halves(until, length)[1]
            self.levels.append(Halves(length, later.clone(), earlier.clone()))
            whole = total.unflatten(2, (-1, 2, 1))
            later.mul_(whole[:, :, :, 0])
            earlier.mul_(whole[:, :, :, 1])
            total, length = whole.prod(3).squeeze(3), 2 * length
        self.until, self.after, self.whole = until, after, total.mT
        self.crossing: list[tuple[Tensor, Tensor]] = []

    @override
    def of_pairs(self, rows: Tensor, keys: Tensor) -> Tensor:
        found = rows.new_zeros(*rows.shape[:4], rows.shape[3])
        found.diagonal(dim1=3, dim2=4).copy_((rows * keys.unsqueeze(2)).sum(-1))
        for level in self.levels:
            later, earlier = _faded(level, rows, keys)
            blocks = _blocks(found, level.length)
            blocks.copy_((later.flatten(3, 4) @ earlier.mT).view(blocks.shape))
        return found

    @override
    def through_pairs(
        self, grads: Tensor, pairs: Tensor, rows: Tensor, keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        own = grads.diagonal(dim1=3, dim2=4).unsqueeze(-1)
        grad_rows, grad_keys = own * keys.unsqueeze(2), (own * rows).sum(2)
        self.crossing = []
        for level in self.levels:
            later, earlier = _faded(level, rows, keys)
            blocks = _blocks(grads, level.length).flatten(3, 4)
            of_later = (blocks @ earlier).view(later.shape)
            of_earlier = blocks.mT @ later.flatten(3, 4)
            self.crossing.append(((of_later * later).sum(3), of_earlier * earlier))
            into = _later_rows(grad_rows, level.length)
            into.addcmul_(of_later, level.until.unsqueeze(3))
            halves(grad_keys, level.length)[0].addcmul_(of_earlier, level.after)
        return grad_rows, grad_keys

    @override
    def gradient(self, until: Tensor, after: Tensor, whole: Tensor) -> Tensor:
        """Back from factors over long runs to those over short ones."""
        of_total = whole.mT
        for level, (of_later, of_earlier) in zip(
            reversed(self.levels), reversed(self.crossing), strict=True
        ):
            earlier, later = halves(after, level.length)[0], halves(until, level.length)[1]
            sums = torch.stack([later.sum(3), earlier.sum(3)], 3)  # each half's, by the other
            of_total = of_total.unsqueeze(3).add(sums).flatten(2, 3)
            later.add_(of_later)
            earlier.add_(of_earlier)
        return until.add_(of_total)


def halves(rows: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Runs of so many rows, earlier and later: [.., pairs of runs, length, channels]."""
    both = rows.unflatten(2, (-1, 2, length))
    return both[:, :, :, 0], both[:, :, :, 1]


def _later_rows(rows: Tensor, length: int) -> Tensor:
    """Rows of later runs, [chunks, count, pairs of runs, kinds, length, head_dim]."""
    return rows.unflatten(3, (-1, 2, length))[:, :, :, :, 1].transpose(2, 3)


def _faded(level: Halves, rows: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of later runs and keys of earlier ones, with their factors."""
    rows = _later_rows(rows, level.length)
    later = rows.new_empty(rows.shape)  # in this order, which a product would not keep
    torch.mul(rows, level.until.unsqueeze(3), out=later)
    return later, halves(keys, level.length)[0] * level.after


def _blocks(pairs: Tensor, length: int) -> Tensor:
    """Pairs of later runs' rows and earlier runs' keys, [.., pairs of runs, kinds, rows, keys]."""
    both = pairs.unflatten(4, (-1, 2, length)).unflatten(3, (-1, 2, length))
    return both.diagonal(dim1=3, dim2=6)[:, :, :, 1, :, 0].permute(0, 1, 5, 2, 3, 4)
