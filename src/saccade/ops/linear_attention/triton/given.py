"""What passes of linear attention are given beside the inputs: states, gradients, flags."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.launcher import Pointer
from saccade.ops.linear_attention.triton.positions import Sums

State = tuple[Tensor, Tensor]  # matrices and vectors, float32


class Given(NamedTuple):
    """What a backward pass adds to the inputs."""

    grad_output: Tensor
    factors: Tensor | None  # 1 / divisor; None without a normaliser
    minus_delta: Tensor
    quotient: tuple[Tensor, Tensor] | None = None
    """Output and normaliser, where the pass over queries is to write the other two."""


class Again(NamedTuple):
    """What does a pass once more where a flag says so."""

    kernel: Any  # takes the flags, and what linear_sweep takes of rows and states
    spoilt: Tensor  # int32 [sequences, heads, segments, parts]


def sums(pointer: Pointer, state: State | None) -> Sums | None:
    """States as kernels take them."""
    if state is None:
        return None
    matrix, vector = state
    return Sums(pointer(matrix), pointer(vector))
