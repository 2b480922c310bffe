"""Dtypes: what a command line and the compile table call them."""

from __future__ import annotations

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STORED = {**DTYPES, "fp8": torch.float8_e4m3fn, "int8": torch.int8}  # those of pages
