"""The gated delta rule, gradients of rows: of a chunk's queries, keys, values, beta and decay.

What the scans kept says all of a chunk that lies outside of it: the state S before it, the gradient
R of the state behind it, `update` and `solved` (chunk_scan.py). With dots over channels of values,

    grad of P = grad_output · update      grad of A = −solved · update      (below the diagonal)

so no product with (I + A)⁻¹ is left. A row enters with a factor e^G of its own (as queries do, and
keys where they ask the state), or with e^{−G} (keys that are written); decay's gradient is the sum
of row · gradient, with a sign for each, over all rows from its own on. Pairs of a row with itself
do not fade, and are left out of that.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.features import load_number, narrow
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import num_rows, store_numbers, tile_pointers, wide
from saccade.ops.delta_rule.triton.chunk_rows import (
    chunk_slot,
    last_sums,
    load_channels,
    load_sums,
    row_factors,
    state_pointers,
    store_channels,
)
from saccade.ops.delta_rule.triton.chunk_system import (
    left_between,
    left_between_rows,
    pairs_of_level,
)


class GradientMeta(NamedTuple):
    """What is known of the gradients of rows when their kernel is compiled."""

    GROUP: int  # value heads of a key head
    HEADS: int
    HEAD_DIM: int
    KEY_TILE: int  # channels at a time
    VALUE_DIM: int
    VALUE_TILE: int
    CHUNK: int
    LEVELS: int
    BY_CHANNEL: bool
    PACKED: bool
    PRECISION: str


@triton.jit
def delta_pair_gradients(
    value, grad_output, beta, decay, updates, solved, of_scores, of_pairs, own, grad_beta,
    grad_value, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: gradients of the pairs of one chunk of a value head, and of its values.

    Written are those of P and of A / beta below the diagonal, times scale and decay between two
    rows where all channels have the same (of_scores, of_pairs: Views of CHUNK numbers a row); of P
    on the diagonal, times scale (own: a View of numbers); of beta as a factor of values
    (grad_beta).
    """
    batch, head, chunk, _ = updates.find(tl.program_id(0), updates.data, META.CHUNK)
    start = chunk * META.CHUNK
    length = num_rows(updates, batch)
    rows = tl.arange(0, META.CHUNK)
    exist = start + rows < length
    beta_rows = load_number(beta, batch, head, start + rows, exist).to(tl.float32)
    scores = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    pairs = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    beta_gradient = tl.zeros([META.CHUNK], tl.float32)
    for first in range(0, META.VALUE_DIM, META.VALUE_TILE):
        values = first + tl.arange(0, META.VALUE_TILE)
        grads = load_rows_of(grad_output, batch, head, start, exist, values, META)
        written = load_rows_of(updates, batch, head, start, exist, values, META)
        errors = load_rows_of(solved, batch, head, start, exist, values, META)
        scores += tl.dot(grads, tl.trans(written), input_precision=META.PRECISION)
        pairs -= tl.dot(errors, tl.trans(written), input_precision=META.PRECISION)
        wide_errors = errors.to(tl.float32)
        wanted = load_rows_of(value, batch, head, start, exist, values, META)
        beta_gradient += tl.sum(wide_errors * wanted.to(tl.float32), 1)
        found = wide_errors * beta_rows[:, None]
        store_channels(grad_value, batch, head, start, exist, values, found, META.VALUE_DIM)
    scores = scores * scale
    alone = tl.sum(tl.where(rows[:, None] == rows[None, :], scores, 0.0), 1)
    store_numbers(own, batch, head, start + rows, length, alone)
    store_numbers(grad_beta, batch, head, start + rows, length, beta_gradient)
    if decay is not None and not META.BY_CHANNEL:
        left = left_between_rows(decay, batch, head, start, exist, rows, META)
        scores, pairs = scores * left, pairs * left
    below = rows[None, :] < rows[:, None]
    scores, pairs = tl.where(below, scores, 0.0), tl.where(below, pairs, 0.0)
    store_channels(of_scores, batch, head, start, exist, rows, scores, META.CHUNK)
    store_channels(of_pairs, batch, head, start, exist, rows, pairs, META.CHUNK)


