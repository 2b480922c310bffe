"""The recurrent step of the gated delta rule: a few new rows of each sequence, as in decoding.

States change where they lie. The step is as fast as they can be read and written; columns of a
state know nothing of one another, so a program takes a few of them.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import row_pointers, wide
from saccade.ops.delta_rule.triton.chunk_rows import NORM_EPS


class Pool(NamedTuple):
    """States in memory, and which of them is whose."""

    states: Any  # [entries, value_heads, head_dim, value_dim]
    slots: Any  # int64 [batch]: the entry of each sequence, −1: of none; None: in order
    entries: Any  # None where slots are


class StepMeta(NamedTuple):
    """What is known of a step when its kernel is compiled."""

    GROUP: int
    HEADS: int
    ROWS: int
    HEAD_DIM: int
    HEAD_WIDTH: int
    VALUE_DIM: int
    VALUE_TILE: int
    TILES: int
    BY_CHANNEL: bool
    NORMALIZE: bool


@triton.jit
def delta_step(query, key, value, beta, decay, output, pool, scale, META: tl.constexpr):
    """One program: some columns of the state of one sequence and head; see `Pool`."""
    program = tl.program_id(0)
    tile, head = program % META.TILES, (program // META.TILES) % META.HEADS
    batch = program // (META.TILES * META.HEADS)
    slot, is_there = wide(batch), batch >= 0
    if pool.slots is not None:
        slot = tl.load(pool.slots + batch).to(tl.int64)
        is_there = (slot >= 0) & (slot < pool.entries)
        slot = tl.where(is_there, slot, 0)
    channels = tl.arange(0, META.HEAD_WIDTH)
    values = tile * META.VALUE_TILE + tl.arange(0, META.VALUE_TILE)
    place = channels[:, None] * META.VALUE_DIM + values[None, :]
    at = pool.states + ((slot * META.HEADS + head) * (META.HEAD_DIM * META.VALUE_DIM) + place)
    exists = (channels < META.HEAD_DIM)[:, None] & (values < META.VALUE_DIM)[None, :]
    exists = exists & (is_there & (channels >= 0))[:, None]
    state = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    for row in range(0, META.ROWS):
        state, found = fold_row(
            state, query, key, value, beta, decay, batch, head, row, channels, values, META
        )
        into = row_pointers(output, batch, head, row, values)
        found = tl.where(is_there & (values >= 0), found * scale, 0.0)
        tl.store(into, found.to(output.ptr.dtype.element_ty), mask=values < META.VALUE_DIM)
    tl.store(at, state.to(pool.states.dtype.element_ty), mask=exists)


@triton.jit
def fold_row(
    state, query, key, value, beta, decay, batch, head, row, channels, values, META: tl.constexpr
):
    """The state behind one token, and what its query finds there."""
    if decay is not None:
        if META.BY_CHANNEL:
            left = row_of(decay, batch, head, row, channels, META.HEAD_DIM)
            state *= tl.exp(left)[:, None]
        else:
            state *= tl.exp(tl.load(row_pointers(decay, batch, head, row, 0)).to(tl.float32))
    keys = unit_row(key, batch, head // META.GROUP, row, channels, META)
    queries = unit_row(query, batch, head // META.GROUP, row, channels, META)
    wanted = row_of(value, batch, head, row, values, META.VALUE_DIM)
    strength = tl.load(row_pointers(beta, batch, head, row, 0)).to(tl.float32)
    error = wanted - tl.sum(state * keys[:, None], 0)
    state += keys[:, None] * (strength * error)[None, :]
    return state, tl.sum(state * queries[:, None], 0)


@triton.jit
def unit_row(view, batch, head, row, channels, META: tl.constexpr):
    """One row of queries or keys, divided by its length where that is asked for."""
    numbers = row_of(view, batch, head, row, channels, META.HEAD_DIM)
    if META.NORMALIZE:
        numbers = numbers * (1.0 / tl.sqrt_rn(tl.sum(numbers * numbers, 0) + NORM_EPS))
    return numbers


@triton.jit
def row_of(view, batch, head, row, channels, DIM: tl.constexpr):
    """The numbers of one row, 0 past the last channel."""
    pointers = row_pointers(view, batch, head, row, channels)
    return tl.load(pointers, mask=channels < DIM, other=0.0).to(tl.float32)
