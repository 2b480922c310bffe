"""Constants of graphs: what a call prepared before, where PyTorch traces the call into a graph.

While AOTAutograd traces, tensors have no numbers. What is the same in every call, such as the rows
that a plan deals to ranks, is computed outside of the graph all the same (`outside_graph`), and its
tensors enter the graph as constants (`constants`), as those of `torch.tensor([1, 2])` would.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

MODES = torch._C._TorchDispatchModeKey
TRACING = (MODES.FAKE, MODES.PROXY, MODES.FUNCTIONAL)  # modes in which numbers are not there
Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def in_graph() -> bool:
    """Whether tensors have no numbers now, as AOTAutograd traces what runs. (Dynamo follows code
    and runs none of it.)"""
    if torch.compiler.is_dynamo_compiling():
        return False
    return any([torch._C._get_dispatch_mode(mode) is not None for mode in TRACING])


def outside_graph(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Run a function on tensors that have numbers, also where its caller is being traced."""

    @functools.wraps(function)
    def call(*args: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not in_graph():
            return function(*args, **options)
        with _disable_current_modes():
            return function(*args, **options)

    return call


def constants(value: Any) -> Any:
    """A value whose tensors may be read by what is traced now; elsewhere the value itself.

    Goes through tuples and lists, and through masks and scores.
    """
    return _lifted(value) if in_graph() else value


def _lifted(value: Any) -> Any:
    if isinstance(value, Tensor):
        return torch.ops.aten.lift_fresh_copy.default(value)
    if isinstance(value, list):
        return [_lifted(each) for each in value]
    if isinstance(value, tuple):
        parts = map(_lifted, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if hasattr(value, "captured"):
        return type(value)(value.key, _lifted(value.captured))
    return value
