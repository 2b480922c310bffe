"""Quantization: keys and values in eight bits, with one scale for each token and head."""

from __future__ import annotations

import torch
from torch import Tensor

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantised(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as numbers of eight bits, and the scale that each row is multiplied by when read.

    Args:
        rows: [..., dim], floating point.
        dtype: int8 or float8_e4m3fn.

    Returns:
        numbers of `rows`' shape, and float32 scales [...]. The largest number of a row takes the
        whole range. A row that holds NaN or inf is NaN when read.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1) if rows.shape[-1] else wide.new_zeros(rows.shape[:-1])
    scales = (largest / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)  # divides
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    numbers = (wide / scales.unsqueeze(-1)).nan_to_num(0, 0, 0)
    if dtype == torch.int8:
        numbers = numbers.round()
    return numbers.to(dtype), scales
