"""Precision: how exactly kernels multiply float32, as PyTorch was told for its own products."""

from __future__ import annotations

import torch

_precision_of = torch._C._get_fp32_precision_getter


def precision(dtype: torch.dtype) -> str:
    """How products of a dtype are computed: "ieee" unless PyTorch was told that less will do.

    Both of PyTorch's interfaces count: `torch.set_float32_matmul_precision` ("high": "tf32x3",
    "medium": "tf32"), which sets a precision for each backend, and `torch.backends...matmul
    .fp32_precision`, which is that precision. "tf32" for CUDA alone is what "high" makes of it.

    The older interface is not asked: it raises once the newer one was used, or does not follow.
    """
    if dtype is not torch.float32 or _precision_of("cuda", "matmul") != "tf32":
        return "ieee"
    return "tf32" if _precision_of("mkldnn", "matmul") == "bf16" else "tf32x3"
