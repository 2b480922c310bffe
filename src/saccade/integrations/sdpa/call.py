"""Call: the arguments of PyTorch's `scaled_dot_product_attention` in saccade's terms."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade import masks, scores

# Made once: a trace would make them anew, through what remembers forms of masks.
TOP_LEFT, BOTTOM_RIGHT = masks.causal(align="top_left"), masks.causal(align="bottom_right")
DISABLED = torch._C._disabled_torch_function_impl


class SdpaCall(NamedTuple):
    """A call in saccade's terms."""

    query: Tensor
    key: Tensor
    value: Tensor
    options: dict[str, Any]
    leading: torch.Size  # of the output, before its rows


def translated(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> SdpaCall:
    """The call with four dimensions, a mask and a score."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() < 2:
            raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes at least 2")
    if is_causal and attn_mask is not None:
        raise ValueError("is_causal: got True with attn_mask, takes one of the two")
    leading = _leading((query, key, value), enable_gqa)
    options: dict[str, Any] = {"dropout_p": float(dropout_p), "scale": scale}
    if is_causal:
        options["mask"] = TOP_LEFT
    if attn_mask is not None and is_causal_bias(attn_mask):
        options["mask"] = _causal(attn_mask, query.shape[-2], key.shape[-2])
    elif attn_mask is not None:
        if has_handler(attn_mask):
            got = type(attn_mask).__name__
            raise TypeError(f"attn_mask: got a {got}, takes a plain tensor or a CausalBias")
        shape = (*leading, query.shape[-2], key.shape[-2])
        if not _broadcasts(attn_mask, shape):
            raise ValueError(
                f"attn_mask: got {list(attn_mask.shape)}, takes what broadcasts to {list(shape)}"
            )
        mask = _four_dimensions(attn_mask, leading[:-1])
        if mask.dtype == torch.bool:
            options["mask"] = mask
        elif mask.dtype == query.dtype:
            options["score"] = scores.bias(mask)
        else:
            raise TypeError(f"attn_mask: got {mask.dtype}, takes bool or query's {query.dtype}")
    batch = leading[:-1]
    query, key, value = (
        _four_dimensions(rows.expand(*batch, *rows.shape[-3:]), batch)
        for rows in (query, key, value)
    )
    return SdpaCall(query, key, value, options, leading)


def is_causal_bias(tensor: object) -> bool:
    """Whether it is `torch.nn.attention.bias.CausalBias`, known by name: its module loads much."""
    kind = type(tensor)
    return kind.__name__ == "CausalBias" and kind.__module__ == "torch.nn.attention.bias"


def has_handler(tensor: object) -> bool:
    """Whether a tensor's type has a say in what functions make of it, by `__torch_function__`."""
    if type(tensor) in (Tensor, torch.nn.Parameter):  # torch 2.11's traces compare no methods
        return False
    handler = getattr(type(tensor), "__torch_function__", DISABLED)
    default = Tensor.__torch_function__
    if handler is DISABLED or handler == default:  # in torch 2.15's traces methods lack __func__
        return False
    return getattr(handler, "__func__", handler) != default.__func__


def _causal(bias: Any, query_len: int, kv_len: int) -> masks.Mask:
    """What a CausalBias hides; a square one is aligned at the first key, as PyTorch has it."""
    if bias.variant.name == "UPPER_LEFT" or bias.seq_len_q == bias.seq_len_kv:
        return TOP_LEFT
    if (bias.seq_len_q, bias.seq_len_kv) != (query_len, kv_len):
        got = [bias.seq_len_q, bias.seq_len_kv]
        raise ValueError(f"attn_mask: got {got}, takes the call's {[query_len, kv_len]}")
    return BOTTOM_RIGHT


def _leading(tensors: tuple[Tensor, ...], enable_gqa: bool) -> torch.Size:
    """The output's dimensions before its rows: those of the batch, and the query heads."""
    query, key, value = ((1, *tensor.shape[:-2]) for tensor in tensors)
    heads = query[-1], key[-1], value[-1]
    grouped = enable_gqa and heads[1] == heads[2]
    if not grouped and any(count not in (1, heads[0]) for count in heads[1:]):
        raise ValueError(
            f"key, value: got {heads[1]} and {heads[2]} heads for query's {heads[0]}, takes as "
            "many; with enable_gqa=True a divisor"
        )
    try:
        batch = torch.broadcast_shapes(*(tensor.shape[:-3] for tensor in tensors))
    except RuntimeError:
        shapes = ", ".join(str(list(tensor.shape)) for tensor in tensors)
        raise ValueError(f"query, key, value: got {shapes}, takes batches that broadcast") from None
    return torch.Size((*batch, *tensors[0].shape[-3:-2]))


def _broadcasts(tensor: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a tensor broadcasts to a shape."""
    if tensor.dim() > len(shape):
        return False
    sizes = zip(reversed(tensor.shape), reversed(shape), strict=False)
    return all(have in (1, want) for have, want in sizes)


def _four_dimensions(tensor: Tensor, batch: torch.Size) -> Tensor:
    """Rows or a mask with all dimensions before the last three as one; what is 1 may stay so."""
    missing = max(len(batch) + 3, 4) - tensor.dim()
    tensor = tensor.reshape((1,) * missing + tuple(tensor.shape))
    if len(batch) <= 1:
        return tensor
    return tensor.expand(*batch, *tensor.shape[-3:]).flatten(0, -4)
