"""Masks as fast-transformers has them (True = keep).

A matrix is made when it is read, so a mask of 131,072 rows takes no memory until then: the
library's own `FullMask` holds 17 GB there.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor


class BaseMask:
    """A mask of rows; subclasses give `bool_matrix`, and set what they know without a matrix."""

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        raise NotImplementedError

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.bool_matrix.shape)

    @property
    def float_matrix(self) -> Tensor:
        """1 where a pair is kept, else 0."""
        return self.bool_matrix.float()

    @property
    def additive_matrix(self) -> Tensor:
        """0 where a pair is kept, else -inf."""
        return self.float_matrix.log()

    @property
    def additive_matrix_finite(self) -> Tensor:
        """0 where a pair is kept, else -1e24."""
        return (1 - self.float_matrix) * -1e24

    @cached_property
    def lengths(self) -> Tensor:
        """How many are kept of each row, if they are the first ones."""
        kept = self.bool_matrix
        lengths = kept.sum(-1)
        first = torch.arange(self.shape[-1], device=kept.device) < lengths.unsqueeze(-1)
        if not torch.equal(first, kept):
            raise ValueError("lengths: got a mask that keeps others than the first, takes lengths")
        return lengths

    @cached_property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return bool(self.bool_matrix.all())

    @cached_property
    def lower_triangular(self) -> bool:
        """Whether row i keeps the first i + 1, for all i."""
        kept = self.bool_matrix
        return kept.dim() == 2 and torch.equal(kept, torch.ones_like(kept).tril())


class FullMask(BaseMask):
    """Any mask of bools; `FullMask(N, M)` keeps everything, and needs no memory for it.

    Args:
        mask: a bool tensor, or N.
        N, M: the shape, M = N where None; ignored where mask is a tensor.
        device: where a matrix is made.
    """

    def __init__(
        self,
        mask: Tensor | int | None = None,
        N: int | None = None,
        M: int | None = None,
        device: torch.device | str = "cpu",
    ):
        self.device, self._mask = device, None
        if isinstance(mask, Tensor):
            if mask.dtype != torch.bool:
                raise ValueError(f"mask: got {mask.dtype}, takes torch.bool")
            self._mask = mask.detach().clone()
            return
        if mask is not None and M is None:
            mask, N, M = None, mask, N
        if N is None:
            raise ValueError("mask: got None, takes a bool tensor, or N")
        self.shape = (N, N if M is None else M)
        self.lengths = torch.full((N,), self.shape[1], device=device)
        self.all_ones, self.lower_triangular = True, self.shape[1] <= 1

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        if self._mask is None:
            return torch.ones(self.shape, dtype=torch.bool, device=self.device)
        return self._mask


class LengthMask(BaseMask):
    """Each row keeps as many of its first columns as its length.

    Args:
        lengths: [N] whole numbers.
        max_len: columns; the largest length where None, which is read from the device.
        device: where the lengths are kept; their own where None.
    """

    def __init__(
        self,
        lengths: Tensor,
        max_len: int | None = None,
        device: torch.device | str | None = None,
    ):
        self.lengths = lengths.detach().clone().to(device or lengths.device)
        self.shape = len(lengths), int(self.lengths.max()) if max_len is None else max_len

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        column = torch.arange(self.shape[1], device=self.lengths.device)
        return column < self.lengths.unsqueeze(-1)


class TriangularCausalMask(BaseMask):
    """Row i keeps the first i + 1 of N."""

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        self.shape, self.device = (N, N), device
        self.lengths = torch.arange(1, N + 1, device=device)
        self.all_ones, self.lower_triangular = N <= 1, True

    @property
    def bool_matrix(self) -> Tensor:
        """True where a pair is kept."""
        return torch.ones(self.shape, dtype=torch.bool, device=self.device).tril()
