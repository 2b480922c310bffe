"""Flash tile: PyTorch's own CPU kernel as the inner tile, for scores that nothing changes.

`aten._scaled_dot_product_flash_attention_for_cpu` gives the lse beside the output, and its
backward takes both, so that any rectangle of pairs can be computed alone: forward results merge
by their lse, and gradients add up when every rectangle is given the lse and output of the whole.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from saccade.ops.attention.cpu.tile_masks import PartialTile

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default

# Below this many query rows a kv head's query heads are packed into rows of one product.
PACK_BELOW = 256


def forward(
    query: Float[Tensor, "batch query_heads rows dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    scale: float,
    partial: PartialTile | None,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Output and lse of one rectangle of pairs.

    `partial`: its mask (None: all are visible); `causal`: row i sees keys 0 … i, with no mask in
    memory.
    """
    value_dim = value.shape[-1]
    heads, rows = query.shape[1:3]
    packing = _heads_to_pack(query, key, partial, causal)
    dim = max(query.shape[-1], value_dim)
    output, lse = _forward(
        _pack(_widen(query, dim), packing),
        _widen(key, dim),
        _widen(value, dim),
        0.0,
        causal,
        attn_mask=_bias(partial, query, key, packing),
        scale=scale,
    )
    output, lse = _unpack(output, heads, rows)[..., :value_dim], _unpack(lse, heads, rows)
    if partial is not None and partial.blind is not None:  # the kernel says lse 0 for such a row
        lse = lse.masked_fill(partial.blind, -torch.inf)
    return output, lse


def backward(
    grad_output: Float[Tensor, "batch query_heads rows value_dim"],
    query: Float[Tensor, "batch query_heads rows dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    output: Float[Tensor, "batch query_heads rows value_dim"],
    lse: Float[Tensor, "batch query_heads rows"],
    scale: float,
    partial: PartialTile | None,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The contribution of one rectangle of pairs in the gradients of query, key and value.

    `output` and `lse` are those of the whole rows; lse is finite (0 where a row sees nothing).
    """
    head_dim, value_dim = query.shape[-1], value.shape[-1]
    heads, rows = query.shape[1:3]
    packing = _heads_to_pack(query, key, partial, causal)
    dim = max(head_dim, value_dim)
    grad_query, grad_key, grad_value = _backward(
        _pack(_widen(grad_output, dim), packing),
        _pack(_widen(query, dim), packing),
        _widen(key, dim),
        _widen(value, dim),
        _pack(_widen(output, dim), packing),
        _pack(lse, packing),
        0.0,
        causal,
        attn_mask=_bias(partial, query, key, packing),
        scale=scale,
    )
    grad_query = _unpack(grad_query, heads, rows)
    return grad_query[..., :head_dim], grad_key[..., :head_dim], grad_value[..., :value_dim]


def _widen(rows: Tensor, dim: int) -> Tensor:
    """Zero channels up to `dim`: the kernel wants one head size. They change no sum.

    It also reads channels as if their stride were 1, so other strides are copied.
    """
    if rows.shape[-1] != dim:
        return F.pad(rows, (0, dim - rows.shape[-1]))
    return rows if rows.stride(-1) == 1 else rows.contiguous()


def _heads_to_pack(query: Tensor, key: Tensor, partial: PartialTile | None, causal: bool) -> int:
    """How many query heads share a kv head and go into rows of one product (1: none)."""
    heads_alike = partial is None or partial.bias.shape[1] == 1
    if causal or not heads_alike or query.shape[2] >= PACK_BELOW:
        return 1
    return query.shape[1] // key.shape[1]


def _pack(tensor: Tensor, packing: int) -> Tensor:
    """[batch, heads, rows, …] to [batch, heads / packing, packing · rows, …]."""
    if packing == 1:
        return tensor
    batch, heads, rows = tensor.shape[:3]
    return tensor.reshape(batch, heads // packing, packing * rows, *tensor.shape[3:])


def _unpack(tensor: Tensor, heads: int, rows: int) -> Tensor:
    if tensor.shape[1] == heads:
        return tensor
    return tensor.reshape(tensor.shape[0], heads, rows, *tensor.shape[3:])


def _bias(partial: PartialTile | None, query: Tensor, key: Tensor, packing: int) -> Tensor | None:
    """A partial tile's bias, repeated for packed heads."""
    if partial is None:
        return None
    bias = partial.bias.expand(*partial.bias.shape[:2], query.shape[2], key.shape[2])
    return bias.repeat(1, 1, packing, 1) if packing > 1 else bias
