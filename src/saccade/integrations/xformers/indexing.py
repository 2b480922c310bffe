"""Indexing: two operators of xformers that dinov2 imports beside its attention."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

__all__ = ["index_select_cat", "scaled_index_add"]


def index_select_cat(sources: Iterable[Tensor], indices: Iterable[Tensor]) -> Tensor:
    """Rows of several tensors, flattened, one behind the other.

    Args:
        sources: each [rows, channels].
        indices: of each, which rows.

    Examples:
        >>> from saccade.integrations.xformers import index_select_cat
        >>> rows = torch.arange(6).view(3, 2)
        >>> index_select_cat([rows, rows], [torch.tensor([2]), torch.tensor([0])])
        tensor([4, 5, 0, 1])
    """
    pairs = zip(sources, indices, strict=True)
    return torch.cat([source.index_select(0, index).flatten() for source, index in pairs])


def scaled_index_add(
    input: Tensor,
    index: Tensor,
    source: Tensor,
    scaling: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """Add rows to some of a tensor's, in place: input[index] += alpha · scaling · source.

    Args:
        input: [rows, length, channels], which is written to.
        index: which rows.
        source: as many rows.
        scaling: [channels], or none.
        alpha: a factor.

    Examples:
        >>> from saccade.integrations.xformers import scaled_index_add
        >>> rows = torch.zeros(3, 1, 2)
        >>> added = scaled_index_add(rows, torch.tensor([2]), torch.ones(1, 1, 2), alpha=0.5)
        >>> added.flatten()
        tensor([0.0000, 0.0000, 0.0000, 0.0000, 0.5000, 0.5000])
    """
    scaled = source if scaling is None else source * scaling.to(source.dtype)
    return input.index_add_(0, index, scaled.to(input.dtype), alpha=alpha)
