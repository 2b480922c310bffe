"""Tile masks: the masks of rectangles that are partly hidden, as the flash kernel takes them."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Bool
from torch import Tensor

from saccade.modifiers.evaluate import visible
from saccade.modifiers.expression import Captured
from saccade.ops.attention.cpu.dense_tile import PairBlock
from saccade.ops.attention.cpu.remembered import Remembered
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
    """The edge of a mask that is written out."""
    bias = torch.where(visible, 0.0, -torch.inf).to(dtype)
    blind = ~visible.any(-1)
    return PartialTile(bias, blind if bool(blind.any()) else None)


def partial_at(
    variant: Variant, pair_block: PairBlock, masked: bool, kv_tile: int, dtype: torch.dtype
) -> tuple[PairBlock, PartialTile | None] | None:
    """The edge of a mask in a rectangle, whose hidden key tiles at both ends are trimmed off.

    `masked`: some pairs may be hidden; otherwise there is no partial tile to look for.

    Returns:
        The smaller place and its partial tile (None: everything in it is visible); None if nothing
        is.
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
