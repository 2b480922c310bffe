"""Cache: FlashAttention's call for generation, over a cache of one slab a sequence or of pages."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.integrations.arguments import (
    first_visible_key,
    flag,
    pages_of_slabs,
    whole,
    without_autocast,
)
from saccade.integrations.flash_attn.functions import attention_options, without_gradient


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
            the cache is an error on a CPU, and left out on a GPU, whose lengths are not read.
        rotary_cos, rotary_sin: (positions, rotary_dim / 2): new keys are turned by those of their
            positions; so are queries of a causal or windowed call, and all others by those of the
            first new position. At least as many positions as the cache has room for; not without k.
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

    Examples:
        >>> from saccade.integrations.flash_attn import flash_attn_with_kvcache
        >>> k_cache, v_cache = torch.zeros(2, 2, 64, 4, 32)  # room for 64 tokens each
        >>> lengths = torch.tensor([5, 9], dtype=torch.int32)
        >>> q, k, v = torch.randn(3, 2, 1, 4, 32)
        >>> output = flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=lengths)
        >>> torch.equal(k_cache[1, 9], k[1, 0])
        True
    """
    if q.dim() != 4:
        raise ValueError(f"q: got {list(q.shape)}, takes (batch, seqlen_q, nheads, headdim)")
    options = attention_options(
        softmax_scale, causal, window_size, softcap, alibi_slopes, (q.shape[0], q.shape[2])
    )
    return_lse = flag("return_softmax_lse", return_softmax_lse)
    whole("num_splits", num_splits)
    rotation = _Rotation.of(rotary_cos, rotary_sin, flag("rotary_interleaved", rotary_interleaved))
    if k is not None and cache_seqlens is None:
        raise ValueError("cache_seqlens: got None with k, takes the lengths before")
    if (k is None) != (v is None):
        raise ValueError("k and v: got one of the two, takes both or neither")
    if k is not None and v is not None:
        _check_new(k, v, q, k_cache, v_cache)
    elif rotation is not None:
        raise ValueError("rotary_cos, rotary_sin: got tables without k, take them with k and v")
    _check_by_sequence("cache_batch_idx", cache_batch_idx, len(q))
    _check_by_sequence("cache_leftpad", cache_leftpad, len(q))
    with torch.no_grad(), without_autocast(q):  # as flash-attn computes in the rows' dtype
        pages = _Pages.of(len(q), (k_cache, v_cache), block_table, cache_batch_idx)
        before, after = pages.lengths(cache_seqlens, len(q), 0 if k is None else k.shape[1])
        if rotation is not None:
            rotation.check(pages.capacity)
        if k is not None and v is not None:
            pages.append(k, v, before, rotation)
        if rotation is not None:
            row = torch.arange(q.shape[1], device=q.device)
            if options["mask"] is None:
                row = torch.zeros_like(row)
            q = rotation.applied(q, before[:, None] + row)
        if cache_leftpad is not None:
            seen = first_visible_key(cache_leftpad)
            options["mask"] = seen if options["mask"] is None else options["mask"] & seen
        found = saccade.attention_paged(
            q.transpose(1, 2), pages.keys, pages.values, pages.table, after, **options,
            return_lse=True,
        )  # fmt: skip
        found = found[0].transpose(1, 2), found[1]
    name = "flash_attn_with_kvcache"
    found = without_gradient(name, found, q, k, v, k_cache, v_cache, alibi_slopes)
    return found if return_lse else found[0]


