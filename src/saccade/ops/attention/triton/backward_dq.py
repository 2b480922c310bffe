"""Attention backward, gradients of queries: one pass over the keys, in order, nothing atomic.

Source: FlashAttention-2 (Dao 2023), algorithm 2, line 15, with the loops exchanged.
"""

from __future__ import annotations

from saccade.gpu.language import gdc_launch_dependents, gdc_wait, tl, triton
from saccade.gpu.tensor_view import (
    any_nonfinite,
    load_rows,
    load_tile,
    nonfinite_rows,
    num_rows,
    pad_rows,
    store_numbers,
    store_rows,
    without,
)
from saccade.gpu.tile_ranges import NAN_SAFE_ROWS, if_present, nan_safe_parts, nan_safe_start
from saccade.ops.attention.triton.backward_common import (
    differentiate,
    drop,
    load_residual,
    load_results,
    load_statistics,
    lse_of_weights,
    statistics_from,
    weigh,
)


@triton.jit(do_not_specialize=["rules"])
def attention_backward_queries(
    forward, grad_query, rules, output, residual, logsumexp, grad_lse,  # the last four may be None
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head, and every key row that they see.

    With `output`, the row statistics are made here, from rows that are read anyway, and written
    for kernels that follow; without, they are read. CHAINED: the kernel that makes them may still
    run, and is waited for here; then the kernel for keys may start.
    """
    batch, query_head, tile, slot = forward.query.find(
        tl.program_id(0), forward.query.data, QUERY_TILE
    )
    query_start = tile * QUERY_TILE
    query_len, kv_len = num_rows(forward.query, batch), num_rows(forward.key, batch)
    query_rows = query_start + tl.arange(0, QUERY_TILE)
    pad_rows(grad_query, 0.0, HEAD_DIM, HEAD_WIDTH)
    query_tile = load_rows(
        forward.query, batch, query_head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH, False
    )
    if output is None:
        grad_tile = load_rows(
            forward.grad_output, batch, query_head, query_rows, query_len, VALUE_DIM, VALUE_WIDTH,
            False,
        )  # fmt: skip
    else:
        results = load_results(
            output, residual, forward.grad_output, logsumexp, grad_lse, batch, query_head,
            query_rows, query_len, VALUE_DIM, VALUE_WIDTH,
        )  # fmt: skip
        grad_tile = results[2]
    at = (batch, query_head, query_head // HEADS_PER_KV_HEAD, query_start, query_len, kv_len)
    tile_range = rules.mask.tile_range(
        rules.mask, batch, query_head, slot, query_start, (query_len, kv_len),
        QUERY_TILE, KV_TILE, True,
    )  # fmt: skip
    tile_range = if_present(tile_range, query_start < query_len)
    if CHAINED:
        if output is None:
            gdc_wait()
        gdc_launch_dependents()
    if output is None:
        row_lse, row_dot = load_statistics(forward, batch, query_head, query_rows, query_len, False)
    else:
        lse, row_dot, saw_nothing = statistics_from(results, residual is not None)
        row_lse = lse_of_weights(lse, saw_nothing, rules.score is not None)
        store_numbers(forward.row_lse, batch, query_head, query_rows, query_len, row_lse)
        store_numbers(forward.row_dot, batch, query_head, query_rows, query_len, row_dot)
    lse_residual = load_residual(forward, batch, query_head, query_rows, query_len, row_lse, False)
    rows = (query_tile, grad_tile, row_lse, lse_residual, row_dot)
    of_query = tl.zeros([QUERY_TILE, HEAD_WIDTH], tl.float32)
    tile = rules.mask.tile(rules.mask, tile_range, 0, True)
    for index in range(0, tile_range.num_full):
        following = rules.mask.tile(rules.mask, tile_range, index + 1, True)
        of_query = add_tile(
            forward, rules, at, tile * KV_TILE, rows, of_query,
            HEAD_DIM, VALUE_DIM, KV_TILE, PRECISION, False, False,
        )  # fmt: skip
        tile = following
    tile = rules.mask.tile(rules.mask, tile_range, 0, False)
    for index in range(0, tile_range.num_partial):
        following = rules.mask.tile(rules.mask, tile_range, index + 1, False)
        of_query = add_tile(
            forward, rules, at, tile * KV_TILE, rows, of_query,
            HEAD_DIM, VALUE_DIM, KV_TILE, PRECISION, True, False,
        )  # fmt: skip
        tile = following
    if rules.mask.visible is not None:  # noqa: SIM102 (known when compiling; the next is not)
        if any_nonfinite(of_query, True):  # as in forward.py
            query_tile = load_rows(
                forward.query, batch, query_head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH,
                False,
            )  # fmt: skip
            grad_tile = load_rows(
                forward.grad_output, batch, query_head, query_rows, query_len, VALUE_DIM,
                VALUE_WIDTH, False,
            )  # fmt: skip
            rows = (query_tile, grad_tile, row_lse, lse_residual, row_dot)
            of_query = tl.zeros([QUERY_TILE, HEAD_WIDTH], tl.float32)
            for index in tl.range(0, nan_safe_parts(tile_range, KV_TILE), num_stages=1):
                kv_start = nan_safe_start(rules.mask, tile_range, index, KV_TILE)
                of_query = add_tile(
                    forward, rules, at, kv_start, rows, of_query,
                    HEAD_DIM, VALUE_DIM, NAN_SAFE_ROWS, PRECISION, True, True,
                )  # fmt: skip
    of_query = of_query * rules.scale
    store_rows(grad_query, batch, query_head, query_rows, query_len, of_query, HEAD_DIM)


@triton.jit
def add_tile(
    forward, rules, at, kv_start, rows, of_query,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, KV_TILE: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Add what one tile of keys gives to the gradients of a tile of queries: [queries, keys]."""
    batch, query_head, kv_head, query_start, query_len, kv_len = at
    query_tile, grad_tile, row_lse, lse_residual, row_dot = rows
    query_rows = query_start + tl.arange(0, query_tile.shape[0])
    kv_rows = kv_start + tl.arange(0, KV_TILE)
    key_tile = load_tile(  # [KV_TILE, HEAD_WIDTH]
        forward.key, batch, kv_head, kv_start, kv_len, KV_TILE, HEAD_DIM, query_tile.shape[1],
        not PARTIAL,
    )  # fmt: skip
    value_tile = load_tile(  # [KV_TILE, VALUE_WIDTH]
        forward.value, batch, kv_head, kv_start, kv_len, KV_TILE, VALUE_DIM, grad_tile.shape[1],
        not PARTIAL,
    )  # fmt: skip
    nonfinite, inside = None, None
    if NAN_SAFE:
        of_keys = nonfinite_rows(key_tile) | nonfinite_rows(value_tile)
        of_queries = nonfinite_rows(query_tile) | nonfinite_rows(grad_tile)
        nonfinite = of_queries[:, None] | of_keys[None, :]
        query_tile, grad_tile = without(of_queries, query_tile), without(of_queries, grad_tile)
        key_tile, value_tile = without(of_keys, key_tile), without(of_keys, value_tile)
    if PARTIAL:
        inside = (kv_rows < kv_len)[None, :]  # a query row past the end has sums of its own
        if NAN_SAFE or rules.score is not None:
            inside = inside & (query_rows < query_len)[:, None]

    # Pairs, here and below: [QUERY_TILE, KV_TILE].
    scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
    pairs = (batch, query_head, query_rows[:, None], kv_rows[None, :], kv_len - query_len)
    weights, derivative, visible = weigh(
        scores, row_lse[:, None], lse_residual[:, None], nonfinite, inside, rules, pairs
    )
    grad_weights = tl.dot(grad_tile, tl.trans(value_tile), input_precision=PRECISION)
    if rules.dropout is not None:
        grad_weights *= drop(rules.dropout, batch, query_head, query_rows, kv_start, KV_TILE)
    if not NAN_SAFE:
        visible = True  # 0 · NaN is NaN, which is seen in the end
    grad_scores = differentiate(weights, grad_weights, row_dot[:, None], derivative, visible)
    # [QUERY_TILE, HEAD_WIDTH]
    return tl.dot(grad_scores.to(key_tile.dtype), key_tile, of_query, input_precision=PRECISION)
