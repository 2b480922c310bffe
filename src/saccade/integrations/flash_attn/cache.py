"""Cache: FlashAttention's call for generation, over a cache of one slab a sequence or of pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade import masks
from saccade.integrations.flash_attn.options import FlashOptions, flag, whole, without_gradient

LARGEST_PAGE = 1024


@masks.function
def behind_padding(batch: Any, head: Any, query_row: Any, kv_row: Any, start: Any) -> Any:
    """Keys from a sequence's own start on."""
    return kv_row >= masks.take(start, batch)


def flash_attn_with_kvcache(  # breaks function-length: most of it is the docstring
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: Tensor | int | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Append new keys and values to a cache, in place, and attend to all of it.

    Args:
        q: (batch, seqlen_q, nheads, headdim).
        k_cache, v_cache: (batch_cache, seqlen_cache, nheads_k, headdim), or with block_table
            (num_blocks, block_size, nheads_k, headdim).
        k, v: (batch, seqlen_new, nheads_k, headdim), or None: nothing is new. What does not fit in
            the cache is an error on a CPU, and left out on a GPU, where nobody looks.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): new keys are turned by those of their
            places; so are queries of a causal or windowed call, and all others by those of the
            first new place.
        cache_seqlens: tokens in the cache before, int32 (batch,) or one number for all. None: the
            whole cache, and nothing is new.
        cache_batch_idx: int32 (batch,): which entry of the cache is whose; not with block_table.
        cache_leftpad: int32 (batch,): where each sequence begins in the cache.
        block_table: int32 (batch, max_blocks).
        rotary_interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + rotary_dim / 2).
        num_splits: a hint that saccade does not need.
        softmax_scale, causal, window_size, softcap, alibi_slopes: as of `flash_attn_func`.
        return_softmax_lse: also return the lse (batch, nheads, seqlen_q).

    Returns:
        (batch, seqlen_q, nheads, headdim).

    Raises:
        TypeError, ValueError: naming the argument.
        NotImplementedError: in backward, as there are no gradients.
    """
    options = FlashOptions.of(softmax_scale, causal, window_size, softcap, alibi_slopes)
    more, interleaved = flag("return_softmax_lse", return_softmax_lse), rotary_interleaved
    new = _New(k, v, _angles(rotary_cos, rotary_sin), flag("rotary_interleaved", interleaved))
    whole("num_splits", num_splits)
    with torch.no_grad():
        found = _attended(
            q, (k_cache, v_cache), new, options, cache_seqlens, cache_batch_idx, cache_leftpad,
            block_table,
        )  # fmt: skip
    name = "flash_attn_with_kvcache"
    found = without_gradient(name, found, q, k, v, k_cache, v_cache, alibi_slopes)
    return found if more else found[0]


class _New(NamedTuple):
    """What is appended, and options it and queries are turned."""

    k: Tensor | None
    v: Tensor | None
    angles: tuple[Tensor, Tensor] | None
    interleaved: bool


def _attended(
    q: Tensor,
    caches: tuple[Tensor, Tensor],
    new: _New,
    options: FlashOptions,
    cache_seqlens: Any,
    cache_batch_idx: Tensor | None,
    cache_leftpad: Tensor | None,
    block_table: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Output and lse of all that is in the cache, after what is new was written."""
    k, v, angles, rotary_interleaved = new
    table, (key_pages, value_pages) = _paged(len(q), caches, block_table, cache_batch_idx)
    capacity = table.shape[1] * key_pages.shape[2]
    if cache_seqlens is None:
        if k is not None:
            raise ValueError("cache_seqlens: got None with k, takes the lengths before")
        cache_seqlens = capacity
    before = _lengths(cache_seqlens, len(q), q.device)
    num_new = 0 if k is None else k.shape[1]
    if (k is None) != (v is None):
        raise ValueError("k and v: got one of the two, takes both or neither")
    if before.device.type == "cpu" and before.numel() and int(before.max()) + num_new > capacity:
        raise ValueError(
            f"cache_seqlens: got {int(before.max())} and {num_new} new tokens, the cache holds "
            f"{capacity}"
        )
    if k is not None and v is not None:
        place = before[:, None] + torch.arange(num_new, device=q.device)
        saccade.write_kv_cache(
            k.flatten(0, 1), v.flatten(0, 1), key_pages, value_pages,
            _slots(place, table, key_pages.shape[2]).flatten(),
            rotary=_at(angles, place), interleaved=rotary_interleaved,
        )  # fmt: skip
    if angles is not None:
        step = 1 if options.local else 0
        place = before[:, None] + step * torch.arange(q.shape[1], device=q.device)
        turned = saccade.apply_rotary(
            q.flatten(0, 1), _at(angles, place), interleaved=rotary_interleaved
        )
        q = turned.view(q.shape)
    keywords = options.keywords()
    if cache_leftpad is not None:
        seen = behind_padding(cache_leftpad)
        keywords["mask"] = seen if keywords["mask"] is None else keywords["mask"] & seen
    lens = (before + num_new).clamp(max=capacity)
    output, lse = saccade.attention_paged(
        q.transpose(1, 2), key_pages, value_pages, table, lens, **keywords, return_lse=True
    )
    return output.transpose(1, 2), lse


