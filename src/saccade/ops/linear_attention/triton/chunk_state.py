"""Linear attention, chunk states: the sums over all rows of one side, or over one segment of them.

    keys:     Σ φ(key) valueᵀ and Σ φ(key)      queries:    Σ φ̂(query) gradᵀ and Σ −δ φ̂(query)

with φ̂ and δ as in chunk_scan.py. Without causality these are the states that every row reads.
With it they let segments of a long sequence be swept side by side, each from the state that the
ones before it left.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.features import in_units, load_features, load_number
from saccade.gpu.tensor_view import wide
from saccade.ops.linear_attention.triton.positions import (
    bounds_of,
    decays_of,
    keep_sums,
    keys_at,
    queries_at,
    start_sums,
)

PARTS = tl.constexpr(16)  # of a sum of rows, each of them the sum of some


@triton.jit
def linear_collect(
    rows, others, factors, weights, sequence, after,  # Views of 1 / divisor and −δ
    HEADS_PER_ROWS: tl.constexpr, HEADS_PER_OTHERS: tl.constexpr, GROUP: tl.constexpr,
    STATE_HEADS: tl.constexpr, SEGMENTS: tl.constexpr,
    INNER: tl.constexpr, INNER_WIDTH: tl.constexpr, OUTER: tl.constexpr, OUTER_TILE: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr, QUERIES: tl.constexpr, CAUSAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, STARTED: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of channels of one state, over one segment."""
    program = tl.program_id(0)
    tile, segment = program % TILES, (program // TILES) % SEGMENTS
    head = (program // (TILES * SEGMENTS)) % STATE_HEADS
    batch = program // (TILES * SEGMENTS * STATE_HEADS)
    bounds = bounds_of(sequence, batch, BOTTOM_RIGHT)
    inner, outer = tl.arange(0, INNER_WIDTH), tile * OUTER_TILE + tl.arange(0, OUTER_TILE)
    matrix, _ = start_sums(after, 0, inner, outer, INNER, OUTER, False)
    vector = tl.zeros([PARTS, INNER_WIDTH], tl.float32)
    chunks = tl.cdiv(bounds[5], CHUNK)
    of_segment = tl.cdiv(chunks, SEGMENTS)
    num_chunks = tl.maximum(tl.minimum(of_segment, chunks - segment * of_segment), 0)
    for index in range(0, num_chunks):
        chunk = segment * of_segment + (num_chunks - 1 - index if QUERIES else index)
        matrix, vector = collect_chunk(
            rows, others, factors, weights, sequence, (batch, head), bounds, bounds[4] + chunk *
            CHUNK, inner, outer, matrix, vector, HEADS_PER_ROWS, HEADS_PER_OTHERS, GROUP, INNER,
            OUTER, CHUNK, QUERIES, CAUSAL, STARTED, NORMALIZE, PRECISION,
        )  # fmt: skip
    number = (wide(batch) * STATE_HEADS + head) * SEGMENTS + segment
    # Every tile writes the vector: to one place, and the same.
    keep_sums(after, number, inner, outer, matrix, tl.sum(vector, 0), True, INNER, OUTER)


@triton.jit
def collect_chunk(
    rows, others, factors, weights, sequence, at, bounds, start, inner, outer, matrix, vector,
    HEADS_PER_ROWS: tl.constexpr, HEADS_PER_OTHERS: tl.constexpr, GROUP: tl.constexpr,
    INNER: tl.constexpr, OUTER: tl.constexpr, CHUNK: tl.constexpr, QUERIES: tl.constexpr,
    CAUSAL: tl.constexpr, STARTED: tl.constexpr, NORMALIZE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add one chunk to the sums, after what was there has faded."""
    FACTORED: tl.constexpr = QUERIES and NORMALIZE != "none"
    batch, head = at
    places = start + tl.arange(0, CHUNK)
    if QUERIES:
        here, _, seen = queries_at(bounds, places, STARTED, CAUSAL)
    else:
        here, _, seen = keys_at(bounds, places)
    first = start - bounds[0] if QUERIES else start
    fade = seen.to(tl.float32)
    if sequence.summed_decay is not None and (CAUSAL or not QUERIES):
        until, whole = decays_of(sequence, batch, head, start, CHUNK)
        fade = tl.exp(until if QUERIES else whole - until)
        matrix, vector = matrix * tl.exp(whole), vector * tl.exp(whole)
    for member in tl.static_range(GROUP if QUERIES else 1):
        common = head * GROUP + member
        wide = load_features(
            rows, factors, batch, common, first, seen, inner, HEADS_PER_ROWS, INNER, False, FACTORED
        )
        tile_of_others = load_features(
            others, factors, batch, common, first, seen, outer, HEADS_PER_OTHERS, OUTER, True, False
        )
        summed_decay = wide.to(tl.float32) * fade[:, None]
        narrowed, unit = in_units(summed_decay, tile_of_others.dtype, FACTORED)
        matrix += tl.dot(tile_of_others, narrowed, input_precision=PRECISION) * unit
        if QUERIES:
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
