"""Normalizers of linear attention, and what backward passes make of them, ahead of the scans.

    total_p = φ(query_p) · Σ_r decay(p, r) φ(key_r)

A scan for the output takes these sums along, and maps rows where it multiplies them. But each tile
of channels has a program of its own, and with many tiles all that would be done as often as there
are tiles.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.features import load_features, where_also
from saccade.gpu.kernel_args import there_are
from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import Launch, next_width
from saccade.gpu.tensor_view import (
    load_numbers,
    load_rows,
    num_rows,
    pad_rows,
    row_pointers,
    store_numbers,
    tile_pointers,
    wide,
)
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.triton.chunk_scan import quotient_of
from saccade.ops.linear_attention.triton.chunk_state import (
    bounds_of,
    decays_of,
    keys_at,
    queries_at,
)
from saccade.ops.linear_attention.triton.configs import counting
from saccade.ops.linear_attention.triton.passes import (
    LinearBackwardInputs,
    Passes,
    State,
)

MANY_TILES = 4  # whose sums cost more than a pass of their own


def counts_first(passes: Passes) -> bool:
    """Whether sums of scores are taken before the output, once for all tiles of its channels."""
    variant = passes.spec.variant
    wanted = variant.causal and variant.normalize != "none"
    return wanted and passes.tiles(passes.spec.value_dim) >= MANY_TILES


def count(
    passes: Passes, totals: Tensor, before: State | None, after: State | None, segments: int
) -> tuple[Tensor, Tensor]:
    """Write each row's sum of scores and, into the last states, the sum of keys.

    Features of queries and of keys come back: the rows themselves where nothing maps them.
    """
    spec, (query, key) = passes.spec, passes.inputs[:2]
    mapped = query, key
    if maps := spec.variant.feature_map != "identity" or spec.variant.scale != 1.0:
        mapped = query.new_empty(query.shape), key.new_empty(key.shape)
    launch = passes.launch(
        linear_count,
        CountMeta,
        ("count", segments, before is None, after is None, *(rows.stride() for rows in mapped)),
        counting(spec.config),
        HEADS_PER_QUERY=passes.heads_per(spec.query_heads),
        HEADS_PER_KEY=passes.heads_per(spec.key_heads),
        SEGMENTS=segments,
        INNER=spec.head_dim,
        INNER_WIDTH=next_width(spec.head_dim),
        OF_SEGMENTS=spec.config.chunk,
        MAPS=maps,
    )
    ends = None if before is None else before[1], None if after is None else after[1]

    def arguments() -> tuple[Any, ...]:
        rows = passes.queries(), passes.keys(), passes.per_row(totals)
        into = passes.query_side(mapped[0]), passes.key_side(mapped[1])
        return (*rows, *into, passes.sequence(), *ends)

    tensors = (*passes.known(), totals, *mapped, *there_are(ends))
    launch(spec.sequences * spec.heads * segments, spec.device, tensors, arguments)
    return mapped


class CountMeta(NamedTuple):
    """What is known of the sums of scores when their kernel is compiled."""

    HEADS_PER_QUERY: int
    HEADS_PER_KEY: int
    GROUP: int
    STATE_HEADS: int
    SEGMENTS: int
    INNER: int
    INNER_WIDTH: int
    CHUNK: int
    OF_SEGMENTS: int
    ALIGN: str
    STARTED: bool
    PRECISION: str
    MAPS: bool


@triton.jit
def linear_count(
    query, key, totals, mapped_query, mapped_key, sequence, before, after, META: tl.constexpr,
):  # fmt: skip
    """One program: all rows of a head, or of one segment of them, cut for chunks of OF_SEGMENTS."""
    program = tl.program_id(0)
    segment = program % META.SEGMENTS
    head = (program // META.SEGMENTS) % (META.STATE_HEADS * META.GROUP)
    batch = program // (META.SEGMENTS * META.STATE_HEADS * META.GROUP)
    bounds = bounds_of(sequence, batch, META.ALIGN)
    pad_rows(totals, 0.0, 1, 1)
    inner = tl.arange(0, META.INNER_WIDTH)
    number = (wide(batch) * META.STATE_HEADS + head // META.GROUP) * META.SEGMENTS + segment
    vector = tl.zeros([META.INNER_WIDTH], tl.float32)
    if before is not None:
        vector += tl.load(before + number * META.INNER + inner, mask=inner < META.INNER, other=0.0)
    chunks = tl.cdiv(bounds[5], META.CHUNK)
    of_segment = tl.cdiv(tl.cdiv(bounds[5], META.OF_SEGMENTS), META.SEGMENTS) * (
        META.OF_SEGMENTS // META.CHUNK
    )
    num_chunks = tl.maximum(tl.minimum(of_segment, chunks - segment * of_segment), 0)
    for index in range(0, num_chunks):
        start = bounds[4] + (segment * of_segment + index) * META.CHUNK
        positions = start + tl.arange(0, META.CHUNK)
        rows, exist, seen = queries_at(bounds, positions, META.STARTED, True)
        _, keys_exist, keys_seen = keys_at(bounds, positions)
        query_features = load_features(
            query, None, batch, head, start - bounds[0], seen, inner, META.HEADS_PER_QUERY,
            META.INNER, False, False,
        )  # fmt: skip
        total = tl.sum(query_features.to(tl.float32) * vector[None, :], 1)
        key_features = load_features(
            key, None, batch, head, start, keys_seen, inner, META.HEADS_PER_KEY, META.INNER, False,
            False,
        )  # fmt: skip
        element: tl.constexpr = key.rows.ptr.dtype.element_ty
        if META.MAPS:
            writes, first = where_also(exist, head % META.HEADS_PER_QUERY == 0), start - bounds[0]
            store_rows(
                mapped_query, batch, head // META.HEADS_PER_QUERY, first, writes, inner,
                query_features, META.INNER,
            )  # fmt: skip
            writes = where_also(keys_exist, head % META.HEADS_PER_KEY == 0)
            store_rows(
                mapped_key, batch, head // META.HEADS_PER_KEY, start, writes, inner, key_features,
                META.INNER,
            )  # fmt: skip
        decayed = key_features.to(tl.float32)
        if sequence.summed_decay is not None:
            until, whole = decays_of(sequence, batch, head // META.GROUP, start, META.CHUNK)
            total *= tl.exp(until)
            vector, decayed = vector * tl.exp(whole), decayed * tl.exp(whole - until)[:, None]
        vector += tl.sum(decayed, 0)
        left, right = query_features.to(element), tl.trans(key_features.to(element))
        scores = tl.dot(left, right, input_precision=META.PRECISION)
        if sequence.summed_decay is not None:
            scores *= tl.exp(tl.minimum(until[:, None] - until[None, :], 0.0))
        total += tl.sum(tl.where(positions[None, :] <= positions[:, None], scores, 0.0), 1)
        at = row_pointers(totals, batch, head, rows, 0)
        tl.store(at, tl.where(seen, total, 0.0), mask=exist)
    if after is not None:
        writes = where_also(inner < META.INNER, head % META.GROUP == 0)
        tl.store(after + number * META.INNER + inner, vector, mask=writes)


@triton.jit
def store_rows(rows, batch, head, first, writes, channels, features, DIM: tl.constexpr):
    """Store adjacent rows from `first` on, where they are this program's."""
    pointers = tile_pointers(rows, batch, head, first, channels[None, :], writes.shape[0], True)
    inside = writes[:, None] & (channels < DIM)[None, :]
    tl.store(pointers, features.to(rows.ptr.dtype.element_ty), mask=inside)


