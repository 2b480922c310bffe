"""Selection: what hidden pairs hold is put away, never multiplied away, by bits.

0 · NaN is NaN, and `torch.where` and `masked_fill` take ten to forty times as long as one operation
on the bits of a tile does on a CPU, above all where pairs of many heads share what is visible.
"""

from __future__ import annotations

import torch
from torch import Tensor

BITS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.float16: torch.int16,
    torch.bfloat16: torch.int16,
}


def keep(tile: Tensor, visible: Tensor) -> Tensor:
    """A new tile that holds 0 where pairs are hidden. `visible` broadcasts to it."""
    bits = BITS[tile.dtype]
    return tile.view(bits).bitwise_and(_ones(visible, bits)).view(tile.dtype)


def hide(scores: Tensor, visible: Tensor) -> Tensor:
    """New scores that are -inf where pairs are hidden. `visible` broadcasts to them."""
    bits = BITS[scores.dtype]
    seen = _ones(visible, bits)
    nothing = torch.tensor(-torch.inf, dtype=scores.dtype, device=scores.device).view(bits)
    hidden = seen.bitwise_not().bitwise_and_(nothing)
    return scores.view(bits).bitwise_and(seen).bitwise_or_(hidden).view(scores.dtype)


def _ones(visible: Tensor, bits: torch.dtype) -> Tensor:
    """All bits of a visible pair, and none of a hidden one; bytes are read faster than bools."""
    return visible.view(torch.int8).to(bits).neg_()
