"""Whole: what keeps a cache whole, whatever is raised in the middle of a call.

An interrupt (KeyboardInterrupt, or what another signal's handler raises) can come between any two
instructions of Python. So a call works out first what will be, and then enters it `at_once`. All
that it does before or after that, such as counting who holds a page, can be done again from what
is entered: a flag says that it may be half done, and the next call mends it before anything else.
"""

from __future__ import annotations

import functools
import operator
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, Concatenate, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

call = operator.methodcaller("__call__")


def at_once(steps: Iterable[Callable[[], object]]) -> None:
    """Call one function after another, with no moment between for an interrupt.

    A loop in C over functions of C holds no instruction of Python. So each step is a method of a
    built-in type, or of a tensor, bound by `functools.partial`; and none of them can fail.
    """
    deque(map(call, tuple(steps)), maxlen=0)


def locked(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of something with a lock, for one thread at a time; it finds all of it whole."""

    @functools.wraps(method)
    def alone(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self._mend()
            return method(self, *args, **kwargs)

    return alone
