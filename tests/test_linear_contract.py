"""The numerical contract of linear attention, on every implementation: see linear_suite.py."""

from linear_suite import (
    TestEmpty,
    TestExactness,
    TestHidden,
    TestResults,
    implementation,
)

__all__ = ["TestEmpty", "TestExactness", "TestHidden", "TestResults", "implementation"]
