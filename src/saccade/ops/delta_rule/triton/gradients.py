"""The gated delta rule, gradients of rows: of a chunk's queries, keys, values, beta and decay.

What the scans kept says all of a chunk that lies outside of it: the state S before it, the gradient
R of the state behind it, `update` and `solved` (chunk_scan.py). With dots over channels of values,

    grad of P = grad_output · update      grad of A = −solved · update      (below the diagonal)

so no product with (I + A)⁻¹ is left. A row enters with a factor e^G of its own (as queries do, and
keys where they ask the state), or with e^{−G} (keys that are written); decay's gradient is the sum
of row · gradient, with a sign for each, over all rows from its own on. Pairs of a row with itself
do not fade, and are left out of that.

A program first makes both gradients of pairs, and both turned over as well, as left operands of
products. What rows of queries and keys are multiplied by (1 / length, beta) is in their columns, so
that rows go from memory into products as they are. Then come tiles of channels of keys; where
registers allow it all channels are one.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.features import load_number, narrow
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import num_rows, pad_rows, store_numbers, tile_pointers, wide
from saccade.ops.delta_rule.triton.chunk_rows import (
    chunk_slot,
    last_sums,
    load_channels,
    load_sums,
    row_factors,
    store_channels,
    turned_state_pointers,
)
from saccade.ops.delta_rule.triton.chunk_system import from_middle, left_between, pairs_of_level


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


class Pairs(NamedTuple):
    """Gradients of a chunk's pairs, as left operands of products, with what these are to be
    multiplied by: of P, times scale, and of A / beta below the diagonal, times decay between two
    rows where all channels have the same; then both turned over. Columns are multiplied by what
    the rows of the products are still to be: 1 / length, and beta where keys ask."""

    scores: Any
    scores_unit: Any
    pairs: Any
    pairs_unit: Any
    later_scores: Any
    later_scores_unit: Any
    later_pairs: Any
    later_pairs_unit: Any


@triton.jit
def delta_gradients(
    query, key, value, grad_output, factors, beta, decay, updates, solved, states, grad_states,
    grad_query, grad_key, grad_value, grad_beta, grad_decay, scale, META: tl.constexpr,
):  # fmt: skip
    """One program: gradients of queries, keys, values, beta and decay of one chunk of a value head.

    query, key, value, grad_output: Views; beta: a View of numbers. factors: Factors; decay: a
    Decay, or None. updates, solved: Views, states, grad_states: memory of one for each chunk and
    head, as the scans kept them. grad_query, grad_key: Views of a row for each value head.
    """
    batch, head, chunk, _ = updates.find(tl.program_id(0), updates.data, META.CHUNK)
    key_head, start = head // META.GROUP, chunk * META.CHUNK
    length = num_rows(updates, batch)
    rows = tl.arange(0, META.CHUNK)
    exist = start + rows < length
    at = batch, head, start, exist
    beta_rows = load_number(beta, batch, head, start + rows, exist).to(tl.float32)[:, None]
    of_keys = row_factors(factors.key, batch, key_head, start, exist)
    of_queries = row_factors(factors.query, batch, key_head, start, exist)
    element: tl.constexpr = query.ptr.dtype.element_ty
    crossing_rows = tl.zeros([META.CHUNK], tl.float32)
    ended_rows = tl.zeros([META.CHUNK], tl.float32)
    slot = wide(chunk_slot(updates, batch, chunk, META.CHUNK, META.PACKED))
    number = slot * META.HEADS + head
    pairs, alone, beta_gradient = pair_gradients(
        value, grad_output, decay, updates, solved, grad_value, of_queries, of_keys, beta_rows, at,
        rows, scale, element, META,
    )  # fmt: skip
    for first in range(0, META.HEAD_DIM, META.KEY_TILE):
        channels = first + tl.arange(0, META.KEY_TILE)
        asking, asked, written, flow = gradients_by_states(
            grad_output, updates, solved, states, grad_states, number, at, channels,
            decay is not None, META,
        )  # fmt: skip
        keys = load_channels(key, batch, key_head, start, exist, channels, META.HEAD_DIM, False)
        queries = load_channels(
            query, batch, key_head, start, exist, channels, META.HEAD_DIM, False
        )
        sums, lasts, since, until = (0.0, 0.0), 1.0, 1.0, 1.0
        if decay is not None:
            sums = load_sums(decay, batch, head, start, exist, channels, META)
            high, low = last_sums(decay, batch, head, start, length, channels, META)
            lasts = tl.exp(high + low)
            if META.BY_CHANNEL:
                high, low = high[None, :], low[None, :]
            since, until = tl.exp(sums[0] + sums[1]), tl.exp((high - sums[0]) + (low - sums[1]))
        gap, mild = 0.0, True
        if META.BY_CHANNEL:
            gap, mild = from_middle(
                decay, sums, batch, head, start, length, exist, channels, element, META
            )
        asking, asked = within_chunk_asking(
            asking * (since * scale), asked * since, keys, pairs, decay, sums, gap, mild, batch,
            head, start, length, channels, element, META,
        )  # fmt: skip
        unit_keys, unit_queries = keys.to(tl.float32) * of_keys, queries.to(tl.float32) * of_queries
        beta_gradient += tl.sum(unit_keys * asked, 1)
        asked = asked * beta_rows
        crossing = unit_queries * asking + unit_keys * asked
        asking = asking + alone * unit_keys
        store_channels(grad_query, batch, head, start, exist, channels, asking, META.HEAD_DIM)
        written = written * until
        ended = by_channel(unit_keys * written, META) + lasts * flow
        written = within_chunk_written(
            written, queries, keys, pairs, decay, sums, gap, mild, batch, head, start, length,
            channels, element, META,
        )  # fmt: skip
        if decay is not None:
            crossing -= unit_keys * written
            if META.BY_CHANNEL:
                crossing = tl.cumsum(crossing, 0, reverse=True) + ended[None, :]
                store_channels(
                    grad_decay, batch, head, start, exist, channels, crossing, META.HEAD_DIM
                )
            else:
                crossing_rows += tl.sum(crossing, 1)
                ended_rows += ended
        written = asked + written + alone * unit_queries
        store_channels(grad_key, batch, head, start, exist, channels, written, META.HEAD_DIM)
    store_numbers(grad_beta, batch, head, start + rows, length, beta_gradient)
    if decay is not None and not META.BY_CHANNEL:
        crossing_rows = tl.cumsum(crossing_rows, 0, reverse=True) + ended_rows
        store_numbers(grad_decay, batch, head, start + rows, length, crossing_rows)


# ---- pairs ---------------------------------------------------------------------------------------


@triton.jit
def pair_gradients(
    value, grad_output, decay, updates, solved, grad_value, of_queries, of_keys, beta_rows, at,
    rows, scale, DTYPE: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """`Pairs`, of rows as they lie in memory; the gradients of P on the diagonal, times scale
    [rows, 1]; those of beta as a factor of values. Gradients of values are written.

    at: batch entry, head, first row, and which rows there are.
    """
    batch, head, start, exist = at
    scores = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    pairs = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    later_scores = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    later_pairs = tl.zeros([META.CHUNK, META.CHUNK], tl.float32)
    beta_gradient = tl.zeros([META.CHUNK], tl.float32)
    precision: tl.constexpr = META.PRECISION
    for first in range(0, META.VALUE_DIM, META.VALUE_TILE):
        values = first + tl.arange(0, META.VALUE_TILE)
        grads = load_rows_of(grad_output, batch, head, start, exist, values, META)
        written = load_rows_of(updates, batch, head, start, exist, values, META)
        errors = load_rows_of(solved, batch, head, start, exist, values, META)
        scores += tl.dot(grads, tl.trans(written), input_precision=precision)
        pairs += tl.dot(errors, tl.trans(written), input_precision=precision)
        later_scores += tl.dot(written, tl.trans(grads), input_precision=precision)
        later_pairs += tl.dot(written, tl.trans(errors), input_precision=precision)
        wide_errors = errors.to(tl.float32)
        wanted = load_rows_of(value, batch, head, start, exist, values, META)
        beta_gradient += tl.sum(wide_errors * wanted.to(tl.float32), 1)
        found = wide_errors * beta_rows
        store_channels(grad_value, batch, head, start, exist, values, found, META.VALUE_DIM)
    scores, later_scores = scores * scale, later_scores * scale
    diagonal = rows[:, None] == rows[None, :]
    alone = tl.sum(tl.where(diagonal, scores, 0.0), 1)[:, None]
    if decay is not None and not META.BY_CHANNEL:
        left, turned = left_both_ways(decay, batch, head, start, exist, rows, META)
        scores, pairs = scores * left, pairs * left
        later_scores, later_pairs = later_scores * turned, later_pairs * turned
    of_queries, of_keys = beta_rows * 0.0 + of_queries, beta_rows * 0.0 + of_keys
    scores, pairs = scores * tl.trans(of_keys), pairs * tl.trans(of_keys)
    later_scores = later_scores * tl.trans(of_queries)
    later_pairs = later_pairs * tl.trans(beta_rows * of_keys)
    below, above = rows[None, :] < rows[:, None], rows[None, :] > rows[:, None]
    scores, scores_unit = narrow(tl.where(below, scores, 0.0), DTYPE, 1)
    pairs, pairs_unit = narrow(tl.where(below, -pairs, 0.0), DTYPE, 1)
    later_scores, later_scores_unit = narrow(tl.where(above, later_scores, 0.0), DTYPE, 1)
    later_pairs, later_pairs_unit = narrow(tl.where(above, -later_pairs, 0.0), DTYPE, 1)
    found = Pairs(
        scores, scores_unit, pairs, pairs_unit, later_scores, later_scores_unit, later_pairs,
        later_pairs_unit,
    )  # fmt: skip
    return found, alone, beta_gradient


@triton.jit
def left_both_ways(decay, batch, head, start, exist, rows, META: tl.constexpr):
    """e^{G_i − G_j} of pairs of rows [i, j], and turned over; 1 where j > i, or past the end."""
    high, low = load_sums(decay, batch, head, start, exist, rows, META)
    gap = (high - tl.trans(high)) + (low - tl.trans(low))
    below, above = rows[None, :] <= rows[:, None], rows[None, :] >= rows[:, None]
    # Rows past the end have sums of 0, from which e^{−G_j} would be left.
    left = tl.exp(tl.where(below & exist[:, None], gap, 0.0))
    return left, tl.exp(tl.where(above & exist[None, :], -gap, 0.0))


# ---- by way of states ----------------------------------------------------------------------------


@triton.jit
def gradients_by_states(
    grad_output, updates, solved, states, grad_states, number, at, channels, FLOWS: tl.constexpr,
    META: tl.constexpr,
):  # fmt: skip
    """Gradients of queries, of keys that ask the state before the chunk, and of keys that are
    written to the one behind it, without factors; ⟨S, R⟩, `by_channel`, if it FLOWS."""
    batch, head, start, exist = at
    asking = tl.zeros([META.CHUNK, META.KEY_TILE], tl.float32)
    asked = tl.zeros([META.CHUNK, META.KEY_TILE], tl.float32)
    written = tl.zeros([META.CHUNK, META.KEY_TILE], tl.float32)
    flow = by_channel(written * 0.0, META)
    element: tl.constexpr = grad_output.ptr.dtype.element_ty
    for first in range(0, META.VALUE_DIM, META.VALUE_TILE):
        values = first + tl.arange(0, META.VALUE_TILE)
        grads = load_rows_of(grad_output, batch, head, start, exist, values, META)
        errors = load_rows_of(solved, batch, head, start, exist, values, META)
        rows = load_rows_of(updates, batch, head, start, exist, values, META)
        pointers, exists = turned_state_pointers(states, number, channels, values, META)
        state = tl.load(pointers, mask=exists, other=0.0)
        pointers, exists = turned_state_pointers(grad_states, number, channels, values, META)
        gradient = tl.load(pointers, mask=exists, other=0.0)
        if FLOWS:
            flow += by_channel(state.to(tl.float32) * gradient.to(tl.float32), META)
        state, unit = narrow(state, element, 0)
        asking += tl.dot(grads, state, input_precision=META.PRECISION) * unit
        asked += tl.dot(errors, state, input_precision=META.PRECISION) * unit
        gradient, unit = narrow(gradient, element, 0)
        written += tl.dot(rows, gradient, input_precision=META.PRECISION) * unit
    return asking, -asked, written, flow


@triton.jit
def by_channel(tile, META: tl.constexpr):
    """The sum of each channel's rows; of all where channels do not fade by themselves, in one step
    (a sum of sums fails to compile for sm_100, Triton 3.6)."""
    return tl.sum(tile, 0) if META.BY_CHANNEL else tl.sum(tile)


# ---- by way of pairs -----------------------------------------------------------------------------


@triton.jit
def within_chunk_asking(
    asking, asked, keys, pairs, decay, sums, gap, mild, batch, head, start, length, channels,
    DTYPE: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Gradients so far and by way of pairs: of queries, and of keys that ask."""
    precision: tl.constexpr = META.PRECISION
    if META.BY_CHANNEL:
        rows, zero = tl.arange(0, META.CHUNK), tl.zeros_like(pairs.scores)
        if mild:
            near, left = (keys.to(tl.float32) * tl.exp(-gap)).to(DTYPE), tl.exp(gap)
            found = tl.dot(pairs.scores, near, input_precision=precision)
            asking += left * (found * pairs.scores_unit)
            found = tl.dot(pairs.pairs, near, input_precision=precision)
            asked += left * (found * pairs.pairs_unit)
        else:
            for level in range(0, META.LEVELS):  # not unrolled, as registers are few
                left = left_between(decay, sums, batch, head, start, length, channels, level, META)
                near = (keys.to(tl.float32) * left).to(DTYPE)
                meet = pairs_of_level(rows, level)
                found = tl.dot(tl.where(meet, pairs.scores, zero), near, input_precision=precision)
                asking += left * (found * pairs.scores_unit)
                found = tl.dot(tl.where(meet, pairs.pairs, zero), near, input_precision=precision)
                asked += left * (found * pairs.pairs_unit)
    else:
        asking += tl.dot(pairs.scores, keys, input_precision=precision) * pairs.scores_unit
        asked += tl.dot(pairs.pairs, keys, input_precision=precision) * pairs.pairs_unit
    return asking, asked


