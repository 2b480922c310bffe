"""Linear attention, chunk states: the sums over all rows of one side, or over one segment of them.

    keys:     Σ φ(key) valueᵀ and Σ φ(key)      queries:    Σ φ̂(query) gradᵀ and Σ −δ φ̂(query)

with φ̂ and δ as in chunk_scan.py. Without causality these are the states that every row reads.
With it they let segments of a long sequence be swept side by side, each from the state that the
ones before it left.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

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


class CollectMeta(NamedTuple):
    """What is known of the sums over one side when their kernel is compiled."""

    HEADS_PER_ROWS: Any
    HEADS_PER_OTHERS: Any
    GROUP: Any
    STATE_HEADS: Any
    SEGMENTS: Any
    INNER: Any
    INNER_WIDTH: Any
    OUTER: Any
    OUTER_TILE: Any
    TILES: Any
    CHUNK: Any
    QUERIES: Any
    CAUSAL: Any
    BOTTOM_RIGHT: Any
    STARTED: Any
    NORMALIZE: Any
    PRECISION: Any


@triton.jit
def linear_collect(
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
def collect_chunk(
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
