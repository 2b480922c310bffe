"""Linear attention on Hopper, wide: heads of up to 256 channels, every pass by one kernel.

The passes are those of `saccade.ops.linear_attention.triton.chunk_scan`, with its names for what
stands where:

    result_p = Σ_r (a_p · b_r + α_p β_r) · c_r         over rows r of this chunk that p sees
             + a_p · Σ_r b_r c_rᵀ + α_p Σ_r β_r c_r    over rows r of the chunks visited before

    pass          a           b           c           α, β        direction
    output        φ(query)    φ(key)      value       –           forwards
    grad_query    grad        value       φ(key)      −δ, 1       forwards
    grad_key      value       grad        φ̂(query)    1, −δ       backwards
    grad_value    φ(key)      φ̂(query)    grad        –           backwards

A program computes 128 channels of the result: two consumers 64 each, whose state of all channels
of b is half of their registers. Another partition loads rows, and maps them where they lie
(features_d256.py). The state is narrowed in halves, which take turns in shared memory.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.hopper.pipeline import (
    as_operand,
    fence_async_shared,
    here,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.language import gl, gluon
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.backward_dq import derivative
from saccade.ops.linear_attention.hopper.backward_rows import (
    keys_seen,
    position_of,
    queries_seeing,
    within,
)
from saccade.ops.linear_attention.hopper.features import narrowed, only
from saccade.ops.linear_attention.hopper.features_d256 import (
    FACTOR,
    MINUS_DELTA,
    make_wide_rings,
    map_inner,
    map_outer,
)
from saccade.ops.linear_attention.hopper.forward import row_of_output, store_output, store_totals
from saccade.ops.linear_attention.hopper.program import (
    BLOCK,
    channel_of,
    chunks_of,
    head_of,
    keep_nonfinite,
    keys_there,
    state_number,
    tile_of_values,
)
from saccade.ops.linear_attention.triton.chunk_scan import (
    GRAD_KEY,
    GRAD_QUERY,
    GRAD_VALUE,
    OUTPUT,
    divisor_of,
)

MAPPER_WARPS = gl.constexpr(8)  # which load, too
HALF = gl.constexpr(128)  # inner channels that are narrowed at once


class WideMeta(NamedTuple):
    """What is known of the call, and how the kernel runs, when it is compiled."""

    HEADS_PER_A: int
    HEADS_PER_B: int
    HEADS_PER_C: int
    HEADS_PER_SOURCE: int
    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    TILES: int
    SEGMENTS: int
    PASS: str
    BOTTOM_RIGHT: bool
    STARTED: bool
    FEATURE_MAP: str
    SCALE: Any
    NORMALIZE: str
    STAGES: int
    CONSUMER_REGISTERS: int
    MAPPER_REGISTERS: int


@gluon.jit(do_not_specialize=["eps"])
def linear_wide(
    a_desc, b_desc, c_desc, source_desc, result_desc, per_row, kept, before, after, sizes, eps,
    META: gl.constexpr,
):  # fmt: skip
    """One program: 128 channels of all rows of a head, or of one segment of them.

    source_desc: the rows that a gradient of features is of. per_row: RowNumbers, for gradients.
    before, after: states (Sums) that the segment starts from and ends with, or None. So many
    (HEADS_PER_A, …) output heads share one of each operand, and of states (GROUP).
    """
    INNER: gl.constexpr = META.PASS == OUTPUT or META.PASS == GRAD_VALUE  # channels that are mapped
    rings = make_wide_rings(a_desc, c_desc, source_desc, META.STAGES)
    gl.warp_specialize(
        [
            (consume, (
                source_desc, result_desc, kept, before, after, sizes, eps, rings, META.GROUP,
                META.HEAD_DIM, META.VALUE_DIM, META.TILES, META.SEGMENTS, META.PASS,
                META.BOTTOM_RIGHT, META.STARTED, META.FEATURE_MAP, META.SCALE, META.NORMALIZE, 0,
            )),
            (consume, (
                source_desc, result_desc, kept, before, after, sizes, eps, rings, META.GROUP,
                META.HEAD_DIM, META.VALUE_DIM, META.TILES, META.SEGMENTS, META.PASS,
                META.BOTTOM_RIGHT, META.STARTED, META.FEATURE_MAP, META.SCALE, META.NORMALIZE, 1,
            )),
            (map_inner if INNER else map_outer, (
                (a_desc, b_desc, c_desc, source_desc), per_row, kept, before, after, sizes, rings,
                META.GROUP, META.HEAD_DIM, META.TILES, META.SEGMENTS, META.PASS, META.BOTTOM_RIGHT,
                META.STARTED, META.FEATURE_MAP, META.SCALE, META.NORMALIZE, (META.HEADS_PER_A,
                META.HEADS_PER_B, META.HEADS_PER_C, META.HEADS_PER_SOURCE),
            )),
        ],
        [4, MAPPER_WARPS],
        [META.CONSUMER_REGISTERS, META.MAPPER_REGISTERS],
    )  # fmt: skip


# ---- summing ------------------------------------------------------------------------------------


@gluon.jit
def consume(
    source_desc, result_desc, kept, before, after, sizes, eps, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, TILES: gl.constexpr,
    SEGMENTS: gl.constexpr, PASS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    STARTED: gl.constexpr, FEATURE_MAP: gl.constexpr, SCALE: gl.constexpr,
    NORMALIZE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 channels of the result, chunk by chunk."""
    BACKWARDS: gl.constexpr = PASS != OUTPUT and PASS != GRAD_QUERY
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    batch, head = head_of(sizes, WHICH, 2, TILES, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, BACKWARDS)
    number = state_number(sizes, batch, head, GROUP, SEGMENTS)
    channel = channel_of(WHICH, 2, TILES, SEGMENTS)
    there = batch < sizes.batches
    num_keys = keys_there(kept, sizes, batch)
    seen = keys_seen(num_keys)
    if PASS == GRAD_QUERY:
        seen = queries_seeing(sizes, shift, num_keys, there, STARTED)
    sums = (
        start_half(before, number, channel, 0, HEAD_DIM, VALUE_DIM, PASS),
        start_half(before, number, channel, 1, HEAD_DIM, VALUE_DIM, PASS),
    )
    narrow_half(sums[0], rings, WHICH, 0 * chunks)
    head_index = batch * sizes.heads + head
    writes = there & (tile_of_values(TILES, SEGMENTS) == 0)
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, BACKWARDS)
        row = position
        if not BACKWARDS:
            row = position - shift
        sums, found, number_of_row = fold_chunk(sums, rings, iteration, PASS, NORMALIZE, WHICH)
        rings.a.release(iteration)  # and with it b and c
        if PASS == OUTPUT:
            if NORMALIZE != "none":
                divisor = divisor_of(number_of_row, eps, NORMALIZE)
                found = found * gl.where(divisor == 0, 0.0, 1.0 / divisor)[:, None]
            done = found.to(result_desc.dtype)
        else:
            if PASS == GRAD_QUERY:
                found = found * number_of_row[:, None]
            if source_desc is not None:
                rings.source.wait(iteration)
                rows = rings.source.tile_of(iteration, WHICH).load(LAYOUT).to(gl.float32)
                found = found * derivative(rows, FEATURE_MAP)
                rings.source.release_loaded(iteration)
            done = only(
                found.to(result_desc.dtype), within(seen, position, gl.SliceLayout(1, LAYOUT))
            )
        at = row_of_output(sizes, batch, head, row, channel)
        store_output(result_desc, rings, at, done, iteration, WHICH)
        if PASS == OUTPUT and NORMALIZE != "none" and WHICH == 0:  # under the next products
            store_totals(kept.normaliser, sizes, head_index, row, writes, number_of_row)
    keep_nonfinite(kept.nonfinite, sums, sizes, batch, head, there, 2, TILES, SEGMENTS, WHICH)
    if after is not None:
        writes = there & (head % GROUP == 0)
        for half in gl.static_range(2):
            position, inside = half_at(number, channel, half, HEAD_DIM, VALUE_DIM, PASS)
            gl.store(after.matrix + position, sums[half], mask=inside & writes)
    wait_for_stores()


