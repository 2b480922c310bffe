"""Linear attention, one chunk of the other side: what it adds to a state; and products with states.

A state is (matrix [values, keys], vector [keys]), channels of each, as chunk_scan.py has it.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.device_ops import maximum
from saccade.gpu.features import in_units, load_features, load_number, where_also
from saccade.gpu.tensor_view import nonfinite_rows, row_pointers, tile_pointers, without


@triton.jit
def add_others(
    b, c, factors, minus_delta, batch, head, first, seen, decay_factor, inner, outer, state,
    META: tl.constexpr, DECAYED: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """The state with a chunk of the other side added to it, and the chunk: its rows as they are
    [channels, rows], its features [rows, channels] and what they are to be multiplied by, β, and
    which of its rows are nonfinite."""
    matrix, vector = state
    OF_QUERIES: tl.constexpr = META.PASS != OUTPUT and META.PASS != GRAD_QUERY
    FACTORED: tl.constexpr = OF_QUERIES and META.NORMALIZE != "none"
    extra = seen.to(tl.float32)
    if META.PASS == GRAD_KEY:
        extra = load_number(minus_delta, batch, head, first + tl.arange(0, seen.shape[0]), seen)
    if META.PASS == GRAD_QUERY or META.PASS == GRAD_KEY:  # a constexpr is in no tuple
        wide = load_features(
            c,
            factors,
            batch,
            head,
            first,
            seen,
            outer,
            META.HEADS_PER_C,
            META.OUTER,
            False,
            FACTORED,
        )
        plain = load_features(
            b, factors, batch, head, first, seen, inner, META.HEADS_PER_B, META.INNER, True, False
        )
    else:
        wide = load_features(
            b,
            factors,
            batch,
            head,
            first,
            seen,
            inner,
            META.HEADS_PER_B,
            META.INNER,
            False,
            FACTORED,
        )
        plain = load_features(
            c, factors, batch, head, first, seen, outer, META.HEADS_PER_C, META.OUTER, True, False
        )
    nonfinite = seen
    if NAN_SAFE:
        nonfinite = nonfinite_rows(wide) | nonfinite_rows(tl.trans(plain))
        nonfinite = nonfinite | ((tl.abs(extra) < float("inf")) == 0)
        plain = tl.where(nonfinite[None, :], tl.zeros_like(plain), plain)
        wide, extra = without(nonfinite, wide), tl.where(nonfinite, 0.0, extra)
    summed_decay = wide
    if DECAYED:
        summed_decay = wide.to(tl.float32) * decay_factor[:, None]
    if META.PASS == GRAD_KEY:
        vector += tl.sum(summed_decay.to(tl.float32) * extra[:, None], 0)
    elif META.PASS == GRAD_QUERY or (META.PASS == OUTPUT and factors is None):
        vector += tl.sum(summed_decay.to(tl.float32), 0)
    features, unit = in_units(wide, plain.dtype, FACTORED)
    summed_decay, decayed_unit = in_units(summed_decay, plain.dtype, FACTORED)
    matrix += tl.dot(plain, summed_decay, input_precision=META.PRECISION) * decayed_unit
    if NAN_SAFE:
        poison = tl.where(tl.max(nonfinite.to(tl.int32), 0) > 0, float("nan"), 0.0)
        matrix, vector = matrix + poison, vector + poison
    return (matrix, vector), (plain, features, unit, extra, nonfinite)


@triton.jit
def times_sums(tile, sums, factor, PRECISION: tl.constexpr):
    """Rows times narrowed sums [channels, inner]: [rows, channels]."""
    found = tl.dot(tile, tl.trans(sums), input_precision=PRECISION)
    if tile.dtype == tl.float16:
        found = found * tl.trans(factor)
    return found


@triton.jit
def total_of(totals, features, vector, batch, head, first, seen):
    """Sums of scores of adjacent rows: those that were counted, or those with earlier keys."""
    if totals is not None:
        total = load_number(totals, batch, head, first + tl.arange(0, seen.shape[0]), seen)
    else:
        total = tl.sum(features.to(tl.float32) * vector[None, :], 1)
    return total


# ---- finish --------------------------------------------------------------------------------------
# What becomes of a sweep's sums before they are stored.

OUTPUT, GRAD_QUERY = tl.constexpr("output"), tl.constexpr("grad_query")
GRAD_KEY, GRAD_VALUE = tl.constexpr("grad_key"), tl.constexpr("grad_value")


@triton.jit
def store_result(
    result, numbers, through, own, eps, at, first, exist, seen, outer, found, total,
    OUTER: tl.constexpr, PASS: tl.constexpr, NORMALIZE: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """Divide by the normaliser, or go back through the feature map, and store; 0 where hidden.

    own: what `load_own` gave for a gradient.
    """
    raw, factor = own
    batch, head, tile = at
    offsets = tl.arange(0, exist.shape[0])
    rows = first + offsets
    if PASS == OUTPUT:
        total = tl.where(seen, total, 0.0)
        if NUMBERS:
            first_tile = where_also(exist, tile == 0)
            tl.store(row_pointers(numbers, batch, head, rows, 0), total, mask=first_tile)
        if NORMALIZE != "none":
            divisor = divisor_of(total, eps, NORMALIZE)
            factor = 1.0 / divisor
            found = tl.where((divisor == 0)[:, None], 0.0, found * factor[:, None])
    if PASS == GRAD_QUERY or PASS == GRAD_KEY:  # noqa: SIM109 (a constexpr is in no tuple)
        mapped = raw.to(tl.float32)
        if through.apply is not None:
            mapped = through.apply(mapped, 0.0)
        if PASS == GRAD_QUERY and NORMALIZE != "none":
            found = found * factor[:, None]
        if through.scale is not None:
            found = found * through.scale
        if NUMBERS:
            inside = seen[:, None] & (outer < OUTER)[None, :]
            dots = tl.sum(tl.where(inside, mapped * found, 0.0), 1)
            tiles: tl.constexpr = (OUTER + outer.shape[0] - 1) // outer.shape[0]
            tl.store(row_pointers(numbers, batch, head * tiles + tile, rows, 0), dots, mask=exist)
        if through.derivative is not None:
            found = found * through.derivative(mapped)
    pointers = tile_pointers(result, batch, head, first, outer[None, :], exist.shape[0], True)
    shown, hidden = seen[:, None], (exist & (seen == 0))[:, None]
    if OUTER == 0 or OUTER // outer.shape[0] * outer.shape[0] != OUTER:
        inside = (outer < OUTER)[None, :]
        shown, hidden = shown & inside, hidden & inside
    narrowed = found.to(result.ptr.dtype.element_ty)
    tl.store(pointers, narrowed, mask=shown)
    tl.store(pointers, tl.zeros_like(narrowed), mask=hidden)


@triton.jit
def load_own(
    through, factors, batch, head, first, seen, channels,
    HEADS_PER: tl.constexpr, DIM: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """The rows that a gradient is of, as they are, and the factors of its own, if FACTORED."""
    offsets = tl.arange(0, seen.shape[0])
    inside = seen[:, None]
    if DIM == 0 or DIM // channels.shape[0] * channels.shape[0] != DIM:
        inside = inside & (channels < DIM)[None, :]
    pointers = tile_pointers(
        through.rows, batch, head // HEADS_PER, first, channels[None, :], seen.shape[0], True
    )
    raw, factor = tl.load(pointers, mask=inside, other=0.0), 1.0
    if FACTORED:
        factor = load_number(factors, batch, head, first + offsets, seen)
    return raw, factor


@triton.jit
def divisor_of(total, eps, NORMALIZE: tl.constexpr):
    """What weighted sums are divided by; see `saccade.linear_attention`."""
    divisor = total * 0.0 + 1.0
    if NORMALIZE == "sum":
        divisor = total + eps
    elif NORMALIZE == "clamp":
        divisor = maximum(total, eps)
    elif NORMALIZE == "abs":
        divisor = maximum(tl.abs(total), eps)
    return divisor


@triton.jit
def quotient_of(total, eps, NORMALIZE: tl.constexpr):
    """1 / divisor, 0 where that is 0, and the derivative of the divisor."""
    divisor = divisor_of(total, eps, NORMALIZE)
    factor = tl.where(divisor == 0, 0.0, 1.0 / divisor)
    slope = total * 0.0 + 1.0
    if NORMALIZE == "clamp":
        slope = tl.where(total >= eps, 1.0, 0.0)
    elif NORMALIZE == "abs":
        slope = tl.where(tl.abs(total) >= eps, tl.where(total < 0, -1.0, 1.0), 0.0)
        slope = tl.where(total == 0, 0.0, slope)
    return factor, slope
