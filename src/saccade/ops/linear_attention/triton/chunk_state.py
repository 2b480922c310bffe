"""Linear attention, chunk states: where rows meet, and the sums over all rows or a segment of them.

Key row n has place n, a query row has the place of the last key that it sees. A query before the
first key has a negative place, one behind the last key (aligned at the top left) a larger one.

    keys:     Σ φ(key) valueᵀ and Σ φ(key)      queries:    Σ φ̂(query) gradᵀ and Σ −δ φ̂(query)

with φ̂ and δ as in chunk_scan.py. Without causality these are the states that every row reads.
With it they let segments of a long sequence be swept side by side, each from the state that the
ones before it left.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.features import in_units, load_features, load_number, where_also
from saccade.gpu.language import tl, triton
from saccade.gpu.packing import offset
from saccade.gpu.tensor_view import num_rows, wide


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


# ---- places ------------------------------------------------------------------------------------


@triton.jit
def bounds_of(sequence, batch, BOTTOM_RIGHT: tl.constexpr):
    """A sequence in places: that of the first query row; how many query rows, key rows, and keys
    that are there; the first place, and how many there are."""
    query_len, kv_len = num_rows(sequence.queries, batch), num_rows(sequence.keys, batch)
    shift = kv_len - query_len if BOTTOM_RIGHT else 0 * kv_len
    num_keys = kv_len
    if sequence.lengths is not None:
        num_keys = tl.minimum(kv_len, tl.load(sequence.lengths + batch).to(tl.int32))
    first = tl.minimum(shift, 0)
    return shift, query_len, kv_len, num_keys, first, tl.maximum(query_len + shift, kv_len) - first


@triton.jit
def queries_at(bounds, positions, STARTED: tl.constexpr, CAUSAL: tl.constexpr):
    """Query rows at places, which of them exist, and which of those have something to see."""
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
    """Key rows at places, which of them exist, and which of those are there to be seen."""
    return (
        positions,
        (positions >= 0) & (positions < bounds[2]),
        (positions >= 0) & (positions < bounds[3]),
    )


@triton.jit
def summed_decay_until(sequence, batch, head, positions):
    """The sum of decay over all keys up to these places, them included, in float64."""
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
def start_sums(
    sums, number, keys, values, KEYS: tl.constexpr, VALUES: tl.constexpr, STATE: tl.constexpr
):
    """Sums to add to: of nothing, or those that lie in memory if STATE."""
    matrix = tl.zeros([values.shape[0], keys.shape[0]], tl.float32)
    vector = tl.zeros([keys.shape[0]], tl.float32)
    if STATE:
        at, exists, vector_at, vector_exists = sums_at(sums, number, keys, values, KEYS, VALUES)
        matrix += tl.load(at, mask=exists, other=0.0).to(tl.float32)
        vector += tl.load(vector_at, mask=vector_exists, other=0.0).to(tl.float32)
    return matrix, vector


@triton.jit
def keep_sums(
    sums, number, keys, values, matrix, vector, mine, KEYS: tl.constexpr, VALUES: tl.constexpr
):
    """Write sums, if they are this program's to write."""
    at, exists, vector_at, vector_exists = sums_at(sums, number, keys, values, KEYS, VALUES)
    element: tl.constexpr = sums.matrix.dtype.element_ty
    tl.store(at, matrix.to(element), mask=where_also(exists, mine))
    tl.store(vector_at, vector.to(element), mask=where_also(vector_exists, mine))


# ---- fading ------------------------------------------------------------------------------------


@triton.jit
def decays_of(sequence, batch, head, start, CHUNK: tl.constexpr):
    """Within a chunk: the logarithm of how far the state has faded at each place, and over all."""
    positions = start + tl.arange(0, CHUNK)
    before = summed_decay_until(sequence, batch, head, start - 1)
    until = (summed_decay_until(sequence, batch, head, positions) - before).to(tl.float32)
    whole = (summed_decay_until(sequence, batch, head, start + CHUNK - 1) - before).to(tl.float32)
    return until, whole


PARTS = tl.constexpr(16)  # of a sum of rows, each of them the sum of some


