"""Epilogue: from the sums of 64 query rows to their output and lse, in memory."""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.gpu.hopper.pipeline import store, wait_for_stores
from saccade.gpu.tensor_view import row_pointers, store_numbers
from saccade.ops.attention.hopper.softmax import ROWS, along_rows, places_of, settle


@gluon.jit
def finish(
    state, output_desc, output, logsumexp, sinks, schedule, at, memory, VALUE_DIM: gl.constexpr
):  # fmt: skip
    """Divide by the sums of the weights; write output and lse."""
    row_max, row_sum, weighted_sum = state
    batch, query_head, first_row, query_len, _ = at
    factor, natural_lse = settle(row_max, row_sum, sinks, query_head)
    attended = (weighted_sum * along_rows(factor, weighted_sum)).to(output_desc.dtype)
    rows = first_row + gl.arange(0, ROWS, row_max.type.layout)
    store_numbers(logsumexp, batch, query_head, rows, query_len, natural_lse)
    if first_row + ROWS <= query_len:
        output_batch, output_row = schedule.origin(batch, output.data)
        position = (output_batch, query_head, output_row + first_row)
        store_in_parts(output_desc, position, attended, memory)
    else:  # rows past the end are another sequence's, or nobody's
        row, channel = places_of(attended, first_row, 0)
        pointers = row_pointers(output, batch, query_head, row, channel)
        gl.store(pointers, attended, mask=(row < query_len) & (channel < VALUE_DIM))


@gluon.jit
def store_in_parts(output_desc, position, attended, memory):
    """Write a tile by TMA through shared memory that may hold half of its channels only."""
    WIDTH: gl.constexpr = memory.shape[-1]
    if attended.shape[1] == WIDTH:
        store_part(output_desc, position, 0, attended, memory)
    else:
        gl.static_assert(attended.shape[1] == 2 * WIDTH)
        halves = gl.split(gl.permute(gl.reshape(attended, [ROWS, 2, WIDTH]), (0, 2, 1)))
        store_part(output_desc, position, 0, halves[0], memory)
        store_part(output_desc, position, WIDTH, halves[1], memory)


@gluon.jit
def store_part(output_desc, position, channel, part, memory):
    """Start to write some channels of 64 rows, once the shared memory is free."""
    wait_for_stores()
    as_matrix(memory).store(part)
    store(output_desc, [position[0], position[1], position[2], channel], memory)


@gluon.jit
def pad_rows(view, number, DIM: gl.constexpr):
    """As `tiles.pad_rows`, by one warp that has few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))[:, None]
    channels = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    view.pad(view, number, rows, channels, DIM)


@gluon.jit
def pad_numbers(view, number):
    """The same of one number a row."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))[:, None]
    channels = gl.arange(0, 1, gl.SliceLayout(0, LAYOUT))[None, :]
    view.pad(view, number, rows, channels, 1)


@gluon.jit
def as_matrix(memory):
    """Shared memory of one tile without its batch and head: [rows, channels]."""
    return memory.reshape([memory.shape[-2], memory.shape[-1]])
