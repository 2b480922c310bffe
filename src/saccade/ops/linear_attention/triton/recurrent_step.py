"""The recurrent step of linear attention: a few new rows of each sequence, as in decoding.

States change where they lie. The step is as fast as they can be read and written; a chunk's
products would only add to that. A program owns whole states: the sum of keys must not change before
all of it has been read.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import Launch, next_width
from saccade.gpu.tensor_view import row_pointers, wide
from saccade.ops.attention.triton.call_spec import remembered
from saccade.ops.linear_attention.triton.chunk_scan import divisor_of
from saccade.ops.linear_attention.triton.chunk_state import state_of, summed_decay_until
from saccade.ops.linear_attention.triton.passes import Passes, State

NUMBERS = 8192  # of a state, in registers at a time; by its time on an H200


def start_step(passes: Passes, output: Tensor, pool: State) -> None:
    """Write the output of new rows, and change the states of a pool."""
    spec = passes.spec
    width = next_width(spec.head_dim)
    tile = min(max(NUMBERS // width, 16), next_width(max(spec.value_dim, 1)))

    def make() -> Launch:
        constants = {
            "HEADS_PER_QUERY": passes.heads_per(spec.query_heads),
            "HEADS_PER_KEY": passes.heads_per(spec.key_heads),
            "HEADS_PER_VALUE": passes.heads_per(spec.value_heads),
            "GROUP": spec.group,
            "STATE_HEADS": spec.state_heads,
            "ROWS": spec.query_len,
            "HEAD_DIM": spec.head_dim,
            "HEAD_WIDTH": width,
            "VALUE_DIM": spec.value_dim,
            "VALUE_TILE": tile,
            "TILES": max(-(-spec.value_dim // tile), 1),
            "NORMALIZE": spec.variant.normalize,
        }
        return Launch(linear_step, constants, {"num_warps": 4, "num_stages": 1})

    def arguments() -> tuple[Any, ...]:
        query, key = passes.queries(), passes.keys()
        rows = query, key, passes.values(), passes.query_side(output)
        return (*rows, passes.sequence(), *pool, spec.variant.eps)

    launch = remembered(spec.launches, ("step", passes.slots is None, passes.num_states), make)
    tensors = (*passes.known(), output, *pool)
    launch(spec.sequences * spec.state_heads, spec.device, tensors, arguments)


@triton.jit
def linear_step(
    query, key, value, output, sequence, kv, key_sum, eps,  # Operands and a View; addresses
    HEADS_PER_QUERY: tl.constexpr, HEADS_PER_KEY: tl.constexpr, HEADS_PER_VALUE: tl.constexpr,
    GROUP: tl.constexpr, STATE_HEADS: tl.constexpr, ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr, VALUE_DIM: tl.constexpr,
    VALUE_TILE: tl.constexpr, TILES: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One program: the state of one sequence and head, read by GROUP output heads."""
    batch, head = tl.program_id(0) // STATE_HEADS, tl.program_id(0) % STATE_HEADS
    number = wide(state_of(sequence, batch)) * STATE_HEADS + head
    keys = tl.arange(0, HEAD_WIDTH)
    sum_at, key_exists = key_sum + (number * HEAD_DIM + keys), keys < HEAD_DIM
    first_sum = tl.load(sum_at, mask=key_exists, other=0.0)
    for tile in range(0, TILES):
        values = tile * VALUE_TILE + tl.arange(0, VALUE_TILE)
        at = kv + (number * (HEAD_DIM * VALUE_DIM) + (keys[:, None] * VALUE_DIM + values[None, :]))
        exists = key_exists[:, None] & (values < VALUE_DIM)[None, :]
        state = tl.load(at, mask=exists, other=0.0)
        sums = first_sum
        for row in range(0, ROWS):
            if sequence.summed_decay is not None:
                until = summed_decay_until(sequence, batch, head, row)
                decay_factor = tl.exp(
                    (until - summed_decay_until(sequence, batch, head, row - 1)).to(tl.float32)
                )
                state, sums = state * decay_factor, sums * decay_factor
            common = head * GROUP
            features = row_of(key, batch, common // HEADS_PER_KEY, row, keys, HEAD_DIM)
            added = row_of(value, batch, common // HEADS_PER_VALUE, row, values, VALUE_DIM)
            state += features[:, None] * added[None, :]
            sums += features
            for member in tl.static_range(GROUP):
                asked = row_of(
                    query, batch, (common + member) // HEADS_PER_QUERY, row, keys, HEAD_DIM
                )
                divisor = divisor_of(tl.sum(asked * sums, 0), eps, NORMALIZE)
                found = tl.sum(asked[:, None] * state, 0)
                found = tl.where(divisor == 0, 0.0, found / divisor)
                into = row_pointers(output, batch, common + member, row, values)
                tl.store(into, found.to(output.ptr.dtype.element_ty), mask=values < VALUE_DIM)
        tl.store(at, state, mask=exists)
        if tile == TILES - 1:
            tl.store(sum_at, sums, mask=key_exists)


@triton.jit
def row_of(operand, batch, head, row, channels, DIM: tl.constexpr):
    """The features of one row, 0 past the last channel."""
    exists = channels < DIM
    pointers = row_pointers(operand.rows, batch, head, row, channels)
    mapped = tl.load(pointers, mask=exists, other=0.0).to(tl.float32)
    if operand.apply is not None:
        mapped = operand.apply(mapped, tl.where(exists, 0.0, float("-inf")))
    if operand.scale is not None:
        mapped = mapped * operand.scale
    return mapped
