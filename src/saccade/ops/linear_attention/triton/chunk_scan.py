"""Linear attention, chunk scans: along the rows in chunks, with the running state in registers.

Every pass over a call has this one form, for rows p of one side and rows r of the other:

    result_p = Σ_r (a_p · b_r + α_p β_r) · fade(p, r) · c_r

The sum over rows of earlier chunks is kept as a state, of b_r and c_r; pairs within a chunk are
multiplied out. Queries and keys are numbered by *position*: that of key row n is n, that of a query
row is the one of the last key that it sees. The four passes are

    pass          a           b           c           α, β        scan
    output        φ(query)    φ(key)      value       –           forward
    grad_query    grad        value       φ(key)      −δ, 1       forward
    grad_key      value       grad        φ̂(query)    1, −δ       reverse
    grad_value    φ(key)      φ̂(query)    grad        –           reverse

with φ̂(query) = φ(query) / divisor and δ = (grad · output) · ∂divisor/∂total: gradients are those of
plain products with values [value, 1]. The divisor goes with the features, and last of all with
grad_query, so that values and their gradients are everywhere multiplied as they lie in memory.

So the forward scan goes along the queries and adds up keys and values, the reverse scan goes along
the keys, from the last one, and adds up queries and gradients. The state is held as [values, keys],
channels of each: whichever of b and c is plain stands on the left of its product, where Triton
cannot take what was computed and then transposed. A program computes one tile of the result's
channels.

Source: Katharopoulos et al. 2020, sections 3.2 and 3.3; chunks as in Hua et al. 2022, section 3.3;
decay as in RetNet (Sun et al. 2023), equations 5 to 7.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.device_ops import maximum
from saccade.gpu.features import load_features, load_number, narrow, where_also
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import (
    any_nonfinite,
    pad_rows,
    row_pointers,
    tile_pointers,
)
from saccade.ops.linear_attention.triton.chunk_state import (
    add_rows,
    chunks_of,
    decays_of,
    keep_sums,
    keys_at,
    program_of,
    queries_at,
    scores_of,
    start_sums,
    state_number,
    summed_decay_until,
    times_sums,
    weighed,
)

OUTPUT, GRAD_QUERY = tl.constexpr("output"), tl.constexpr("grad_query")
GRAD_KEY, GRAD_VALUE = tl.constexpr("grad_key"), tl.constexpr("grad_value")


class ScanMeta(NamedTuple):
    """What is known of a scan when it is compiled: heads that share an operand, channels, pass.

    INNER: the channels of a, of all rows; OUTER: those of the result, in TILES of OUTER_TILE.
    ALIGN: "top_left" or "bottom_right", or "all" where every row sees all keys.
    """

    HEADS_PER_QUERY: int
    HEADS_PER_KEY: int
    HEADS_PER_VALUE: int
    GROUP: int
    STATE_HEADS: int
    SEGMENTS: int
    INNER: int
    INNER_WIDTH: int
    OUTER: int
    OUTER_TILE: int
    TILES: int
    CHUNK: int
    PASS: str
    ALIGN: str
    STARTED: bool
    COUNTED: bool  # whether `totals` are known, and not to be written
    NORMALIZE: str
    PRECISION: str
    PARTS: int | None = None


# ---- forward -------------------------------------------------------------------------------------


@triton.jit
def linear_forward_scan(
    query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps, sequence,
    before, after, META: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of the output or of grad_query, for one segment of a head.

    query, key, value, grad_output: Operands; the output has no grad_output. factors, minus_delta:
    Views of 1 / divisor and −δ of each query row, or None. totals: a View of sums of scores, for
    the output, or None. dots: a View of features · gradient, for each row of a gradient and tile,
    or None. before, after: states (Sums) that the segment starts from and ends with, or None.
    """
    HEADS: tl.constexpr = META.STATE_HEADS * META.GROUP
    GRADIENT: tl.constexpr = META.PASS == GRAD_QUERY
    KEYS: tl.constexpr = META.OUTER if GRADIENT else META.INNER
    VALUES: tl.constexpr = META.INNER if GRADIENT else META.OUTER
    batch, head, tile, segment, bounds, inner, outer = program_of(sequence, HEADS, META)
    pad_rows(result, 0.0, META.OUTER, META.OUTER_TILE)
    if totals is not None and not META.COUNTED:
        pad_rows(totals, 0.0, 1, 1)
    keys, values = inner, outer
    if GRADIENT:
        keys, values = outer, inner
    number = state_number(sequence, batch, head // META.GROUP, segment, META)
    state = start_sums(before, number, keys, values, KEYS, VALUES)
    first, num_chunks = chunks_of(bounds, segment, META)
    for index in range(0, num_chunks):
        state = visit_queries(
            query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps,
            sequence, (batch, head, tile, bounds, keys, values),
            bounds[4] + (first + index) * META.CHUNK, state, META, False,
        )  # fmt: skip
    if META.ALIGN != "all" and any_nonfinite(state[0]):
        # NaN or inf: within its chunk it may have reached rows that do not see it. NaN-safe again.
        state = start_sums(before, number, keys, values, KEYS, VALUES)
        for index in tl.range(0, num_chunks, num_stages=1):
            state = visit_queries(
                query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps,
                sequence, (batch, head, tile, bounds, keys, values),
                bounds[4] + (first + index) * META.CHUNK, state, META, True,
            )  # fmt: skip
    if after is not None:
        writes = head % META.GROUP == 0
        keep_sums(after, number, keys, values, state[0], state[1], writes, KEYS, VALUES)


@triton.jit
def visit_queries(
    query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps, sequence, work,
    start, state, META: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Store the results of one chunk of queries; the state with the chunk's keys added to it.

    work: batch entry, head and tile, the sequence's bounds, channels of keys and of values. start:
    the first position of the chunk.
    """
    GRADIENT: tl.constexpr = META.PASS == GRAD_QUERY
    CAUSAL: tl.constexpr = META.ALIGN != "all"
    DECAYED: tl.constexpr = sequence.summed_decay is not None
    KEYS: tl.constexpr = META.OUTER if GRADIENT else META.INNER
    VALUES: tl.constexpr = META.INNER if GRADIENT else META.OUTER
    batch, head, tile, bounds, keys, values = work
    matrix, vector = state
    positions = start + tl.arange(0, META.CHUNK)
    first = start - bounds[0]
    _, exist, seen = queries_at(bounds, positions, META.STARTED, CAUSAL)
    _, _, keys_seen = keys_at(bounds, positions)
    source = 0.0, 1.0
    if GRADIENT:  # asked for early, as nothing hides how long it takes
        source = load_source(
            query, factors, batch, head, first, seen, keys, META.HEADS_PER_QUERY, KEYS,
            META.NORMALIZE != "none",
        )  # fmt: skip
    decay_factor = keys_seen.to(tl.float32)
    if DECAYED:
        until, whole = decays_of(sequence, batch, head // META.GROUP, start, META.CHUNK)
        decay_factor = tl.exp(whole - until)
    # Later rows read the state before the chunk, which is narrowed before the chunk is added.
    narrowed, factor = narrow(matrix, key.rows.ptr.dtype.element_ty, 0 if GRADIENT else 1)
    if CAUSAL:
        if DECAYED:
            state = matrix * tl.exp(whole), vector * tl.exp(whole)
        state, others = add_rows(
            key, value, None, None, batch, head, start, keys_seen, decay_factor, keys, values,
            state, META.HEADS_PER_KEY, META.HEADS_PER_VALUE, KEYS, VALUES, DECAYED, not
            META.COUNTED, NAN_SAFE, META.PRECISION,
        )  # fmt: skip
    total = tl.zeros([META.CHUNK], tl.float32)
    if GRADIENT:
        a_tile = load_features(
            grad_output, None, batch, head, first, seen, values, 1, VALUES, False, False
        )
        found = tl.dot(a_tile, narrowed, input_precision=META.PRECISION) * factor
        extra = load_number(minus_delta, batch, head, first + tl.arange(0, META.CHUNK), seen)
        found += extra[:, None] * vector[None, :]
    else:
        a_wide = load_features(
            query, None, batch, head, first, seen, keys, META.HEADS_PER_QUERY, KEYS, False, False
        )
        if META.COUNTED:
            total = load_number(totals, batch, head, first + tl.arange(0, META.CHUNK), seen)
        else:
            total = tl.sum(a_wide.to(tl.float32) * vector[None, :], 1)
        a_tile, extra = a_wide.to(query.rows.ptr.dtype.element_ty), seen.to(tl.float32)
        found = times_sums(a_tile, narrowed, factor, META.PRECISION)
    if CAUSAL:
        if DECAYED:
            found = found * tl.exp(until)[:, None]
            if not META.COUNTED:
                total = total * tl.exp(until)
        scores = scores_of(a_tile, extra, others, GRADIENT, META.PRECISION)
        if DECAYED:
            scores *= tl.exp(tl.minimum(until[:, None] - until[None, :], 0.0))
        if NAN_SAFE:
            scores = tl.where(others[4][None, :], float("nan"), scores)
        scores = tl.where(positions[None, :] <= positions[:, None], scores, 0.0)
        if not GRADIENT and not META.COUNTED:
            total += tl.sum(scores, 1)
        found += weighed(scores, others, GRADIENT, META.PRECISION)
    if GRADIENT:
        store_gradient(
            result, dots, query, source, (batch, head, tile), first, exist, seen, keys, found, KEYS,
            META.NORMALIZE != "none",
        )  # fmt: skip
    else:
        store_output(
            result, totals, eps, (batch, head, tile), first, exist, seen, values, found, total,
            VALUES, META.NORMALIZE, META.COUNTED,
        )  # fmt: skip
    return state


# ---- reverse -------------------------------------------------------------------------------------


@triton.jit
def linear_reverse_scan(
    query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps, sequence,
    before, after, META: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of grad_key or grad_value, for one segment of a head.

    Arguments as in `linear_forward_scan`, heads those of the state. The state is the gradient of
    the forward scan's: `before` is the one behind the segment, `after` the one in front of it.
    """
    GRAD_OF_KEY: tl.constexpr = META.PASS == GRAD_KEY
    KEYS: tl.constexpr = META.OUTER if GRAD_OF_KEY else META.INNER
    VALUES: tl.constexpr = META.INNER if GRAD_OF_KEY else META.OUTER
    batch, head, tile, segment, bounds, inner, outer = program_of(sequence, META.STATE_HEADS, META)
    pad_rows(result, 0.0, META.OUTER, META.OUTER_TILE)
    keys, values = inner, outer
    if GRAD_OF_KEY:
        keys, values = outer, inner
    number = state_number(sequence, batch, head, segment, META)
    state = start_sums(before, number, keys, values, KEYS, VALUES)
    first, num_chunks = chunks_of(bounds, segment, META)
    for index in range(0, num_chunks):
        state = visit_keys(
            query, key, value, grad_output, factors, minus_delta, dots, result, sequence,
            (batch, head, tile, bounds, keys, values),
            bounds[4] + (first + (num_chunks - 1 - index)) * META.CHUNK, state, META, False,
        )  # fmt: skip
    if META.ALIGN != "all" and any_nonfinite(state[0]):  # NaN-safe again
        state = start_sums(before, number, keys, values, KEYS, VALUES)
        for index in tl.range(0, num_chunks, num_stages=1):
            state = visit_keys(
                query, key, value, grad_output, factors, minus_delta, dots, result, sequence,
                (batch, head, tile, bounds, keys, values),
                bounds[4] + (first + (num_chunks - 1 - index)) * META.CHUNK, state, META, True,
            )  # fmt: skip
    if after is not None:
        keep_sums(after, number, keys, values, state[0], state[1], True, KEYS, VALUES)


@triton.jit
def visit_keys(
    query, key, value, grad_output, factors, minus_delta, dots, result, sequence, work, start,
    state, META: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Store the results of one chunk of keys; the state with the chunk's queries added to it.

    work, start: as in `visit_queries`, of a head of the state; GROUP query heads share it.
    """
    GRAD_OF_KEY: tl.constexpr = META.PASS == GRAD_KEY
    CAUSAL: tl.constexpr = META.ALIGN != "all"
    DECAYED: tl.constexpr = sequence.summed_decay is not None
    KEYS: tl.constexpr = META.OUTER if GRAD_OF_KEY else META.INNER
    VALUES: tl.constexpr = META.INNER if GRAD_OF_KEY else META.OUTER
    batch, head, tile, bounds, keys, values = work
    matrix, vector = state
    positions = start + tl.arange(0, META.CHUNK)
    query_head, first_query = head * META.GROUP, start - bounds[0]
    _, exist, seen = keys_at(bounds, positions)
    _, _, queries_see = queries_at(bounds, positions, META.STARTED, CAUSAL)
    source = 0.0, 1.0
    if GRAD_OF_KEY:  # asked for early, as nothing hides how long it takes
        source = load_source(
            key, None, batch, query_head, start, seen, keys, META.HEADS_PER_KEY, KEYS, False
        )
    decay_factor = queries_see.to(tl.float32)
    if DECAYED:
        until, whole = decays_of(sequence, batch, head, start, META.CHUNK)
        decay_factor = tl.exp(until)
    # Earlier rows read the state behind the chunk, which is narrowed before the chunk is added.
    narrowed, factor = narrow(matrix, key.rows.ptr.dtype.element_ty, 0 if GRAD_OF_KEY else 1)
    if CAUSAL:
        if DECAYED:
            state = matrix * tl.exp(whole), vector * tl.exp(whole)
        state, others = add_rows(
            query, grad_output, factors, minus_delta, batch, query_head, first_query, queries_see,
            decay_factor, keys, values, state, META.HEADS_PER_QUERY, 1, KEYS, VALUES, DECAYED,
            GRAD_OF_KEY, NAN_SAFE, META.PRECISION,
        )  # fmt: skip
    extra = seen.to(tl.float32)
    if GRAD_OF_KEY:
        a_tile = load_features(
            value, None, batch, query_head, start, seen, values, META.HEADS_PER_VALUE, VALUES,
            False, False,
        )  # fmt: skip
        found = tl.dot(a_tile, narrowed, input_precision=META.PRECISION) * factor
        found += extra[:, None] * vector[None, :]
    else:
        a_tile = load_features(
            key, None, batch, query_head, start, seen, keys, META.HEADS_PER_KEY, KEYS, False, False
        ).to(key.rows.ptr.dtype.element_ty)
        found = times_sums(a_tile, narrowed, factor, META.PRECISION)
    if DECAYED:
        if CAUSAL:
            left = tl.exp(whole - until)
        else:  # as far as a key has faded when rows see it: at the end
            end = summed_decay_until(sequence, batch, head, bounds[2])
            since = end - summed_decay_until(sequence, batch, head, positions)
            left = tl.exp(since.to(tl.float32))
        found = found * left[:, None]
    if CAUSAL:
        for member in tl.static_range(META.GROUP):
            if member > 0:
                state, others = add_rows(
                    query, grad_output, factors, minus_delta, batch, query_head + member,
                    first_query, queries_see, decay_factor, keys, values, state,
                    META.HEADS_PER_QUERY, 1, KEYS, VALUES, DECAYED, GRAD_OF_KEY, NAN_SAFE,
                    META.PRECISION,
                )  # fmt: skip
            scores = scores_of(a_tile, extra, others, GRAD_OF_KEY, META.PRECISION)
            if DECAYED:
                scores *= tl.exp(tl.minimum(-(until[:, None] - until[None, :]), 0.0))
            if NAN_SAFE:
                scores = tl.where(others[4][None, :], float("nan"), scores)
            scores = tl.where(positions[None, :] >= positions[:, None], scores, 0.0)
            found += weighed(scores, others, GRAD_OF_KEY, META.PRECISION)
    at = batch, head, tile
    if GRAD_OF_KEY:
        store_gradient(result, dots, key, source, at, start, exist, seen, keys, found, KEYS, False)
    else:
        store_shown(result, batch, head, start, exist, seen, values, found, VALUES)
    return state


# ---- results -------------------------------------------------------------------------------------


@triton.jit
def store_output(
    output, totals, eps, at, first, exist, seen, values, found, total, VALUES: tl.constexpr,
    NORMALIZE: tl.constexpr, COUNTED: tl.constexpr,
):  # fmt: skip
    """Store weighted sums divided by the normaliser, and the sums of scores unless COUNTED."""
    batch, head, tile = at
    total = tl.where(seen, total, 0.0)
    if totals is not None and not COUNTED:
        first_tile = where_also(exist, tile == 0)
        rows = first + tl.arange(0, exist.shape[0])
        tl.store(row_pointers(totals, batch, head, rows, 0), total, mask=first_tile)
    if NORMALIZE != "none":
        divisor = divisor_of(total, eps, NORMALIZE)
        factor = 1.0 / divisor
        found = tl.where((divisor == 0)[:, None], 0.0, found * factor[:, None])
    store_shown(output, batch, head, first, exist, seen, values, found, VALUES)


@triton.jit
def store_gradient(
    result, dots, operand, source, at, first, exist, seen, keys, found, KEYS: tl.constexpr,
    FACTORED: tl.constexpr,
):  # fmt: skip
    """Go back through the feature map of an operand, and store; with `dots`, features · gradient.

    source: what `load_source` gave.
    """
    raw, factor = source
    batch, head, tile = at
    mapped = raw.to(tl.float32)
    if operand.apply is not None:
        mapped = operand.apply(mapped, 0.0)
    if FACTORED:
        found = found * factor[:, None]
    if operand.scale is not None:
        found = found * operand.scale
    if dots is not None:
        inside = seen[:, None] & (keys < KEYS)[None, :]
        products = tl.sum(tl.where(inside, mapped * found, 0.0), 1)
        tiles: tl.constexpr = (KEYS + keys.shape[0] - 1) // keys.shape[0]
        rows = first + tl.arange(0, exist.shape[0])
        pointers = row_pointers(dots, batch, head * tiles + tile, rows, 0)
        tl.store(pointers, products, mask=exist)
    if operand.derivative is not None:
        found = found * operand.derivative(mapped)
    store_shown(result, batch, head, first, exist, seen, keys, found, KEYS)


@triton.jit
def store_shown(
    result, batch, head, first, exist, seen, channels, found, DIM: tl.constexpr
):  # fmt: skip
    """Store a tile of results, 0 in rows that exist and are hidden."""
    pointers = tile_pointers(result, batch, head, first, channels[None, :], exist.shape[0], True)
    shown, hidden = seen[:, None], (exist & (seen == 0))[:, None]
    if DIM == 0 or DIM // channels.shape[0] * channels.shape[0] != DIM:
        inside = (channels < DIM)[None, :]
        shown, hidden = shown & inside, hidden & inside
    narrowed = found.to(result.ptr.dtype.element_ty)
    tl.store(pointers, narrowed, mask=shown)
    tl.store(pointers, tl.zeros_like(narrowed), mask=hidden)


@triton.jit
def load_source(
    operand, factors, batch, head, first, seen, channels,
    HEADS_PER: tl.constexpr, DIM: tl.constexpr, FACTORED: tl.constexpr,
):  # fmt: skip
    """The rows that a gradient is of, as they are, and their factors, if FACTORED."""
    offsets = tl.arange(0, seen.shape[0])
    inside = seen[:, None]
    if DIM == 0 or DIM // channels.shape[0] * channels.shape[0] != DIM:
        inside = inside & (channels < DIM)[None, :]
    pointers = tile_pointers(
        operand.rows, batch, head // HEADS_PER, first, channels[None, :], seen.shape[0], True
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
