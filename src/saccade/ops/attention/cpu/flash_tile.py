"""Flash tile: PyTorch's own CPU kernel as the inner tile, for scores that nothing changes.

`aten._scaled_dot_product_flash_attention_for_cpu` gives the lse beside the output, and its
backward takes both, so that any rectangle of pairs can be computed alone: forward results merge
by their lse, and gradients add up when every rectangle is given the lse and output of the whole.
Rectangles that are partly hidden have a `PartialTile`, their mask as the kernel takes it.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from saccade.modifiers.evaluate import visible
from saccade.modifiers.expression import Captured
from saccade.ops.attention.cpu.block_mask import Remembered
from saccade.ops.attention.cpu.dense_tile import PairBlock
from saccade.runtime.spec import Variant

# Partial tiles of at most this many pairs are remembered, and so many pairs in all: 32 MiB in
# float32.
REMEMBERED_PAIRS = 2**20
MOST_PAIRS = 2**23


class PartialTile(NamedTuple):
    """A mask ready for the kernel.

    Attributes:
        bias: 0 where visible, -inf where hidden, broadcastable to [batch, heads, rows, keys].
        blind: the rows that see nothing, broadcastable to [batch, heads, rows]; None if none are.
    """

    bias: Tensor
    blind: Tensor | None


def partial(visible: Bool[Tensor, "#batch #heads #rows #keys"], dtype: torch.dtype) -> PartialTile:
    """The partial tile of a mask that is written out."""
    bias = torch.where(visible, 0.0, -torch.inf).to(dtype)
    blind = ~visible.any(-1)
    return PartialTile(bias, blind if bool(blind.any()) else None)


def partial_at(
    variant: Variant, pair_block: PairBlock, masked: bool, kv_tile: int, dtype: torch.dtype
) -> tuple[PairBlock, PartialTile | None] | None:
    """The partial tile of a rectangle, whose hidden key tiles at both ends are trimmed off.

    `masked`: some pairs may be hidden; otherwise there is no partial tile to look for.

    Returns:
        The smaller rectangle and its partial tile (None: all of it is visible); None if nothing is.
    """
    if not masked:
        return pair_block, None
    captured = variant.mask_captured
    sides = (
        stop - start
        for start, stop in (pair_block.batch, pair_block.query_rows, pair_block.kv_rows)
    )
    if math.prod(sides) > REMEMBERED_PAIRS:
        return _partial_at(variant.mask, captured, pair_block, kv_tile, dtype)
    numbers = (tuple(captured.ints), tuple(map(float.hex, captured.floats)))
    return _remembered.get(
        (variant.mask, *numbers, pair_block, kv_tile, dtype),
        captured.tensors,
        lambda: _partial_at(variant.mask, captured, pair_block, kv_tile, dtype),
    )


def _pairs_of(found: tuple[PairBlock, PartialTile | None] | None) -> int:
    return 2**10 if found is None or found[1] is None else found[1].bias.numel()


_remembered: Remembered[tuple[PairBlock, PartialTile | None] | None] = Remembered(
    MOST_PAIRS, _pairs_of
)


def _partial_at(
    mask: str, captured: Captured, pair_block: PairBlock, kv_tile: int, dtype: torch.dtype
) -> tuple[PairBlock, PartialTile | None] | None:
    seen = visible(mask, captured, pair_block.coordinates())
    if bool(seen.all()):
        return pair_block, None
    if seen.shape[3] > 1:
        columns = seen.flatten(0, 2).any(0).nonzero()
        if columns.numel() == 0:
            return None
        first = int(columns[0]) // kv_tile * kv_tile
        last = min(-(-(int(columns[-1]) + 1) // kv_tile) * kv_tile, seen.shape[3])
        start = pair_block.kv_rows[0]
        pair_block = pair_block._replace(kv_rows=(start + first, start + last))
        seen = seen[..., first:last]
    elif not bool(seen.any()):
        return None
    return pair_block, None if bool(seen.all()) else partial(seen, dtype)


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
    batch, heads, rows = query.shape[:3]
    packing = _heads_to_pack(query, key, partial, causal)
    dim = max(query.shape[-1], value_dim)
    query, scale = _with_positive_scale(query, scale)
    packed = _pack(_widen(query, dim), packing)
    key, value = _widen(key, dim), _widen(value, dim)
    bias = _bias(partial, query, key, packing)
    blind = None
    if partial is not None and partial.blind is not None:
        blind = _pack(partial.blind.expand(batch, heads, rows), packing)
    output, lse = _attend(packed, key, value, scale, causal, bias, blind)
    return _unpack(output, heads, rows)[..., :value_dim], _unpack(lse, heads, rows)


def forward_rows(
    query: Float[Tensor, "batch query_heads *one dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys value_dim"],
    scale: float,
    bias: Float[Tensor, "batch 1 heads_per_kv_head keys"] | None,
    blind: Bool[Tensor, "batch 1 1"] | None = None,
) -> tuple[Float[Tensor, "batch query_heads 1 value_dim"], Float[Tensor, "batch query_heads 1"]]:
    """`forward` for one query row of each sequence.

    Args:
        bias: 0 where visible, -inf where hidden; None: all are visible.
        blind: the sequences whose row sees nothing; None if none are.
    """
    batch, heads, head_dim = query.shape[0], query.shape[1], query.shape[-1]
    kv_heads, value_dim = key.shape[1], value.shape[-1]
    dim = max(head_dim, value_dim)
    query, scale = _with_positive_scale(query, scale)
    packed = _widen(query, dim).reshape(batch, kv_heads, heads // kv_heads, dim)
    key, value = _widen(key, dim), _widen(value, dim)
    output, lse = _attend(packed, key, value, scale, False, bias, blind)
    output, lse = output.reshape(batch, heads, 1, dim), lse.reshape(batch, heads, 1)
    return output if value_dim == dim else output[..., :value_dim], lse


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
    negated = scale < 0
    query, scale = _with_positive_scale(query, scale)
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
    if negated:
        grad_query = grad_query.neg_()
    return grad_query[..., :head_dim], grad_key[..., :head_dim], grad_value[..., :value_dim]


def _attend(
    query: Float[Tensor, "batch heads rows dim"],
    key: Float[Tensor, "batch kv_heads keys dim"],
    value: Float[Tensor, "batch kv_heads keys dim"],
    scale: float,
    causal: bool,
    bias: Tensor | None,
    blind: Bool[Tensor, "#batch #heads #rows"] | None,
) -> tuple[Tensor, Tensor]:
    """Output and lse as the kernel has them, but right in the rows where it is not.

    - Where a row's lse is NaN or inf, so is its output NaN. In bfloat16 the kernel has finite
      numbers there, mostly 0.
    - Where all scores of a row are -inf, the kernel says 0 for output and lse. A row that is blind,
      or whose scores left the range of numbers, has the lse -inf; where a row of queries or keys
      holds NaN or inf, output and lse are NaN.
    """

    def attended(value: Tensor) -> tuple[Tensor, Tensor]:
        return _forward(query, key, value, 0.0, causal, attn_mask=bias, scale=scale)

    output, lse = attended(value)
    odd = (lse / lse).isnan()  # 0, inf or NaN
    if not bool(odd.any()):
        return output, lse
    nonfinite = ~(lse < torch.inf)
    empty = lse == 0
    if blind is not None:
        lse = lse.masked_fill(blind, -torch.inf)
        empty &= ~blind
    empty &= (output == 0).all(-1)
    if bool(empty.any()):
        of_weights = attended(torch.ones_like(value))[0][..., 0]  # their sum, over itself
        empty &= of_weights == 0
        lse = lse.masked_fill(empty, -torch.inf)
        of_keys = ~key.isfinite().flatten(2).all(-1, keepdim=True)
        of_keys = of_keys.repeat_interleave(query.shape[1] // key.shape[1], dim=1)
        nonfinite |= empty & (~query.isfinite().all(-1) | of_keys)
        lse = lse.masked_fill(nonfinite & empty, torch.nan)
    return output.masked_fill(nonfinite.unsqueeze(-1), torch.nan), lse


def _with_positive_scale(query: Tensor, scale: float) -> tuple[Tensor, float]:
    """Queries and a factor of at least 0 that give the same scores.

    On some processors the kernel hides bfloat16 scores under a causal mask, as -inf, before it
    multiplies by the factor: by a negative one what is hidden would be all that is seen.
    """
    return (-query, -scale) if scale < 0 else (query, scale)


def _widen(rows: Tensor, dim: int) -> Tensor:
    """Zero channels up to `dim`: the kernel wants one head size. They change no sum.

    It also reads channels as if their stride were 1, so other strides are copied; `pad` keeps
    those of PyTorch's channels_last.
    """
    if rows.shape[-1] != dim:
        rows = F.pad(rows, (0, dim - rows.shape[-1]))
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
    rows = query.shape[2]
    repeated = packing if rows == 1 else 1  # one row is the same in all heads: no copies
    bias = partial.bias.expand(*partial.bias.shape[:2], rows * repeated, key.shape[2])
    return bias.repeat(1, 1, packing, 1) if packing > repeated else bias
