"""The numerical contract, on every implementation: everything stands in suite.py."""

from attention_suite import (
    TestEmpty,
    TestExactness,
    TestHidden,
    TestResults,
    implementation,
)

__all__ = ["TestEmpty", "TestExactness", "TestHidden", "TestResults", "implementation"]