# ---- row dot -------------------------------------------------------------------------------------
# What all scans of a backward pass need of each query row.
#
#     factor = 1 / divisor
#     minus_delta = −(grad_output · output) · ∂divisor/∂total
#
# Source: the derivative of a quotient; see chunk_scan.py.


@triton.jit
def linear_row_dot(
    output, grad_output, totals, factors, minus_delta, eps,  # Views, and a number
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, QUERY_TILE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head."""
    batch, head, tile, _ = output.find(tl.program_id(0), output.data, QUERY_TILE)
    length = num_rows(output, batch)
    rows = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)
    attended = load_rows(output, batch, head, rows, length, VALUE_DIM, VALUE_WIDTH, False)
    grad = load_rows(grad_output, batch, head, rows, length, VALUE_DIM, VALUE_WIDTH, False)
    total = load_numbers(totals, batch, head, rows, length, 0.0)
    factor, slope = quotient_of(total, eps, NORMALIZE)
    dot = tl.sum(attended.to(tl.float32) * grad.to(tl.float32), 1) * slope
    store_numbers(factors, batch, head, rows, length, factor)
    store_numbers(minus_delta, batch, head, rows, length, -dot)


ROW_DOT_TILE = 64


# ---- rows --------------------------------------------------------------------------------------


def upstream_of(
    passes: Passes, output: Tensor, normaliser: Tensor, grad_output: Tensor
) -> LinearBackwardInputs:
    """The output's gradients, 1 / divisor and −δ."""
    if grad_output.stride(-1) != 1:
        grad_output = grad_output.contiguous()
    spec, inputs = passes.spec, passes.inputs
    rows = (spec.heads, spec.query_len)
    rows = rows if spec.packed else (spec.sequences, *rows)
    if spec.variant.normalize == "none":
        return LinearBackwardInputs(
            grad_output, None, grad_output.new_zeros(rows, dtype=torch.float32)
        )
    factors, minus_delta = (grad_output.new_empty(rows, dtype=torch.float32) for _ in range(2))

    def make() -> Launch:
        constants = {
            "VALUE_DIM": spec.value_dim,
            "VALUE_WIDTH": next_width(spec.value_dim),
            "QUERY_TILE": ROW_DOT_TILE,
            "NORMALIZE": spec.variant.normalize,
        }
        return Launch(linear_row_dot, constants, {"num_warps": 4, "num_stages": 1})

    def arguments() -> tuple[Any, ...]:
        offsets = inputs.cu_seqlens_q
        return (
            *(spec.side(rows, offsets, keys=False) for rows in (output, grad_output)),
            *(
                spec.numbers(numbers, offsets, keys=False)
                for numbers in (normaliser, factors, minus_delta)
            ),
            spec.variant.eps,
        )

    launch = remembered(spec.launches, ("row_dot", output.stride(), grad_output.stride()), make)
    tensors = [output, grad_output, normaliser, factors, minus_delta]
    if inputs.cu_seqlens_q is not None:
        tensors.append(inputs.cu_seqlens_q)
    launch(spec.row_programs(ROW_DOT_TILE), spec.device, tensors, arguments)
    return LinearBackwardInputs(grad_output, factors, minus_delta)
