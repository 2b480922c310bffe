"""Shape checks: beartype's, of which a nested function gets the same one each time it is made.

`make test` has jaxtyping decorate every function of some modules. For each it writes an empty one
of the same signature, which beartype turns into a check. A nested function is decorated whenever
the one around it runs: to write its check anew took a quarter of the time of such modules' tests.

Of the calls of decorated functions four in five had no shape among their types, and took a tenth of
the time. They are left as they are: pyright reads types that are no shapes.
"""

from __future__ import annotations

from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any, get_args, get_origin

import jaxtyping
from beartype import beartype
from jaxtyping import AbstractArray

_NESTED: dict[Any, Callable[..., Any]] = {}
_NAME_SHAPES: dict[CodeType, bool] = {}


def check_shapes_alone() -> None:
    """Have jaxtyping leave functions as they are that name no shape."""
    whole: Any = jaxtyping
    decorate = whole.jaxtyped

    def jaxtyped(function: Any = None, *, typechecker: Any) -> Any:
        if function is None:
            return lambda function: jaxtyped(function, typechecker=typechecker)
        if isinstance(function, FunctionType) and not names_shapes(function):
            return function
        return decorate(function, typechecker=typechecker)

    whole.jaxtyped = jaxtyped


def names_shapes(function: FunctionType) -> bool:
    """Whether an argument, or the result, has a shape in its annotation."""
    code = function.__code__
    if code not in _NAME_SHAPES:
        kinds = [_resolved(kind, function) for kind in function.__annotations__.values()]
        _NAME_SHAPES[code] = any(map(_holds_shape, kinds))
    return _NAME_SHAPES[code]


def _resolved(kind: Any, function: FunctionType) -> Any:
    """An annotation that may be text; Any, as by jaxtyping, where its names are not known."""
    if not isinstance(kind, str):
        return kind
    try:
        return eval(kind, function.__globals__)
    except Exception:
        return Any


def _holds_shape(kind: Any) -> bool:
    if isinstance(kind, type) and issubclass(kind, AbstractArray):
        return True
    return any(map(_holds_shape, kind if isinstance(kind, list) else get_args(kind)))


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
