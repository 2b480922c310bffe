"""Linear attention, chunk scan: chunk by chunk along the rows, with the running state in registers.

Every pass over a call has this one form, for rows p of one side and rows r of the other:

    result_p = Σ_r (a_p · b_r + α_p β_r) · fade(p, r) · c_r

The sum over rows of earlier chunks is kept as a state, of b_r and c_r; pairs within a chunk are
multiplied out. Queries and keys are numbered by *place*: key row n has place n, a query row has
the place of the last key that it sees. The four passes are

    pass          a           b           c           α, β        direction
    output        φ(query)    φ(key)      value       –           forwards
    grad_query    grad        value       φ(key)      −δ, 1       forwards
    grad_key      value       grad        φ̂(query)    1, −δ       backwards
    grad_value    φ(key)      φ̂(query)    grad        –           backwards

with φ̂(query) = φ(query) / divisor and δ = (grad · output) · ∂divisor/∂total: gradients are those of
plain products with values [value, 1]. The divisor goes with the features, and last of all with
grad_query, so that values and their gradients are everywhere multiplied as they lie in memory.

The state is held as [values, keys], channels of each: whichever of b and c is plain stands on the
left of its product, where Triton cannot take what was computed and then transposed. A program
computes one tile of the result's channels.

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
from saccade.gpu.features import in_units, load_features, load_number, narrow, where_also
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import (
    any_nonfinite,
    nonfinite_rows,
    pad_rows,
    row_pointers,
    tile_pointers,
    wide,
    without,
)
from saccade.ops.linear_attention.triton.chunk_state import (
    bounds_of,
    decays_of,
    keep_sums,
    keys_at,
    queries_at,
    start_sums,
    state_of,
    summed_decay_until,
)


class SweepMeta(NamedTuple):
    """What is known of a sweep when it is compiled: heads that share an operand, channels, pass."""

    HEADS_PER_A: int
    HEADS_PER_B: int
    HEADS_PER_C: int
    HEADS_PER_THROUGH: int
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
    CAUSAL: bool
    BOTTOM_RIGHT: bool
    STARTED: bool
    NORMALIZE: str
    PRECISION: str
    BEFORE: bool
    AFTER: bool
    NUMBERS: bool
    PARTS: int = None


@triton.jit
def linear_sweep(  # breaks kernel-booleans: one kernel serves four passes
    a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before, after,
    META: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of all rows of a head, or of one segment of them.

    factors, minus_delta: Views of 1 / divisor and −δ where a pass has them. numbers: a View of one
    number for each row, written if NUMBERS: sums of scores with the output, and with a gradient its
    dot product with the features, for each tile of channels. through: the rows that a gradient is
    of (Operand). before, after: states (Sums) that the segment starts from and ends with. Without
    CAUSAL every row reads the state before, in which all rows of the other side are.
    """
    BACKWARDS: tl.constexpr = META.PASS != OUTPUT and META.PASS != GRAD_QUERY
    AUGMENTED: tl.constexpr = META.PASS != OUTPUT and META.PASS != GRAD_VALUE
    HEADS: tl.constexpr = META.STATE_HEADS if BACKWARDS else META.STATE_HEADS * META.GROUP
    program = tl.program_id(0)
    tile, segment = program % META.TILES, (program // META.TILES) % META.SEGMENTS
    head = (program // (META.TILES * META.SEGMENTS)) % HEADS
    batch = program // (META.TILES * META.SEGMENTS * HEADS)
    state_head = head if BACKWARDS else head // META.GROUP
    bounds = bounds_of(sequence, batch, META.BOTTOM_RIGHT)
    pad_rows(result, 0.0, META.OUTER, META.OUTER_TILE)
    if META.NUMBERS and META.PASS == OUTPUT:
        pad_rows(numbers, 0.0, 1, 1)
    inner, outer = (
        tl.arange(0, META.INNER_WIDTH),
        tile * META.OUTER_TILE + tl.arange(0, META.OUTER_TILE),
    )
    at = (batch, head, state_head, tile)

    number = (
        wide(state_of(sequence, batch)) * META.STATE_HEADS + state_head
    ) * META.SEGMENTS + segment
    keys, values, KEYS, VALUES = inner, outer, META.INNER, META.OUTER
    if AUGMENTED:
        keys, values, KEYS, VALUES = outer, inner, META.OUTER, META.INNER
    state = start_sums(before, number, keys, values, KEYS, VALUES, META.BEFORE)
    chunks = tl.cdiv(bounds[5], META.CHUNK)
    of_segment = tl.cdiv(chunks, META.SEGMENTS)
    num_chunks = tl.maximum(tl.minimum(of_segment, chunks - segment * of_segment), 0)
    for index in range(0, num_chunks):
        chunk = segment * of_segment + (num_chunks - 1 - index if BACKWARDS else index)
        state = visit(
            a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, (at, bounds,
            bounds[4] + chunk * META.CHUNK, inner, outer), state, META, False,
        )  # fmt: skip
    if META.CAUSAL and any_nonfinite(state[0]):
        # NaN or inf: within its chunk it may have reached rows that do not see it. NaN-safe again.
        state = start_sums(before, number, keys, values, KEYS, VALUES, META.BEFORE)
        for index in tl.range(0, num_chunks, num_stages=1):
            chunk = segment * of_segment + (num_chunks - 1 - index if BACKWARDS else index)
            state = visit(
                a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, (at, bounds,
                bounds[4] + chunk * META.CHUNK, inner, outer), state, META, True,
            )  # fmt: skip
    if META.AFTER:
        mine = (head % META.GROUP == 0) | BACKWARDS
        keep_sums(after, number, keys, values, state[0], state[1], mine, KEYS, VALUES)


@triton.jit
def visit(  # breaks kernel-booleans: META is that of linear_sweep
    a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, position, state,
    META: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Store the results of one chunk; the state with the chunk added to it.

    position: (which heads and tile, the sequence's bounds, the first place of the chunk, channels).
    """
    BACKWARDS: tl.constexpr = META.PASS != OUTPUT and META.PASS != GRAD_QUERY
    AUGMENTED: tl.constexpr = META.PASS != OUTPUT and META.PASS != GRAD_VALUE
    DECAYED: tl.constexpr = sequence.summed_decay is not None
    COUNTED: tl.constexpr = META.PASS == OUTPUT and factors is not None
    at, bounds, start, inner, outer = position
    batch, head, state_head, tile = at
    matrix, vector = state
    positions = start + tl.arange(0, META.CHUNK)
    common = head * META.GROUP if BACKWARDS else head  # the first output head that is concerned
    if BACKWARDS:
        first, others_first = start, start - bounds[0]
        _, exist, seen = keys_at(bounds, positions)
        _, _, others_seen = queries_at(bounds, positions, META.STARTED, META.CAUSAL)
    else:
        first, others_first = start - bounds[0], start
        _, exist, seen = queries_at(bounds, positions, META.STARTED, META.CAUSAL)
        _, _, others_seen = keys_at(bounds, positions)
    own = 0.0, 1.0
    if AUGMENTED:  # asked for early, as nothing hides how long it takes
        own = load_own(
            through, factors, batch, common, first, seen, outer, META.HEADS_PER_THROUGH, META.OUTER,
            META.PASS == GRAD_QUERY and META.NORMALIZE != "none",
        )  # fmt: skip
    decay_factor = others_seen.to(tl.float32)
    if DECAYED:
        until, whole = decays_of(sequence, batch, state_head, start, META.CHUNK)
        decay_factor = tl.exp(until if BACKWARDS else whole - until)
    # Later rows read the state before the chunk, which is narrowed before the chunk is added.
    narrowed, factor = narrow(matrix, b.rows.ptr.dtype.element_ty, 0 if AUGMENTED else 1)
    if META.CAUSAL:
        if DECAYED:
            state = matrix * tl.exp(whole), vector * tl.exp(whole)
        state, others = add_others(
            b, c, factors, minus_delta, batch, common, others_first, others_seen, decay_factor,
            inner, outer, state, META, DECAYED, NAN_SAFE,
        )  # fmt: skip
    a_wide = load_features(
        a, factors, batch, common, first, seen, inner, META.HEADS_PER_A, META.INNER, False, False
    )
    total = tl.zeros([META.CHUNK], tl.float32)
    if META.PASS == OUTPUT:
        total = total_of(factors, a_wide, vector, batch, common, first, seen)
    a_tile = a_wide.to(a.rows.ptr.dtype.element_ty)
    extra = seen.to(tl.float32)
    if AUGMENTED:
        found = tl.dot(a_tile, narrowed, input_precision=META.PRECISION) * factor
        if META.PASS == GRAD_QUERY:
            extra = load_number(minus_delta, batch, common, first + tl.arange(0, META.CHUNK), seen)
        found += extra[:, None] * vector[None, :]
    else:
        found = times_sums(a_tile, narrowed, factor, META.PRECISION)
    if DECAYED:
        if META.CAUSAL:
            left = tl.exp(whole - until if BACKWARDS else until)
            found = found * left[:, None]
            if not COUNTED:
                total = total * left
        elif BACKWARDS:  # as far as a key has faded when rows see it: at the end
            end = summed_decay_until(sequence, batch, state_head, bounds[2])
            left = tl.exp(
                (end - summed_decay_until(sequence, batch, state_head, positions)).to(tl.float32)
            )
            found = found * left[:, None]
    if META.CAUSAL:
        meet = positions[None, :] <= positions[:, None]
        if BACKWARDS:
            meet = positions[None, :] >= positions[:, None]
        for member in tl.static_range(META.GROUP if BACKWARDS else 1):
            if member > 0:
                state, others = add_others(
                    b, c, factors, minus_delta, batch, common + member, others_first, others_seen,
                    decay_factor, inner, outer, state, META, DECAYED, NAN_SAFE,
                )  # fmt: skip
            plain, features, unit, other_extra, nonfinite = others
            if AUGMENTED:
                scores = tl.dot(a_tile, plain, input_precision=META.PRECISION)
                scores += extra[:, None] * other_extra[None, :]
            else:
                scores = tl.dot(a_tile, tl.trans(features), input_precision=META.PRECISION) * unit
            if DECAYED:
                gap = until[:, None] - until[None, :]
                gap = -gap if BACKWARDS else gap
                scores *= tl.exp(tl.minimum(gap, 0.0))
            if NAN_SAFE:
                scores = tl.where(nonfinite[None, :], float("nan"), scores)
            scores = tl.where(meet, scores, 0.0)
            if META.PASS == OUTPUT and not COUNTED:
                total += tl.sum(scores, 1)
            scores, factor = narrow(scores, plain.dtype, 1)
            if AUGMENTED:
                found += tl.dot(scores, features, input_precision=META.PRECISION) * (factor * unit)
            else:
                found += tl.dot(scores, tl.trans(plain), input_precision=META.PRECISION) * factor
    store_result(
        result, numbers, through, own, eps, (batch, head, tile), first, exist, seen, outer, found,
        total, META.OUTER, META.PASS, META.NORMALIZE, META.NUMBERS,
    )  # fmt: skip
    return state


# ---- a chunk of the other side -------------------------------------------------------------------
# What it adds to a state (matrix [values, keys], vector [keys]), and products with states.


@triton.jit
def add_others(  # breaks kernel-booleans: META is that of linear_sweep
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
