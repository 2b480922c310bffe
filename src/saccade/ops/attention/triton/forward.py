"""Attention forward: one pass over the keys, nothing of size query_len x kv_len in memory.

Source: FlashAttention-2 (Dao 2023), algorithm 1. docs/forward.md walks through this file.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from saccade.gpu.language import is_hopper, tl, triton
from saccade.gpu.online_softmax import (
    LN_2,
    LOG2_E,
    finish_softmax,
    join_sink,
    softmax_step,
    start_softmax,
)
from saccade.gpu.rounding import residual_of
from saccade.gpu.tensor_view import (
    any_nonfinite,
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
    next_of_both,
)
from saccade.gpu.wide_heads import load_parts, load_rest, within


@triton.jit(do_not_specialize=["rules"])
def attention_forward(
    query, key, value, output, logsumexp, residual, largest,  # Views; the last two may be None
    rules, sinks,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
    ONE_LOOP: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head. Grid: every tile of every head and sequence.

    ONE_LOOP: full tiles and partial tiles share one, as tile ranges are so short that the start of
    another takes longer than a branch in each tile. residual: see `runtime/rounding.py`. largest:
    takes the largest score of each row, so that sinks must join the softmax after it is known.
    """
    batch, query_head, tile, slot = query.find(tl.program_id(0), query.data, QUERY_TILE)
    query_start = tile * QUERY_TILE
    query_len, kv_len = num_rows(query, batch), num_rows(key, batch)
    query_rows = query_start + tl.arange(0, QUERY_TILE)
    pad_results(output, logsumexp, VALUE_DIM, VALUE_WIDTH)
    query_tiles = load_parts(query, batch, query_head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH)
    at = (batch, query_head, query_head // HEADS_PER_KV_HEAD, query_rows, query_len, kv_len)
    tile_range = rules.mask.tile_range(
        rules.mask,
        batch,
        query_head,
        slot,
        query_start,
        (query_len, kv_len),
        QUERY_TILE,
        KV_TILE,
        True,
    )
    tile_range = if_present(tile_range, query_start < query_len)

    early_sinks = sinks if largest is None else None
    NATURAL: tl.constexpr = rules.score is not None
    row_max, row_sum = start_softmax(early_sinks, query_head, QUERY_TILE, NATURAL)  # [QUERY_TILE]
    weighted_sum = tl.zeros([QUERY_TILE, VALUE_WIDTH], tl.float32)
    state = (row_max, row_sum, weighted_sum)
    if not ONE_LOOP and (rules.mask.visible is not None or tile_range.num_full > 0):
        tile = rules.mask.tile(rules.mask, tile_range, 0, True)
        ahead = key.ahead(key, batch, tile * KV_TILE, kv_len, KV_TILE)
        for index in range(0, tile_range.num_full):  # full tiles: no mask arithmetic
            following = rules.mask.tile(rules.mask, tile_range, index + 1, True)
            state = fold_tile(
                key, value, rules, at, query_tiles, tile * KV_TILE, ahead, state,
                HEAD_DIM, VALUE_DIM, KV_TILE, PRECISION, False, False,
            )  # fmt: skip
            tile, ahead = following, key.ahead(key, batch, following * KV_TILE, kv_len, KV_TILE)
    if not ONE_LOOP and (
        tile_range.num_partial > 0 or (rules.mask.visible is not None and not is_hopper())
    ):
        tile = rules.mask.tile(rules.mask, tile_range, 0, False)
        ahead = key.ahead(key, batch, tile * KV_TILE, kv_len, KV_TILE)
        for index in range(0, tile_range.num_partial):  # partial tiles: pair by pair
            following = rules.mask.tile(rules.mask, tile_range, index + 1, False)
            state = fold_tile(
                key, value, rules, at, query_tiles, tile * KV_TILE, ahead, state,
                HEAD_DIM, VALUE_DIM, KV_TILE, PRECISION, True, False,
            )  # fmt: skip
            tile, ahead = following, key.ahead(key, batch, following * KV_TILE, kv_len, KV_TILE)
    if ONE_LOOP:
        tile = next_of_both(rules.mask, tile_range, 0)
        ahead = key.ahead(key, batch, tile * KV_TILE, kv_len, KV_TILE)
        for index in range(0, tile_range.num_partial + tile_range.num_full):
            following = next_of_both(rules.mask, tile_range, index + 1)
            state = fold_tile(
                key, value, rules, at, query_tiles, tile * KV_TILE, ahead, state, HEAD_DIM,
                VALUE_DIM, KV_TILE, PRECISION, True, False, index < tile_range.num_partial,
            )  # fmt: skip
            tile, ahead = following, key.ahead(key, batch, following * KV_TILE, kv_len, KV_TILE)
    if rules.mask.visible is not None and any_nonfinite(state[2], True):
        # NaN or inf, perhaps from a hidden value row (0 · NaN is NaN): once more, NaN-safe. The
        # queries are read again, or they would take registers all the time.
        query_tiles = load_parts(
            query, batch, query_head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH
        )
        row_max, row_sum = start_softmax(early_sinks, query_head, QUERY_TILE, NATURAL)
        state = (row_max, row_sum, tl.zeros([QUERY_TILE, VALUE_WIDTH], tl.float32))
        for index in tl.range(0, nan_safe_parts(tile_range, KV_TILE), num_stages=1):
            kv_start = nan_safe_start(rules.mask, tile_range, index, KV_TILE)
            found = key.ahead(key, batch, kv_start, kv_len, NAN_SAFE_ROWS)
            state = fold_tile(
                key, value, rules, at, query_tiles, kv_start, found, state,
                HEAD_DIM, VALUE_DIM, NAN_SAFE_ROWS, PRECISION, True, True,
            )  # fmt: skip

    row_max, row_sum, weighted_sum = state
    if largest is not None:
        natural_max = row_max if NATURAL else row_max * LN_2
        store_numbers(largest, batch, query_head, query_rows, query_len, natural_max)
        if sinks is not None:
            rescale, row_max, row_sum = join_sink(sinks, query_head, row_max, row_sum, NATURAL)
            weighted_sum = weighted_sum * rescale[:, None]
    divisor, natural_lse = finish_softmax(row_max, row_sum, NATURAL)
    if rules.dropout is not None:
        divisor = divisor / rules.dropout.data.dropout_scale
    attended = weighted_sum * (1.0 / divisor)[:, None]  # one division a row
    store_tile(output, batch, query_head, query_start, query_len, attended, VALUE_DIM)
    if residual is not None:
        lost = residual_of(attended, attended.to(output.ptr.dtype.element_ty))
        store_tile(residual, batch, query_head, query_start, query_len, lost, VALUE_DIM)
    store_numbers(logsumexp, batch, query_head, query_rows, query_len, natural_lse)


@triton.jit
def fold_tile(
    key, value, rules, at, query_tiles, kv_start, ahead, state,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KV_TILE: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr, NAN_SAFE: tl.constexpr, is_partial=True,
):  # fmt: skip
    """Fold one tile of keys and values into the state (row_max, row_sum, weighted_sum).

    PARTIAL: pairs may be hidden, and rows may lie past the end, unless a tile `is_partial` not.
    NAN_SAFE: a row that holds NaN or inf makes nonfinite the pairs that it is visible in and no
    others.
    """
    batch, query_head, kv_head, query_rows, query_len, kv_len = at
    row_max, row_sum, weighted_sum = state
    query_tile = query_tiles[0]
    HEAD_WIDTH: tl.constexpr = query_tile.shape[1]
    kv_rows = kv_start + tl.arange(0, KV_TILE)
    key_tile = load_tile(  # [KV_TILE, HEAD_WIDTH]
        key, batch, kv_head, kv_start, kv_len, KV_TILE, within(HEAD_DIM, HEAD_WIDTH), HEAD_WIDTH,
        not PARTIAL, ahead=ahead,
    )  # fmt: skip
    if HEAD_DIM > HEAD_WIDTH:
        key_rest = load_rest(
            key, ahead, batch, kv_head, kv_start, kv_len, KV_TILE, HEAD_DIM, HEAD_WIDTH, not PARTIAL
        )
    if value is None:  # a value is the first channels of its key
        value_tile = key_tile
    else:
        value_tile = load_tile(  # [KV_TILE, VALUE_WIDTH]
            value, batch, kv_head, kv_start, kv_len, KV_TILE, VALUE_DIM, weighted_sum.shape[1],
            not PARTIAL, ahead=ahead,
        )  # fmt: skip
    if NAN_SAFE:
        nonfinite_query, nonfinite_value = nonfinite_rows(query_tile), nonfinite_rows(value_tile)
        nonfinite = nonfinite_query[:, None] | (nonfinite_value | nonfinite_rows(key_tile))[None, :]
        if HEAD_DIM > HEAD_WIDTH:
            nonfinite = nonfinite | nonfinite_rows(query_tiles[1])[:, None]
            nonfinite = nonfinite | nonfinite_rows(key_rest)[None, :]
        query_tile = without(nonfinite_query, query_tile)
        value_tile = without(nonfinite_value, value_tile)

    # [QUERY_TILE, KV_TILE]
    scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
    if HEAD_DIM > HEAD_WIDTH:
        scores = tl.dot(query_tiles[1], tl.trans(key_rest), scores, input_precision=PRECISION)
    shift = kv_len - query_len
    if rules.score is not None:
        scores = rules.score.change(
            scores * rules.scale, batch, query_head, query_rows[:, None], kv_rows[None, :], shift,
            rules.score.data,
        )  # fmt: skip
    if NAN_SAFE:
        scores = tl.where(nonfinite, float("nan"), scores)
    if PARTIAL:  # noqa: SIM102 (known when compiling; the next may not be)
        if is_partial:
            visible = (kv_rows < kv_len)[None, :]
            if rules.mask.visible is not None:
                visible = visible & rules.mask.visible(
                    batch, query_head, query_rows[:, None], kv_rows[None, :], shift,
                    rules.mask.data,
                )  # fmt: skip
            scores = tl.where(visible, scores, float("-inf"))

    factor = None if rules.score is not None else rules.scale * LOG2_E
    weights, rescale, row_max, row_sum = softmax_step(
        scores, factor, row_max, row_sum, PARTIAL or rules.score is not None, rules.dropout is None
    )
    if rules.dropout is not None:
        keep = rules.dropout.kept(rules.dropout, batch, query_head, query_rows, kv_start, KV_TILE)
        weights = tl.where(keep, weights, 0.0)
    weighted_sum = tl.dot(  # [QUERY_TILE, VALUE_WIDTH]
        weights.to(value_tile.dtype), value_tile, weighted_sum * rescale[:, None],
        input_precision=PRECISION,
    )  # fmt: skip
    return row_max, row_sum, weighted_sum
