"""The numerical contract over pages, on every implementation: all stands in paged_suite.py."""

from paged_suite import (
    TestEmpty,
    TestExactness,
    TestHidden,
    TestResults,
    implementation,
)

__all__ = ["TestEmpty", "TestExactness", "TestHidden", "TestResults", "implementation"]
