"""Ops: what mask and score functions may call beside operators, on torch tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def index_range(start: int, stop: int, dim: int, device: torch.device | str = "cpu") -> Tensor:
    """The numbers start … stop - 1 along one of four dimensions, known to `take` as a range."""
    shape = [1, 1, 1, 1]
    shape[dim] = stop - start
    rows = torch.arange(start, stop, device=device).view(shape)
    rows.saccade_range = (start, stop, dim)  # type: ignore[attr-defined]  # lost by arithmetic
    return rows


def take(table: Any, *indices: Any) -> Any:
    """Read a captured tensor at the given indices, one for each of its dimensions.

    A dimension of size 1 serves every index (it broadcasts); an index outside the table reads its
    nearest entry. The result has the broadcast shape of the indices. Inside a mask or score
    function this is how captured tensors are read, on every implementation.
    """
    for index in indices:
        if hasattr(index, "take_from"):  # a row of a mask or score that is traced
            return index.take_from(table, indices)
    if table.dim() != len(indices):
        raise ValueError(
            f"take: a table of {table.dim()} dimensions needs as many indices, got {len(indices)}"
        )
    sliced = take_by_slices(table, indices)
    if sliced is not None:
        return sliced
    nearest = [
        0 if size == 1 else torch.as_tensor(index, device=table.device).clamp(0, size - 1)
        for size, index in zip(table.shape, indices, strict=True)
    ]
    return table[tuple(nearest)]


def take_by_slices(table: Tensor, indices: Sequence[Any]) -> Tensor | None:
    """`take` without a gather, where the indices are ranges along dimensions that ascend."""
    slices = slices_of(table, indices)
    if slices is None:
        return None
    shape = [1, 1, 1, 1]
    for dim, start, stop in slices:
        if dim >= 0:
            shape[dim] = stop - start
    return table[tuple(slice(start, stop) for _, start, stop in slices)].reshape(shape)


def slices_of(table: Tensor, indices: Sequence[Any]) -> list[tuple[int, int, int]] | None:
    """For each dimension of a table the dimension of the pairs that it is read along, and the
    first and last entry that are read; -1 where it has one entry for all. None for other reads."""
    last_dim, found = -1, []
    for size, index in zip(table.shape, indices, strict=True):
        if size == 1:
            found.append((-1, 0, 1))
            continue
        known = getattr(index, "saccade_range", None)
        if known is None or known[2] <= last_dim or known[1] > size:
            return None
        start, stop, last_dim = known
        found.append((last_dim, start, stop))
    return found


# The functions of numbers that scores are made of, each with one meaning on every implementation.
absolute, exp, log, tanh = torch.abs, torch.exp, torch.log, torch.tanh
minimum, maximum, where = torch.minimum, torch.maximum, torch.where
