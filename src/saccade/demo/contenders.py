"""Contenders: Saccade, plain PyTorch and PyTorch's fused operator, on the same arguments."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

import saccade

Rows = Float[Tensor, "batch heads rows dim"]
Contender = Callable[[Rows, Rows, Rows, int | None], Rows]


def with_saccade(query: Rows, key: Rows, value: Rows, window: int | None) -> Rows:
    """`saccade.attention`, whose masks are never written out in full."""
    mask = saccade.masks.causal() if window is None else saccade.masks.window(window)
    output = saccade.attention(query, key, value, mask=mask)
    return output


def with_sdpa(query: Rows, key: Rows, value: Rows, window: int | None) -> Rows:
    """PyTorch's `scaled_dot_product_attention`, which takes a window only as a whole matrix."""
    if window is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    mask = visible(query.shape[2], window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def by_hand(query: Rows, key: Rows, value: Rows, window: int | None) -> Rows:
    """softmax(QKᵀ)V as one writes it: every score lies in memory at once."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    hidden = ~visible(query.shape[2], window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def visible(length: int, window: int | None) -> Bool[Tensor, "length length"]:
    """The mask written out: causal, and at most `window` rows back."""
    mask = torch.ones(length, length, dtype=torch.bool).tril_()
    return mask if window is None else mask.triu_(-window)


CONTENDERS: dict[str, Contender] = {
    "saccade": with_saccade,
    "PyTorch SDPA": with_sdpa,
    "plain PyTorch": by_hand,
}
