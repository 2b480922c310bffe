"""Answers: the float64 results of a case, worked out once for all that are given the same case.

A description makes the same numbers every time. Implementations and configs that are compared with
them differ; the answer took longer than most of what it is compared with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor

from saccade.testing import (
    Description,
    PagedDescription,
    delta,
    linear,
    make_case,
    make_delta_case,
    make_linear_case,
    make_paged_case,
    oracle,
    tolerances,
)
from saccade.testing.delta import DeltaDescription
from saccade.testing.linear import LinearDescription


def _of_attention(case: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    exact = oracle(case)
    return exact, tolerances(case, exact)


_MADE: dict[type, tuple[Callable[..., Any], Callable[[Any], Any]]] = {
    Description: (make_case, _of_attention),
    PagedDescription: (make_paged_case, _of_attention),
    LinearDescription: (make_linear_case, linear.expected),
    DeltaDescription: (make_delta_case, delta.expected),
}


@functools.lru_cache(maxsize=600)  # some hundred cases go to one implementation, then to the next
def expected(description: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The exact results of what a description makes, and the error allowed to their numbers."""
    make, answer = _MADE[type(description)]
    return answer(make(description))