@gluon.jit
def fold_chunk(
    sums, rings, iteration, PASS: gl.constexpr, NORMALIZE: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """The sums with a chunk added, their first half narrowed; what its rows find; their totals, or
    what multiplies them at last. Nothing else of the chunk is needed then.

    In registers scores have become weights before anything is found. A half is narrowed when no
    product reads the other one any more, and before one adds to it.
    """
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    origin = here(iteration - iteration)
    rings.wait_for_mapped(iteration)
    a, b = rings.a.at(iteration), rings.b.at(iteration)
    c = rings.c.at(iteration).slice(WHICH * BLOCK, BLOCK, dim=1)
    memory = rings.narrowed.index(origin + WHICH)
    scores = warpgroup_mma(a, b.permute((1, 0)), nothing, use_acc=False, is_async=True)
    one = warpgroup_mma(c.permute((1, 0)), b.slice(0, HALF, dim=1), sums[0], is_async=True)
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights, number_of_row = weights_of(scores, rings, iteration, PASS, NORMALIZE)
    found = found_at_first(rings, iteration, PASS, NORMALIZE, WHICH)
    found = warpgroup_mma(
        a.slice(0, HALF, dim=1), memory.permute((1, 0)), found,
        use_acc=PASS != OUTPUT and PASS != GRAD_VALUE, is_async=True,
    )  # fmt: skip
    found = warpgroup_mma(weights, c, found, is_async=True)
    found, one = warpgroup_mma_wait(0, deps=[found, one])
    narrow_half(sums[1], rings, WHICH, origin)
    found = warpgroup_mma(a.slice(HALF, HALF, dim=1), memory.permute((1, 0)), found, is_async=True)
    two = warpgroup_mma(c.permute((1, 0)), b.slice(HALF, HALF, dim=1), sums[1], is_async=True)
    found = warpgroup_mma_wait(1, deps=[found])
    narrow_half(one, rings, WHICH, origin)
    two = warpgroup_mma_wait(0, deps=[two])
    return (one, two), found, number_of_row


@gluon.jit
def weights_of(scores, rings, iteration, PASS: gl.constexpr, NORMALIZE: gl.constexpr):
    """Scores as weights, 0 where a row does not see another one; and a number of each row: of the
    output its sum of scores, of grad_query the factor."""
    BACKWARDS: gl.constexpr = PASS != OUTPUT and PASS != GRAD_QUERY
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    if NORMALIZE != "none":
        if PASS == GRAD_QUERY:
            minus_delta = rings.numbers_of(iteration, MINUS_DELTA).load(gl.SliceLayout(1, LAYOUT))
            scores = scores + minus_delta[:, None]
        elif PASS == GRAD_KEY:
            minus_delta = rings.numbers_of(iteration, MINUS_DELTA).load(gl.SliceLayout(0, LAYOUT))
            scores = scores + minus_delta[None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    if BACKWARDS:
        scores = gl.where(row <= column, scores, 0.0)
    else:
        scores = gl.where(row >= column, scores, 0.0)
    number_of_row = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, LAYOUT))
    if PASS == OUTPUT and NORMALIZE != "none":
        number_of_row = gl.sum(scores, 1)
        for which in gl.static_range(4):
            number_of_row += rings.part_of(iteration, which).load(gl.SliceLayout(1, LAYOUT))
    elif PASS == GRAD_QUERY:
        number_of_row = rings.numbers_of(iteration, FACTOR).load(gl.SliceLayout(1, LAYOUT))
    return as_operand(narrowed(scores), gl.bfloat16, LAYOUT), number_of_row


