"""Captures: what tensors and numbers that masks and scores capture must look like."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.expressions import ALIGNMENTS


class Extents(NamedTuple):
    """The sizes of a problem's four index axes.

    For packed sequences the lengths are those of the longest sequence (None: not known without
    reading the device), and a captured tensor may be longer.
    """

    batch: int
    query_heads: int
    query_len: int | None
    kv_len: int | None
    packed: bool = False

    def in_blocks(self, query_block: int, kv_block: int) -> Extents:
        """The same, with lengths counted in blocks."""
        query_len = None if self.query_len is None else -(-self.query_len // query_block)
        kv_len = None if self.kv_len is None else -(-self.kv_len // kv_block)
        return self._replace(query_len=query_len, kv_len=kv_len)


def misfit(name: str, table: Tensor, axes: tuple[str, ...], extents: Extents) -> str | None:
    """Say what is wrong with a captured tensor's shape, or None. Size 1 always broadcasts."""
    wanted = [getattr(extents, axis) for axis in axes]
    for axis, size, want in zip(axes, table.shape, wanted, strict=True):
        if size == 1 or want is None or size == want:
            continue
        if extents.packed and axis in ("query_len", "kv_len") and size > want:
            continue
        sizes = ", ".join(
            f"{a} {w}" if w is not None else a for a, w in zip(axes, wanted, strict=True)
        )
        return f"{name}: got shape {tuple(table.shape)}, takes [{sizes}] or 1 there"
    return None


def check_align(align: str) -> None:
    """Refuse an alignment that does not exist."""
    if align not in ALIGNMENTS:
        raise ValueError(f"align: got {align!r}, takes 'bottom_right' or 'top_left'")


def check_whole_number(name: str, value: object, *, least: int) -> None:
    """Refuse what is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, (int, torch.SymInt)):
        raise TypeError(f"{name}: got {value!r}, takes a whole number of at least {least}")
    if value < least:
        raise ValueError(f"{name}: got {value}, takes a whole number of at least {least}")


def integers(name: str, tensor: Tensor, num_dims: int) -> Tensor:
    """The tensor, if it is one of whole numbers with so many dimensions."""
    whole = isinstance(tensor, Tensor) and tensor.dtype in (torch.int32, torch.int64)
    if not whole:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: got {got}, takes a tensor of int32 or int64")
    if tensor.dim() != num_dims:
        raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes {num_dims}")
    return tensor


def bools(name: str, tensor: Tensor) -> Tensor:
    """The tensor with four dimensions, if it is one of bools with at most as many."""
    if not isinstance(tensor, Tensor) or tensor.dtype != torch.bool:
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: got {got}, takes a tensor of torch.bool (True = visible)")
    if tensor.dim() > 4:
        raise ValueError(f"{name}: got {tensor.dim()} dimensions, takes at most 4")
    return tensor.reshape((1,) * (4 - tensor.dim()) + tuple(tensor.shape))


def floats(name: str, tensor: Tensor) -> Tensor:
    """The tensor, if it is a floating-point one."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        got = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
        raise TypeError(f"{name}: got {got}, takes a floating-point tensor")
    return tensor
