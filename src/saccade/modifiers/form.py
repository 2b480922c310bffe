"""Form: a function's expression for captured values of given kinds, whatever they are.

The form depends on no value, so torch.compile may take it for a constant and pass values through
its graph; and built-in masks and scores, whose values have names, are traced once for all calls.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.modifiers.constant import constant
from saccade.modifiers.expression import Captured, Expression, key_of
from saccade.modifiers.trace import letter_of, name_of, trace

DTYPES = {"b": torch.bool, "i": torch.int32, "l": torch.int64, "f": torch.float32}


class Form(NamedTuple):
    """A key, and which of the values that a function is given stand in its slots.

    A slot of a number holds (place, value): a place among those values, or -1 and the number that
    the function itself brings.
    """

    key: str
    tensors: tuple[int, ...]
    ints: tuple[tuple[int, int], ...]
    floats: tuple[tuple[int, float], ...]

    def captured(self, given: Sequence[Any]) -> Captured:
        """What the expression captured of the given values."""
        return Captured(
            tuple(given[place] for place in self.tensors),
            tuple(int(given[place]) if place >= 0 else own for place, own in self.ints),
            tuple(given[place] if place >= 0 else own for place, own in self.floats),
        )


def kind_of(value: object) -> str:
    """The kind of a value that a function may be given: its letter, and a tensor's dimensions.

    Raises:
        TypeError: for a value that is neither a tensor nor a number.
    """
    if isinstance(value, Tensor):
        return f"{letter_of(value)}{value.dim()}"
    if isinstance(value, (int, torch.SymInt)):
        return "i"
    if isinstance(value, (float, torch.SymFloat)):
        return "f"
    raise TypeError(f"captured data must be tensors, ints or floats, got {type(value).__name__}")


@constant
def form_of(
    function: Callable[..., Any],
    align: str,
    kinds: tuple[str, ...],
    *,
    score: bool = False,
    built_in: bool = False,
) -> Form:
    """The form of a function that is given values of these kinds.

    built_in: tensors keep the names of the function's parameters, whose sizes must be those of the
        call, and numbers in the function are part of the code.

    Raises:
        TypeError: if the function reads tensors that it is not given.
    """
    if not built_in:
        _check_reach(function)
    places = placeholders(kinds)
    form = form_from(
        *trace(function, align, places, score=score, known=False, built_in=built_in), places
    )
    if -1 in form.tensors:
        raise TypeError(
            f"{name_of(function)} reads tensors from outside; inside torch.compile give them to "
            "the function that masks.function or scores.function makes, or make the mask before"
        )
    return form


def form_from(expression: Expression, found: Captured, places: list[Any]) -> Form:
    """The form of an expression that was traced for such placeholders."""
    return Form(
        key_of(expression),
        tuple(_index(places, tensor) for tensor in found.tensors),
        tuple((_index(places, n), 0 if isinstance(n, Given) else n) for n in found.ints),
        tuple((_index(places, n), 0.0 if isinstance(n, Given) else n) for n in found.floats),
    )


def _check_reach(function: Callable[..., Any]) -> None:
    """Refuse a function that reaches values from outside, whose changes a graph would not see.

    Raises:
        TypeError: naming the first of them.
    """
    problem = None if isinstance(function, types.FunctionType) else "is no plain function"
    if problem is None:
        reached = inspect.getclosurevars(function)
        for name, value in {**reached.globals, **reached.nonlocals}.items():
            if isinstance(value, types.FunctionType):
                _check_reach(value)
            elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
                problem = f"reaches {name} from outside"
    if problem is not None:
        raise TypeError(
            f"{name_of(function)} {problem}, which a graph cannot follow; inside torch.compile "
            "give values to the function that masks.function or scores.function makes, or make "
            "the mask or score before"
        )


class Given(NamedTuple):
    """Stands for a number that is not known yet."""

    kind: str


def placeholders(kinds: Sequence[str]) -> list[Any]:
    """What a function is given to be traced for values of these kinds."""
    return [_placeholder(kind) for kind in kinds]


def _placeholder(kind: str) -> Any:
    if len(kind) == 1:
        return Given(kind)
    return torch.empty((1,) * int(kind[1:]), dtype=DTYPES[kind[0]], device="cpu")


def _index(places: list[Any], value: Any) -> int:
    return next((place for place, given in enumerate(places) if given is value), -1)
