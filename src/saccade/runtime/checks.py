"""Checks of the values that masks, scores and caches are given."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENTS = ("bottom_right", "top_left")


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