# ---- collecting --------------------------------------------------------------------------------


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
    CAUSAL: bool
    BOTTOM_RIGHT: bool
    STARTED: bool
    NORMALIZE: str
    PRECISION: str


@triton.jit
def linear_collect(  # breaks kernel-booleans: three say which rows exist, for queries and keys
    rows, others, factors, weights, sequence, after, META: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of one state, over one segment."""
    program = tl.program_id(0)
    tile, segment = program % META.TILES, (program // META.TILES) % META.SEGMENTS
    head = (program // (META.TILES * META.SEGMENTS)) % META.STATE_HEADS
    batch = program // (META.TILES * META.SEGMENTS * META.STATE_HEADS)
    bounds = bounds_of(sequence, batch, META.BOTTOM_RIGHT)
    inner, outer = (
        tl.arange(0, META.INNER_WIDTH),
        tile * META.OUTER_TILE + tl.arange(0, META.OUTER_TILE),
    )
    matrix, _ = start_sums(after, 0, inner, outer, META.INNER, META.OUTER, False)
    vector = tl.zeros([PARTS, META.INNER_WIDTH], tl.float32)
    chunks = tl.cdiv(bounds[5], META.CHUNK)
    of_segment = tl.cdiv(chunks, META.SEGMENTS)
    num_chunks = tl.maximum(tl.minimum(of_segment, chunks - segment * of_segment), 0)
    for index in range(0, num_chunks):
        chunk = segment * of_segment + (num_chunks - 1 - index if META.QUERIES else index)
        matrix, vector = collect_chunk(
            rows, others, factors, weights, sequence, (batch, head), bounds, bounds[4] + chunk *
            META.CHUNK, inner, outer, matrix, vector, META,
        )  # fmt: skip
    number = (wide(batch) * META.STATE_HEADS + head) * META.SEGMENTS + segment
    # Every tile writes the vector: to one place, and the same.
    keep_sums(after, number, inner, outer, matrix, tl.sum(vector, 0), True, META.INNER, META.OUTER)


@triton.jit
def collect_chunk(  # breaks kernel-booleans: META is that of linear_collect
    rows, others, factors, weights, sequence, at, bounds, start, inner, outer, matrix, vector,
    META: tl.constexpr,
):  # fmt: skip
    """Add one chunk to the sums, after what was there has faded."""
    FACTORED: tl.constexpr = META.QUERIES and META.NORMALIZE != "none"
    batch, head = at
    positions = start + tl.arange(0, META.CHUNK)
    if META.QUERIES:
        here, _, seen = queries_at(bounds, positions, META.STARTED, META.CAUSAL)
    else:
        here, _, seen = keys_at(bounds, positions)
    first = start - bounds[0] if META.QUERIES else start
    decay_factor = seen.to(tl.float32)
    if sequence.summed_decay is not None and (META.CAUSAL or not META.QUERIES):
        until, whole = decays_of(sequence, batch, head, start, META.CHUNK)
        decay_factor = tl.exp(until if META.QUERIES else whole - until)
        matrix, vector = matrix * tl.exp(whole), vector * tl.exp(whole)
    for member in tl.static_range(META.GROUP if META.QUERIES else 1):
        common = head * META.GROUP + member
        wide = load_features(
            rows,
            factors,
            batch,
            common,
            first,
            seen,
            inner,
            META.HEADS_PER_ROWS,
            META.INNER,
            False,
            FACTORED,
        )
        tile_of_others = load_features(
            others,
            factors,
            batch,
            common,
            first,
            seen,
            outer,
            META.HEADS_PER_OTHERS,
            META.OUTER,
            True,
            False,
        )
        summed_decay = wide.to(tl.float32) * decay_factor[:, None]
        narrowed, unit = in_units(summed_decay, tile_of_others.dtype, FACTORED)
        matrix += tl.dot(tile_of_others, narrowed, input_precision=META.PRECISION) * unit
        if META.QUERIES:
            summed_decay = summed_decay * load_number(weights, batch, common, here, seen)[:, None]
        vector += in_parts(summed_decay)
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
