"""Version 3: the calls of `flash_attn_interface`, FlashAttention-3's module.

They differ from version 2's in their arguments: no dropout, no ALiBi, pages by `page_table`. With
`return_attn_probs` they return the output and the lse. Options that only choose how kernels run
(`num_splits`, `pack_gqa`, `sm_margin`, `scheduler_metadata`) change nothing here; those that change
the result and are not served raise by name.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.integrations.arguments import flag, heads_first, serve_only, whole
from saccade.integrations.flash_attn import cache, functions
from saccade.integrations.flash_attn.functions import (
    attention_options,
    unpacked,
    without_gradient,
)

__all__ = [
    "flash_attn_combine",
    "flash_attn_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_with_kvcache",
    "get_scheduler_metadata",
]

Scale = Tensor | None


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention, as version 2's `flash_attn_func` computes it; of float8_e4m3fn in fp8.

    Then the descales are float32 [batch, nheads_k], and the output is bfloat16, forward only, as
    FlashAttention-3's is.

    Examples:
        >>> from saccade.integrations.flash_attn import version_3
        >>> q, k, v = torch.randn(3, 2, 16, 4, 32)
        >>> version_3.flash_attn_func(q, k, v, causal=True).shape
        torch.Size([2, 16, 4, 32])
    """
    scales = _scales(q, q_descale, k_descale, v_descale)
    _check(qv, *scales.unserved, attention_chunk, num_splits, pack_gqa, sm_margin)
    if scales.fp8 is not None:
        options = attention_options(softmax_scale, causal, window_size, softcap)
        found = heads_first(
            saccade.attention_fp8, q, k, v, **options, **scales.fp8, return_lse=True
        )
        return _answer(found, return_attn_probs)
    found = functions.flash_attn_func(
        q, k, v, 0.0, softmax_scale, causal, window_size, softcap, None, deterministic, True
    )
    return _answer(found, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    deterministic: bool = False,
    num_heads_q: int | None = None,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention as `flash_attn_func` computes it, of queries, keys and values in one tensor.

    Args:
        qkv: (batch, seqlen, 3, nheads, headdim), or with num_heads_q
            (batch, seqlen, num_heads_q + 2 * nheads_k, headdim).
        others: as of `flash_attn_func`.

    Examples:
        >>> from saccade.integrations.flash_attn import version_3
        >>> version_3.flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 4, 32), causal=True).shape
        torch.Size([2, 16, 4, 32])
    """
    if qkv.dim() == 4 and num_heads_q is not None:
        heads = whole("num_heads_q", num_heads_q)
        count = (qkv.shape[2] - heads) // 2
        if heads < 1 or count < 1 or heads + 2 * count != qkv.shape[2]:
            raise ValueError(
                f"num_heads_q: got {heads} for {qkv.shape[2]} heads, takes what leaves an even "
                "number above 0"
            )
        q, k, v = qkv.split([heads, count, count], -2)
    else:
        q, k, v = unpacked("qkv", qkv, 3, 5)
    return flash_attn_func(
        q, k, v, softmax_scale, causal, None, q_descale, k_descale, v_descale, window_size,
        attention_chunk, softcap, 1, None, deterministic, sm_margin, return_attn_probs,
    )  # fmt: skip


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Tensor | None = None,
    seqused_k: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Any:
    """Attention of packed sequences, as version 2's `flash_attn_varlen_func` computes it; of
    float8_e4m3fn in fp8, as `flash_attn_func` does.

    Examples:
        >>> from saccade.integrations.flash_attn import version_3
        >>> q, k, v = torch.randn(3, 10, 4, 32)
        >>> ends = torch.tensor([0, 4, 10], dtype=torch.int32)
        >>> version_3.flash_attn_varlen_func(q, k, v, ends, ends, 6, 6, causal=True).shape
        torch.Size([10, 4, 32])
    """
    scales = _scales(q, q_descale, k_descale, v_descale)
    _check(qv, *scales.unserved, attention_chunk, num_splits, pack_gqa, sm_margin)
    serve_only(None, seqused_q=seqused_q, seqused_k=seqused_k)
    if scales.fp8 is not None:
        options = attention_options(softmax_scale, causal, window_size, softcap)
        longest = whole("max_seqlen_q", max_seqlen_q), whole("max_seqlen_k", max_seqlen_k)
        found = saccade.attention_fp8_varlen(
            q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=longest[0], max_seqlen_k=longest[1],
            **options, **scales.fp8, return_lse=True,
        )  # fmt: skip
        return _answer(found, return_attn_probs)
    found = functions.flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, 0.0, softmax_scale,
        causal, window_size, softcap, None, deterministic, True,
    )  # fmt: skip
    return _answer(found, return_attn_probs)


def flash_attn_with_kvcache(  # breaks function-length: half of it is its arguments
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    qv: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    page_table: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k_new: Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: Tensor | None = None,
    q_descale: Scale = None,
    k_descale: Scale = None,
    v_descale: Scale = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention to a cache, as version 2's `flash_attn_with_kvcache` computes it.

    Args:
        q: with cu_seqlens_q (total, nheads, headdim); then nothing is new and nothing is turned,
            and there is a page_table.
        cu_seqlens_k_new: of new keys; nothing without them.
        others: as of version 2's call.

    Examples:
        >>> from saccade.integrations.flash_attn import version_3 as v3
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 32)
        >>> lengths = torch.tensor([5, 9], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 2, 1, 4, 32)
        >>> v3.flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths).shape
        torch.Size([2, 1, 4, 32])
    """
    _check(qv, q_descale, k_descale, v_descale, attention_chunk, num_splits, pack_gqa, sm_margin)
    serve_only(None, rotary_seqlens=rotary_seqlens)
    if cu_seqlens_q is None:
        if k is not None:
            serve_only(None, cu_seqlens_k_new=cu_seqlens_k_new)
        return cache.flash_attn_with_kvcache(
            q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx,
            cache_leftpad, page_table, softmax_scale, causal, window_size, softcap,
            rotary_interleaved, return_softmax_lse=return_softmax_lse,
        )  # fmt: skip
    serve_only(None, "with cu_seqlens_q", k=k, v=v, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
               cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad)  # fmt: skip
    if page_table is None or not isinstance(cache_seqlens, Tensor):
        raise NotImplementedError(
            "page_table, cache_seqlens: take tensors with cu_seqlens_q: queries are packed over "
            "pages alone"
        )
    options = attention_options(softmax_scale, causal, window_size, softcap)
    with torch.no_grad():
        found = saccade.attention_paged(
            q, k_cache.transpose(1, 2), v_cache.transpose(1, 2), page_table, cache_seqlens,
            cu_seqlens_q=cu_seqlens_q, **options, return_lse=True,
        )  # fmt: skip
    found = without_gradient("flash_attn_with_kvcache", found, q, k_cache, v_cache)
    return _answer(found, return_softmax_lse, "return_softmax_lse")


