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

# Scores that the caller changed are NATURAL here, and so is their row_max: exponents of e. Others
# are products, whose scale and LOG2_E are one factor of an FMA with row_max in base 2. Differences
# of scores are off by a rounding of row_max there, as much as products themselves may be. But -1e9
# that is added to a whole row makes its scores equal, and equal they must stay: the difference is
# taken before anything is multiplied, which cannot overflow either.


@triton.jit
def start_softmax(sinks, head, ROWS: tl.constexpr, NATURAL: tl.constexpr = False):
    """row_max and row_sum before any key: nothing seen, or the sink alone."""
    if sinks is None:
        row_max = tl.full([ROWS], float("-inf"), tl.float32)
        row_sum = tl.zeros([ROWS], tl.float32)
    else:
        row_max = tl.zeros([ROWS], tl.float32) + load_sink(sinks, head, NATURAL)
        row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    return row_max, row_sum


@triton.jit
def load_sink(sinks, head, NATURAL: tl.constexpr):
    """The sink of a head (or of heads), as row_max counts."""
    sink = tl.load(sinks + head).to(tl.float32)
    if not NATURAL:
        sink = sink * LOG2_E
    return sink


@triton.jit
def power(difference, NATURAL: tl.constexpr):
    """e to a difference of natural scores, 2 to one of others."""
    if NATURAL:
        difference = difference * LOG2_E
    return tl.exp2(difference)


@triton.jit
def join_sink(sinks, head, row_max, row_sum, NATURAL: tl.constexpr = False):
    """row_max and row_sum with the sink, where it did not start the softmax; and what shrinks
    everything that was summed without it."""
    sink = load_sink(sinks, head, NATURAL)
    new_max = tl.maximum(row_max, sink)
    shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    rescale = power(row_max - shift, NATURAL)
    return rescale, new_max, row_sum * rescale + power(sink - shift, NATURAL)


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

    scores · factor is base 2, and -inf where a pair is hidden; factor is greater than 0, or None
    for natural scores. GUARDED: a row may have seen nothing yet, where -inf - -inf must not become
    NaN.

    Returns the weights of this tile, the factor that shrinks everything summed before it, and the
    new row_max and row_sum.
    """
    largest = max_of_rows(scores, CHAINS)
    if factor is not None:  # noqa: SIM108
        largest = largest * factor
    else:  # Triton 3.9 fails for gfx942 where nothing is done to it
        largest = largest + 0.0
    new_max = tl.maximum(row_max, largest)
    if GUARDED:  # noqa: SIM108
        shift = tl.where(new_max == float("-inf"), 0.0, new_max)
    else:
        shift = new_max
    if factor is None:
        rescale = power(row_max - shift, True)
        weights = power(scores - shift[:, None], True)
    else:  # `power` would do, but ptxas gives other registers to what a function more has written
        rescale = tl.exp2(row_max - shift)
        weights = tl.exp2(scores * factor - shift[:, None])  # one FMA and one exponential each
    return weights, rescale, new_max, row_sum * rescale + sum_of_rows(weights, CHAINS)


@triton.jit
def finish_softmax(row_max, row_sum, NATURAL: tl.constexpr = False):
    """What divides the weighted sums, and the natural lse: base 2 never leaves a kernel.

    A row that saw nothing divides 0 by 1 and has the lse -inf.
    """
    divisor = tl.where(row_sum == 0, 1.0, row_sum)
    if NATURAL:  # noqa: SIM108
        lse = row_max + tl.log2(divisor) * LN_2
    else:
        lse = (row_max + tl.log2(divisor)) * LN_2
    return divisor, lse
