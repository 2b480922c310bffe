"""Plain attention: the names of `xformers.attn_bias_utils`, which tests compare with."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from saccade.integrations.xformers.attn_bias import AttentionBias

__all__ = ["ref_attention", "ref_attention_bmhk"]


def ref_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_bias: Any = None,
    drop_mask: Tensor | None = None,
    p: float = 0.0,
    scale: float | None = None,
) -> Tensor:
    """Attention with all scores written out, in float32 at least.

    Args:
        q, k, v: [B, M, K], [B, M, H, K] or [B, M, G, H, K].
        attn_bias: a bias, or what is added to the scores [B, heads..., M, keys].
        drop_mask: 0 where a weight is dropped, else 1.
        p: the probability by which that was drawn.
        scale: 1 / sqrt(K) where None.

    Examples:
        >>> from saccade.integrations.xformers import attn_bias_utils
        >>> q, k, v = torch.randn(3, 2, 16, 4, 32)
        >>> attn_bias_utils.ref_attention(q, k, v).shape
        torch.Size([2, 16, 4, 32])
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    query, key, value = (rows.to(wide).movedim(1, -2) for rows in (q, k, v))
    scores = query * scale @ key.mT
    if isinstance(attn_bias, AttentionBias):
        attn_bias = attn_bias.materialize(scores.shape, wide, q.device)
    if attn_bias is not None:
        scores = scores + attn_bias.to(wide)
    weights = scores.softmax(-1)
    if drop_mask is not None:
        weights = weights * (drop_mask / (1 - p))
    return (weights @ value).movedim(-2, 1)


def ref_attention_bmhk(
    q: Tensor, k: Tensor, v: Tensor, attn_bias: Any, scale: float | None = None
) -> Tensor:
    """`ref_attention` of rows [B, M, H, K].

    Examples:
        >>> from saccade.integrations.xformers import attn_bias, attn_bias_utils
        >>> q, k, v = torch.randn(3, 2, 16, 4, 32)
        >>> causal = attn_bias.LowerTriangularMask()
        >>> attn_bias_utils.ref_attention_bmhk(q, k, v, causal).shape
        torch.Size([2, 16, 4, 32])
    """
    if q.dim() != 4:
        raise ValueError(f"q: got {list(q.shape)}, takes [B, M, H, K]")
    return ref_attention(q, k, v, attn_bias, scale=scale)
