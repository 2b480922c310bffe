"""Rotary embedding: turn pairs of channels by an angle that grows with a token's position."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from saccade.runtime import shards
from saccade.runtime.arguments import check_flag


def apply_rotary(
    rows: Tensor, rotary: tuple[Tensor, Tensor], *, interleaved: bool = False
) -> Tensor:
    """Turn pairs of channels of each row, as `write_kv_cache` turns keys.

    Args:
        rows: [tokens, heads, dim]; a DTensor may be sharded by any of them.
        rotary: cosines and sines [tokens, pairs] of the angles; 2 · pairs is at most dim, and
            channels behind the pairs stay as they are.
        interleaved: pairs are channels (2i, 2i + 1) instead of (i, i + pairs).

    Returns:
        The turned rows, of the same dtype; computed in float32 at least.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: RoFormer (Su et al. 2021), section 3.2.2, equation 34.

    Examples:
        >>> rows = torch.randn(10, 4, 16)
        >>> angles = torch.arange(10)[:, None] * 10_000.0 ** (-torch.arange(8) / 8)
        >>> turned = saccade.apply_rotary(rows, (angles.cos(), angles.sin()))
        >>> torch.testing.assert_close(turned.norm(dim=-1), rows.norm(dim=-1))
    """
    check_flag("interleaved", interleaved)
    if rows.dim() != 3:
        raise ValueError(f"rows: got shape {tuple(rows.shape)}, takes [tokens, heads, dim]")
    cos, sin = check_rotary(rotary, rows, "rows")
    if shards.any_sharded(rows):
        mesh = cast("Any", rows).device_mesh
        cos, sin = (shards.distributed("rotary", each, "rows", mesh) for each in (cos, sin))
    return rotated(rows, cos, sin, interleaved).to(rows.dtype)


def rotated(rows: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """The rows after their rotation, in float32 (float64 for float64 rows).

    Args:
        rows: [tokens, heads, dim].
        cos, sin: [tokens, pairs] of each pair's angle, with 2 · pairs at most dim; channels behind
            the pairs stay as they are.
        interleaved: pairs are channels (2i, 2i + 1); otherwise (i, i + pairs).

    Source: RoFormer (Su et al. 2021), section 3.2.2, equation 34.
    """
    wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
    cos, sin = (angle.to(wide.dtype).unsqueeze(1) for angle in (cos, sin))
    turned, rest = wide.split([2 * cos.shape[2], rows.shape[2] - 2 * cos.shape[2]], dim=2)
    pairs = turned.unflatten(2, (-1, 2)) if interleaved else turned.unflatten(2, (2, -1)).mT
    first, second = pairs.unbind(3)
    pairs = torch.stack((first * cos - second * sin, first * sin + second * cos), dim=3)
    return torch.cat(((pairs if interleaved else pairs.mT).flatten(2), rest), dim=2)


def check_rotary(rotary: object, rows: Tensor, name: str) -> tuple[Tensor, Tensor]:
    """Cosines and sines that fit rows [tokens, heads, dim].

    Raises:
        TypeError, ValueError: saying what `rotary` got and what it takes.
    """
    takes = "(cosines, sines), two floating-point tensors [tokens, pairs]"
    if not isinstance(rotary, (tuple, list)) or len(rotary) != 2:
        raise TypeError(f"rotary: got {type(rotary).__name__}, takes {takes}")
    tokens, dim = rows.shape[0], rows.shape[2]
    for angle in rotary:
        if not isinstance(angle, Tensor) or not angle.is_floating_point():
            raise TypeError(f"rotary: got {type(angle).__name__}, takes {takes}")
        if angle.dim() != 2 or angle.shape[0] != tokens or 2 * angle.shape[1] > dim:
            raise ValueError(
                f"rotary: got shape {tuple(angle.shape)}, takes [{tokens}, at most {dim // 2}]"
            )
        if angle.device != rows.device:
            raise ValueError(f"rotary: got {angle.device}, takes {name}'s {rows.device}")
    if rotary[0].shape != rotary[1].shape:
        raise ValueError(
            f"rotary: got {tuple(rotary[0].shape)} cosines and {tuple(rotary[1].shape)} sines, "
            "takes as many"
        )
    return rotary[0], rotary[1]
