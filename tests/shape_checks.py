"""Shape checks: beartype's, of which a nested function gets the same one each time it is made.

`make test` has jaxtyping decorate every function of some modules. For each it writes an empty one
of the same signature, which beartype turns into a check. A nested function is decorated whenever
the one around it runs: to write its check anew took a quarter of the time of such modules' tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, get_args, get_origin

from beartype import beartype
from jaxtyping import AbstractArray

_NESTED: dict[Any, Callable[..., Any]] = {}


def typechecked(function: Callable[..., Any]) -> Callable[..., Any]:
    """The check of an empty function: called with its arguments, it looks at their types."""
    code = function.__code__
    nested = "<locals>" in function.__qualname__
    if not nested or function.__defaults__ or function.__kwdefaults__:
        return beartype(function)
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount + 2]  # *, ** as well
    types = tuple((name, _compared(kind)) for name, kind in function.__annotations__.items())
    key = function.__module__, function.__qualname__, code.co_flags, names, types
    if key not in _NESTED:
        _NESTED[key] = beartype(function)
    return _NESTED[key]


def _compared(kind: Any) -> Any:
    """What equals that of an equal annotation: jaxtyping makes a new class each time."""
    if isinstance(kind, type) and issubclass(kind, AbstractArray):
        array: Any = kind
        return array.array_type, tuple(array.dtypes), array.dim_str
    parts = get_args(kind)
    return (get_origin(kind), *map(_compared, parts)) if parts else kind
