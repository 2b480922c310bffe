"""Testing: random problems, a float64 oracle, derived tolerances, memory filled with NaN."""

from saccade.runtime.arguments import checked
from saccade.testing.cases import Case, Description, make_case, poisoned, problems
from saccade.testing.delta import DeltaCase, assert_delta_exact, delta_oracle, make_delta_case
from saccade.testing.linear import LinearCase, assert_linear_exact, linear_oracle, make_linear_case
from saccade.testing.oracle import assert_exact, oracle, tolerances
from saccade.testing.paged import PagedCase, PagedDescription, make_paged_case

__all__ = [
    "Case",
    "DeltaCase",
    "Description",
    "LinearCase",
    "PagedCase",
    "PagedDescription",
    "assert_delta_exact",
    "assert_exact",
    "assert_linear_exact",
    "checked",
    "delta_oracle",
    "linear_oracle",
    "make_case",
    "make_delta_case",
    "make_linear_case",
    "make_paged_case",
    "oracle",
    "poisoned",
    "problems",
    "tolerances",
]
