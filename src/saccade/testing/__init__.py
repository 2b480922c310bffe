"""Testing: random problems, a float64 oracle, derived tolerances, memory filled with NaN."""

from saccade.runtime.arguments import checked as checked
from saccade.testing.cases import Case as Case
from saccade.testing.cases import Description as Description
from saccade.testing.cases import make_case as make_case
from saccade.testing.cases import poisoned as poisoned
from saccade.testing.cases import problems as problems
from saccade.testing.linear import LinearCase as LinearCase
from saccade.testing.linear import assert_linear_exact as assert_linear_exact
from saccade.testing.linear import linear_oracle as linear_oracle
from saccade.testing.linear import make_linear_case as make_linear_case
from saccade.testing.oracle import assert_exact as assert_exact
from saccade.testing.oracle import oracle as oracle
from saccade.testing.oracle import tolerances as tolerances
from saccade.testing.paged import PagedCase as PagedCase
from saccade.testing.paged import PagedDescription as PagedDescription
from saccade.testing.paged import make_paged_case as make_paged_case

__all__ = [
    "Case",
    "LinearCase",
    "PagedCase",
    "PagedDescription",
    "assert_exact",
    "assert_linear_exact",
    "checked",
    "linear_oracle",
    "make_case",
    "make_linear_case",
    "make_paged_case",
    "oracle",
    "poisoned",
    "problems",
    "tolerances",
]
