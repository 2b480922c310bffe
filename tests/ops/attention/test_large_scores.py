"""Rows of large scores, on every implementation: everything stands in large_scores_suite.py."""

from large_scores_suite import TestLargeScores, implementation

__all__ = ["TestLargeScores", "implementation"]
