"""Baselines: what counting bytes, and counting pairs of bytes, can predict."""

from __future__ import annotations

import torch
from jaxtyping import Float, UInt8
from torch import Tensor

VOCABULARY = 256
# A pair's probability leans on the single byte's as if that had been seen this often.
PRIOR_COUNT = 4.0


def unigram(training: UInt8[Tensor, " bytes"]) -> Float[Tensor, " byte"]:
    """The probability of each byte: its count plus one, of all counts plus 256."""
    counts = torch.bincount(training.long(), minlength=VOCABULARY).double() + 1
    return counts / counts.sum()


def bigram(training: UInt8[Tensor, " bytes"]) -> Float[Tensor, "previous byte"]:
    """The probability of each byte after each other byte.

    A pair's count is smoothed towards the unigram probability:
    (count(a, b) + PRIOR_COUNT · p(b)) / (count(a) + PRIOR_COUNT).
    """
    pairs = training[:-1].long() * VOCABULARY + training[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).double()
    counts = counts.view(VOCABULARY, VOCABULARY) + PRIOR_COUNT * unigram(training)
    return counts / counts.sum(1, keepdim=True)


def unigram_bits(
    training: UInt8[Tensor, " bytes"], windows: UInt8[Tensor, "windows window_bytes"]
) -> float:
    """Bits per byte of the unigram model on all but the first byte of each window."""
    return float(-unigram(training).log2()[windows[:, 1:].long()].mean())


def bigram_bits(
    training: UInt8[Tensor, " bytes"], windows: UInt8[Tensor, "windows window_bytes"]
) -> float:
    """Bits per byte of the bigram model on all but the first byte of each window."""
    previous, following = windows[:, :-1].long(), windows[:, 1:].long()
    return float(-bigram(training).log2()[previous, following].mean())
