"""Write: put the keys and values of new tokens into their slots."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.kv_cache.storage import quantised
from saccade.rotary import check_rotary, rotated
from saccade.runtime import backends
from saccade.runtime.arguments import (
    INTEGERS,
    check_flag,
    check_pages,
    check_scales,
    check_tensor,
    values_readable,
)
from saccade.runtime.custom_op import EXACT_STRIDES
from saccade.runtime.spec import DTYPES

torch.library.define(
    "saccade::write_kv_cache",
    "(Tensor key, Tensor value, Tensor(a!) key_pages, Tensor(b!) value_pages, "
    "Tensor slot_mapping, Tensor(c!)? key_scales, Tensor(d!)? value_scales, Tensor? cos, "
    "Tensor? sin, bool interleaved) -> ()",
    tags=EXACT_STRIDES,
)


def write_kv_cache(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    *,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    rotary: tuple[Tensor, Tensor] | None = None,
    interleaved: bool = False,
) -> None:
    """Write the keys and values of new tokens into their slots of the pages.

    Args:
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, value_dim].
        key_pages, value_pages: as in `attention_paged`; changed in place.
        slot_mapping: int32 or int64 [tokens]: page · page_size + slot of each token, all different;
            a token of -1 is not written.
        key_scales, value_scales: [num_pages, kv_heads, page_size], written beside pages of int8
            and float8_e4m3fn: each token of each head takes the whole range. float8_e4m3fn may go
            without: its numbers are then rounded as they are, NaN beyond 448.
        rotary: cosines and sines [tokens, pairs] of the angles by which pairs of key channels are
            turned first; 2 · pairs is at most head_dim. None turns nothing.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + pairs).

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
        NotImplementedError: if key or value asks for a gradient.

    Sources: PagedAttention (Kwon et al. 2023), section 4.3; RoFormer (Su et al. 2021), section
    3.2.2.

    >>> saccade.write_kv_cache(key, value, key_pages, value_pages, slot_mapping)
    """
    check_flag("interleaved", interleaved)
    _check_tokens(key, value, key_pages, value_pages)
    check_scales(key_pages, value_pages, key_scales, value_scales, required=True)
    _check_slots(slot_mapping, key, key_pages)
    cos, sin = (None, None) if rotary is None else check_rotary(rotary, key, "key")
    if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
        raise NotImplementedError(
            "saccade: a gradient through write_kv_cache is not implemented; call it under "
            "torch.no_grad()"
        )
    torch.ops.saccade.write_kv_cache.default(
        key, value, key_pages, value_pages, slot_mapping, key_scales, value_scales, cos, sin,
        interleaved,
    )  # fmt: skip


def _write(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None,
    value_scales: Tensor | None,
    cos: Tensor | None,
    sin: Tensor | None,
    interleaved: bool,
) -> None:
    """In plain PyTorch, on any device; it waits for the device to learn which slots are skipped."""
    if cos is not None and sin is not None:
        key = rotated(key, cos, sin, interleaved)
    if bool((slot_mapping < 0).any()):
        kept = slot_mapping >= 0
        key, value, slot_mapping = key[kept], value[kept], slot_mapping[kept]
    page_size = key_pages.shape[2]
    page, slot = slot_mapping // page_size, slot_mapping % page_size
    for rows, pages, scales in (
        (key, key_pages, key_scales),
        (value, value_pages, value_scales),
    ):
        if scales is not None:
            rows, of_rows = quantised(rows, pages.dtype)
            scales.transpose(1, 2)[page, slot] = of_rows.to(scales.dtype)
        rows = rows.to(pages.dtype)
        if pages.dtype == torch.float8_e4m3fn:  # which PyTorch places only by their bits
            rows, pages = rows.view(torch.int8), pages.view(torch.int8)
        pages.transpose(1, 2)[page, slot] = rows


torch.library.impl("saccade::write_kv_cache", "CompositeExplicitAutograd", _write)


def _write_on_gpu(*arguments: Any) -> None:
    """By a kernel that waits for nothing, where there is one."""
    key, key_pages, value_pages = arguments[0], arguments[2], arguments[3]
    if backends.no_kernels(key.device) is None:
        from saccade.kv_cache import write_triton as kernels  # imports Triton

        if kernels.fits(key_pages, value_pages):
            kernels.write(*arguments)
            return
    _write(*arguments)


torch.library.impl("saccade::write_kv_cache", "CUDA", _write_on_gpu)


@torch.library.register_fake("saccade::write_kv_cache")
def _write_fake(*arguments: object) -> None:
    """No results: it changes tensors in place."""


def _check_tokens(key: Tensor, value: Tensor, key_pages: Tensor, value_pages: Tensor) -> None:
    for name, rows, dim in (("key", key, "head_dim"), ("value", value, "value_dim")):
        takes = f"[tokens, kv_heads, {dim}]"
        check_tensor(name, rows, f"a tensor {takes}")
        if rows.dim() != 3:
            raise ValueError(f"{name}: got shape {tuple(rows.shape)}, takes {takes}")
        if rows.dtype not in DTYPES:
            raise TypeError(
                f"{name}: got {rows.dtype}, takes float32, float64, bfloat16 or float16"
            )
    if value.dtype != key.dtype or value.device != key.device:
        raise TypeError(
            f"value: got {value.dtype} on {value.device}, takes key's {key.dtype} on {key.device}"
        )
    check_pages(key_pages, value_pages, key.dtype, key.device)
    for name, rows, pages in (("key", key, key_pages), ("value", value, value_pages)):
        if rows.shape[0] != key.shape[0]:
            raise ValueError(f"{name}: got {rows.shape[0]} tokens, takes key's {key.shape[0]}")
        if (rows.shape[1], rows.shape[2]) != (pages.shape[1], pages.shape[3]):
            raise ValueError(
                f"{name}: got {tuple(rows.shape[1:])} heads and channels, takes those of its "
                f"pages, {(pages.shape[1], pages.shape[3])}"
            )


def _check_slots(slot_mapping: Tensor, key: Tensor, key_pages: Tensor) -> None:
    takes = "a tensor [tokens] of int32 or int64"
    check_tensor("slot_mapping", slot_mapping, takes, dtypes=INTEGERS)
    if tuple(slot_mapping.shape) != (key.shape[0],):
        raise ValueError(
            f"slot_mapping: got shape {tuple(slot_mapping.shape)}, takes ({key.shape[0]},)"
        )
    if slot_mapping.device != key.device:
        raise ValueError(f"slot_mapping: got {slot_mapping.device}, takes key's {key.device}")
    slots = key_pages.shape[0] * key_pages.shape[2]
    if not values_readable(slot_mapping) or slot_mapping.numel() == 0:
        return
    least, most = int(slot_mapping.min()), int(slot_mapping.max())
    if least < -1 or most >= slots:
        got = least if least < -1 else most
        raise ValueError(f"slot_mapping: got slot {got}, takes -1 to {slots - 1}")
