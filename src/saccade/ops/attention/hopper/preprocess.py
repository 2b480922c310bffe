"""Preprocess: what each query row needs before the backward pass, and what is left to do after.

Both kernels stand at a slot of the scratch, which holds as many rows of one head as the backward
kernel takes at once. No slot is shared by two sequences, so rows past an end harm nobody.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from saccade.gpu.packing import first_slot
from saccade.gpu.tensor_view import (
    any_nonfinite,
    num_rows,
    pad_rows,
    row_pointers,
    store_numbers,
)
from saccade.gpu.tile_ranges import first_and_end
from saccade.ops.attention.triton.backward_common import in_base_2, statistics_of

PARTS = tl.constexpr(2)  # of a slot's partial sum of the gradients of queries: one of each consumer
PART_ROWS = tl.constexpr(64)


class BackwardScratch(NamedTuple):
    """Where the kernels of one backward pass leave things for each other."""

    slot: Any  # dense_slot or packed_slot
    # of the gradients of queries: float32 in memory, by slot; None: there are none
    dq_accumulate: Any
    # int32 in memory: whether hidden rows may have made nonfinite something; None: they cannot
    flag: Any
    semaphores: Any = None  # int32 in memory, by part: whose turn it is; None: in any order


@triton.jit
def dense_slot(batch, head, data, TILE: tl.constexpr):
    """The slot of a head's first tile of query rows."""
    return (batch * data[1] + head) * tl.cdiv(data[0], TILE)


@triton.jit
def packed_slot(batch, head, data, TILE: tl.constexpr):
    """The same in a packed sequence; see `packing.packed_program`."""
    slots = data[3] // TILE + data[1]
    return head * slots + first_slot(data, batch, TILE)


@triton.jit
def first_semaphore(
    mask, batch, head, tile, lengths, QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr
):  # fmt: skip
    """Whose turn it is to begin with: the last tile of keys of which a tile of queries may see
    something, as `dq_accumulate.py` writes it down. lengths: of queries and keys."""
    tile_range = mask.tile_range(
        mask, batch, head, tile, tile * QUERY_TILE, lengths, QUERY_TILE, KV_TILE, True
    )  # fmt: skip
    _, end = first_and_end(tile_range)
    return (end - 1) * 2 + 1


@triton.jit
def from_the_end():
    """The program's number, counted from the last one: the backward kernel goes from the first head
    to the last, so what begins there was written last and lies in the L2, and the other way round.
    """
    return tl.num_programs(0) - 1 - tl.program_id(0)


@triton.jit(do_not_specialize=["mask"])
def attention_backward_begin(
    output, grad_output, logsumexp, grad_lse, lse_log2, row_dot,  # Views; grad_lse may be None
    key, mask, scratch, starts, factor,  # key and mask are None unless there are turns
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """One program: one slot. Beside the two row statistics, for kernels that may have to repeat
    the work, it writes what sums of scores and of grad_weights start at: -lse · factor, -row_dot.

    A row that saw nothing starts at -inf, which makes all its weights 0. Shares of the gradients
    of queries are added to zeros, unless they have turns.
    """
    batch, head, tile, _ = output.find(from_the_end(), output.data, QUERY_TILE)
    slot = scratch.slot(batch, head, output.data, QUERY_TILE) + tile
    query_len = num_rows(output, batch)
    positions = tl.arange(0, QUERY_TILE)
    rows = tile * QUERY_TILE + positions
    lse, dot, saw_nothing = statistics_of(
        output, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    if lse_log2 is not None:
        base_2 = in_base_2(lse, saw_nothing)
        store_numbers(lse_log2, batch, head, rows, query_len, base_2)
        store_numbers(row_dot, batch, head, rows, query_len, dot)
    start = starts + slot * (2 * QUERY_TILE)
    tl.store(start + positions, tl.where(saw_nothing, float("-inf"), -lse * factor))
    tl.store(start + QUERY_TILE + positions, -dot)
    if scratch.dq_accumulate is not None and scratch.semaphores is None:
        partial_dq = scratch.dq_accumulate + slot.to(tl.int64) * (QUERY_TILE * HEAD_WIDTH)
        numbers = tl.arange(0, QUERY_TILE * HEAD_WIDTH)
        tl.store(partial_dq + numbers, tl.zeros([QUERY_TILE * HEAD_WIDTH], tl.float32))
    if scratch.flag is not None:
        tl.store(scratch.flag, 0)
    if scratch.semaphores is not None:
        lengths = query_len, num_rows(key, batch)
        semaphore = first_semaphore(mask, batch, head, tile, lengths, QUERY_TILE, KV_TILE)
        parts = slot * PARTS + tl.arange(0, PARTS)
        tl.store(scratch.semaphores + parts, tl.zeros([PARTS], tl.int32) + semaphore)


@triton.jit
def attention_backward_end(
    grad_query, scratch, scale,
    HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr, QUERY_TILE: tl.constexpr,
    NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """One program: one slot. Sums of partial sums become gradients of queries."""
    WIDTH: tl.constexpr = QUERY_TILE * HEAD_WIDTH // (PARTS * PART_ROWS)  # of a part
    batch, head, tile, _ = grad_query.find(from_the_end(), grad_query.data, QUERY_TILE)
    slot = scratch.slot(batch, head, grad_query.data, QUERY_TILE) + tile
    query_len = num_rows(grad_query, batch)
    pad_rows(grad_query, 0.0, HEAD_DIM, HEAD_WIDTH)
    for part in tl.static_range(PARTS):
        numbers = tl.arange(0, PART_ROWS * WIDTH)
        position = (slot.to(tl.int64) * PARTS + part) * (PART_ROWS * WIDTH)
        if scratch.semaphores is None:
            partial_dq = tl.load(scratch.dq_accumulate + (position + numbers))
        else:  # who comes first writes; where nobody came, nobody wrote
            written = tl.load(scratch.semaphores + slot * PARTS + part) & 1 == 0
            partial_dq = tl.load(
                scratch.dq_accumulate + (position + numbers), mask=written, other=0.0
            )
        # As registers lay: eight channels, warp, row, two of them, row + 8, channel.
        partial_dq = tl.reshape(partial_dq, [WIDTH // 8, 4, 8, 4, 2, 2])
        partial_dq = tl.reshape(tl.permute(partial_dq, [1, 4, 2, 0, 3, 5]), [PART_ROWS, WIDTH])
        if NAN_SAFE and any_nonfinite(partial_dq):
            tl.store(scratch.flag, 1)
        rows = tile * QUERY_TILE + tl.arange(0, PART_ROWS)
        channels = tl.arange(0, WIDTH)
        if QUERY_TILE > PART_ROWS:
            rows += part * PART_ROWS
        else:
            channels += part * WIDTH
        pointers = row_pointers(grad_query, batch, head, rows[:, None], channels[None, :])
        exists = (rows < query_len)[:, None] & (channels < HEAD_DIM)[None, :]
        tl.store(pointers, (partial_dq * scale).to(grad_query.ptr.dtype.element_ty), mask=exists)
