"""The numerical contract of the gated delta rule, on every implementation: see delta_suite.py."""

from delta_suite import (
    TestEmpty,
    TestExactness,
    TestNonfinite,
    TestResults,
    TestSteps,
    implementation,
)

__all__ = [
    "TestEmpty",
    "TestExactness",
    "TestNonfinite",
    "TestResults",
    "TestSteps",
    "implementation",
]
