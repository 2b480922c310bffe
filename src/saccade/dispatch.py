"""Dispatch: the ordered list of implementations, and why each can or cannot serve a problem."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from saccade.problem import Problem


class Implementation(NamedTuple):
    """A name, and a function that gives the reason why a problem cannot be served, or None."""

    name: str
    unsupported: Callable[[Problem], str | None]


def _cpu_unsupported(problem: Problem) -> str | None:
    if problem.device != "cpu":
        return f"tensors lie on {problem.device}; it takes CPU tensors"
    return None


def _reference_unsupported(problem: Problem) -> str | None:
    if problem.configured:
        return "it has no tiles, so it takes no config"
    return None


IMPLEMENTATIONS = (
    Implementation("cpu", _cpu_unsupported),
    Implementation("reference", _reference_unsupported),
)
"""In order of preference: the first that gives no reason against itself is taken."""

BY_NAME = {implementation.name: implementation for implementation in IMPLEMENTATIONS}
NAMES = tuple(BY_NAME)


def choose(problem: Problem, name: str | None = None) -> str:
    """The implementation that serves a problem.

    Raises:
        ValueError: for a name that is not in the list.
        NotImplementedError: if the named one (or, without a name, every one) cannot serve it.
    """
    if name is not None and name not in NAMES:
        raise ValueError(f"implementation: got {name!r}, takes one of {NAMES} or None")
    reasons = []
    for candidate in NAMES if name is None else (name,):
        reason = BY_NAME[candidate].unsupported(problem)
        if reason is None:
            return candidate
        reasons.append(f"{candidate}: {reason}")
    raise NotImplementedError("implementation: " + "; ".join(reasons))