@gluon.jit
def found_at_first(
    rings, iteration, PASS: gl.constexpr, NORMALIZE: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """What rows find without a product: α times the sum of β times rows of c visited before."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    found = gl.zeros([ROWS, BLOCK], gl.float32, LAYOUT)
    if PASS == GRAD_KEY or (PASS == GRAD_QUERY and NORMALIZE != "none"):
        vector = rings.sum_of(iteration).slice(WHICH * BLOCK, BLOCK, dim=0)
        vector = vector.load(gl.SliceLayout(0, LAYOUT))[None, :]
        if PASS == GRAD_QUERY:
            minus_delta = rings.numbers_of(iteration, MINUS_DELTA).load(gl.SliceLayout(1, LAYOUT))
            found = found + minus_delta[:, None] * vector
        else:
            found = found + vector
    return found


@gluon.jit
def narrow_half(sums, rings, WHICH: gl.constexpr, origin):
    """Put half of the sums where products find them. origin: 0."""
    memory = rings.narrowed.index(origin + WHICH)
    memory.store(sums.to(memory.dtype))
    fence_async_shared()


# ---- states in memory ---------------------------------------------------------------------------


@gluon.jit
def half_at(
    number, channel, half, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, PASS: gl.constexpr
):  # fmt: skip
    """Where 64 channels of c times half of those of b are, in elements, and what of them exists."""
    LAYOUT: gl.constexpr = mma_layout(HALF)
    outer = channel + gl.arange(0, BLOCK, gl.SliceLayout(1, LAYOUT))[:, None]
    inner = half * HALF + gl.arange(0, HALF, gl.SliceLayout(0, LAYOUT))[None, :]
    keys, values = inner, outer
    if PASS == GRAD_QUERY or PASS == GRAD_KEY:  # noqa: SIM109 (a constexpr is in no tuple)
        keys, values = outer, inner
    inside = (keys < HEAD_DIM) & (values < VALUE_DIM)
    return number * (HEAD_DIM * VALUE_DIM) + (keys * VALUE_DIM + values), inside


@gluon.jit
def start_half(
    before, number, channel, half, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    PASS: gl.constexpr,
):  # fmt: skip
    """Half of the sums to add to: of nothing, or those that lie in memory."""
    sums = gl.zeros([BLOCK, HALF], gl.float32, mma_layout(HALF))
    if before is not None:
        position, inside = half_at(number, channel, half, HEAD_DIM, VALUE_DIM, PASS)
        sums = gl.load(before.matrix + position, mask=inside, other=0.0)
    return sums
