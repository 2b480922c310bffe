"""Scores: how a score changes, as a kernel argument."""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl  # noqa: F401  the interpreter runs functions only where it is in sight


class Score(NamedTuple):
    """A change of the scaled score; a kernel whose scores do not change gets None instead."""

    change: Any  # from (score, batch, head, query rows, key rows, shift, data)
    derivative: Any  # of the same arguments; None where there is none
    data: tuple[Any, ...]  # what the score captured


@triton.jit
def unchanged(score, batch, head, query_row, kv_row, shift, data):
    """The score as it is: for scales of 0 or less, which softmax_step cannot fold in."""
    return score


@triton.jit
def one(score, batch, head, query_row, kv_row, shift, data):
    """The derivative of `unchanged`."""
    return score * 0.0 + 1.0
