"""Functions: the plain Python functions that masks and scores are made of, known by name.

A name is what travels in the key of an expression, so that PyTorch's operators need to carry no
Python object. Names are given when a function is registered and never change.
"""

from __future__ import annotations

import dis
import types
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor


@dataclass(frozen=True)
class Function:
    """A registered function of (batch, head, query_row, kv_row, *captured).

    Scores take the score as their first argument and have a derivative of the same form.
    ``check(captured, extents)`` returns a complaint about captured data that cannot serve
    a problem of these extents, or None.
    """

    name: str
    body: Callable[..., Any]
    derivative: Callable[..., Any] | None = None
    differentiable: bool = False  # d score / d captured tensor is 1 where the function takes it
    check: Callable[..., str | None] | None = None

    in_place: bool = False  # whether its code may change tensors that it is given

    def __call__(self, *arguments: Any) -> Any:
        """The body's answer; what it may change it gets as a copy."""
        return self.body(*self._own(arguments))

    def differentiate(self, *arguments: Any) -> Any:
        """The derivative's answer, in the same way.

        Raises:
            NotImplementedError: if the function has no derivative.
        """
        if self.derivative is None:
            raise NotImplementedError(
                f"score: function {self.name!r} has no derivative; give one with "
                "saccade.scores.function(derivative=…) to train through it"
            )
        return self.derivative(*self._own(arguments))

    def _own(self, arguments: tuple[Any, ...]) -> tuple[Any, ...]:
        if not self.in_place:
            return arguments
        return tuple(own.clone() if isinstance(own, Tensor) else own for own in arguments)


def named(body: Callable[..., Any], argument: str = "body") -> str:
    """A user's function by its module and name, without characters that a key's grammar uses.

    Raises:
        TypeError: if it is no plain function, as functools.partial and callable objects are not.
    """
    if not isinstance(body, (types.FunctionType, types.MethodType)):
        raise TypeError(
            f"{argument}: got {type(body).__name__}, takes a plain function; numbers and tensors "
            "that it needs are captured by calling what this gives you"
        )
    text = f"{body.__module__}.{body.__qualname__}"
    return "".join(c if c.isalnum() or c in "._-" else "_" for c in text)


def changes_in_place(body: Callable[..., Any]) -> bool:
    """Whether a function's own code holds an in-place operator (+=), store or method (add_)."""
    return any(
        step.opname in ("STORE_SUBSCR", "DELETE_SUBSCR")
        or step.opname.startswith("INPLACE_")  # Python 3.10; later ones have BINARY_OP with "+="
        or (step.opname == "BINARY_OP" and step.argrepr.endswith("="))
        or (isinstance(step.argval, str) and step.argval[-1:] == "_" != step.argval[-2:-1])
        for step in dis.get_instructions(body)
    )


_FUNCTIONS: dict[str, Function] = {}


def register(function: Function) -> Function:
    """Make a function known under its name; a name that is taken gets a number behind it."""
    name, count = function.name, 1
    while name in _FUNCTIONS:
        count += 1
        name = f"{function.name}-{count}"
    bodies = filter(None, (function.body, function.derivative))
    function = replace(function, name=name, in_place=any(map(changes_in_place, bodies)))
    _FUNCTIONS[name] = function
    return function


def lookup(name: str) -> Function:
    """The registered function of that name."""
    try:
        return _FUNCTIONS[name]
    except KeyError:
        raise KeyError(
            f"no mask or score function {name!r} is registered in this process; "
            "import the module that defines it before the call"
        ) from None
