"""Gradient sums: shares of many rectangles added up in the accumulation dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.runtime.spec import accumulate_dtype


class GradientSum:
    """The gradient of [batch, heads, rows, dim], to which rectangles add their shares.

    Laid out [batch, rows, heads, dim] in memory, as the results of every implementation are. A
    first share that covers everything is taken as it is: one rectangle needs no second copy.
    """

    def __init__(self, like: Tensor):
        self.shape = like.shape
        self.wide = accumulate_dtype(like.dtype)
        self.total: Tensor | None = None

    def add(self, at: tuple[slice, slice, slice], share: Tensor) -> None:
        """Add a rectangle's share at its slices of [batch, heads, rows]."""
        if self.total is None and share.shape == self.shape:
            self.total = share
            return
        if self.total is None:
            batch, heads, rows, dim = self.shape
            self.total = torch.zeros(
                batch, rows, heads, dim, dtype=self.wide, device="cpu"
            ).transpose(1, 2)
        elif self.total.dtype != self.wide:
            self.total = self.total.to(self.wide)
        self.total[at] += share

    def result(self) -> Tensor:
        """The sum; zeros where nothing was added."""
        if self.total is None:
            return torch.zeros(self.shape, dtype=self.wide, device="cpu")
        return self.total
