"""The gated delta rule on Hopper, NaN and inf: token by token, where a last state is not finite.

Products of a chunk carry NaN to earlier tokens, as 0 · NaN is NaN. Once in a state it stays, so the
last one tells. The output is then computed once more as the recurrence has it, column by column of
the state, which is slow and carries nothing back.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false, reportAssignmentType=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import any_nonfinite, num_rows, row_pointers
from saccade.ops.delta_rule.triton.chunk_rows import state_pointers
from saccade.ops.delta_rule.triton.recurrent_step import fold_row


class NanSafeMeta(NamedTuple):
    """What is known of the call when the kernel is compiled; see `StepMeta`."""

    GROUP: int
    HEADS: int
    HEAD_DIM: int
    HEAD_WIDTH: int
    VALUE_DIM: int
    VALUE_TILE: int
    TILES: int
    BY_CHANNEL: bool
    NORMALIZE: bool


@triton.jit
def delta_nan_safe(
    query, key, value, beta, decay, output, before, after, scale, META: tl.constexpr
):
    """One program: some columns of the state of one sequence and head, if the last one needs it."""
    number, tile = tl.program_id(0) // META.TILES, tl.program_id(0) % META.TILES
    batch, head = number // META.HEADS, number % META.HEADS
    channels = tl.arange(0, META.HEAD_WIDTH)
    values = tile * META.VALUE_TILE + tl.arange(0, META.VALUE_TILE)
    pointers, exists = state_pointers(after, number, channels, values, META)
    last = tl.load(pointers, mask=exists, other=0.0)
    length = tl.where(any_nonfinite(last), num_rows(output, batch), 0)
    state = tl.zeros([META.HEAD_WIDTH, META.VALUE_TILE], tl.float32)
    if before is not None:
        pointers, exists = state_pointers(before, number, channels, values, META)
        state += tl.load(pointers, mask=exists, other=0.0)
    for row in range(0, length):
        state, found = fold_row(
            state, query, key, value, beta, decay, batch, head, row, channels, values, META
        )
        into = row_pointers(output, batch, head, row, values)
        found = (found * scale).to(output.ptr.dtype.element_ty)
        tl.store(into, found, mask=values < META.VALUE_DIM)
