"""Non-finite rows of fp8 attention: what is done again where a hidden row may have made nonfinite
the sums (0 · NaN is NaN).

It happens seldom, so the consumer does it alone, with plain loads and products from registers, 16
keys at a time. Numbers are multiplied as float16, which holds all e4m3 numbers exactly. So are rows
whose values have scales by which sums may leave float32: here sums are divided by the number of
keys as they grow, so that they are no larger than the largest value.
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import mma_v2
from saccade.gpu.language import gl, gluon
from saccade.gpu.online_softmax import LOG2_E, softmax_step
from saccade.gpu.tensor_view import row_pointers, store_numbers
from saccade.gpu.tile_ranges import NAN_SAFE_ROWS, nan_safe_parts, nan_safe_start
from saccade.ops.attention.hopper.nonfinite import CHANNELS
from saccade.ops.attention.hopper.softmax import ROWS, hide, places_of, settle
from saccade.ops.attention_fp8.hopper.softmax import LIFTED, change, exponent_factor, shift_of
from saccade.ops.attention_fp8.triton.numbers import BLOCK, load_scale
from saccade.ops.attention_fp8.triton.quantise import operand_place


@gluon.jit
def attend_nan_safe(
    query, key, values, output, logsumexp, scales, rules, sinks, at, kv_head, factor, tile_range,
    KV_TILE: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
):  # fmt: skip
    """All of the work of one consumer for one tile of query rows, and its results in memory."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[2, 0], warps_per_cta=[4, 1], instr_shape=[16, 8]
    )
    batch, query_head, first_row, query_len, _ = at
    for first_channel in range(0, VALUE_DIM, CHANNELS):
        row_max = gl.full([ROWS], float("-inf"), gl.float32, gl.SliceLayout(1, MMA))
        row_sum = gl.full([ROWS], 0.0, gl.float32, gl.SliceLayout(1, MMA))
        weighted_sum = gl.zeros([ROWS, CHANNELS], gl.float32, MMA)
        state = (row_max, row_sum, weighted_sum)
        for index in range(0, nan_safe_parts(tile_range, KV_TILE)):
            kv_start = nan_safe_start(rules.mask, tile_range, index, KV_TILE).to(gl.int32)
            state = fold_part(
                query, key, values, scales, rules, at, kv_head, factor, kv_start, first_channel,
                state, HEAD_DIM, VALUE_DIM,
            )  # fmt: skip
        row_max, row_sum, weighted_sum = state
        if scales.shift is not None and rules.score is None:
            row_max += gl.sum(shift_of(scales, rules, at, weighted_sum), 1) * LOG2_E
        multiplier, natural_lse = settle(row_max, row_sum, sinks, query_head)
        multiplier = multiplier * summands(at[4])
        attended = (weighted_sum * multiplier[:, None]).to(output.ptr.dtype.element_ty)
        row, channel = places_of(attended, first_row, first_channel)
        exist = (row < query_len) & (channel < VALUE_DIM)
        gl.store(row_pointers(output, batch, query_head, row, channel), attended, mask=exist)
        rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, MMA))
        store_numbers(logsumexp, batch, query_head, rows, query_len, natural_lse)


@gluon.jit
def summands(kv_len):
    """Twice as many as there are keys, at least 2."""
    return 2.0 * gl.maximum(kv_len, 1).to(gl.float32)


@gluon.jit
def fold_part(
    query, key, values, scales, rules, at, kv_head, factor, kv_start, first_channel, state,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
):  # fmt: skip
    """Fold 16 rows of keys and values into the state, for some channels of the values.

    A value row that holds NaN there is taken as 0, and makes nonfinite the pairs that it is visible
    in.
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
            row_pointers(key, batch, kv_head, kv_rows, channels),
            mask=(kv_rows < kv_len) & (channels < HEAD_DIM), other=0.0,
        )  # fmt: skip
        scores = mma_v2(queries.to(gl.float16), keys.to(gl.float16), scores)
    rows = kv_start + gl.arange(0, NAN_SAFE_ROWS, gl.SliceLayout(1, RIGHT))[:, None]
    channels = first_channel + gl.arange(0, CHANNELS, gl.SliceLayout(0, RIGHT))[None, :]
    within = channels * BLOCK + operand_place(rows % BLOCK)
    value_rows = gl.load(  # [NAN_SAFE_ROWS, CHANNELS]
        row_pointers(values, batch, kv_head, kv_start // BLOCK, within),
        mask=(rows < kv_len) & (channels < VALUE_DIM), other=0.0,
    )  # fmt: skip
    wide_values = value_rows.to(gl.float32)
    nonfinite = gl.sum(wide_values * 0.0, 1) != 0.0
    half_values = gl.where(nonfinite[:, None], 0.0, wide_values).to(gl.float16)

    key_factor = factor * load_scale(scales.key, batch, kv_head, kv_start)
    if rules.score is not None:
        scores = change(scores, key_factor, scales, rules, at, kv_start)
    of_column = gl.convert_layout(nonfinite.to(gl.int32), gl.SliceLayout(0, MMA)) > 0
    scores = gl.where(of_column[None, :], float("nan"), scores)
    scores = hide(scores, rules, at, kv_start)
    weights, rescale, row_max, row_sum = softmax_step(
        scores, exponent_factor(key_factor, rules), row_max, row_sum, True
    )
    lifted = (weights * LIFTED).to(gl.float8e4nv).to(gl.float16)
    nothing = gl.zeros([ROWS, CHANNELS], gl.float32, MMA)
    product = mma_v2(gl.convert_layout(lifted, LEFT), half_values, nothing)
    means = product * (1.0 / (summands(kv_len) * LIFTED))
    value_scale = load_scale(scales.value, batch, kv_head, kv_start)
    weighted_sum = weighted_sum * rescale[:, None] + means * value_scale
    return row_max, row_sum, weighted_sum
