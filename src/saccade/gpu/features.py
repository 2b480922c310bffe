"""Features: rows as linear attention multiplies them: through a feature map, scaled, hidden or not.

Feature maps mean what their namesakes in `saccade.ops.linear_attention.reference` mean; a map that
changes nothing is None, and so is what stands in for its derivative.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import row_pointers, tile_pointers

LOG2_E = tl.constexpr(1.4426950408889634)


class Operand(NamedTuple):
    """Rows of one side of a product."""

    rows: Any  # View
    apply: Any  # a feature map, or None
    derivative: Any  # of the map, from its result; None where the map is
    scale: Any  # the factor of all features, or None


@triton.jit
def elu_plus_one(rows, hidden):
    """elu(x) + 1: e^x up to 0, where the tangent x + 1 lies below it; from there on the tangent.

    So it is the lesser of the two once the tangent stops at 1. A selection would be made on
    narrowed numbers, which then are narrowed one by one.
    """
    grown = tl.exp2(rows * LOG2_E + hidden)
    return tl.minimum(grown, tl.maximum(rows, 0.0) + 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def elu_plus_one_derivative(features):
    """exp(x) below 0, where it is the feature itself; 1 above."""
    return tl.minimum(features, 1.0)


@triton.jit
def elu_plus_one_less(rows, taken):
    """elu(x) + 1 less a number, 0 or 1. Less 1 it is exact above 0, and its mean is small."""
    grown = tl.exp2(rows * LOG2_E) - taken
    above = tl.maximum(rows, 0.0) + (1.0 - taken)
    return tl.minimum(grown, above, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu(rows, hidden):
    """max(x, 0), NaN for NaN."""
    return tl.maximum(rows, 0.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def relu_derivative(features):
    """1 above 0."""
    return tl.where(features > 0, 1.0, 0.0)


@triton.jit
def exponential(rows, hidden):
    """e to the power of x."""
    return tl.exp2(rows * LOG2_E + hidden)


@triton.jit
def exponential_derivative(features):
    """The feature itself."""
    return features


# Each map takes rows and −inf or 0 for each row: a row of zeros with −inf becomes zeros again.
MAPS: dict[str, tuple[Any, Any]] = {
    "elu+1": (elu_plus_one, elu_plus_one_derivative),
    "relu": (relu, relu_derivative),
    "exp": (exponential, exponential_derivative),
    "identity": (None, None),
}


@triton.jit
def load_features(
    operand, factors, batch, head, first, visible, channels, GROUP: tl.constexpr,
    DIM: tl.constexpr, TRANSPOSED: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """Features of adjacent rows from `first` on, 0 where hidden; wide where they were computed.

    [rows, channels], or [channels, rows] if TRANSPOSED: rows as they are go from memory into a
    product in either form, but what was computed cannot be transposed on a product's left (Triton
    3.6 on Hopper: illegal memory access). GROUP output heads have these rows in common, but each
    has factors of its own: a View of one for each row, if FACTORED.
    """
    if TRANSPOSED:
        channels_of, exists = channels[:, None], visible[None, :]
    else:
        channels_of, exists = channels[None, :], visible[:, None]
    if DIM == 0 or DIM // channels.shape[0] * channels.shape[0] != DIM:
        exists = exists & (channels_of < DIM)
    pointers = tile_pointers(
        operand.rows, batch, head // GROUP, first, channels_of, visible.shape[0], True, TRANSPOSED
    )
    raw = tl.load(pointers, mask=exists, other=0.0)
    mapped = raw
    if operand.apply is not None:
        mapped = operand.apply(mapped.to(tl.float32), tl.where(exists, 0.0, float("-inf")))
    if operand.scale is not None:
        mapped = mapped.to(tl.float32) * operand.scale
    if FACTORED:
        rows = first + tl.arange(0, visible.shape[0])
        of_rows = load_number(factors, batch, head, rows, visible)
        mapped = mapped.to(tl.float32) * (of_rows[None, :] if TRANSPOSED else of_rows[:, None])
    return mapped


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


@triton.jit
def scaled_features(features, DTYPE: tl.constexpr, FACTORED: tl.constexpr):
    """Features of a chunk as an operand of products, and the scale that they are divided by.

    Where FACTORED by 1 / divisor, they fall as the length grows, out of the range of float16; so
    there the largest of a chunk is the scale.
    """
    feature_scale = 1.0
    if FACTORED and tl.float16 == DTYPE:
        largest = tl.max(tl.max(tl.abs(features), 1), 0)
        feature_scale = tl.where((largest > 0) & (largest < float("inf")), largest, 1.0)
        features = features / feature_scale
    return features.to(DTYPE), feature_scale


@triton.jit
def where_also(mask, condition):
    """Where a mask holds, if a condition of the whole program holds, too.

    Compiled, the comparison is nothing. By Triton 3.9's interpreter a scalar condition makes
    integers of a mask, which it then refuses to load and store by.
    """
    return (mask & condition) != 0
