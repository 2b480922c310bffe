"""Masks as fast-transformers has them (True = keep), known by what they are.

A matrix is made when somebody asks for it, so a mask of 131,072 rows costs nothing: the library's
own `FullMask` holds 17 GB there.
"""

from __future__ import annotations

import torch
from torch import Tensor


class BaseMask:
    """What all masks answer; subclasses say what is kept."""

    @property
    def bool_matrix(self) -> Tensor:
        """True where something is kept."""
        raise NotImplementedError

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return tuple(self.bool_matrix.shape)

    @property
    def float_matrix(self) -> Tensor:
        """1 where something is kept, else 0."""
        return self.bool_matrix.float()

    @property
    def additive_matrix(self) -> Tensor:
        """0 where something is kept, else -inf."""
        return self.float_matrix.log()

    @property
    def additive_matrix_finite(self) -> Tensor:
        """0 where something is kept, else -1e24."""
        return (1 - self.float_matrix) * -1e24

    @property
    def lengths(self) -> Tensor:
        """How many are kept of each row, if they are the first ones."""
        kept = self.bool_matrix
        lengths = kept.sum(-1)
        first = torch.arange(self.shape[-1], device=kept.device) < lengths.unsqueeze(-1)
        if not torch.equal(first, kept):
            raise ValueError("lengths: got a mask that keeps others than the first, takes lengths")
        return lengths

    @property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return bool(self.bool_matrix.all())

    @property
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
        self._sizes = (N, N if M is None else M)

    @property
    def bool_matrix(self) -> Tensor:
        """True where something is kept."""
        if self._mask is None:
            return torch.ones(self._sizes, dtype=torch.bool, device=self.device)
        return self._mask

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return self._sizes if self._mask is None else tuple(self._mask.shape)

    @property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return self._mask is None or bool(self._mask.all())

    @property
    def lengths(self) -> Tensor:
        """How many are kept of each row, if they are the first ones."""
        if self._mask is None:
            return torch.full((self._sizes[0],), self._sizes[1], device=self.device)
        return super().lengths

    @property
    def lower_triangular(self) -> bool:
        """Whether row i keeps the first i + 1, for all i."""
        if self._mask is None:
            return self._sizes[1] <= 1
        return super().lower_triangular


class LengthMask(BaseMask):
    """Each row keeps its first so many.

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
        self._lengths = lengths.detach().clone().to(device or lengths.device)
        self._max_len = max_len if max_len is not None else int(self._lengths.max())

    @property
    def bool_matrix(self) -> Tensor:
        """True where something is kept."""
        column = torch.arange(self._max_len, device=self._lengths.device)
        return column < self._lengths.unsqueeze(-1)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return (self._lengths.shape[0], self._max_len)

    @property
    def lengths(self) -> Tensor:
        """How many are kept of each row."""
        return self._lengths

    @property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return bool((self._lengths >= self._max_len).all())


class TriangularCausalMask(BaseMask):
    """Row i keeps the first i + 1 of N."""

    def __init__(self, N: int, device: torch.device | str = "cpu"):
        self._size, self.device = N, device

    @property
    def bool_matrix(self) -> Tensor:
        """True where something is kept."""
        sizes = (self._size, self._size)
        return torch.ones(sizes, dtype=torch.bool, device=self.device).tril()

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the matrix."""
        return (self._size, self._size)

    @property
    def lengths(self) -> Tensor:
        """How many are kept of each row."""
        return torch.arange(1, self._size + 1, device=self.device)

    @property
    def all_ones(self) -> bool:
        """Whether everything is kept."""
        return self._size <= 1

    @property
    def lower_triangular(self) -> bool:
        """True: that is what it is."""
        return True