@triton.jit
def delta_gradients(
    query, key, grad_output, factors, beta, decay, updates, solved, states, grad_states, of_scores,
    of_pairs, own, grad_query, grad_key, grad_beta, grad_decay, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: gradients of queries, keys, beta and decay of one chunk of a value head.

    query, key, grad_output: Views; beta: a View of numbers. factors: Factors; decay: a Decay, or
    None. updates, solved: Views, states, grad_states: memory of one for each chunk and head, as the
    scans kept them. of_scores, of_pairs, own: what `delta_pair_gradients` wrote; grad_beta too,
    which is added to. grad_query, grad_key: Views of a row for each value head.
    """
    batch, head, chunk, _ = updates.find(tl.program_id(0), updates.data, META.CHUNK)
    key_head, start = head // META.GROUP, chunk * META.CHUNK
    length = num_rows(updates, batch)
    rows = tl.arange(0, META.CHUNK)
    exist = start + rows < length
    beta_rows = load_number(beta, batch, head, start + rows, exist).to(tl.float32)[:, None]
    alone = load_number(own, batch, head, start + rows, exist)[:, None]
    beta_gradient = load_number(grad_beta, batch, head, start + rows, exist)
    of_keys = row_factors(factors.key, batch, key_head, start, exist)
    of_queries = row_factors(factors.query, batch, key_head, start, exist)
    element: tl.constexpr = query.ptr.dtype.element_ty
    crossing_rows = tl.zeros([META.CHUNK], tl.float32)
    ended_rows = tl.zeros([META.CHUNK], tl.float32)
    slot = wide(chunk_slot(updates, batch, chunk, META.CHUNK, META.PACKED))
    number = slot * META.HEADS + head
    for first in range(0, META.HEAD_DIM, META.KEY_TILE):
        channels = first + tl.arange(0, META.KEY_TILE)
        asking, asked, written, flow = state_gradients(
            grad_output, updates, solved, states, grad_states, batch, head, number, start, exist,
            channels, META,
        )  # fmt: skip
        keys = load_channels(key, batch, key_head, start, exist, channels, META.HEAD_DIM, False)
        queries = load_channels(
            query, batch, key_head, start, exist, channels, META.HEAD_DIM, False
        )
        keys, queries = keys.to(tl.float32) * of_keys, queries.to(tl.float32) * of_queries
        sums, lasts = (0.0, 0.0), 1.0
        if decay is not None:
            sums = load_sums(decay, batch, head, start, exist, channels, META)
            high, low = last_sums(decay, batch, head, start, length, channels, META)
            lasts = tl.exp(high + low)
            if META.BY_CHANNEL:
                high, low = high[None, :], low[None, :]
            since, until = tl.exp(sums[0] + sums[1]), tl.exp((high - sums[0]) + (low - sums[1]))
            asking, asked, written = asking * since, asked * since, written * until
        ended = by_channel(keys * written, META) + lasts * flow
        asking, asked, written = within_chunk(
            queries, keys, keys * beta_rows, (asking * scale, asked, written), of_scores, of_pairs,
            decay, sums, batch, head, start, length, exist, channels, element, META,
        )  # fmt: skip
        beta_gradient += tl.sum(keys * asked, 1)
        asked = asked * beta_rows
        if decay is not None:
            crossing = queries * asking + keys * (asked - written)
            if META.BY_CHANNEL:
                crossing = tl.cumsum(crossing, 0, reverse=True) + ended[None, :]
                store_channels(
                    grad_decay, batch, head, start, exist, channels, crossing, META.HEAD_DIM
                )
            else:
                crossing_rows += tl.sum(crossing, 1)
                ended_rows += ended
        asking, written = asking + alone * keys, asked + written + alone * queries
        store_channels(grad_query, batch, head, start, exist, channels, asking, META.HEAD_DIM)
        store_channels(grad_key, batch, head, start, exist, channels, written, META.HEAD_DIM)
    store_numbers(grad_beta, batch, head, start + rows, length, beta_gradient)
    if decay is not None and not META.BY_CHANNEL:
        crossing_rows = tl.cumsum(crossing_rows, 0, reverse=True) + ended_rows
        store_numbers(grad_decay, batch, head, start + rows, length, crossing_rows)


@triton.jit
def state_gradients(
    grad_output, updates, solved, states, grad_states, batch, head, number, start, exist, channels,
    META: tl.constexpr,
):  # fmt: skip
    """Gradients by way of states: of queries and of keys that ask the one before the chunk, and of
    keys that are written to the one behind it, without their factors; ⟨S, R⟩, `by_channel`."""
    element: tl.constexpr = grad_output.ptr.dtype.element_ty
    asking = tl.zeros([META.CHUNK, META.KEY_TILE], tl.float32)
    asked = tl.zeros([META.CHUNK, META.KEY_TILE], tl.float32)
    written = tl.zeros([META.CHUNK, META.KEY_TILE], tl.float32)
    flow = by_channel(asking * 0.0, META)
    for first in range(0, META.VALUE_DIM, META.VALUE_TILE):
        values = first + tl.arange(0, META.VALUE_TILE)
        grads = load_rows_of(grad_output, batch, head, start, exist, values, META)
        rows = load_rows_of(updates, batch, head, start, exist, values, META)
        errors = load_rows_of(solved, batch, head, start, exist, values, META)
        at, exists = state_pointers(states, number, channels, values, META, True)
        state = tl.load(at, mask=exists, other=0.0)
        at, exists = state_pointers(grad_states, number, channels, values, META, True)
        gradient = tl.load(at, mask=exists, other=0.0)
        flow += by_channel(state.to(tl.float32) * gradient.to(tl.float32), META)
        state, unit = narrow(state, element, 0)
        gradient, grad_unit = narrow(gradient, element, 0)
        asking += tl.dot(grads, state, input_precision=META.PRECISION) * unit
        asked -= tl.dot(errors, state, input_precision=META.PRECISION) * unit
        written += tl.dot(rows, gradient, input_precision=META.PRECISION) * grad_unit
    return asking, asked, written, flow


@triton.jit
def by_channel(tile, META: tl.constexpr):
    """The sum of each channel's rows; of all where channels do not fade by themselves, in one step
    (a sum of sums fails to compile for sm_100, Triton 3.6)."""
    return tl.sum(tile, 0) if META.BY_CHANNEL else tl.sum(tile)


@triton.jit
def within_chunk(
    queries, keys, scaled_keys, so_far, of_scores, of_pairs, decay, sums, batch, head, start,
    length, exist, channels, DTYPE: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Gradients so far and by way of pairs: of queries, of keys that ask, of keys that are written.

    scaled_keys: beta · keys.
    """
    precision: tl.constexpr = META.PRECISION
    asking, asked, written = so_far
    rows = tl.arange(0, META.CHUNK)
    at = batch, head, start
    scores, scores_unit = load_pairs(of_scores, at, exist, rows, DTYPE, META, False)
    pairs, pairs_unit = load_pairs(of_pairs, at, exist, rows, DTYPE, META, False)
    later_scores, later_unit = load_pairs(of_scores, at, exist, rows, DTYPE, META, True)
    later_pairs, last_unit = load_pairs(of_pairs, at, exist, rows, DTYPE, META, True)
    if META.BY_CHANNEL:
        zero = tl.zeros_like(scores)
        for level in range(0, META.LEVELS):  # not unrolled, as registers are few
            left = left_between(decay, sums, batch, head, start, length, channels, level, META)
            near = (keys * left).to(DTYPE)
            meet = pairs_of_level(rows, level)
            found = tl.dot(tl.where(meet, scores, zero), near, input_precision=precision)
            asking += left * (found * scores_unit)
            found = tl.dot(tl.where(meet, pairs, zero), near, input_precision=precision)
            asked += left * (found * pairs_unit)
            meet = pairs_of_level_turned(rows, level)
            near = (queries * left).to(DTYPE)
            found = tl.dot(tl.where(meet, later_scores, zero), near, input_precision=precision)
            written += left * (found * later_unit)
            near = (scaled_keys * left).to(DTYPE)
            found = tl.dot(tl.where(meet, later_pairs, zero), near, input_precision=precision)
            written += left * (found * last_unit)
    else:
        near = keys.to(DTYPE)
        asking += tl.dot(scores, near, input_precision=precision) * scores_unit
        asked += tl.dot(pairs, near, input_precision=precision) * pairs_unit
        near = queries.to(DTYPE)
        written += tl.dot(later_scores, near, input_precision=precision) * later_unit
        near = scaled_keys.to(DTYPE)
        written += tl.dot(later_pairs, near, input_precision=precision) * last_unit
    return asking, asked, written


@triton.jit
def load_pairs(
    view, at, exist, rows, DTYPE: tl.constexpr, META: tl.constexpr, TRANSPOSED: tl.constexpr
):
    """Gradients of pairs as an operand of a product, and what that is to be multiplied by.

    at: batch entry, head and first row.
    """
    tile = load_channels(view, at[0], at[1], at[2], exist, rows, META.CHUNK, TRANSPOSED)
    narrowed, unit = narrow(tile, DTYPE, 1)
    return narrowed, unit


@triton.jit
def pairs_of_level_turned(rows, level):
    """`pairs_of_level`, the two rows exchanged."""
    first, second = rows[:, None] >> level, rows[None, :] >> level
    return (first < second) & ((first >> 1) == (second >> 1))


@triton.jit
def load_rows_of(view, batch, head, start, exist, values, META: tl.constexpr):
    """Rows of a chunk × channels of values."""
    return load_channels(view, batch, head, start, exist, values, META.VALUE_DIM, False)


# ---- what value heads have in common -----------------------------------------------------------


@triton.jit
def delta_sum_heads(
    found, rows, factors, result, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: gradients of some rows of a key head, summed over its GROUP value heads, and by
    way of their division by their length, if they have `factors`.

    found: a View of float32, one row for each value head.
    """
    batch, head, tile, _ = result.find(tl.program_id(0), result.data, TILE)
    start, channels = tile * TILE, tl.arange(0, WIDTH)
    exist = start + tl.arange(0, TILE) < num_rows(result, batch)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for member in range(0, GROUP):
        total += load_channels(
            found, batch, head * GROUP + member, start, exist, channels, DIM, False
        )
    if factors is not None:
        factor = row_factors(factors, batch, head, start, exist)
        raw = load_channels(rows, batch, head, start, exist, channels, DIM, False)
        unit = raw.to(tl.float32) * factor
        along = tl.sum(unit * total, 1)
        total = factor * (total - unit * along[:, None])
    pointers = tile_pointers(result, batch, head, start, channels[None, :], TILE, True)
    exists = exist[:, None] & (channels < DIM)[None, :]
    tl.store(pointers, total.to(result.ptr.dtype.element_ty), mask=exists)
