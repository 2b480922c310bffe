"""Functions: FlashAttention's calls for sequences of one length."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.integrations.flash_attn.how import How, answer, attend, no_weights


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn.flash_attn_func` has it.

    Numbers may be Python's, NumPy's or tensors of one element, here and in all calls beside it.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k, v: (batch, seqlen_k, nheads_k, headdim); nheads_k divides nheads.
        dropout_p: the share of weights that is dropped.
        softmax_scale: 1 / sqrt(headdim) where None.
        causal: whether rows see what comes after them; the last query row and the last key row
            stand side by side.
        window_size: (left, right): rows seen before and after a row's own place; -1: all.
        softcap: greater than 0 bends scores into (-softcap, softcap).
        alibi_slopes: (nheads,) or (batch, nheads).
        deterministic: gradients with equal bits from run to run.
        return_attn_probs: also return the lse (batch, nheads, seqlen_q), and an empty tensor.

    Returns:
        (batch, seqlen_q, nheads, headdim).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    dropout_p, weights = no_weights(return_attn_probs, dropout_p)
    how = How.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return answer(*attend(q, k, v, how, dropout_p, deterministic), weights)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The same with keys and values in one tensor.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        kv: (batch, seqlen_k, 2, nheads_k, headdim).
        others: as of `flash_attn_func`.
    """
    k, v = unpacked("kv", kv, 2, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Any:
    """The same with queries, keys and values in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim).
        others: as of `flash_attn_func`.
    """
    q, k, v = unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, dropout_p, softmax_scale, causal, window_size, softcap,
        alibi_slopes, deterministic, return_attn_probs,
    )  # fmt: skip


def unpacked(name: str, together: Tensor, parts: int, dims: int) -> tuple[Tensor, ...]:
    """Tensors that lie in one, side by side in its dimension before heads.

    Raises:
        ValueError: for another shape.
    """
    if together.dim() != dims or together.shape[-3] != parts:
        shape = ", ".join(["batch, seqlen"] * (dims - 4) + ["total"] * (5 - dims))
        raise ValueError(
            f"{name}: got {list(together.shape)}, takes ({shape}, {parts}, nheads, headdim)"
        )
    return together.unbind(-3)
