"""Scalars: numbers as callers of FlashAttention give them, and nothing else.

Its extension takes Python's numbers, NumPy's, and tensors of one element; so does this.
"""

from __future__ import annotations

import numbers
import operator
from typing import Any

import torch
from torch import Tensor


def whole(name: str, value: Any) -> Any:
    """A whole number.

    Raises:
        TypeError: for what is none.
    """
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        if isinstance(value, bool) or (isinstance(value, Tensor) and value.dtype == torch.bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {_said(value)}, takes a whole number") from None


def real(name: str, value: Any) -> Any:
    """A number.

    Raises:
        TypeError: for what is none.
        ValueError: for a tensor that waits for a gradient, which it would not get.
    """
    if type(value) in (int, float) or isinstance(value, (torch.SymFloat, torch.SymInt)):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.dtype != torch.bool:
        if value.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name}: got a tensor that requires a gradient, takes a number")
        return value.item()
    if isinstance(value, numbers.Real) and not isinstance(value, bool):
        return float(value)
    raise TypeError(f"{name}: got {_said(value)}, takes a number")


def flag(name: str, value: Any) -> bool:
    """True or False.

    Raises:
        TypeError: for what is neither, nor 0 or 1.
    """
    if type(value) is bool:
        return value
    one = getattr(value, "size", None) == 1 or (isinstance(value, Tensor) and value.numel() == 1)
    if (one or isinstance(value, int)) and value in (0, 1):
        return bool(value)
    raise TypeError(f"{name}: got {_said(value)}, takes True or False")


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two whole numbers, of a tuple, a list, an array or a tensor.

    Raises:
        TypeError: for anything else.
    """
    try:
        left, right = value
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {_said(value)}, takes two whole numbers") from None
    return whole(name, left), whole(name, right)


def _said(value: Any) -> str:
    """A value as messages say it."""
    if isinstance(value, Tensor):
        return f"a tensor {list(value.shape)} of {value.dtype}"
    return f"{value!r} ({type(value).__name__})"
