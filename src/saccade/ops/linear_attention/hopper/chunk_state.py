"""Linear attention on Hopper, collecting: the states of segments alone, kernel and host.

Of keys and values it is what forward.py does without queries, with the same producer and the
same mapping; of queries and gradients of the output, backward_dkdv.py without keys.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

from saccade.gpu.hopper.pipeline import warpgroup_mma
from saccade.gpu.kernel_args import there_are
from saccade.gpu.language import gl, gluon, tl, triton
from saccade.gpu.launcher import Launch
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.hopper import backward_rows
from saccade.ops.linear_attention.hopper.backward_dkdv import map_queries
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers, make_sweep_rings
from saccade.ops.linear_attention.hopper.features import map_features
from saccade.ops.linear_attention.hopper.forward import make_linear_rings, produce, settled
from saccade.ops.linear_attention.hopper.program import (
    GRADS,
    QUERIES,
    WIDE,
    HeadSplit,
    Kept,
    channel_of,
    chunks_of,
    head_of,
    keep_sums,
    moved,
    sizes,
    start_sums,
    state_number,
)
from saccade.ops.linear_attention.triton.chunk_scan import (
    GRAD_QUERY,
    OUTPUT,
    linear_forward_scan,
    linear_reverse_scan,
)
from saccade.ops.linear_attention.triton.passes import LinearBackwardInputs, Passes, State, sums


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
    query_desc, grad_desc, per_row, kept, after, sizes,
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
            (map_queries, (
                per_row, kept, None, after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, SEGMENTS,
                BOTTOM_RIGHT, STARTED, FEATURE_MAP, SCALE, False, 0,
            )),
            (map_queries, (
                per_row, kept, None, after, sizes, rings, HEAD_DIM, VALUE_DIM, BLOCKS, SEGMENTS,
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


# ---- states --------------------------------------------------------------------------------------
# What starts the kernel.

STAGES = 6  # of two operands
CONSUMER_REGISTERS, MAPPER_REGISTERS = 168, 56


def collect_keys(passes: Passes, split: HeadSplit, less_one: bool = False) -> State:
    """Of keys and values. less_one: of features of keys less 1."""
    if split.blocks == WIDE:
        return Passes.collect(passes, None, split.segments)
    spec, inputs = passes.spec, passes.inputs
    matrix, vector = passes.empty_states(split.segments)

    def make() -> Launch:
        constants = {
            "HEADS_PER_KEY": spec.state_heads // spec.key_heads,
            "HEADS_PER_VALUE": spec.state_heads // spec.value_heads,
            **split.constants(spec),
            "STAGES": STAGES,
            "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
            "MAPPER_REGISTERS": MAPPER_REGISTERS,
        }
        if less_one:
            constants["FEATURE_MAP"] = "elu"
        return Launch(linear_collect, constants, {"num_warps": 4})

    def arguments() -> tuple[Any, ...]:
        return (
            *moved(inputs[1:3]),
            Kept(None, inputs.key_lengths, None),
            sums((matrix, vector)),
            sizes(spec, spec.state_heads),
        )

    programs = split.programs(spec, spec.state_heads)
    launch = remembered(spec.launches, ("hopper collect", split, less_one), make)
    launch(programs, spec.device, (*passes.known(), matrix, vector), arguments)
    return matrix, vector


def collect_queries(passes: Passes, split: HeadSplit, upstream: LinearBackwardInputs) -> State:
    """Of queries and gradients of the output, each with the factor and −δ of its row."""
    spec, inputs = passes.spec, passes.inputs
    matrix, vector = passes.empty_states(split.segments)

    def make() -> Launch:
        constants = split.constants(spec)
        del constants["TILES"]  # one
        constants |= {
            "HEADS_PER_QUERY": passes.heads_per(spec.query_heads),
            "STARTED": spec.started,
            "SCALE": spec.variant.scale,
            "STAGES": STAGES,
            "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
            "MAPPER_REGISTERS": MAPPER_REGISTERS,
        }
        return Launch(linear_collect_queries, constants, {"num_warps": 4})

    def arguments() -> tuple[Any, ...]:
        return (
            *moved((inputs.query, upstream.grad_output)),
            RowNumbers(upstream.factors, upstream.minus_delta),
            Kept(None, inputs.key_lengths, None),
            sums((matrix, vector)),
            sizes(spec, spec.heads),
        )

    key = "hopper collect queries", split, upstream.grad_output.stride()
    launch = remembered(spec.launches, key, make)
    tensors = (*passes.known(), *there_are(upstream[:3]), matrix, vector)
    launch(split.programs(spec, spec.heads), spec.device, tensors, arguments)
    return matrix, vector


# ---- NaN-safe ------------------------------------------------------------------------------------
# Triton scans of linear attention, where a row may have made nonfinite rows before it.
#
# NaN or inf in a row, a value say, reaches all rows of its chunk in a product, as 0 · NaN is NaN.
# Where the sums of a head hold such, all of its rows are computed once more, with the care of
# Triton kernels.


@triton.jit
def linear_nan_safe(
    nonfinite, query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps,
    sequence, before, META: tl.constexpr,
):  # fmt: skip
    """A scan of segments of which one of PARTS numbers of `nonfinite` is not 0. States after
    segments stay as they are: NaN in either case."""
    segment = tl.program_id(0) // META.TILES
    part = tl.arange(0, triton.next_power_of_2(META.PARTS))
    flags = tl.load(nonfinite + segment * META.PARTS + part, mask=part < META.PARTS, other=0)
    if tl.max(flags, 0) > 0:
        if META.PASS == OUTPUT or META.PASS == GRAD_QUERY:
            linear_forward_scan(
                query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps,
                sequence, before, None, META,
            )  # fmt: skip
        else:
            linear_reverse_scan(
                query, key, value, grad_output, factors, minus_delta, totals, dots, result, eps,
                sequence, before, None, META,
            )  # fmt: skip