def _paged(
    batch: int,
    caches: tuple[Tensor, Tensor],
    block_table: Tensor | None,
    cache_batch_idx: Tensor | None,
) -> tuple[Tensor, list[Tensor]]:
    """The page table, and both caches as pages [pages, kv_heads, page_size, dim], nothing copied.

    A slab of up to 1024 slots is one page; a longer one is several.
    """
    if block_table is not None:
        if cache_batch_idx is not None:
            raise ValueError("cache_batch_idx: got a tensor with block_table, takes None")
        return block_table, [cache.transpose(1, 2) for cache in caches]
    entries, length = caches[0].shape[:2]
    size = _page_size(length)
    count = length // size
    owner = torch.arange(batch, dtype=torch.int32, device=caches[0].device)
    if cache_batch_idx is not None:
        owner = cache_batch_idx.to(torch.int32)
    elif entries < batch:
        raise ValueError(f"k_cache: got {entries} entries, takes one for each of {batch} sequences")
    table = owner[:, None] * count + torch.arange(count, dtype=torch.int32, device=caches[0].device)
    try:
        pages = [
            cache.unflatten(1, (count, size)).view(-1, size, *cache.shape[2:]) for cache in caches
        ]
    except RuntimeError:
        raise ValueError(
            f"k_cache, v_cache: got strides {caches[0].stride()} and {caches[1].stride()}, takes "
            f"entries that lie one behind the other where they are longer than {LARGEST_PAGE}"
        ) from None
    return table, [cache.transpose(1, 2) for cache in pages]


def _page_size(length: int) -> int:
    """The largest number of slots that divides a slab and is allowed in a page."""
    return next(
        size for size in range(min(max(length, 1), LARGEST_PAGE), 0, -1) if length % size == 0
    )


def _slots(place: Tensor, table: Tensor, size: int) -> Tensor:
    """The slot of each place in its sequence; -1 for one behind the cache's end."""
    fits = place < table.shape[1] * size
    page = table.gather(1, torch.where(fits, place // size, 0).long())
    return torch.where(fits, page.long() * size + place % size, -1)


def _angles(cos: Tensor | None, sin: Tensor | None) -> tuple[Tensor, Tensor] | None:
    if cos is None or sin is None:
        if cos is not sin:
            raise ValueError("rotary_cos and rotary_sin: got one of the two, takes both or neither")
        return None
    return cos, sin


def _at(angles: tuple[Tensor, Tensor] | None, place: Tensor) -> Any:
    """Cosines and sines of each place, flat."""
    if angles is None:
        return None
    return tuple(table[place.flatten().long()] for table in angles)


def _lengths(lens: Any, batch: int, device: torch.device) -> Tensor:
    """Lengths int32 [batch], of a number that all share or of a tensor."""
    if isinstance(lens, Tensor) and lens.dim() > 0:
        return lens.to(torch.int32)
    lens = whole("cache_seqlens", lens)
    return torch.full((batch,), lens, dtype=torch.int32, device=device)
