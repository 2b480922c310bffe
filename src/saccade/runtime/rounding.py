"""Rounding: what an output loses when it is rounded to 16 bits, kept in 8 bits more.

Gradients of scores are weights · (grad_weights - row_dot), where row_dot = Σ grad_output · output
is the mean of grad_weights under the weights: the gradients of a row's scores add up to 0. From a
rounded output row_dot is a little off, by as much for all keys of a row, so that they do not: the
gradients of queries and keys get a part of the mean key and of the mean query. That is small unless
outputs have a mean, of which rounding takes a part, that differences of values do not have.

So where a gradient is due, a forward pass keeps beside each 16-bit number of the output what its
rounding took, relative to it: at most eps / 2, in 127 steps of an int8. The sum of both is as
exact as 8 bits more make it, wherever the number lies, and 0, inf and NaN stay what they are.
"""

from __future__ import annotations

import torch
from torch import Tensor

STEPS = 127  # of eps / 2


def steps_per_one(dtype: torch.dtype) -> float:
    """How many steps of a residual make up the number itself."""
    return STEPS * 2 / torch.finfo(dtype).eps


def rounded(exact: Tensor, output: Tensor) -> Tensor:
    """The residual of an output that was rounded from `exact`."""
    wide = output.to(exact.dtype)
    steps = (exact - wide) / wide * steps_per_one(output.dtype)
    steps = steps.nan_to_num_(0.0, STEPS, -STEPS)  # beside 0, inf and NaN any number does
    return steps.round_().clamp_(-STEPS, STEPS).to(torch.int8)


def restored(output: Tensor, residual: Tensor | None) -> Tensor:
    """An output with what its rounding took, in float32; where nothing was kept, as it is."""
    if residual is None:
        return output
    return output.float() * (1 + residual.float() / steps_per_one(output.dtype))
