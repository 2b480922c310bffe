"""Online softmax: what lets attention visit the keys one tile at a time.

Source: Milakov and Gimelshein 2018; FlashAttention-2 (Dao 2023), section 3.1.1.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def start_softmax(sinks, head, ROWS: tl.constexpr):
    """row_max (base 2) and row_sum before any key: nothing seen, or the sink alone."""
    if sinks is None:
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
    else:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        row_max = tl.zeros([ROWS], tl.float32) + sink
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def softmax_step(scores, factor, row_max, row_sum, GUARDED: tl.constexpr):
    """Fold one tile of scores into the running softmax of each query row.

    scores · factor is base 2, and -inf where a pair is hidden; factor is greater than 0. GUARDED:
    a row may have seen nothing yet, where -inf - -inf must not become NaN.

    Returns the weights of this tile, the factor that shrinks everything summed before it, and the
    new row_max and row_sum.
    """
    new_max = tl.maximum(row_max, tl.max(scores, 1) * factor)
    if GUARDED:  # noqa: SIM108
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    rescale = tl.exp2(row_max - shift)
    weights = tl.exp2(scores * factor - shift[:, None])  # one FMA and one exponential each
    return weights, rescale, new_max, row_sum * rescale + tl.sum(weights, 1)


@triton.jit
def finish_softmax(row_max, row_sum):
    """What divides the weighted sums, and the natural lse: base 2 never leaves a kernel.

    A row that saw nothing divides 0 by 1 and has the lse -inf.
    """
    divisor = tl.where(row_sum == 0, 1.0, row_sum)
    return divisor, (row_max + tl.log2(divisor)) * LN_2
