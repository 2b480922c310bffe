"""The states of segments alone, by Hopper's kernel (chunk_state.py)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch, Pointer
from saccade.ops.attention.triton.kind import remembered
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers
from saccade.ops.linear_attention.hopper.chunk_state import linear_collect, linear_collect_queries
from saccade.ops.linear_attention.hopper.program import Kept
from saccade.ops.linear_attention.hopper.split import WIDE, Split, maybe, moved, sizes
from saccade.ops.linear_attention.triton.chunk_scan import linear_sweep
from saccade.ops.linear_attention.triton.passes import Passes
from saccade.ops.linear_attention.triton.rows import Given, State, sums

STAGES = 6  # of two operands
CONSUMER_REGISTERS, MAPPER_REGISTERS = 168, 56


def empty_states(passes: Passes, split: Split) -> State:
    """Memory for the states of each segment."""
    kind, query = passes.kind, passes.inputs.query
    counts = kind.sequences, kind.state_heads, split.segments, kind.head_dim
    matrix = query.new_empty(*counts, kind.value_dim, dtype=torch.float32)
    return matrix, query.new_empty(counts, dtype=torch.float32)


def collect_keys(passes: Passes, split: Split, less_one: bool = False) -> State:
    """Of keys and values. less_one: of features of keys less 1."""
    if split.blocks == WIDE:
        return Passes.collect(passes, None, split.segments)
    kind, inputs = passes.kind, passes.inputs
    matrix, vector = empty_states(passes, split)

    def make() -> Launch:
        constants = {
            "KEY_SHARE": kind.state_heads // kind.key_heads,
            "VALUE_SHARE": kind.state_heads // kind.value_heads,
            **split.constants(kind),
            "STAGES": STAGES,
            "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
            "MAPPER_REGISTERS": MAPPER_REGISTERS,
        }
        if less_one:
            constants["FEATURE_MAP"] = "elu"
        return Launch(linear_collect, constants, {"num_warps": 4})

    def arguments(pointer: Pointer) -> tuple[Any, ...]:
        return (
            *moved(pointer, inputs[1:3]),
            Kept(None, maybe(pointer, inputs.key_lengths), None),
            sums(pointer, (matrix, vector)),
            sizes(kind, kind.state_heads),
        )

    programs = split.programs(kind, kind.state_heads)
    launch = remembered(kind.launches, ("hopper collect", split, less_one), make)
    launch(programs, kind.device, (*passes.known(), matrix, vector), arguments)
    return matrix, vector


def collect_queries(passes: Passes, split: Split, given: Given) -> State:
    """Of queries and gradients of the output, each with the factor and −δ of its row."""
    kind, inputs = passes.kind, passes.inputs
    matrix, vector = empty_states(passes, split)

    def make() -> Launch:
        constants = split.constants(kind)
        del constants["TILES"]  # one
        constants |= {
            "QUERY_SHARE": passes.share(kind.query_heads),
            "STARTED": kind.started,
            "SCALE": kind.variant.scale,
            "STAGES": STAGES,
            "CONSUMER_REGISTERS": CONSUMER_REGISTERS,
            "MAPPER_REGISTERS": MAPPER_REGISTERS,
        }
        return Launch(linear_collect_queries, constants, {"num_warps": 4})

    def arguments(pointer: Pointer) -> tuple[Any, ...]:
        return (
            *moved(pointer, (inputs.query, given.grad_output)),
            RowNumbers(maybe(pointer, given.factors), pointer(given.minus_delta)),
            Kept(None, maybe(pointer, inputs.key_lengths), None),
            sums(pointer, (matrix, vector)),
            sizes(kind, kind.heads),
        )

    key = "hopper collect queries", split, given.grad_output.stride()
    launch = remembered(kind.launches, key, make)
    tensors = (*passes.known(), *there_are(given[:3]), matrix, vector)
    launch(split.programs(kind, kind.heads), kind.device, tensors, arguments)
    return matrix, vector


# ---- again ---------------------------------------------------------------------------------------
# Triton sweeps of linear attention, where a row may have made nonfinite rows before it.
#
# NaN or inf in a row, a value say, reaches all rows of its chunk in a product, as 0 · NaN is NaN.
# Where the sums of a head hold such, all of its rows are computed once more, with the care of
# Triton kernels.


@triton.jit
def linear_again(
    nonfinite, a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before,
    A_SHARE: tl.constexpr, B_SHARE: tl.constexpr, C_SHARE: tl.constexpr,
    THROUGH_SHARE: tl.constexpr, GROUP: tl.constexpr, STATE_HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    INNER: tl.constexpr, INNER_WIDTH: tl.constexpr, OUTER: tl.constexpr, OUTER_TILE: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr, PASS: tl.constexpr, CAUSAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, STARTED: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, NUMBERS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """As `linear_sweep`, of segments of which one of PARTS numbers is not 0. States after segments
    stay as they are: NaN in either case."""
    segment = tl.program_id(0) // TILES
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    flags = tl.load(nonfinite + segment * PARTS + part, mask=part < PARTS, other=0)
    if tl.max(flags, 0) > 0:
        linear_sweep(
            a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before, None,
            A_SHARE, B_SHARE, C_SHARE, THROUGH_SHARE, GROUP, STATE_HEADS, SEGMENTS,
            INNER, INNER_WIDTH, OUTER, OUTER_TILE, TILES, CHUNK, PASS, CAUSAL, BOTTOM_RIGHT,
            STARTED, NORMALIZE, PRECISION, BEFORE, False, NUMBERS,
        )  # fmt: skip
