"""Non-finite rows: what is done again where a hidden row may have made nonfinite the sums (0 · NaN
is NaN).

It happens seldom, so the consumer does it alone, with plain loads and products from registers, 16
keys at a time. The producer has long gone on.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import mma_v2
from saccade.gpu.language import gl, gluon, tl, triton
from saccade.gpu.online_softmax import LN_2, LOG2_E, softmax_step
from saccade.gpu.paged_view import inside, slot_pointers
from saccade.gpu.rounding import residual_of
from saccade.gpu.tensor_view import row_pointers, store_numbers, wide
from saccade.gpu.tile_ranges import NAN_SAFE_ROWS, TileRange, nan_safe_parts, nan_safe_start
from saccade.ops.attention.hopper.softmax import (
    ROWS,
    change,
    hide,
    places_of,
    settle,
)
from saccade.ops.attention.triton.backward_dkdv import REPEAT, differentiate_keys
from saccade.ops.attention.triton.backward_dq import attention_backward_queries

CHANNELS = gl.constexpr(64)  # that are multiplied at once


@gluon.jit
def note_nonfinite(flag, tile):
    """Write 1 to memory if a tile holds NaN or inf anywhere.

    No thread waits for another one, and hardly ever does one write.
    """
    parts = gl.reshape(tile * 0.0, [tile.shape[0], tile.shape[1] // 8, 4, 2])
    nonfinite = gl.sum(gl.sum(parts, 1), 2) != 0.0
    gl.store(flag + nonfinite.to(gl.int32) * 0, 1, mask=nonfinite)


@gluon.jit
def attend_nan_safe(
    query, key, value, output, logsumexp, residual, largest, rules, sinks, at, tile_range,
    KV_TILE: gl.constexpr, HEADS_PER_KV_HEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """All of the work of one consumer for one tile of query rows, and its results in memory."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
    )
    batch, query_head, first_row, query_len, _ = at
    kv_head = query_head // HEADS_PER_KV_HEAD
    NATURAL: gl.constexpr = rules.score is not None
    for first_channel in range(0, VALUE_DIM, CHANNELS):
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, MMA))
        weighted_sum = gl.zeros([ROWS, CHANNELS], gl.float32, MMA)
        state = (row_max, row_sum, weighted_sum)
        for index in range(0, nan_safe_parts(tile_range, KV_TILE)):
            kv_start = nan_safe_start(rules.mask, tile_range, index, KV_TILE).to(gl.int32)
            state = fold_part(
                query, key, value, rules, at, kv_head, kv_start, first_channel, state,
                HEAD_DIM, VALUE_DIM, PAGE_SIZE,
            )  # fmt: skip
        row_max, row_sum, weighted_sum = state
        factor, natural_lse = settle(row_max, row_sum, sinks, query_head, NATURAL)
        exact = weighted_sum * factor[:, None]
        attended = exact.to(output.ptr.dtype.element_ty)
        row, channel = places_of(attended, first_row, first_channel)
        exist = (row < query_len) & (channel < VALUE_DIM)
        gl.store(row_pointers(output, batch, query_head, row, channel), attended, mask=exist)
        if residual is not None:
            pointers = row_pointers(residual, batch, query_head, row, channel)
            gl.store(pointers, residual_of(exact, attended), mask=exist)
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        if largest is not None:
            natural_max = row_max if NATURAL else row_max * LN_2
            store_numbers(largest, batch, query_head, rows, query_len, natural_max)
        store_numbers(logsumexp, batch, query_head, rows, query_len, natural_lse)


