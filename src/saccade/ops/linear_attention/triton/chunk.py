"""Linear attention, one chunk of the other side: what it adds to a state; and products with states.

A state is (matrix [values, keys], vector [keys]), channels of each, as chunk_scan.py has it.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.features import in_units, load_features, load_number
from saccade.gpu.tensor_view import spoilt_rows, without
from saccade.ops.linear_attention.triton.finish import GRAD_KEY, GRAD_QUERY, OUTPUT


@triton.jit
def add_others(
    b, c, factors, minus_delta, batch, head, first, seen, fade, inner, outer, state,
    B_SHARE: tl.constexpr, C_SHARE: tl.constexpr, INNER: tl.constexpr, OUTER: tl.constexpr,
    PASS: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr, FADED: tl.constexpr,
    CAREFUL: tl.constexpr,
):  # fmt: skip
    """The state with a chunk of the other side added to it, and the chunk: its rows as they are
    [channels, rows], its features [rows, channels] and what they are to be multiplied by, β, and
    which of its rows are spoilt."""
    matrix, vector = state
    OF_QUERIES: tl.constexpr = PASS != OUTPUT and PASS != GRAD_QUERY
    FACTORED: tl.constexpr = OF_QUERIES and NORMALIZE != "none"
    extra = seen.to(tl.float32)
    if PASS == GRAD_KEY:
        extra = load_number(minus_delta, batch, head, first + tl.arange(0, seen.shape[0]), seen)
    if PASS == GRAD_QUERY or PASS == GRAD_KEY:  # noqa: SIM109 (a constexpr is in no tuple)
        wide = load_features(
            c, factors, batch, head, first, seen, outer, C_SHARE, OUTER, False, FACTORED
        )
        plain = load_features(
            b, factors, batch, head, first, seen, inner, B_SHARE, INNER, True, False
        )
    else:
        wide = load_features(
            b, factors, batch, head, first, seen, inner, B_SHARE, INNER, False, FACTORED
        )
        plain = load_features(
            c, factors, batch, head, first, seen, outer, C_SHARE, OUTER, True, False
        )
    spoilt = seen
    if CAREFUL:
        spoilt = spoilt_rows(wide) | spoilt_rows(tl.trans(plain))
        spoilt = spoilt | ((tl.abs(extra) < float("inf")) == 0)
        plain = tl.where(spoilt[None, :], tl.zeros_like(plain), plain)
        wide, extra = without(spoilt, wide), tl.where(spoilt, 0.0, extra)
    faded = wide
    if FADED:
        faded = wide.to(tl.float32) * fade[:, None]
    if PASS == GRAD_KEY:
        vector += tl.sum(faded.to(tl.float32) * extra[:, None], 0)
    elif PASS == GRAD_QUERY or (PASS == OUTPUT and factors is None):
        vector += tl.sum(faded.to(tl.float32), 0)
    features, unit = in_units(wide, plain.dtype, FACTORED)
    faded, faded_unit = in_units(faded, plain.dtype, FACTORED)
    matrix += tl.dot(plain, faded, input_precision=PRECISION) * faded_unit
    if CAREFUL:
        poison = tl.where(tl.max(spoilt.to(tl.int32), 0) > 0, float("nan"), 0.0)
        matrix, vector = matrix + poison, vector + poison
    return (matrix, vector), (plain, features, unit, extra, spoilt)


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
