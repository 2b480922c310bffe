"""Linear attention on Hopper, collecting: the states of segments alone.

Of keys and values it is what forward.py does without queries, with the same producer and the
same mapping; of queries and gradients of the output, backward_dkdv.py without keys.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.gpu.hopper.pipeline import warpgroup_mma
from saccade.ops.linear_attention.hopper import backward_rows
from saccade.ops.linear_attention.hopper.features import map_features
from saccade.ops.linear_attention.hopper.forward import produce, settled
from saccade.ops.linear_attention.hopper.program import (
    GRADS,
    QUERIES,
    channel_of,
    chunks_of,
    head_of,
    keep_sums,
    start_sums,
    state_number,
)
from saccade.ops.linear_attention.hopper.smem import make_linear_rings, make_sweep_rings


@gluon.jit
def linear_collect(
    key_desc, value_desc, kept, after, sizes,
    HEADS_PER_KEY: gl.constexpr, HEADS_PER_VALUE: gl.constexpr, HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr, TILES: gl.constexpr, SEGMENTS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, FEATURE_MAP: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, MAPPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: one segment of a head of the state, or of two; see `linear_forward`."""
    rings = make_linear_rings(key_desc, BLOCKS, STAGES, 0)
    gl.warp_specialize(
        [
            (add_up, (
                after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, TILES, SEGMENTS, BOTTOM_RIGHT, 0,
            )),
            (add_up, (
                after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, TILES, SEGMENTS, BOTTOM_RIGHT, 1,
            )),
            (map_features, (
                kept, None, after, sizes, rings, 1, HEAD_DIM, BLOCKS, TILES, SEGMENTS,
                BOTTOM_RIGHT, FEATURE_MAP, 1.0, "none", False, 0,
            )),
            (map_features, (
                kept, None, after, sizes, rings, 1, HEAD_DIM, BLOCKS, TILES, SEGMENTS,
                BOTTOM_RIGHT, FEATURE_MAP, 1.0, "none", False, 1,
            )),
            (produce, (
                None, key_desc, value_desc, sizes, rings, 1, HEADS_PER_KEY, HEADS_PER_VALUE, BLOCKS,
                TILES, SEGMENTS, BOTTOM_RIGHT,
            )),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, MAPPER_REGISTERS, MAPPER_REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def add_up(
    after, sizes, rings, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr,
    TILES: gl.constexpr, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Sum up key features times 64 channels of values."""
    batch, head = head_of(sizes, WHICH, BLOCKS, TILES, SEGMENTS)
    _, chunks, _ = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT)
    exists = batch < sizes.batches
    number = state_number(sizes, batch, head, 1, SEGMENTS)
    channel = channel_of(WHICH, BLOCKS, TILES, SEGMENTS)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH  # the first block of this head's features
    sums = start_sums(None, number, exists, channel, HEAD_DIM, VALUE_DIM, BLOCKS)
    for iteration in range(0, chunks):
        rings.wait_for_mapped(iteration)
        rings.values.wait(iteration)
        values = rings.values.tile_of(iteration, WHICH)
        added = ()
        for block in gl.static_range(BLOCKS):
            keys = rings.keys.tile_of(iteration, LEFT + block)
            token = warpgroup_mma(keys.permute((1, 0)), values, sums[block], is_async=True)
            added = added + (token,)  # noqa: RUF005
        sums = settled(added, 0)
        rings.keys.release(iteration)
    keep_sums(after, sums, number, exists, channel, HEAD_DIM, VALUE_DIM)


@gluon.jit
def linear_collect_queries(
    query_desc, grad_desc, given, kept, after, sizes,
    HEADS_PER_QUERY: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    STARTED: gl.constexpr, FEATURE_MAP: gl.constexpr, SCALE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, MAPPER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One program: one segment of a head, or of two; see `linear_backward_keys`."""
    rings = make_sweep_rings(query_desc, 2, BLOCKS, STAGES, 0)
    gl.warp_specialize(
        [
            (add_up_queries, (
                after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, SEGMENTS, BOTTOM_RIGHT, 0,
            )),
            (add_up_queries, (
                after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, SEGMENTS, BOTTOM_RIGHT, 1,
            )),
            (backward_rows.map_queries, (
                given, kept, None, after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, SEGMENTS,
                BOTTOM_RIGHT, STARTED, FEATURE_MAP, SCALE, False, 0,
            )),
            (backward_rows.map_queries, (
                given, kept, None, after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, SEGMENTS,
                BOTTOM_RIGHT, STARTED, FEATURE_MAP, SCALE, False, 1,
            )),
            (backward_rows.produce, (
                query_desc, grad_desc, None, None, None, sizes, rings, HEADS_PER_QUERY, 1, 1,
                BLOCKS, SEGMENTS, BOTTOM_RIGHT, True,
            )),
        ],
        [4, 4, 4, 1],
        [CONSUMER_REGISTERS, MAPPER_REGISTERS, MAPPER_REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def add_up_queries(
    after, sizes, rings, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr,
    SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Sum up query features times 64 channels of the output's gradients."""
    batch, head = head_of(sizes, WHICH, BLOCKS, 1, SEGMENTS)
    _, chunks, _ = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, True)
    exists = batch < sizes.batches
    number = state_number(sizes, batch, head, 1, SEGMENTS)
    channel = channel_of(WHICH, BLOCKS, 1, SEGMENTS)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH  # the first block of this head's features
    sums = start_sums(None, number, exists, channel, HEAD_DIM, VALUE_DIM, BLOCKS)
    for iteration in range(0, chunks):
        rings.wait_for_mapped(iteration)
        grads = rings.tile_of(iteration, GRADS, WHICH)
        added = ()
        for block in gl.static_range(BLOCKS):
            queries = rings.tile_of(iteration, QUERIES, LEFT + block)
            token = warpgroup_mma(queries.permute((1, 0)), grads, sums[block], is_async=True)
            added = added + (token,)  # noqa: RUF005
        sums = settled(added, 0)
        rings.tiles.release(iteration)
    keep_sums(after, sums, number, exists, channel, HEAD_DIM, VALUE_DIM)
