"""Linear attention, the sweep: chunk by chunk along the rows, with the running state in registers.

Every pass over a call has this one form, for rows p of one side and rows r of the other:

    result_p = Σ_r (a_p · b_r + α_p β_r) · fade(p, r) · c_r

The sum over rows of earlier chunks is kept as a state, Σ b_r c_rᵀ; pairs within a chunk are
multiplied out. Queries and keys are numbered by *place*: key row n has place n, a query row has
the place of the last key that it sees. The four passes are

    pass          a           b           c           α, β        direction
    output        φ(query)    φ(key)      value       –           forwards
    grad_query    ĝ           value       φ(key)      −δ, 1       forwards
    grad_key      value       ĝ           φ(query)    1, −δ       backwards
    grad_value    φ(key)      φ(query)    ĝ           –           backwards

with ĝ = grad_output / divisor and δ = (ĝ · output) · ∂divisor/∂total: gradients are those of plain
products with values [value, 1]. A program computes one tile of the result's channels.

Source: Katharopoulos et al. 2020, sections 3.2 and 3.3; chunks as in Hua et al. 2022, section 3.3;
decay as in RetNet (Sun et al. 2023), equations 5 to 7.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.kernels.features import load_features, load_number, narrow
from saccade.kernels.tiles import any_spoilt, spoilt_rows, wide, without
from saccade.portable.linear_finish import GRAD_KEY, GRAD_QUERY, GRAD_VALUE, OUTPUT, store_result
from saccade.portable.linear_places import (
    bounds_of,
    faded_until,
    fades_of,
    keys_at,
    queries_at,
    sums_at,
)


@triton.jit
def linear_sweep(
    a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before, after,
    A_SHARE: tl.constexpr, B_SHARE: tl.constexpr, C_SHARE: tl.constexpr,
    THROUGH_SHARE: tl.constexpr, GROUP: tl.constexpr, STATE_HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    INNER: tl.constexpr, INNER_WIDTH: tl.constexpr, OUTER: tl.constexpr, OUTER_TILE: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr, PASS: tl.constexpr, CAUSAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, STARTED: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, NUMBERS: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of all rows of a head, or of one segment of them.

    factors, minus_delta: Views of 1 / divisor and −δ where a pass has them. numbers: a View of one
    number for each row, written if NUMBERS: sums of scores with the output, and with a gradient its
    dot product with the features, for each tile of channels. through: the rows that a gradient is
    of (Operand). before, after: states (Sums) that the segment starts from and ends with. Without
    CAUSAL every row reads the state before, in which all rows of the other side are.
    """
    BACKWARDS: tl.constexpr = PASS != OUTPUT and PASS != GRAD_QUERY
    TRANSPOSED: tl.constexpr = PASS != OUTPUT and PASS != GRAD_VALUE
    HEADS: tl.constexpr = STATE_HEADS if BACKWARDS else STATE_HEADS * GROUP
    program = tl.program_id(0)
    tile, segment = program % TILES, (program // TILES) % SEGMENTS
    head = (program // (TILES * SEGMENTS)) % HEADS
    batch = program // (TILES * SEGMENTS * HEADS)
    state_head = head if BACKWARDS else head // GROUP
    bounds = bounds_of(sequence, batch, BOTTOM_RIGHT)
    inner, outer = tl.arange(0, INNER_WIDTH), tile * OUTER_TILE + tl.arange(0, OUTER_TILE)
    at = (batch, head, state_head, tile)

    slot = batch
    if sequence.slots is not None:
        slot = tl.load(sequence.slots + batch)
    number = (wide(slot) * STATE_HEADS + state_head) * SEGMENTS + segment
    state = start_state(
        before, number, inner, outer, INNER, OUTER, TRANSPOSED, PASS == OUTPUT,
        PASS != GRAD_VALUE, BEFORE,
    )  # fmt: skip
    chunks = tl.cdiv(bounds[5], CHUNK)
    of_segment = tl.cdiv(chunks, SEGMENTS)
    num_chunks = tl.maximum(tl.minimum(of_segment, chunks - segment * of_segment), 0)
    for index in range(0, num_chunks):
        chunk = segment * of_segment + (num_chunks - 1 - index if BACKWARDS else index)
        state = visit(
            a, b, c, factors, minus_delta, result, numbers, through, eps, sequence,
            (at, bounds, bounds[4] + chunk * CHUNK, inner, outer), state,
            A_SHARE, B_SHARE, C_SHARE, THROUGH_SHARE, GROUP, INNER, OUTER, CHUNK,
            PASS, CAUSAL, STARTED, NORMALIZE, PRECISION, NUMBERS, False,
        )  # fmt: skip
    if CAUSAL and any_spoilt(state[0]):
        # NaN or inf: within its chunk it may have reached rows that do not see it. With care again.
        state = start_state(
        before, number, inner, outer, INNER, OUTER, TRANSPOSED, PASS == OUTPUT,
        PASS != GRAD_VALUE, BEFORE,
    )  # fmt: skip
        for index in tl.range(0, num_chunks, num_stages=1):
            chunk = segment * of_segment + (num_chunks - 1 - index if BACKWARDS else index)
            state = visit(
                a, b, c, factors, minus_delta, result, numbers, through, eps, sequence,
                (at, bounds, bounds[4] + chunk * CHUNK, inner, outer), state,
                A_SHARE, B_SHARE, C_SHARE, THROUGH_SHARE, GROUP, INNER, OUTER, CHUNK,
                PASS, CAUSAL, STARTED, NORMALIZE, PRECISION, NUMBERS, True,
            )  # fmt: skip
    if AFTER:
        mine = (head % GROUP == 0) | BACKWARDS
        keep_state(
            after, number, inner, outer, state, mine, INNER, OUTER, TRANSPOSED, PASS == OUTPUT
        )


@triton.jit
def start_state(
    before, number, inner, outer, INNER: tl.constexpr, OUTER: tl.constexpr,
    TRANSPOSED: tl.constexpr, VECTOR_INNER: tl.constexpr, VECTOR: tl.constexpr,
    STATE: tl.constexpr,
):  # fmt: skip
    """The state before the first chunk: (matrix [inner, outer], vector)."""
    size: tl.constexpr = inner.shape[0] if VECTOR_INNER else outer.shape[0]
    matrix = tl.zeros([inner.shape[0], outer.shape[0]], tl.float32)
    vector = tl.zeros([size], tl.float32)
    if STATE:
        at, exists, vector_at, vector_exists = sums_at(
            before, number, inner, outer, INNER, OUTER, TRANSPOSED, VECTOR_INNER
        )
        matrix += tl.load(at, mask=exists, other=0.0).to(tl.float32)
        if VECTOR:
            vector += tl.load(vector_at, mask=vector_exists, other=0.0).to(tl.float32)
    return matrix, vector


@triton.jit
def keep_state(
    after, number, inner, outer, state, mine, INNER: tl.constexpr, OUTER: tl.constexpr,
    TRANSPOSED: tl.constexpr, VECTOR_INNER: tl.constexpr,
):  # fmt: skip
    """Write the state after the last chunk, if it is this program's to write."""
    at, exists, vector_at, vector_exists = sums_at(
        after, number, inner, outer, INNER, OUTER, TRANSPOSED, VECTOR_INNER
    )
    element: tl.constexpr = after.matrix.dtype.element_ty
    tl.store(at, state[0].to(element), mask=exists & mine)
    tl.store(vector_at, state[1].to(element), mask=vector_exists & mine)


@triton.jit
def visit(
    a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, place, state,
    A_SHARE: tl.constexpr, B_SHARE: tl.constexpr, C_SHARE: tl.constexpr,
    THROUGH_SHARE: tl.constexpr, GROUP: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr, CHUNK: tl.constexpr,
    PASS: tl.constexpr, CAUSAL: tl.constexpr, STARTED: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, NUMBERS: tl.constexpr, CAREFUL: tl.constexpr,
):  # fmt: skip
    """Store the results of one chunk; the state with the chunk added to it.

    place: (which heads and tile, the sequence's bounds, the first place of the chunk, channels).
    """
    BACKWARDS: tl.constexpr = PASS != OUTPUT and PASS != GRAD_QUERY
    AUGMENTED: tl.constexpr = PASS != OUTPUT and PASS != GRAD_VALUE
    at, bounds, start, inner, outer = place
    batch, head, state_head, tile = at
    matrix, vector = state
    places = start + tl.arange(0, CHUNK)
    common = head * GROUP if BACKWARDS else head  # the first output head that is concerned
    if BACKWARDS:
        rows, exist, seen = keys_at(bounds, places)
        others, _, others_seen = queries_at(bounds, places, STARTED, CAUSAL)
    else:
        rows, exist, seen = queries_at(bounds, places, STARTED, CAUSAL)
        others, _, others_seen = keys_at(bounds, places)
    a_tile = load_features(
        a, factors, batch, common // A_SHARE, rows, seen, inner, INNER, False,
        PASS == GRAD_QUERY and NORMALIZE != "none",
    )  # fmt: skip
    narrowed, factor = narrow(matrix, a_tile.dtype, 0)
    found = tl.dot(a_tile, narrowed, input_precision=PRECISION) * factor
    total = tl.zeros([CHUNK], tl.float32)
    extra = seen.to(tl.float32)
    if PASS == OUTPUT:
        total = tl.sum(a_tile.to(tl.float32) * vector[None, :], 1)
    if AUGMENTED:
        if PASS == GRAD_QUERY:
            extra = load_number(minus_delta, batch, common, rows, seen)
        found += extra[:, None] * vector[None, :]
    if sequence.faded is not None:
        until, whole = fades_of(sequence, batch, state_head, start, CHUNK)
        if CAUSAL:
            own = tl.exp(whole - until if BACKWARDS else until)
            found, total = found * own[:, None], total * own
        elif BACKWARDS:  # as far as a key has faded when rows see it: at the end
            end = faded_until(sequence, batch, state_head, bounds[2])
            own = tl.exp((end - faded_until(sequence, batch, state_head, places)).to(tl.float32))
            found = found * own[:, None]
    if CAUSAL:
        meet = places[None, :] <= places[:, None]
        if BACKWARDS:
            meet = places[None, :] >= places[:, None]
        if sequence.faded is not None:
            matrix, vector = matrix * tl.exp(whole), vector * tl.exp(whole)
        for member in tl.static_range(GROUP if BACKWARDS else 1):
            other = common + member
            b_tile = load_features(
                b, factors, batch, other // B_SHARE, others, others_seen, inner, INNER, True,
                PASS == GRAD_KEY and NORMALIZE != "none",
            )  # fmt: skip
            c_tile = load_features(
                c, factors, batch, other // C_SHARE, others, others_seen, outer, OUTER, False,
                PASS == GRAD_VALUE and NORMALIZE != "none",
            )  # fmt: skip
            other_extra = others_seen.to(tl.float32)
            if PASS == GRAD_KEY:
                other_extra = load_number(minus_delta, batch, other, others, others_seen)
            if CAREFUL:
                spoilt = spoilt_rows(tl.trans(b_tile)) | spoilt_rows(c_tile)
                spoilt = spoilt | ((tl.abs(other_extra) < float("inf")) == 0)
                b_tile = tl.where(spoilt[None, :], tl.zeros_like(b_tile), b_tile)
                c_tile, other_extra = without(spoilt, c_tile), tl.where(spoilt, 0.0, other_extra)
            scores = tl.dot(a_tile, b_tile, input_precision=PRECISION)
            if AUGMENTED:
                scores += extra[:, None] * other_extra[None, :]
            faded = b_tile.to(tl.float32)
            if sequence.faded is not None:
                gap = until[:, None] - until[None, :]
                gap = -gap if BACKWARDS else gap
                scores *= tl.exp(tl.minimum(gap, 0.0))
                fade = tl.exp(until if BACKWARDS else whole - until)
                faded, other_extra = faded * fade[None, :], other_extra * fade
            if CAREFUL:
                scores = tl.where(spoilt[None, :], float("nan"), scores)
            scores = tl.where(meet, scores, 0.0)
            total += tl.sum(scores, 1)
            narrowed, factor = narrow(scores, c_tile.dtype, 1)
            found += tl.dot(narrowed, c_tile, input_precision=PRECISION) * factor
            matrix += tl.dot(faded.to(c_tile.dtype), c_tile, input_precision=PRECISION)
            if PASS == OUTPUT:
                vector += tl.sum(faded, 1)
            if AUGMENTED:
                vector += tl.sum(other_extra[:, None] * c_tile.to(tl.float32), 0)
            if CAREFUL:
                poison = tl.where(tl.max(spoilt.to(tl.int32), 0) > 0, float("nan"), 0.0)
                matrix, vector = matrix + poison, vector + poison
    store_result(
        result, numbers, through, eps, (batch, head, common, tile), rows, exist, seen, outer,
        found, total, OUTER, THROUGH_SHARE, PASS, NORMALIZE, NUMBERS,
    )  # fmt: skip
    return matrix, vector
