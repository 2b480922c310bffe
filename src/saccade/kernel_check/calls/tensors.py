"""What descriptions of calls share: sizes, dtypes, and memory for tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from saccade.runtime.spec import KernelConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PAGE_DTYPES = {**DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}

CPU = torch.device("cpu")
WINDOW = 256
SHORT = 1024  # rows; Hopper's forward pass has other schedules for so few

StartPass = Callable[[str, KernelConfig | None], None]
"""Starts one of PASSES in the library, with a config or with the one that it chooses."""


def untouched(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros on a GPU; on a CPU, where nothing runs, memory that is never touched and takes none."""
    if device.type == "cuda":
        return torch.zeros(shape, device=device).to(dtype)
    return torch.empty(shape, dtype=dtype)
