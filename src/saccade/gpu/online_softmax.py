"""Online softmax: what lets attention visit the keys one tile at a time.

Source: Milakov and Gimelshein 2018; FlashAttention-2 (Dao 2023), section 3.1.1.

One source serves all GPUs. Where the same numbers can be had in two ways, and machine code shows
that one of them is better on some GPU and worse on another, the way may depend on `is_hopper`.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false

from __future__ import annotations

from saccade.gpu.language import is_hopper, tl, triton

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
def join_sink(sinks, head, row_max, row_sum):
    """row_max and row_sum with the sink, where it did not start the softmax; and what shrinks
    everything that was summed without it."""
    sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = tl.exp2(row_max - shift)
    return rescale, new_max, row_sum * rescale + tl.exp2(sink - shift)


# On Hopper each thread holds two of every eight neighbours in a row of a product (of 64 rows).
# Reduced in steps, these are several CHAINS of operations that do not wait for each other, at no
# cost. Elsewhere numbers may have to move between threads for it (on sm_100 they do).


@triton.jit
def max_of_rows(tile, CHAINS: tl.constexpr):
    """The largest number of each row."""
    if CHAINS and is_hopper():
        eights = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8])
        largest = tl.max(tl.max(eights, 1), 1)
    else:
        largest = tl.max(tile, 1)
    return largest


@triton.jit
def sum_of_rows(tile, CHAINS: tl.constexpr):
    """The sum of each row."""
    if CHAINS and is_hopper():
        eights = tl.reshape(tile, [tile.shape[0], tile.shape[1] // 8, 8])
        total = tl.sum(tl.sum(eights, 1), 1)
    else:
        total = tl.sum(tile, 1)
    return total


@triton.jit
def softmax_step(
    scores, factor, row_max, row_sum, GUARDED: tl.constexpr, CHAINS: tl.constexpr = False
):  # fmt: skip
    """Fold one tile of scores into the running softmax of each query row.

    scores · factor is base 2, and -inf where a pair is hidden; factor is greater than 0. GUARDED:
    a row may have seen nothing yet, where -inf - -inf must not become NaN.

    Returns the weights of this tile, the factor that shrinks everything summed before it, and the
    new row_max and row_sum.
    """
    new_max = tl.maximum(row_max, max_of_rows(scores, CHAINS) * factor)
    if GUARDED:  # noqa: SIM108
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    rescale = tl.exp2(row_max - shift)
    weights = tl.exp2(scores * factor - shift[:, None])  # one FMA and one exponential each
    return weights, rescale, new_max, row_sum * rescale + sum_of_rows(weights, CHAINS)


@triton.jit
def finish_softmax(row_max, row_sum):
    """What divides the weighted sums, and the natural lse: base 2 never leaves a kernel.

    A row that saw nothing divides 0 by 1 and has the lse -inf.
    """
    divisor = tl.where(row_sum == 0, 1.0, row_sum)
    return divisor, (row_max + tl.log2(divisor)) * LN_2
