"""The numerical contract of linear attention, on every implementation: see linear_suite.py."""

from linear_suite import (
    TestDecay,
    TestEmpty,
    TestExactness,
    TestHidden,
    TestResults,
    implementation,
)

__all__ = ["TestDecay", "TestEmpty", "TestExactness", "TestHidden", "TestResults", "implementation"]
