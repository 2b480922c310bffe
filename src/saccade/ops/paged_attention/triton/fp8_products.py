"""Products of e4m3 queries with pages of e4m3 numbers, and of their weights with values.

Weights take the scales of values, in units of the largest that a program has met, and are rounded
to e4m3 numbers, LIFTED times their size so that small ones survive. Keys of full tiles are visited
from the last to the first: weights are rounded in units of the largest so far, and sinks of
attention are the first keys. (`ops/attention_fp8/triton/forward.py` has the same of dense rows.)
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from saccade.gpu.fp8_numbers import as_e4m3, operand
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import row_pointers
from saccade.runtime.fp8_spec import WEIGHTS_LOG2

OF_FP8 = tl.constexpr(3)  # a way in which the kernel multiplies (decode.py has the others)
LEAST = tl.constexpr(7.888609052210118e-31)  # 2^-100: LIFTED over it is no inf
LIFTED = tl.constexpr(2.0**WEIGHTS_LOG2)


@triton.jit
def fp8_query(rows, query_scale, batch, query_heads):
    """Rows of queries and the factor of each."""
    factors = tl.full([rows.shape[0]], 1.0, tl.float32)
    if query_scale is not None:
        factors = tl.load(row_pointers(query_scale, batch, query_heads, query_heads * 0, 0))
    return rows, factors


@triton.jit
def fp8_scores(query, stored_keys):
    """Scores of a tile, but for the factors of keys."""
    queries, keys = operand(query[0], False), operand(stored_keys, False)
    return tl.dot(queries, tl.trans(keys)) * query[1][:, None]


@triton.jit
def start_fp8_sums(value_scales, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Weighted sums of nothing, in units of peak."""
    peak = tl.full([], 1.0 if value_scales is None else LEAST, tl.float32)
    return tl.zeros([ROWS, WIDTH], tl.float32), peak


@triton.jit
def add_fp8_values(sums, values, factors, weights, rescale):
    """Weighted sums after one more tile of values, whose rows have factors (or None)."""
    peak = sums[1]
    lift = tl.full([1], LIFTED, tl.float32)
    if factors is not None:
        peak = tl.maximum(peak, tl.max(tl.abs(factors), 0))
        rescale = rescale * (sums[1] / peak)
        lift = factors * (LIFTED / peak)
    lifted = operand(as_e4m3(weights * lift[None, :]), False)
    product = tl.dot(lifted, operand(values, False))  # from zero: few bits of it are kept
    return sums[0] * rescale[:, None] + product, peak


@triton.jit
def finish_fp8_sums(sums):
    """Weighted sums as numbers."""
    return sums[0] * (sums[1] / LIFTED)
