"""Pairs: pages of eight bits, two channels at a time, multiplied as float16.

float16 holds int8 and float8_e4m3fn exactly, and rounds less than bfloat16 does; only its range is
small. So rows of queries are scaled by powers of two, and weights by the factors of the values
they meet, in units of the largest that a program has met.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.paged_view import as_halves

# How pairs are taken apart: 0 where there are none.
BY_TRITON, BY_PTX = tl.constexpr(1), tl.constexpr(2)
HEADROOM = tl.constexpr(16384.0)  # 2^14: times 448, and in units below 2, float16 still holds it
LEAST = tl.constexpr(7.888609052210118e-31)  # 2^-100: HEADROOM over it is no inf


@triton.jit
def paired_query(rows):
    """Two tiles of float16, of the first channels of all pairs and of the second; and the factor
    of each row."""
    factors = tl.full([rows.shape[0]], 1.0, tl.float32)
    if rows.dtype == tl.bfloat16:
        numbers = rows.to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)
        exponents = largest.to(tl.int32, bitcast=True) & 0x7F800000
        powers = tl.maximum(exponents.to(tl.float32, bitcast=True), LEAST)
        powers = tl.where(largest < float("inf"), powers, HEADROOM)
        rows = (numbers * (HEADROOM / powers)[:, None]).to(tl.float16)
        factors = powers / HEADROOM
    first, second = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1] // 2, 2)))
    return first, second, factors


@triton.jit
def paired_scores(query, stored_keys, PTX: tl.constexpr):
    """Scores of a tile, but for the factors of keys."""
    first, second = as_halves(stored_keys, PTX)
    scores = tl.dot(query[0], tl.trans(first))
    return tl.dot(query[1], tl.trans(second), scores) * query[2][:, None]


@triton.jit
def start_paired_sums(value_scales, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Weighted sums of nothing: of first and second channels, in which unit."""
    zeros = tl.zeros([ROWS, WIDTH // 2], tl.float32)
    unit = tl.full([], 1.0 if value_scales is None else LEAST, tl.float32)
    return zeros, zeros, unit


@triton.jit
def add_paired_values(sums, first, second, factors, weights, rescale):
    """Weighted sums after one more tile of values, whose rows have factors (or None)."""
    unit = sums[2]
    if factors is not None:
        unit = tl.maximum(unit, tl.max(tl.abs(factors), 0))
        rescale = rescale * (sums[2] / unit)
        weights = weights * (factors * (HEADROOM / unit))[None, :]
    else:
        weights = weights * HEADROOM
    weights = weights.to(tl.float16)
    return (
        tl.dot(weights, first, sums[0] * rescale[:, None]),
        tl.dot(weights, second, sums[1] * rescale[:, None]),
        unit,
    )


@triton.jit
def finish_paired_sums(sums):
    """Weighted sums as one tile of numbers."""
    width: tl.constexpr = 2 * sums[0].shape[1]
    together = tl.reshape(tl.join(sums[0], sums[1]), (sums[0].shape[0], width))
    return together * (sums[2] / HEADROOM)
