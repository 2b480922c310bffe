"""Linear attention, chunk states: where rows meet, and the sums over all rows or a segment of them.

The position of key row n is n, that of a query row is the one of the last key that it sees. A query
before the first key has a negative one, one behind the last key (aligned at the top left) a larger
one.

    keys:     Σ φ(key) valueᵀ and Σ φ(key)      queries:    Σ φ̂(query) gradᵀ and Σ −δ φ̂(query)

with φ̂ and δ as in chunk_scan.py. Without causality these are the states that every row reads.
With it they let segments of a long sequence be scanned side by side, each from the state that the
ones before it left.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.features import load_features, load_number, narrow, scaled_features, where_also
from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import nonfinite_rows, num_rows, offset, wide, without


class Sequence(NamedTuple):
    """Where rows meet: both sides as Views, and how far keys go."""

    queries: Any
    keys: Any
    lengths: Any  # int64 [batch] in memory, or None
    # float64 sums of decay before each key row: (address, batch step, head step), or None
    summed_decay: Any
    offsets: Any  # where packed sequences start in `summed_decay`, or None
    slots: Any  # int64 [batch]: where each sequence's state lies; None: in order
    num_states: Any  # None where slots are


class Sums(NamedTuple):
    """States in memory: [sequences, heads, segments, head_dim, value_dim] and a vector of each."""

    matrix: Any
    vector: Any


# ---- positions -------------------------------------------------------------------------------


@triton.jit
def bounds_of(sequence, batch, ALIGN: tl.constexpr):
    """A sequence in places: that of the first query row; how many query rows, key rows, and keys
    that are there; the first position, and how many there are."""
    query_len, kv_len = num_rows(sequence.queries, batch), num_rows(sequence.keys, batch)
    shift = kv_len - query_len if ALIGN == "bottom_right" else 0 * kv_len
    num_keys = kv_len
    if sequence.lengths is not None:
        num_keys = tl.minimum(kv_len, tl.load(sequence.lengths + batch).to(tl.int32))
    first = tl.minimum(shift, 0)
    return shift, query_len, kv_len, num_keys, first, tl.maximum(query_len + shift, kv_len) - first


@triton.jit
def queries_at(bounds, positions, STARTED: tl.constexpr, CAUSAL: tl.constexpr):
    """Query rows at positions, which of them exist, and which of those have something to see."""
    rows = positions - bounds[0]
    exist = (rows >= 0) & (rows < bounds[1])
    see = exist
    if not STARTED:  # nothing before the first key, unless a state came before it
        see = where_also(see, bounds[3] > 0)
        if CAUSAL:
            see = see & (positions >= 0)
    return rows, exist, see


@triton.jit
def keys_at(bounds, positions):
    """Key rows at positions, which of them exist, and which of those are there to be seen."""
    return (
        positions,
        (positions >= 0) & (positions < bounds[2]),
        (positions >= 0) & (positions < bounds[3]),
    )


@triton.jit
def summed_decay_until(sequence, batch, head, positions):
    """The sum of decay over all keys up to these positions, them included, in float64."""
    inside = tl.minimum(tl.maximum(positions + 1, 0), num_rows(sequence.keys, batch))
    if sequence.offsets is not None:
        inside = inside + offset(sequence.keys.data, batch)
    base = sequence.summed_decay[0] + (
        wide(batch) * sequence.summed_decay[1] + wide(head) * sequence.summed_decay[2]
    )
    return tl.load(base + inside)


# ---- states in memory --------------------------------------------------------------------------


@triton.jit
def state_of(sequence, batch):
    """Which state of the memory is a sequence's: one that is there, whatever slots say."""
    slot = wide(batch)
    if sequence.slots is not None:
        slot = tl.load(sequence.slots + batch)
        slot = tl.minimum(tl.maximum(slot, 0), sequence.num_states - 1)
    return slot


