"""Constants of graphs: what functions of texts and kinds give, taken as it is by torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

Function = TypeVar("Function", bound=Callable[..., Any])


def constant(function: Function) -> Function:
    """Remember what a function gives; to a graph, which knows its arguments, that is a constant.

    Dynamo looks for its mark at plain functions only, and warns of caches that it would trace.
    """
    remembered = functools.lru_cache(maxsize=4096)(function)

    def call(*args: Any, **options: Any) -> Any:
        return remembered(*args, **options)

    functools.update_wrapper(call, function)
    vars(call).pop("__wrapped__", None)  # by which Dynamo would find the way around the mark
    call._dynamo_marked_constant = True  # type: ignore[attr-defined]
    call.cache_clear = remembered.cache_clear  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]