def _check_new(k: Tensor, v: Tensor, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> None:
    """Refuse by name new rows that are not of q's sequences and of the cache's heads."""
    for name, rows, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = (q.shape[0], k.shape[1] if k.dim() == 4 else -1, *cache.shape[-2:])
        if tuple(rows.shape) != wanted:
            length = "seqlen_new" if name == "k" else wanted[1]
            takes = f"({wanted[0]}, {length}, {wanted[2]}, {wanted[3]})"
            raise ValueError(f"{name}: got {list(rows.shape)}, takes {takes}")


def _check_by_sequence(name: str, numbers: Any, batch: int) -> None:
    """Refuse by name what is no whole number for each sequence."""
    if numbers is None:
        return
    if not isinstance(numbers, Tensor):
        raise TypeError(f"{name}: got {type(numbers).__name__}, takes an int32 tensor ({batch},)")
    kinds = torch.int32, torch.int64
    if numbers.dtype not in kinds or tuple(numbers.shape) != (batch,):
        got = f"{numbers.dtype} {tuple(numbers.shape)}"
        raise ValueError(f"{name}: got {got}, takes int32 ({batch},)")


class _Rotation(NamedTuple):
    """Angles by position [positions, rotary_dim / 2], and which channels are pairs."""

    cos: Tensor
    sin: Tensor
    interleaved: bool

    @classmethod
    def of(cls, cos: Tensor | None, sin: Tensor | None, interleaved: bool) -> _Rotation | None:
        if cos is not None and sin is not None:
            return cls(cos, sin, interleaved)
        if cos is not sin:
            raise ValueError("rotary_cos and rotary_sin: got one of the two, takes both or neither")
        return None

    def check(self, room: int) -> None:
        """Refuse tables that have no angles for each place in the cache, as flash-attn does."""
        for name, table in (("rotary_cos", self.cos), ("rotary_sin", self.sin)):
            if table.dim() != 2 or table.shape[0] < room:
                raise ValueError(
                    f"{name}: got {list(table.shape)}, takes [at least {room}, rotary_dim / 2], an "
                    "angle for each place in the cache"
                )

    def at(self, position: Tensor) -> tuple[Tensor, Tensor]:
        rows = position.flatten().long()
        return self.cos[rows], self.sin[rows]

    def applied(self, q: Tensor, position: Tensor) -> Tensor:
        turned = saccade.apply_rotary(
            q.flatten(0, 1), self.at(position), interleaved=self.interleaved
        )
        return turned.view(q.shape)


class _Pages(NamedTuple):
    """A page table, and caches as pages [pages, kv_heads, page_size, dim]; nothing is copied."""

    table: Tensor
    keys: Tensor
    values: Tensor

    @classmethod
    def of(
        cls,
        batch: int,
        caches: tuple[Tensor, Tensor],
        block_table: Tensor | None,
        cache_batch_idx: Tensor | None,
    ) -> _Pages:
        """Of a pool, or of a slab for each sequence."""
        if block_table is not None:
            if cache_batch_idx is not None:
                raise ValueError("cache_batch_idx: got a tensor with block_table, takes None")
            return cls(block_table, *(cache.transpose(1, 2) for cache in caches))
        entries, device = len(caches[0]), caches[0].device
        entry = torch.arange(batch, dtype=torch.int32, device=device)
        if cache_batch_idx is not None:
            entry = cache_batch_idx.to(torch.int32)
        elif entries < batch:
            raise ValueError(
                f"k_cache: got {entries} entries, takes one for each of {batch} sequences"
            )
        table, (keys, values) = pages_of_slabs("k_cache, v_cache", entry, *caches)
        return cls(table, keys, values)

    @property
    def capacity(self) -> int:
        return self.table.shape[1] * self.keys.shape[2]

    def lengths(self, cache_seqlens: Any, batch: int, num_new: int) -> tuple[Tensor, Tensor]:
        """Lengths int32 [batch] before and after new tokens, from a number or a tensor."""
        if cache_seqlens is None:
            cache_seqlens = self.capacity
        if isinstance(cache_seqlens, Tensor) and cache_seqlens.dim() > 0:
            whole_numbers = cache_seqlens.dtype in (torch.int32, torch.int64)
            if not whole_numbers or cache_seqlens.shape != (batch,):
                raise ValueError(
                    f"cache_seqlens: got {cache_seqlens.dtype} {tuple(cache_seqlens.shape)}, takes "
                    f"int32 ({batch},) or one number"
                )
            before = cache_seqlens.to(torch.int32)
        else:
            length = whole("cache_seqlens", cache_seqlens)
            before = torch.full((batch,), length, dtype=torch.int32, device=self.keys.device)
        if before.device.type == "cpu" and batch and not torch.compiler.is_compiling():
            least, most = (int(end) for end in before.aminmax())
            if least < 0:
                raise ValueError(f"cache_seqlens: got {least}, takes 0 to {self.capacity}")
            if most + num_new > self.capacity:
                raise ValueError(
                    f"cache_seqlens: got {most} and {num_new} new tokens, the cache holds "
                    f"{self.capacity}"
                )
        return before, (before + num_new).clamp(max=self.capacity)

    def append(self, k: Tensor, v: Tensor, before: Tensor, rotation: _Rotation | None) -> None:
        """Write new rows behind the old ones; those behind the cache's end are left out."""
        position = before[:, None] + torch.arange(k.shape[1], device=k.device)
        size = self.keys.shape[2]
        fits = position < self.capacity
        page = self.table.gather(1, torch.where(fits, position // size, 0).long())
        slots = torch.where(fits, page.long() * size + position % size, -1)
        saccade.write_kv_cache(
            k.flatten(0, 1), v.flatten(0, 1), self.keys, self.values, slots.flatten(),
            rotary=None if rotation is None else rotation.at(torch.where(fits, position, 0)),
            interleaved=rotation is None or rotation.interleaved,
        )  # fmt: skip
