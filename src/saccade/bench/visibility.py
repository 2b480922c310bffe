"""Visibility: which pairs of rows a case lets through, in words, as tensors and as a count."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor


@dataclass(frozen=True)
class Visibility:
    """Which key rows a query row sees, for a sequence on itself.

    Attributes:
        kind: "full", "causal", "window" (its own row and `size` rows before it), or "documents"
            (the sequence is cut into documents of `size` rows, and a row sees its own document).
        size: see `kind`; 0 for "full" and "causal".
    """

    kind: Literal["full", "causal", "window", "documents"] = "full"
    size: int = 0

    def __str__(self) -> str:
        return f"{self.kind} {self.size}" if self.size else self.kind

    def sees(self, query_rows: Tensor, kv_rows: Tensor) -> Tensor:
        """A bool tensor [query rows, key rows]; written apart from the library's own masks."""
        query_row, kv_row = query_rows[:, None], kv_rows[None, :]
        if self.kind == "full":
            return (query_row >= 0) & (kv_row >= 0)
        if self.kind == "documents":
            return query_row // self.size == kv_row // self.size
        past = kv_row <= query_row
        return past & (kv_row >= query_row - self.size) if self.kind == "window" else past

    def tensor(self, query_len: int, kv_len: int, device: torch.device) -> Tensor:
        """The whole mask written out, for peers that take nothing else."""
        rows = torch.arange(query_len, device=device), torch.arange(kv_len, device=device)
        return self.sees(*rows)

    def pairs(self, query_len: int, kv_len: int) -> int:
        """How many pairs are visible in one head."""
        if self.kind == "full":
            return query_len * kv_len
        if self.kind == "documents":
            whole, rest = divmod(query_len, self.size)
            return whole * self.size**2 + rest**2
        reach = self.size + 1 if self.kind == "window" else query_len
        reach = min(reach, query_len)  # the first `reach` rows see 1, 2, ... keys, the others reach
        return reach * (reach + 1) // 2 + (query_len - reach) * reach


FULL = Visibility()
CAUSAL = Visibility("causal")