@triton.jit
def sums_at(sums, number, keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Pointers to a state [values, keys] and to its vector of keys, and what of the two exists.

    `keys` and `values` are channels, of KEYS and VALUES in all; in memory those of keys come first.
    """
    position = keys[None, :] * VALUES + values[:, None]
    matrix = sums.matrix + (wide(number) * (KEYS * VALUES) + position)
    exists = (keys < KEYS)[None, :] & (values < VALUES)[:, None]
    return matrix, exists, sums.vector + (wide(number) * KEYS + keys), keys < KEYS


@triton.jit
def start_sums(sums, number, keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr):
    """Sums to add to: those that lie in memory, or zeros."""
    matrix = tl.zeros([values.shape[0], keys.shape[0]], tl.float32)
    vector = tl.zeros([keys.shape[0]], tl.float32)
    if sums is not None:
        at, exists, vector_at, vector_exists = sums_at(sums, number, keys, values, KEYS, VALUES)
        matrix += tl.load(at, mask=exists, other=0.0).to(tl.float32)
        vector += tl.load(vector_at, mask=vector_exists, other=0.0).to(tl.float32)
    return matrix, vector


@triton.jit
def keep_sums(
    sums, number, keys, values, matrix, vector, writes, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    """Write sums, if the program `writes`: of several that have the same, one."""
    at, exists, vector_at, vector_exists = sums_at(sums, number, keys, values, KEYS, VALUES)
    element: tl.constexpr = sums.matrix.dtype.element_ty
    tl.store(at, matrix.to(element), mask=where_also(exists, writes))
    tl.store(vector_at, vector.to(element), mask=where_also(vector_exists, writes))


# ---- fading ------------------------------------------------------------------------------------


@triton.jit
def decays_of(sequence, batch, head, start, CHUNK: tl.constexpr):
    """Within a chunk: the logarithm of the state's decay up to each position, and over all."""
    positions = start + tl.arange(0, CHUNK)
    before = summed_decay_until(sequence, batch, head, start - 1)
    until = (summed_decay_until(sequence, batch, head, positions) - before).to(tl.float32)
    whole = (summed_decay_until(sequence, batch, head, start + CHUNK - 1) - before).to(tl.float32)
    return until, whole


# ---- programs ------------------------------------------------------------------------------------


@triton.jit
def program_of(sequence, HEADS: tl.constexpr, META: tl.constexpr):
    """A program's batch entry, head, tile and segment; its sequence's bounds; inner channels, and
    those of its tile."""
    program = tl.program_id(0)
    tile, segment = program % META.TILES, (program // META.TILES) % META.SEGMENTS
    head = (program // (META.TILES * META.SEGMENTS)) % HEADS
    batch = program // (META.TILES * META.SEGMENTS * HEADS)
    bounds = bounds_of(sequence, batch, META.ALIGN)
    inner = tl.arange(0, META.INNER_WIDTH)
    outer = tile * META.OUTER_TILE + tl.arange(0, META.OUTER_TILE)
    return batch, head, tile, segment, bounds, inner, outer


@triton.jit
def state_number(sequence, batch, state_head, segment, META: tl.constexpr):
    """Which of the states in memory a program's segment starts from, and ends with."""
    of_head = wide(state_of(sequence, batch)) * META.STATE_HEADS + state_head
    return of_head * META.SEGMENTS + segment


@triton.jit
def chunks_of(bounds, segment, META: tl.constexpr):
    """The first chunk of a segment, and how many it has."""
    chunks = tl.cdiv(bounds[5], META.CHUNK)
    of_segment = tl.cdiv(chunks, META.SEGMENTS)
    first = segment * of_segment
    return first, tl.maximum(tl.minimum(of_segment, chunks - first), 0)


# ---- a chunk ------------------------------------------------------------------------------------
# What its rows add to a state, and what rows of the other side find in them and in the state.


@triton.jit
def add_rows(
    mapped, plain, factors, weights, batch, head, first, seen, decay_factor, keys, values, state,
    HEADS_PER_MAPPED: tl.constexpr, HEADS_PER_PLAIN: tl.constexpr, KEYS: tl.constexpr,
    VALUES: tl.constexpr, DECAYED: tl.constexpr, SUMMED: tl.constexpr, NAN_SAFE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The state with a chunk of keys and values added to it, or of queries and gradients.

    mapped: the Operand of features, each row times its number of `factors` if there are any. plain:
    the one of values or gradients. weights: β of each row; None: 1. SUMMED: whether the vector of
    the state is wanted.

    Returns:
        The state, and the chunk: plain rows [channels, rows], features [rows, channels], what they
        are to be multiplied by, β, and which rows are nonfinite.
    """
    matrix, vector = state
    extra = seen.to(tl.float32)
    if weights is not None:
        extra = load_number(weights, batch, head, first + tl.arange(0, seen.shape[0]), seen)
    wide_rows = load_features(
        mapped, factors, batch, head, first, seen, keys, HEADS_PER_MAPPED, KEYS, False, factors is
        not None,
    )  # fmt: skip
    plain_rows = load_features(
        plain, None, batch, head, first, seen, values, HEADS_PER_PLAIN, VALUES, True, False
    )
    nonfinite = seen
    if NAN_SAFE:
        nonfinite = nonfinite_rows(wide_rows) | nonfinite_rows(tl.trans(plain_rows))
        nonfinite = nonfinite | ((tl.abs(extra) < float("inf")) == 0)
        plain_rows = tl.where(nonfinite[None, :], tl.zeros_like(plain_rows), plain_rows)
        wide_rows, extra = without(nonfinite, wide_rows), tl.where(nonfinite, 0.0, extra)
    decayed = wide_rows
    if DECAYED:
        decayed = wide_rows.to(tl.float32) * decay_factor[:, None]
    if SUMMED:
        if weights is not None:
            vector += tl.sum(decayed.to(tl.float32) * extra[:, None], 0)
        else:
            vector += tl.sum(decayed.to(tl.float32), 0)
    features, feature_scale = scaled_features(wide_rows, plain_rows.dtype, factors is not None)
    decayed, decayed_scale = scaled_features(decayed, plain_rows.dtype, factors is not None)
    matrix += tl.dot(plain_rows, decayed, input_precision=PRECISION) * decayed_scale
    if NAN_SAFE:
        poison = tl.where(tl.max(nonfinite.to(tl.int32), 0) > 0, float("nan"), 0.0)
        matrix, vector = matrix + poison, vector + poison
    return (matrix, vector), (plain_rows, features, feature_scale, extra, nonfinite)


@triton.jit
def scores_of(a_tile, extra, others, OF_PLAIN: tl.constexpr, PRECISION: tl.constexpr):
    """a · b + α β of all pairs of a chunk: b is what is plain, or the features."""
    plain, features, feature_scale, other_extra, _ = others
    if OF_PLAIN:
        scores = tl.dot(a_tile, plain, input_precision=PRECISION)
        scores += extra[:, None] * other_extra[None, :]
    else:
        scores = tl.dot(a_tile, tl.trans(features), input_precision=PRECISION) * feature_scale
    return scores


@triton.jit
def weighed(scores, others, FEATURES: tl.constexpr, PRECISION: tl.constexpr):
    """The sum of rows c by their scores: c is the features, or what is plain."""
    plain, features, feature_scale, _, _ = others
    scores, factor = narrow(scores, plain.dtype, 1)
    if FEATURES:
        found = tl.dot(scores, features, input_precision=PRECISION) * (factor * feature_scale)
    else:
        found = tl.dot(scores, tl.trans(plain), input_precision=PRECISION) * factor
    return found


@triton.jit
def times_sums(tile, sums, factor, PRECISION: tl.constexpr):
    """Rows times narrowed sums [channels, inner]: [rows, channels]."""
    found = tl.dot(tile, tl.trans(sums), input_precision=PRECISION)
    if tile.dtype == tl.float16:
        found = found * tl.trans(factor)
    return found


# ---- collecting --------------------------------------------------------------------------------

PARTS = tl.constexpr(16)  # of a sum of rows, each of them the sum of some


class CollectMeta(NamedTuple):
    """What is known of the sums over one side when their kernel is compiled."""

    HEADS_PER_ROWS: int
    HEADS_PER_OTHERS: int
    GROUP: int
    STATE_HEADS: int
    SEGMENTS: int
    INNER: int
    INNER_WIDTH: int
    OUTER: int
    OUTER_TILE: int
    TILES: int
    CHUNK: int
    QUERIES: bool
    ALIGN: str
    STARTED: bool
    NORMALIZE: str
    PRECISION: str


@triton.jit
def linear_collect(
    rows, others, factors, weights, sequence, after, META: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of one state, over one segment."""
    batch, head, _, segment, bounds, inner, outer = program_of(sequence, META.STATE_HEADS, META)
    matrix, _ = start_sums(None, 0, inner, outer, META.INNER, META.OUTER)
    vector = tl.zeros([PARTS, META.INNER_WIDTH], tl.float32)
    first, num_chunks = chunks_of(bounds, segment, META)
    for index in range(0, num_chunks):
        chunk = first + (num_chunks - 1 - index if META.QUERIES else index)
        matrix, vector = collect_chunk(
            rows, others, factors, weights, sequence, (batch, head), bounds, bounds[4] + chunk *
            META.CHUNK, inner, outer, matrix, vector, META,
        )  # fmt: skip
    number = state_number(sequence, batch, head, segment, META)
    # Every tile writes the vector: to one place, and the same.
    keep_sums(after, number, inner, outer, matrix, tl.sum(vector, 0), True, META.INNER, META.OUTER)


@triton.jit
def collect_chunk(
    rows, others, factors, weights, sequence, at, bounds, start, inner, outer, matrix, vector,
    META: tl.constexpr,
):  # fmt: skip
    """Add one chunk to the sums, after what was there has faded."""
    FACTORED: tl.constexpr = META.QUERIES and META.NORMALIZE != "none"
    batch, head = at
    positions = start + tl.arange(0, META.CHUNK)
    if META.QUERIES:
        row_numbers, _, seen = queries_at(bounds, positions, META.STARTED, META.ALIGN != "all")
    else:
        row_numbers, _, seen = keys_at(bounds, positions)
    first = start - bounds[0] if META.QUERIES else start
    decay_factor = seen.to(tl.float32)
    if sequence.summed_decay is not None and (META.ALIGN != "all" or not META.QUERIES):
        until, whole = decays_of(sequence, batch, head, start, META.CHUNK)
        decay_factor = tl.exp(until if META.QUERIES else whole - until)
        matrix, vector = matrix * tl.exp(whole), vector * tl.exp(whole)
    for member in tl.static_range(META.GROUP if META.QUERIES else 1):
        query_head = head * META.GROUP + member
        features = load_features(
            rows, factors, batch, query_head, first, seen, inner, META.HEADS_PER_ROWS, META.INNER,
            False, FACTORED,
        )  # fmt: skip
        plain = load_features(
            others, factors, batch, query_head, first, seen, outer, META.HEADS_PER_OTHERS,
            META.OUTER, True, False,
        )  # fmt: skip
        decayed = features.to(tl.float32) * decay_factor[:, None]
        narrowed, feature_scale = scaled_features(decayed, plain.dtype, FACTORED)
        matrix += tl.dot(plain, narrowed, input_precision=META.PRECISION) * feature_scale
        if META.QUERIES:
            decayed = decayed * load_number(weights, batch, query_head, row_numbers, seen)[:, None]
        vector += in_parts(decayed)
    return matrix, vector


@triton.jit
def in_parts(features):
    """The sum of rows, as PARTS rows that are yet to be added up: no thread asks another for them.

    Rows that lie so far apart in a tile lie with one thread, at least where a tile is no wider.
    """
    rows: tl.constexpr = features.shape[0] // PARTS
    return tl.sum(tl.reshape(features, [rows, PARTS, features.shape[1]]), 0)


# ---- chaining ------------------------------------------------------------------------------------
# The state that each segment starts from, of what segments add to it:
#
#     start_n = fade_{n−1} · start_{n−1} + part_{n−1}
#
# Few numbers against those of a sequence, but many steps: one kernel takes them all.


NUMBERS = 256  # of a state, which one program follows through the segments


@triton.jit
def linear_chain(
    parts, before, last, decays,  # addresses; fades: a factor for each state and segment, or None
    SIZE: tl.constexpr, SEGMENTS: tl.constexpr, NUMBERS: tl.constexpr, BACKWARDS: tl.constexpr,
):  # fmt: skip
    """One program: NUMBERS of the SIZE of one state. Parts [states, SEGMENTS, SIZE] become starts.

    before: the first start (None: 0). last: what a segment after all others would start from.
    """
    pieces: tl.constexpr = (SIZE + NUMBERS - 1) // NUMBERS
    state, piece = tl.program_id(0) // pieces, tl.program_id(0) % pieces
    at = piece * NUMBERS + tl.arange(0, NUMBERS)
    exists = at < SIZE
    running = tl.zeros([NUMBERS], tl.float32)
    if before is not None:
        running += tl.load(before + (wide(state) * SIZE + at), mask=exists, other=0.0)
    for index in range(0, SEGMENTS):
        segment = SEGMENTS - 1 - index if BACKWARDS else index
        position = parts + ((wide(state) * SEGMENTS + segment) * SIZE + at)
        part = tl.load(position, mask=exists, other=0.0)
        tl.store(position, running, mask=exists)
        if decays is not None:
            running *= tl.load(decays + (wide(state) * SEGMENTS + segment))
        running += part
    tl.store(last + (wide(state) * SIZE + at), running, mask=exists)
