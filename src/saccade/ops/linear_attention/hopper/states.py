"""The states of segments alone, by Hopper's kernel (chunk_state.py)."""

from __future__ import annotations

from typing import Any

import torch

from saccade.gpu.kernel_args import there_are
from saccade.gpu.launcher import Launch, Pointer
from saccade.ops.attention.triton.kind import remembered
from saccade.ops.linear_attention.hopper.backward_rows import RowNumbers
from saccade.ops.linear_attention.hopper.chunk_state import linear_collect, linear_collect_queries
from saccade.ops.linear_attention.hopper.program import Kept
from saccade.ops.linear_attention.hopper.split import WIDE, Split, maybe, moved, sizes
from saccade.ops.linear_attention.triton.given import Given, State, sums
from saccade.ops.linear_attention.triton.passes import Passes

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
