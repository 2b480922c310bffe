"""The states of segments alone, by Hopper's kernel (chunk_state.py)."""

# Fields of META are read off a constexpr.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch, Pointer
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers
from saccade.ops.linear_attention.hopper.chunk_state import linear_collect, linear_collect_queries
from saccade.ops.linear_attention.hopper.program import Kept
from saccade.ops.linear_attention.hopper.split import WIDE, HeadSplit, maybe, moved, sizes
from saccade.ops.linear_attention.triton.chunk_scan import linear_sweep
from saccade.ops.linear_attention.triton.passes import Passes
from saccade.ops.linear_attention.triton.rows import LinearBackwardInputs, State, sums

STAGES = 6  # of two operands
CONSUMER_REGISTERS, MAPPER_REGISTERS = 168, 56


def empty_states(passes: Passes, split: HeadSplit) -> State:
    """Memory for the states of each segment."""
    spec, query = passes.spec, passes.inputs.query
    counts = spec.sequences, spec.state_heads, split.segments, spec.head_dim
    matrix = query.new_empty(*counts, spec.value_dim, dtype=torch.float32)
    return matrix, query.new_empty(counts, dtype=torch.float32)


def collect_keys(passes: Passes, split: HeadSplit, less_one: bool = False) -> State:
    """Of keys and values. less_one: of features of keys less 1."""
    if split.blocks == WIDE:
        return Passes.collect(passes, None, split.segments)
    spec, inputs = passes.spec, passes.inputs
    matrix, vector = empty_states(passes, split)

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

    def arguments(pointer: Pointer) -> tuple[Any, ...]:
        return (
            *moved(pointer, inputs[1:3]),
            Kept(None, maybe(pointer, inputs.key_lengths), None),
            sums(pointer, (matrix, vector)),
            sizes(spec, spec.state_heads),
        )

    programs = split.programs(spec, spec.state_heads)
    launch = remembered(spec.launches, ("hopper collect", split, less_one), make)
    launch(programs, spec.device, (*passes.known(), matrix, vector), arguments)
    return matrix, vector


def collect_queries(passes: Passes, split: HeadSplit, given: LinearBackwardInputs) -> State:
    """Of queries and gradients of the output, each with the factor and −δ of its row."""
    spec, inputs = passes.spec, passes.inputs
    matrix, vector = empty_states(passes, split)

    def make() -> Launch:
        constants = split.constants(spec)
        del constants["TILES"]  # one
        constants |= {
            "HEADS_PER_QUERY": passes.share(spec.query_heads),
            "STARTED": spec.started,
            "SCALE": spec.variant.scale,
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
            sizes(spec, spec.heads),
        )

    key = "hopper collect queries", split, given.grad_output.stride()
    launch = remembered(spec.launches, key, make)
    tensors = (*passes.known(), *there_are(given[:3]), matrix, vector)
    launch(split.programs(spec, spec.heads), spec.device, tensors, arguments)
    return matrix, vector


# ---- again ---------------------------------------------------------------------------------------
# Triton sweeps of linear attention, where a row may have made nonfinite rows before it.
#
# NaN or inf in a row, a value say, reaches all rows of its chunk in a product, as 0 · NaN is NaN.
# Where the sums of a head hold such, all of its rows are computed once more, with the care of
# Triton kernels.


@triton.jit
def linear_nan_safe(
    nonfinite, a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before,
    META: tl.constexpr,
):  # fmt: skip
    """As `linear_sweep`, of segments of which one of PARTS numbers is not 0. States after segments
    stay as they are: NaN in either case."""
    segment = tl.program_id(0) // META.TILES
    part = tl.arange(0, triton.next_power_of_2(META.PARTS))
    flags = tl.load(nonfinite + segment * META.PARTS + part, mask=part < META.PARTS, other=0)
    if tl.max(flags, 0) > 0:
        linear_sweep(
            a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before, None,
            META,
        )  # fmt: skip