@gluon.jit
def fold_part(
    query, key, value, rules, at, kv_head, kv_start, first_channel, state,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """Fold 16 rows of keys and values into the state, for some channels of the values.

    A value row that holds NaN or inf there is taken as 0, and makes nonfinite the pairs that it is
    visible in.
    """
    row_max, row_sum, weighted_sum = state
    MMA: gl.constexpr = weighted_sum.type.layout
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, 2)
    batch, query_head, first_row, query_len, kv_len = at
    scores = gl.zeros([ROWS, NAN_SAFE_ROWS], gl.float32, MMA)
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, LEFT))[:, None]
    kv_rows = kv_start + gl.arange(0, NAN_SAFE_ROWS, gl.SliceLayout(0, RIGHT))[None, :]
    for first in range(0, HEAD_DIM, CHANNELS):
        channels = first + gl.arange(0, CHANNELS, gl.SliceLayout(0, LEFT))[None, :]
        queries = gl.load(  # [ROWS, CHANNELS]
            row_pointers(query, batch, query_head, rows, channels),
            mask=(rows < query_len) & (channels < HEAD_DIM), other=0.0,
        )  # fmt: skip
        channels = first + gl.arange(0, CHANNELS, gl.SliceLayout(1, RIGHT))[:, None]
        keys = gl.load(  # [CHANNELS, NAN_SAFE_ROWS]
            kv_pointers(key, batch, kv_head, kv_rows, channels, kv_len, PAGE_SIZE),
            mask=(kv_rows < kv_len) & (channels < HEAD_DIM), other=0.0,
        )  # fmt: skip
        scores = mma_v2(queries, keys, scores)
    rows = kv_start + gl.arange(0, NAN_SAFE_ROWS, gl.SliceLayout(1, RIGHT))[:, None]
    channels = first_channel + gl.arange(0, CHANNELS, gl.SliceLayout(0, RIGHT))[None, :]
    values = gl.load(  # [NAN_SAFE_ROWS, CHANNELS]
        kv_pointers(value, batch, kv_head, rows, channels, kv_len, PAGE_SIZE),
        mask=(rows < kv_len) & (channels < VALUE_DIM), other=0.0,
    )  # fmt: skip
    nonfinite = gl.sum(values.to(gl.float32) * 0.0, 1) != 0.0
    values = gl.where(nonfinite[:, None], 0.0, values).to(value.ptr.dtype.element_ty)

    if rules.score is not None:
        scores = change(scores, rules, at, kv_start)
    of_column = gl.convert_layout(nonfinite.to(gl.int32), gl.SliceLayout(0, MMA)) > 0
    scores = gl.where(of_column[None, :], float("nan"), scores)
    scores = hide(scores, rules, at, kv_start)
    factor = None if rules.score is not None else rules.scale * LOG2_E
    weights, rescale, row_max, row_sum = softmax_step(scores, factor, row_max, row_sum, True)
    weights = gl.convert_layout(weights.to(values.dtype), LEFT)
    weighted_sum = mma_v2(weights, values, weighted_sum * rescale[:, None])
    return row_max, row_sum, weighted_sum


@gluon.jit
def kv_pointers(view, batch, head, rows, channels, length, PAGE_SIZE: gl.constexpr):
    """Addresses of rows × channels of keys or values, which lie in pages unless PAGE_SIZE is 0."""
    if PAGE_SIZE == 0:
        pointers = row_pointers(view, batch, head, rows, channels)
    else:
        table = view.data[0] + wide(batch) * view.data[1]
        page = gl.load(table + rows // PAGE_SIZE, mask=rows < length, other=0)
        page = inside(page, view.data)
        pointers = slot_pointers(view, head, (page, 0, rows % PAGE_SIZE), channels)
    return pointers


# ---- again ---------------------------------------------------------------------------------------
# Triton's pass, where a hidden row may have reached what it must not reach.
#
# The kernels here do nothing unless a flag is up: NaN or inf was found among the gradients, and
# 0 · NaN is NaN. Then all of the pass is done once more, with the care that Triton kernels take.


@triton.jit(do_not_specialize=["rules"])
def attention_backward_nan_safe_keys(
    flag, forward, grad_key, grad_value, rules,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of keys and values once more, NaN-safe, where the flag is raised."""
    if tl.load(flag) != 0:
        differentiate_keys(
            forward, grad_key, grad_value, None, rules, None, tl.program_id(0), REPEAT,
            HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERY_TILE, KV_TILE, PRECISION, True, False,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rules"])
def attention_backward_nan_safe_queries(
    flag, forward, grad_query, rules,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of queries once more, NaN-safe, where the flag is raised."""
    if tl.load(flag) != 0:
        attention_backward_queries(
            forward, grad_query, rules, None, None, None, None,
            HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERY_TILE, KV_TILE, PRECISION, False,
        )  # fmt: skip


@triton.jit
def every_tile(
    mask, batch, head, slot, start, lengths,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr,
):  # fmt: skip
    """A mask's tile range that takes every tile for a partial tile, so that nothing need be planned
    ahead for what is seldom done."""
    num_tiles = tl.cdiv(lengths[1], OTHER)
    return TileRange(0, num_tiles, 0, num_tiles, 0, 0)
