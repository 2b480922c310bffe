"""Features: rows as linear attention multiplies them: through a feature map, scaled, hidden or not.

Feature maps mean what their namesakes in `saccade.reference.linear` mean; a map that changes
nothing is None, and so is what stands in for its derivative.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.kernels.tiles import row_pointers


class Operand(NamedTuple):
    """Rows of one side of a product."""

    rows: Any  # View
    apply: Any  # a feature map, or None
    derivative: Any  # of the map, from its result; None where the map is
    scale: Any  # the factor of all features, or None


@triton.jit
def elu_plus_one(rows):
    """elu(x) + 1."""
    return tl.where(rows > 0, rows + 1.0, tl.exp(rows))


@triton.jit
def elu_plus_one_derivative(features):
    """exp(x) below 0, where it is the feature itself; 1 above."""
    return tl.minimum(features, 1.0)


@triton.jit
def relu(rows):
    """max(x, 0), NaN for NaN."""
    return tl.where(rows < 0, 0.0, rows)


@triton.jit
def relu_derivative(features):
    """1 above 0."""
    return tl.where(features > 0, 1.0, 0.0)


@triton.jit
def exponential(rows):
    """e to the power of x."""
    return tl.exp(rows)


@triton.jit
def exponential_derivative(features):
    """The feature itself."""
    return features


MAPS: dict[str, tuple[Any, Any]] = {
    "elu+1": (elu_plus_one, elu_plus_one_derivative),
    "relu": (relu, relu_derivative),
    "exp": (exponential, exponential_derivative),
    "identity": (None, None),
}


@triton.jit
def load_features(
    operand, factors, batch, head, rows, visible, channels,
    DIM: tl.constexpr, TRANSPOSED: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Features of rows in the inputs' dtype, 0 where hidden, whatever lies there.

    [rows, channels], or [channels, rows] if TRANSPOSED: a left operand that was computed must not
    be transposed afterwards (Triton 3.6 on Hopper: illegal memory access). factors: a View of one
    factor for each row, if FACTORED.
    """
    if TRANSPOSED:
        rows_of, channels_of, seen = rows[None, :], channels[:, None], visible[None, :]
    else:
        rows_of, channels_of, seen = rows[:, None], channels[None, :], visible[:, None]
    exists = seen & (channels_of < DIM)
    raw = tl.load(
        row_pointers(operand.rows, batch, head, rows_of, channels_of), mask=exists, other=0.0
    )
    mapped = raw
    if operand.apply is not None:
        mapped = operand.apply(mapped.to(tl.float32))
    if operand.scale is not None:
        mapped = mapped.to(tl.float32) * operand.scale
    if FACTORED:
        of_rows = load_number(factors, batch, head, rows, visible)
        mapped = mapped.to(tl.float32) * (of_rows[None, :] if TRANSPOSED else of_rows[:, None])
    return tl.where(exists, mapped, 0.0).to(raw.dtype)


@triton.jit
def load_number(view, batch, head, rows, visible):
    """One number a row, 0 where it is hidden."""
    return tl.load(row_pointers(view, batch, head, rows, 0), mask=visible, other=0.0)


@triton.jit
def narrow(tile, DTYPE: tl.constexpr, AXIS: tl.constexpr):
    """Sums as an operand of a product, and what the product is to be multiplied by.

    float16 ends at 65504, so there the largest number along AXIS becomes 1.
    """
    if tl.float16 == DTYPE:
        largest = tl.max(tl.abs(tile), AXIS)
        usable = (largest > 0) & (largest < float("inf"))
        factor = tl.expand_dims(tl.where(usable, largest, 1.0), AXIS)
        narrowed = (tile / factor).to(DTYPE)
    else:
        factor = 1.0
        narrowed = tile.to(DTYPE)
    return narrowed, factor
