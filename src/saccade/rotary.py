"""Rotary embedding: turn pairs of channels by an angle that grows with a token's position."""

from __future__ import annotations

import torch
from torch import Tensor


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