def flash_attn_combine(
    out_partial: Tensor,
    lse_partial: Tensor,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Partial results of the same queries with different keys, as one.

    Args:
        out_partial: (num_splits, batch, seqlen, nheads, headdim).
        lse_partial: (num_splits, batch, seqlen, nheads).
        out: where the result is written.
        out_dtype: of the result; out_partial's where None.

    Returns:
        (batch, seqlen, nheads, headdim) and (batch, seqlen, nheads).

    Examples:
        >>> from saccade.integrations.flash_attn import version_3
        >>> outputs, lses = torch.randn(3, 2, 16, 4, 32), torch.randn(3, 2, 16, 4)
        >>> output, lse = version_3.flash_attn_combine(outputs, lses)
        >>> output.shape, lse.shape
        (torch.Size([2, 16, 4, 32]), torch.Size([2, 16, 4]))
    """
    if lse_partial.shape != out_partial.shape[:-1]:
        raise ValueError(
            f"lse_partial: got {list(lse_partial.shape)}, takes out_partial's "
            f"{list(out_partial.shape[:-1])}"
        )
    if out is not None and out.shape != out_partial.shape[1:]:
        raise ValueError(f"out: got {list(out.shape)}, takes {list(out_partial.shape[1:])}")
    lse = lse_partial.logsumexp(0)
    weights = (lse_partial - lse.masked_fill(lse == -torch.inf, 0)).exp().unsqueeze(-1)
    # A part that saw nothing counts for nothing, whatever its output is.
    parts = torch.where(weights > 0, out_partial.to(weights.dtype), 0)
    combined = (parts * weights).sum(0).to(out_dtype or out_partial.dtype)
    return combined if out is None else out.copy_(combined), lse


def get_scheduler_metadata(*options: Any, **named: Any) -> None:
    """Nothing: what FlashAttention-3 plans ahead, saccade plans in its kernels.

    Examples:
        >>> from saccade.integrations.flash_attn import version_3
        >>> version_3.get_scheduler_metadata() is None
        True
    """


class _Scales(NamedTuple):
    """Descales, as `saccade.attention_fp8` takes them; or such as no call takes."""

    fp8: dict[str, Any] | None
    unserved: tuple[object, object, object]


def _scales(q: Tensor, q_descale: Scale, k_descale: Scale, v_descale: Scale) -> _Scales:
    """Descales of rows of float8_e4m3fn; of others they are not served."""
    if q.dtype != torch.float8_e4m3fn:
        return _Scales(None, (q_descale, k_descale, v_descale))
    names = "query_scale", "key_scale", "value_scale"
    return _Scales(
        dict(zip(names, (q_descale, k_descale, v_descale), strict=True)), (None, None, None)
    )


def _check(
    qv: object,
    q_descale: object,
    k_descale: object,
    v_descale: object,
    attention_chunk: Any,
    num_splits: Any,
    pack_gqa: Any,
    sm_margin: Any,
) -> None:
    """Refuse what changes the result and is not served; look at hints."""
    serve_only(None, qv=qv, q_descale=q_descale, k_descale=k_descale, v_descale=v_descale)
    serve_only(0, attention_chunk=whole("attention_chunk", attention_chunk))
    whole("num_splits", num_splits)
    whole("sm_margin", sm_margin)
    if pack_gqa is not None:
        flag("pack_gqa", pack_gqa)


def _answer(found: Any, more: Any, name: str = "return_attn_probs") -> Any:
    """The output, and the lse where it is wanted."""
    return tuple(found[:2]) if flag(name, more) else found[0]
