"""Modifiers: what masks and scores have in common as values."""

from __future__ import annotations

import functools
import types
from typing import Any, TypeVar

import torch

from saccade.modifiers.expression import Captured
from saccade.modifiers.written import written

Self = TypeVar("Self", bound="Modifier")


class Modifier:
    """An expression with what it captured: compared by value, and moved as tensors are."""

    key: str
    captured: Captured

    def to(self: Self, device: torch.device | str) -> Self:
        """The same with its captured tensors on a device."""
        tensors = tuple(tensor.to(device) for tensor in self.captured.tensors)
        return type(self)(self.key, self.captured._replace(tensors=tensors))  # type: ignore[call-arg]

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        mine, others = self.captured, other.captured  # type: ignore[attr-defined]
        numbers = (self.key, tuple(mine.ints), tuple(mine.floats))
        if numbers != (other.key, tuple(others.ints), tuple(others.floats)):  # type: ignore[attr-defined]
            return False
        return all(
            one is another
            or (
                (one.device == another.device and one.dtype == another.dtype)
                and torch.equal(one, another)
            )
            for one, another in zip(mine.tensors, others.tensors, strict=True)
        )

    def __hash__(self) -> int:
        shapes = tuple(tuple(tensor.shape) for tensor in self.captured.tensors)
        return hash((self.key, tuple(self.captured.ints), tuple(self.captured.floats), shapes))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({written(self.key, self.captured)})"


def refuse_in_graphs(argument: str, value: Any) -> None:
    """Refuse a plain function while torch.compile traces: a graph cannot follow what it reaches.

    Raises:
        TypeError: saying where to make the mask or score.
    """
    if torch.compiler.is_compiling() and is_plain_function(value):
        raise TypeError(
            f"{argument}: got a function inside torch.compile, whose values a graph cannot follow; "
            f"make the {argument} before, or give values to what saccade.{argument}s.function makes"
        )


def is_plain_function(value: Any) -> bool:
    """Whether a value is a function that a mask or score may be traced from."""
    kinds = (types.FunctionType, types.MethodType, functools.partial)
    return isinstance(value, kinds) or (callable(value) and not isinstance(value, type))
