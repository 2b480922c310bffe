"""Extremes: the smallest and largest entry of a captured tensor over the rows of a tile.

Composed verdicts on whole tiles call these functions. Indices past the last one of a tile read the
last one again, which changes no extreme.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.tensor_view import wide


@triton.jit
def bounds(entries):
    """Entries as a lower and an upper bound; NaN is all numbers, of which `in_order` knows."""
    if entries.dtype == tl.int1:
        numbers = entries.to(tl.int32)
        low, high = numbers, numbers
    elif entries.dtype.is_floating():
        numbers = entries.to(tl.float32)
        low = tl.where(numbers != numbers, float("-inf"), numbers)
        high = tl.where(numbers != numbers, float("inf"), numbers)
    else:
        whole = entries if entries.dtype == tl.int64 else entries.to(tl.int32)
        low, high = whole, whole
    return low, high


@triton.jit
def in_order(low, high):
    """The bounds of entries; where any was NaN, or they are infinite to both sides, both NaN."""
    if low.dtype.is_floating():
        anything = (low == float("-inf")) & (high == float("inf"))
        low = tl.where(anything, float("nan"), low)
        high = tl.where(anything, float("nan"), high)
    return low, high


@triton.jit
def along(table, index, DIM: tl.constexpr):
    """Where the entry nearest to an index lies along one dimension, in elements."""
    inside = tl.minimum(tl.maximum(index, 0), table[1][DIM] - 1)
    return wide(inside) * table[2][DIM]


@triton.jit
def along_one(table, offset, DIM: tl.constexpr, low, high, TILE: tl.constexpr):
    """Smallest and largest entry between two indices that lie less than TILE apart: [tiles]."""
    index = tl.minimum(low[:, None] + tl.arange(0, TILE)[None, :], high[:, None])
    lows, highs = bounds(tl.load(table[0] + (offset + along(table, index, DIM))))
    return in_order(tl.min(lows, 1), tl.max(highs, 1))


@triton.jit
def along_two(
    table, offset,
    DIM_A: tl.constexpr, low_a, high_a, TILE_A: tl.constexpr,
    DIM_B: tl.constexpr, low_b, high_b, TILE_B: tl.constexpr,
):  # fmt: skip
    """The same along two dimensions."""
    index_a = tl.minimum(low_a[:, None] + tl.arange(0, TILE_A)[None, :], high_a[:, None])
    index_b = tl.minimum(low_b[:, None] + tl.arange(0, TILE_B)[None, :], high_b[:, None])
    places = along(table, index_a, DIM_A)[:, :, None] + along(table, index_b, DIM_B)[:, None, :]
    lows, highs = bounds(tl.load(table[0] + (offset + places)))
    return in_order(tl.min(tl.min(lows, 2), 1), tl.max(tl.max(highs, 2), 1))


@triton.jit
def along_two_blocks(
    table, offset,
    DIM_A: tl.constexpr, low_a, high_a, TILE_A: tl.constexpr,
    DIM_B: tl.constexpr, low_b, high_b, TILE_B: tl.constexpr,
):  # fmt: skip
    """The same where whole blocks of rows share an index: there are few, so they come in turn."""
    places = along(table, low_a, DIM_A) + along(table, low_b, DIM_B)
    lows, highs = bounds(tl.load(table[0] + (offset + places)))
    for a in range(0, tl.max(high_a - low_a, 0) + 1):
        for b in range(0, tl.max(high_b - low_b, 0) + 1):
            place_a = along(table, tl.minimum(low_a + a, high_a), DIM_A)
            place_b = along(table, tl.minimum(low_b + b, high_b), DIM_B)
            low, high = bounds(tl.load(table[0] + (offset + (place_a + place_b))))
            lows, highs = tl.minimum(lows, low), tl.maximum(highs, high)
    return in_order(lows, highs)
