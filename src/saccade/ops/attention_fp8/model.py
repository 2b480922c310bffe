"""A model of fp8 attention on Hopper's tensor cores, which keep few bits of their sums.

An fp8 product on Hopper (QGMMA) adds 32 products of e4m3 numbers to its accumulator at a time. All
33 numbers are aligned to the largest one, keep 13 bits behind its leading one, and lose the rest;
so does their sum. Products of queries and keys add a few such steps; weights and values as many
as there are keys over 32, with ever larger sums. Two-level accumulation adds what every few tiles
of keys gave to a sum in float32, and starts the accumulator at 0 again.

The model predicts errors (`tools/fp8_study.py`): one head, as tiles visit it, in any order.

Source: DeepSeek-AI 2024 (DeepSeek-V3), section 3.3.2; Zhang et al. 2025 (SageAttention2),
section 3.4; Khattak and Mikaitis 2025, "Accurate models of NVIDIA tensor cores".
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.runtime.fp8_spec import rounded_weights

STEP = 32  # products that are added at a time
BITS = 13  # that a sum keeps behind its leading one
AT_ONCE = 2**24  # products that are looked at together


class Sums(NamedTuple):
    """How products are added up.

    Attributes:
        bits: what a sum keeps behind its leading one; None: all that float64 has.
        tiles: after so many tiles of keys sums go into a float32 one; 0: they never do.
    """

    bits: int | None = BITS
    tiles: int = 0


class Tiles(NamedTuple):
    """How keys are visited."""

    rows: int = 128
    last_first: bool = True


EXACT, LAST_FIRST = Sums(None), Tiles()


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    sums: Sums = EXACT,
    tiles: Tiles = LAST_FIRST,
    visible: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output and lse of one head in float64, with rounded weights.

    query [rows, dim], key [keys, dim] and value [keys, value_dim] hold e4m3 numbers, or those times
    scales that are powers of two; visible: bools [rows, keys].
    """
    query, key, value = query.double(), key.double(), value.double()
    rows, keys = query.shape[0], key.shape[0]
    row_max = query.new_full((rows, 1), -torch.inf)
    row_sum = query.new_zeros(rows, 1)
    accumulator = query.new_zeros(rows, value.shape[1])
    total = torch.zeros_like(accumulator)
    starts = list(range(0, keys, tiles.rows))
    for number, start in enumerate(reversed(starts) if tiles.last_first else starts):
        here = slice(start, min(start + tiles.rows, keys))
        zero = query.new_zeros(rows, here.stop - here.start)
        scores = product(query, key[here].mT, zero, sums.bits) * scale
        if visible is not None:
            scores = scores.masked_fill(~visible[:, here], -torch.inf)
        new_max = torch.maximum(row_max, scores.amax(1, keepdim=True))
        base = new_max.masked_fill(new_max == -torch.inf, 0)
        rescale, weights = (row_max - base).exp(), (scores - base).exp()
        row_max, row_sum = new_max, row_sum * rescale + weights.sum(1, keepdim=True)
        accumulator, total = accumulator * rescale, total * rescale
        accumulator = product(rounded_weights(weights), value[here], accumulator, sums.bits)
        if sums.tiles and (number + 1) % sums.tiles == 0:
            total, accumulator = total + accumulator, torch.zeros_like(accumulator)
    divisor = torch.where(row_sum == 0, 1, row_sum)
    return (total + accumulator) / divisor, (row_max + divisor.log()).squeeze(1)


def product(left: Tensor, right: Tensor, start: Tensor, bits: int | None) -> Tensor:
    """left @ right + start, added up in steps of which each keeps so many bits."""
    if bits is None:
        return start + left @ right
    columns = max(AT_ONCE // (left.shape[0] * STEP), 1)
    found = [
        _product(left, right[:, first : first + columns], start[:, first : first + columns], bits)
        for first in range(0, right.shape[1], columns)
    ]
    return torch.cat(found, 1)


def _product(left: Tensor, right: Tensor, start: Tensor, bits: int) -> Tensor:
    total = kept(start, start.abs(), bits)
    for first in range(0, left.shape[1], STEP):
        here = slice(first, first + STEP)
        terms = left[:, here].unsqueeze(2) * right[here].unsqueeze(0)  # [rows, STEP, columns]
        largest = torch.maximum(terms.abs().amax(1), total.abs())
        added = kept(terms, largest.unsqueeze(1), bits).sum(1) + kept(total, largest, bits)
        total = kept(added, added.abs(), bits)
    return total


def kept(numbers: Tensor, largest: Tensor, bits: int) -> Tensor:
    """Numbers cut off behind so many bits after the leading one of the largest."""
    _, exponent = torch.frexp(largest)
    unit = torch.exp2((exponent - 1 - bits).to(numbers.dtype))
    return torch.where(largest == 0, 0, (numbers / unit).trunc() * unit)
