"""fp8 attention forward: one pass over the keys, from the last to the first.

Products are of e4m3 numbers. What a tile of keys gives is added to a float32 sum of its own
registers (two-level accumulation), so that the few bits which Hopper's products keep of their sums
are those of one tile. Weights are 2^8 times what they are elsewhere, and so is their sum, so that
small ones survive as e4m3 numbers.

Source: FlashAttention-3 (Shah et al. 2024), section 3.3; `ops/attention/triton/forward.py`.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportArgumentType=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.fp8_numbers import as_e4m3, operand
from saccade.gpu.language import tl, triton
from saccade.gpu.online_softmax import (
    LN_2,
    LOG2_E,
    load_sink,
    max_of_rows,
    power,
    sum_of_rows,
)
from saccade.gpu.tensor_view import (
    any_nonfinite,
    load_numbers,
    load_rows,
    load_tile,
    nonfinite_rows,
    num_rows,
    pad_results,
    store_numbers,
    store_tile,
    without,
)
from saccade.gpu.tile_ranges import (
    NAN_SAFE_ROWS,
    if_present,
    nan_safe_parts,
    nan_safe_start,
)
from saccade.ops.attention_fp8.triton.numbers import load_scale
from saccade.ops.attention_fp8.triton.quantise import load_values
from saccade.runtime.fp8_spec import WEIGHTS_LOG2

LIFT: Any = tl.constexpr(float(WEIGHTS_LOG2))  # weights are 2^LIFT times their size
# The unit that sums are counted in, of the largest scale of values so far: products times 2^60 and
# the number of keys fit float32, and scales 2^180 times smaller still count. From the smallest unit
# to the largest, 2^60, what changes units is a normal number.
UNIT_OF_SCALE: Any = tl.constexpr(2.0**-60)
SMALLEST_UNIT: Any = tl.constexpr(2.0**-66)


class Scales(NamedTuple):
    """Views of the scales, by block of rows; None: 1. And what smoothing took from the scores."""

    query: Any
    key: Any
    value: Any
    shift: Any  # a View of numbers of query rows, or None


class Sums(NamedTuple):
    """The running softmax of a tile of query rows.

    The product of a tile's weights and values is added to the weighted sum when the next tile is
    folded in, so that the tensor core goes on with the next tile's scores meanwhile. Sums are
    counted in a unit that grows with the scales of values, if these go by blocks: as numbers they
    may leave float32 where their means do not.
    """

    row_max: Any  # [QUERY_TILE]
    row_sum: Any
    weighted_sum: Any  # [QUERY_TILE, VALUE_WIDTH]
    product: Any  # of the tile that was folded in last
    product_scale: Any  # the scale of its values, in the unit
    unit: Any


@triton.jit(do_not_specialize=["rules"])
def attention_fp8_forward(
    query, key, values, output, logsumexp,  # Views; values: of tiles [VALUE_DIM, BLOCK]
    scales, rules, sinks,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head. Grid: every tile of every head and sequence."""
    batch, query_head, tile, slot = query.find(tl.program_id(0), query.data, QUERY_TILE)
    query_start = tile * QUERY_TILE
    query_len, kv_len = num_rows(query, batch), num_rows(key, batch)
    query_rows = query_start + tl.arange(0, QUERY_TILE)
    pad_results(output, logsumexp, VALUE_DIM, VALUE_WIDTH)
    query_tile = load_rows(
        query, batch, query_head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH, False
    )
    shift = tl.zeros([QUERY_TILE], tl.float32)  # of scores, by smoothing
    if scales.shift is not None:
        shift = rules.scale * load_numbers(
            scales.shift, batch, query_head, query_rows, query_len, 0.0
        )
    # A program past the end of its sequence has no scale.
    present = query_start < query_len
    factor = rules.scale * load_scale(
        scales.query, batch, query_head, tl.where(present, query_start, 0)
    )
    at = (batch, query_head, query_head // HEADS_PER_KV_HEAD, query_rows, query_len, kv_len)
    tile_range = rules.mask.tile_range(
        rules.mask, batch, query_head, slot, query_start, (query_len, kv_len), QUERY_TILE, KV_TILE,
        True,
    )  # fmt: skip
    tile_range = if_present(tile_range, present)
    # Partial tiles behind the full ones (of a list, which is not in order, hardly any).
    right = tl.maximum(tile_range.num_partial - tile_range.num_left, 0)
    if rules.mask.visible is None:
        right = tile_range.num_partial

    state = nothing_seen(QUERY_TILE, VALUE_WIDTH)
    for index in range(0, right):
        tile = rules.mask.tile(rules.mask, tile_range, tile_range.num_partial - 1 - index, False)
        state = fold_tile(
            key, values, scales, rules, at, query_tile, factor, shift, tile * KV_TILE, state,
            HEAD_DIM, VALUE_DIM, KV_TILE, True, False,
        )  # fmt: skip
    for index in range(0, tile_range.num_full):  # no mask arithmetic
        tile = rules.mask.tile(rules.mask, tile_range, tile_range.num_full - 1 - index, True)
        state = fold_tile(
            key, values, scales, rules, at, query_tile, factor, shift, tile * KV_TILE, state,
            HEAD_DIM, VALUE_DIM, KV_TILE, False, False,
        )  # fmt: skip
    if rules.mask.visible is not None:
        left = tile_range.num_partial - right
        for index in range(0, left):
            tile = rules.mask.tile(rules.mask, tile_range, left - 1 - index, False)
            state = fold_tile(
                key, values, scales, rules, at, query_tile, factor, shift, tile * KV_TILE, state,
                HEAD_DIM, VALUE_DIM, KV_TILE, True, False,
            )  # fmt: skip
        if any_nonfinite(total_of(state), True):  # once more, NaN-safe: hidden rows may hold NaN
            query_tile = load_rows(
                query, batch, query_head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH, False
            )
            state = nothing_seen(QUERY_TILE, VALUE_WIDTH)
            for index in tl.range(0, nan_safe_parts(tile_range, KV_TILE), num_stages=1):
                kv_start = nan_safe_start(rules.mask, tile_range, index, KV_TILE)
                state = fold_tile(
                    key, values, scales, rules, at, query_tile, factor, shift, kv_start, state,
                    HEAD_DIM, VALUE_DIM, NAN_SAFE_ROWS, True, True,
                )  # fmt: skip
    multiplier, natural_lse = finish(state, shift, sinks, query_head, rules.score is not None)
    attended = total_of(state) * multiplier[:, None]
    if scales.value is not None:  # last: only means of values are sure to suit float32
        if scales.value.step == 0:  # one for all keys
            attended = attended * load_scale(scales.value, batch, at[2], 0)
        else:
            attended = attended * state.unit
    store_tile(output, batch, query_head, query_start, query_len, attended, VALUE_DIM)
    store_numbers(logsumexp, batch, query_head, query_rows, query_len, natural_lse)


@triton.jit
def nothing_seen(ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """The state before any key."""
    row_max, row_sum = tl.full([ROWS], float("-inf"), tl.float32), tl.zeros([ROWS], tl.float32)
    weighted_sum = tl.zeros([ROWS, WIDTH], tl.float32)
    product = tl.zeros([ROWS, WIDTH], tl.float32)
    return Sums(row_max, row_sum, weighted_sum, product, 1.0, SMALLEST_UNIT)


@triton.jit
def total_of(state):
    """The weighted sum with the last tile's product."""
    return state.weighted_sum + state.product * state.product_scale


@triton.jit
def fold_tile(
    key, values, scales, rules, at, query_tile, factor, shift, kv_start, state,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KV_TILE: tl.constexpr,
    PARTIAL: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Fold one tile of keys and values into the state.

    factor: the scale of the scores times that of the queries. PARTIAL: pairs may be hidden.
    NAN_SAFE: a row that holds NaN makes nonfinite the pairs that it is visible in and no others;
    then products are of float16, which changes no number.
    """
    batch, query_head, kv_head, query_rows, query_len, kv_len = at
    row_max, unit = state.row_max, state.unit
    kv_rows = kv_start + tl.arange(0, KV_TILE)
    key_tile = load_tile(  # [KV_TILE, HEAD_WIDTH]
        key, batch, kv_head, kv_start, kv_len, KV_TILE, HEAD_DIM, query_tile.shape[1], not PARTIAL
    )
    value_tile = load_values(  # [VALUE_WIDTH, KV_TILE]
        values, batch, kv_head, kv_start, VALUE_DIM, state.product.shape[1], KV_TILE
    )
    queries, keys = operand(query_tile, NAN_SAFE), operand(key_tile, NAN_SAFE)
    value_rows = tl.trans(operand(value_tile, NAN_SAFE))
    if NAN_SAFE:
        nonfinite_query, nonfinite_value = nonfinite_rows(queries), nonfinite_rows(value_rows)
        nonfinite = nonfinite_query[:, None] | (nonfinite_value | nonfinite_rows(keys))[None, :]
        queries, value_rows = (
            without(nonfinite_query, queries),
            without(nonfinite_value, value_rows),
        )
        keys = without(nonfinite_rows(keys), keys)

    factor = factor * load_scale(scales.key, batch, kv_head, kv_start)
    scores = tl.dot(queries, tl.trans(keys))  # [QUERY_TILE, KV_TILE]
    if rules.score is not None:
        scores = rules.score.change(
            scores * factor + shift[:, None], batch, query_head, query_rows[:, None],
            kv_rows[None, :], kv_len - query_len, rules.score.data,
        )  # fmt: skip
        factor = 1.0
    if NAN_SAFE:
        scores = tl.where(nonfinite, float("nan"), scores)
    if PARTIAL:
        visible = (kv_rows < kv_len)[None, :]
        if rules.mask.visible is not None:
            visible = visible & rules.mask.visible(
                batch, query_head, query_rows[:, None], kv_rows[None, :], kv_len - query_len,
                rules.mask.data,
            )  # fmt: skip
        scores = tl.where(visible, scores, float("-inf"))

    factor = factor * LOG2_E
    largest = max_of_rows(scores, True)
    if rules.score is None:
        largest = largest * factor
    new_max = tl.maximum(row_max, largest)
    base = new_max
    if PARTIAL or rules.score is not None:  # a row may have seen nothing
        base = tl.where(new_max == float("-inf"), 0.0, new_max)
    if rules.score is None:
        rescale = tl.exp2(row_max - base)
        weights = tl.exp2(scores * factor - (base - LIFT)[:, None])  # one FMA, one exponential
    else:  # natural, and so is row_max (gpu/online_softmax.py)
        rescale = power(row_max - base, True)
        weights = tl.exp2((scores - base[:, None]) * LOG2_E + LIFT)
    row_sum = state.row_sum * rescale + sum_of_rows(weights, True)
    value_scale, change_of_unit = 1.0, 1.0
    if scales.value is not None:  # noqa: SIM102 (known when compiling)
        if scales.value.step != 0:
            value_scale = load_scale(scales.value, batch, kv_head, kv_start)
            new_unit = value_scale * UNIT_OF_SCALE
            if new_unit > unit:  # seldom, and behind a branch it takes no registers
                change_of_unit = unit / new_unit
                unit = new_unit
            value_scale = value_scale / unit
    rescale = rescale * change_of_unit
    weighted_sum = total_of(state) * rescale[:, None]
    product = tl.dot(operand(as_e4m3(weights), NAN_SAFE), value_rows)  # [QUERY_TILE, VALUE_WIDTH]
    return Sums(new_max, row_sum, weighted_sum, product, value_scale, unit)


@triton.jit
def finish(state, shift, sinks, head, NATURAL: tl.constexpr):
    """What the weighted sums are multiplied by, and the natural lse. NATURAL: so are scores, which
    have `shift` then; others lack it.

    Sinks join here, so that weights are as large as they can be until then. A row that saw nothing
    multiplies 0 by 1 and has the lse -inf.
    """
    row_max, row_sum = state.row_max, state.row_sum
    rescale = tl.full([row_max.shape[0]], 1.0, tl.float32)
    if sinks is not None:
        sink = load_sink(sinks, head, NATURAL) + tl.zeros_like(row_max)
        if not NATURAL:
            sink = sink - shift * LOG2_E
        top = tl.maximum(row_max, sink)
        base = tl.where(top == float("-inf"), 0.0, top)
        rescale = power(row_max - base, NATURAL)
        if NATURAL:  # noqa: SIM108
            of_sink = tl.exp2((sink - base) * LOG2_E + LIFT)
        else:
            of_sink = tl.exp2(sink - base + LIFT)
        row_sum = row_sum * rescale + of_sink
        row_max = top
    seen = row_sum != 0
    divisor = tl.where(seen, row_sum, 1.0)
    if NATURAL:
        natural_lse = row_max + (tl.log2(divisor) - LIFT) * LN_2
    else:
        natural_lse = (row_max + (tl.log2(divisor) - LIFT)) * LN_2 + shift
    return rescale / divisor, tl.where(seen, natural_lse, float("-inf"))
