"""What is hidden, on every implementation: everything stands in hidden_suite.py."""

from hidden_suite import TestHiddenNumbers, implementation

__all__ = ["TestHiddenNumbers", "implementation"]
