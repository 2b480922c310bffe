"""Functions: FlashAttention's calls, for sequences of one length and for such laid end to end."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import saccade
from saccade.integrations.flash_attn.options import (
    FlashOptions,
    answer,
    attend,
    flag,
    no_weights,
    whole,
    without_gradient,
)


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
    options = FlashOptions.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    return answer(*attend(q, k, v, options, dropout_p, deterministic), weights)


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


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Any:
    """Attention as `flash_attn.flash_attn_varlen_func` has it.

    Args:
        q: (total_q, nheads, headdim).
        k, v: (total_k, nheads_k, headdim), or with block_table (num_blocks, block_size, nheads_k,
            headdim).
        cu_seqlens_q, cu_seqlens_k: int32 (batch + 1,), from 0 to the number of tokens.
        max_seqlen_q, max_seqlen_k: the longest lengths.
        block_table: int32 (batch, max_blocks): the pages of each sequence. Forward only (backward
            raises), and without dropout.
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
            return_attn_probs: as of `flash_attn_func`; the lse is (nheads, total_q).

    Returns:
        (total_q, nheads, headdim).

    Raises:
        TypeError, ValueError, NotImplementedError: naming the argument.
    """
    dropout_p, weights = no_weights(return_attn_probs, dropout_p)
    options = FlashOptions.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    longest = whole("max_seqlen_q", max_seqlen_q), whole("max_seqlen_k", max_seqlen_k)
    deterministic = flag("deterministic", deterministic)
    if block_table is None:
        output, lse = saccade.attention_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k,
            max_seqlen_q=longest[0], max_seqlen_k=longest[1], **options.keywords(),
            dropout_p=dropout_p, deterministic=deterministic, return_lse=True,
        )  # fmt: skip
        return answer(output, lse, weights)
    if dropout_p > 0:
        raise NotImplementedError(f"dropout_p: got {dropout_p} with block_table, takes 0")
    with torch.no_grad():
        found = saccade.attention_paged(
            q, k.transpose(1, 2), v.transpose(1, 2), block_table, cu_seqlens_k.diff(),
            cu_seqlens_q=cu_seqlens_q, **options.keywords(), return_lse=True,
        )  # fmt: skip
    name = "flash_attn_varlen_func with block_table"
    output, lse = without_gradient(name, found, q, k, v, alibi_slopes)
    return answer(output, lse, weights)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
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
        q: (total_q, nheads, headdim).
        kv: (total_k, 2, nheads_k, headdim).
        others: as of `flash_attn_varlen_func`.
    """
    k, v = unpacked("kv", kv, 2, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
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
        qkv: (total, 3, nheads, headdim).
        others: as of `flash_attn_varlen_func`.
    """
    q, k, v = unpacked("qkv", qkv, 3, 4)
    return flash_attn_varlen_func(
        q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen,
        dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic,
        return_attn_probs,
    )  # fmt: skip