@triton.jit
def within_chunk_written(
    written, queries, keys, pairs, decay, sums, gap, mild, batch, head, start, length,
    channels, DTYPE: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """Gradients so far and by way of pairs, of keys that are written."""
    precision: tl.constexpr = META.PRECISION
    if META.BY_CHANNEL:
        rows, zero = tl.arange(0, META.CHUNK), tl.zeros_like(pairs.scores)
        if mild:
            left, right = tl.exp(gap), tl.exp(-gap)
            near = (queries.to(tl.float32) * left).to(DTYPE)
            found = tl.dot(pairs.later_scores, near, input_precision=precision)
            written += right * (found * pairs.later_scores_unit)
            near = (keys.to(tl.float32) * left).to(DTYPE)
            found = tl.dot(pairs.later_pairs, near, input_precision=precision)
            written += right * (found * pairs.later_pairs_unit)
        else:
            for level in range(0, META.LEVELS):  # not unrolled, as registers are few
                left = left_between(decay, sums, batch, head, start, length, channels, level, META)
                meet = pairs_of_level_turned(rows, level)
                near = (queries.to(tl.float32) * left).to(DTYPE)
                found = tl.dot(
                    tl.where(meet, pairs.later_scores, zero), near, input_precision=precision
                )
                written += left * (found * pairs.later_scores_unit)
                near = (keys.to(tl.float32) * left).to(DTYPE)
                found = tl.dot(
                    tl.where(meet, pairs.later_pairs, zero), near, input_precision=precision
                )
                written += left * (found * pairs.later_pairs_unit)
    else:
        found = tl.dot(pairs.later_scores, queries, input_precision=precision)
        written += found * pairs.later_scores_unit
        found = tl.dot(pairs.later_pairs, keys, input_precision=precision)
        written += found * pairs.later_pairs_unit
    return written


@triton.jit
def pairs_of_level_turned(rows, level):
    """`pairs_of_level`, the two rows exchanged."""
    first, second = rows[:, None] >> level, rows[None, :] >> level
    return (first < second) & ((first >> 1) == (second >> 1))


@triton.jit
def load_rows_of(view, batch, head, start, exist, values, META: tl.constexpr):
    """Rows of a chunk × channels of values."""
    return load_channels(view, batch, head, start, exist, values, META.VALUE_DIM, False)


# ---- tokens of no sequence ---------------------------------------------------------------------


@triton.jit
def delta_clear_behind(
    query, key, value, beta, decay, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr, BY_CHANNEL: tl.constexpr,
):  # fmt: skip
    """Clear gradients behind the last sequence, in whose rows no other program writes; decay: a
    View, or None. Each program clears some."""
    pad_rows(query, 0.0, HEAD_DIM, HEAD_WIDTH)
    pad_rows(key, 0.0, HEAD_DIM, HEAD_WIDTH)
    pad_rows(value, 0.0, VALUE_DIM, VALUE_WIDTH)
    pad_rows(beta, 0.0, 1, 1)
    if decay is not None:
        if BY_CHANNEL:
            pad_rows(decay, 0.0, HEAD_DIM, HEAD_WIDTH)
        else:
            pad_rows(decay, 0.0, 1, 1)


# ---- what value heads have in common -----------------------------------------------------------


@triton.jit
def delta_sum_heads(
    found, rows, factors, result, GROUP: tl.constexpr, TILE: tl.constexpr, DIM: tl.constexpr,
    WIDTH: tl.constexpr,
):  # fmt: skip
    """One program: gradients of some rows of a key head, summed over its GROUP value heads, and by
    way of their division by their length, if they have `factors`.

    found: a View of rows for each value head.
    """
    batch, head, tile, _ = result.find(tl.program_id(0), result.data, TILE)
    start, channels = tile * TILE, tl.arange(0, WIDTH)
    exist = start + tl.arange(0, TILE) < num_rows(result, batch)
    total = tl.zeros([TILE, WIDTH], tl.float32)
    for member in range(0, GROUP):
        each = load_channels(
            found, batch, head * GROUP + member, start, exist, channels, DIM, False
        )
        total += each.to(tl.float32)
    if factors is not None:
        factor = row_factors(factors, batch, head, start, exist)
        raw = load_channels(rows, batch, head, start, exist, channels, DIM, False)
        unit = raw.to(tl.float32) * factor
        along = tl.sum(unit * total, 1)
        total = factor * (total - unit * along[:, None])
    pointers = tile_pointers(result, batch, head, start, channels[None, :], TILE, True)
    exists = exist[:, None] & (channels < DIM)[None, :]
    tl.store(pointers, total.to(result.ptr.dtype.element_ty), mask=exists)
