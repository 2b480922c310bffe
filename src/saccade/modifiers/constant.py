"""Constants of a trace: functions of plain values that torch.compile calls and does not enter."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def remembered_constant(function: F) -> F:
    """Remember a function's results; what it gives in a compiled function is a constant there.

    The cache stands behind a plain function, as torch.compile warns of one that it meets itself.
    """
    remembered = functools.lru_cache(maxsize=4096)(function)

    def constant(*arguments: Any, **options: Any) -> Any:
        return remembered(*arguments, **options)

    functools.update_wrapper(constant, function)
    del constant.__wrapped__  # which Dynamo would follow
    constant._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return constant  # type: ignore[return-value]
