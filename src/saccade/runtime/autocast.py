"""Autocast: inputs take its dtype once, when they are checked, and nothing is cast after that.

Implementations widen what they multiply, and autocast would narrow it again.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
R = TypeVar("R")

CPU = torch.device("cpu")


def cast(tensor: Tensor) -> Tensor:
    """Under autocast, inputs take its dtype; float64 stays, as in PyTorch's own operators."""
    if not isinstance(tensor, Tensor) or not tensor.is_floating_point():
        return tensor  # for the checks to refuse
    if tensor.dtype == torch.float64 or not _is_on(tensor.device):
        return tensor
    return tensor.to(torch.get_autocast_dtype(tensor.device.type))


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Autocast off, for what must be as exact as its inputs are."""
    if not _is_on(device):
        return contextlib.nullcontext()
    # A new one each time: threads that shared one would restore each other's.
    return torch.autocast(device.type, enabled=False)


def computed_without(function: Callable[P, R]) -> Callable[P, R]:
    """A pass on the CPU, with autocast off in it."""

    @functools.wraps(function)
    def call(*arguments: P.args, **keywords: P.kwargs) -> R:
        with without_autocast(CPU):
            return function(*arguments, **keywords)

    return call


def _is_on(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)  # meta knows none
