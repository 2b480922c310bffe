"""Attention backward: gradients of keys and values in one kernel, of queries in it or in another.

`attention_backward_keys` stands at a tile of keys and goes along the queries that see it. It can
add the gradients of queries to memory on its way (atomic additions, in any order); or
backward_dq.py computes them in a pass of its own, which does two of the products again and
gives equal bits every time.

Source: FlashAttention-2 (Dao 2023), algorithm 2.
"""

from __future__ import annotations

from saccade.gpu.language import gdc_launch_dependents, gdc_wait, is_hopper, tl, triton
from saccade.gpu.tensor_view import (
    add_rows,
    any_nonfinite,
    load_rows,
    load_tile,
    nonfinite_rows,
    num_rows,
    pad_rows,
    store_tile,
    without,
)
from saccade.gpu.tile_ranges import NAN_SAFE_ROWS, if_present, nan_safe_parts, nan_safe_start
from saccade.ops.attention.triton.backward_common import (
    differentiate,
    drop,
    load_both_statistics,
    load_residual,
    load_statistics,
    weigh,
)

AS_IT_IS, REPEAT, REPEAT_WITH_QUERIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
VERDICTS_AT_ONCE = tl.constexpr(16)


@triton.jit(do_not_specialize=["rules"])
def attention_backward_keys(
    forward, grad_key, grad_value, grad_query, rules,  # grad_query: float32, or None
    verdicts, num_verdicts,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
    NAN_SAFE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: KV_TILE rows of one kv head, and every query row of its heads that sees them.

    Where pairs are hidden, NaN or inf may go where it must not (0 · NaN is NaN). A program that
    finds some writes a verdict, and its work is done again by a program of a second launch, which
    is NAN_SAFE and takes longer. As that seldom happens, a program there looks at many classes.

    CHAINED: it may start while kernels before it run. Where the one for queries makes the row
    statistics (under a mask), it is waited for before they are read; elsewhere they were there
    before that one's programs let this one start, and it is waited for at the end, so that
    kernels that follow find both done.
    """
    program = tl.program_id(0)
    if NAN_SAFE:
        if CHAINED:
            gdc_wait()
        first = program * VERDICTS_AT_ONCE
        several = first + tl.arange(0, VERDICTS_AT_ONCE)
        found = tl.load(verdicts + several, mask=several < num_verdicts, other=AS_IT_IS)
        if tl.max(found, 0) != AS_IT_IS:
            for position in range(first, tl.minimum(first + VERDICTS_AT_ONCE, num_verdicts)):
                verdict = tl.load(verdicts + position)
                if verdict != AS_IT_IS:
                    differentiate_keys(
                        forward, grad_key, grad_value, grad_query, rules, verdicts,
                        position, verdict,
                        HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
                        QUERY_TILE, KV_TILE, PRECISION, True, False,
                    )  # fmt: skip
    else:
        differentiate_keys(
            forward, grad_key, grad_value, grad_query, rules, verdicts, program, AS_IT_IS,
            HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERY_TILE, KV_TILE, PRECISION, False, CHAINED,
        )  # fmt: skip


@triton.jit
def differentiate_keys(
    forward, grad_key, grad_value, grad_query, rules, verdicts, program, verdict,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
    NAN_SAFE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """What one program does. verdict: that of the first launch, if this is the second."""
    batch, kv_head, tile, slot = forward.key.find(program, forward.key.data, KV_TILE)
    kv_start = tile * KV_TILE
    query_len, kv_len = num_rows(forward.query, batch), num_rows(forward.key, batch)
    present, added_len = kv_start < kv_len, query_len
    if NAN_SAFE:
        added_len = tl.where(verdict == REPEAT_WITH_QUERIES, query_len, 0)
    kv_rows = kv_start + tl.arange(0, KV_TILE)
    if not NAN_SAFE:
        pad_rows(grad_key, 0.0, HEAD_DIM, HEAD_WIDTH)
        pad_rows(grad_value, 0.0, VALUE_DIM, VALUE_WIDTH)
    key_tile = load_rows(forward.key, batch, kv_head, kv_rows, kv_len, HEAD_DIM, HEAD_WIDTH, False)
    value_tile = load_rows(
        forward.value, batch, kv_head, kv_rows, kv_len, VALUE_DIM, VALUE_WIDTH, False
    )
    nonfinite = False  # these keys would poison gradients of queries that do not see them
    if rules.mask.visible is not None and grad_query is not None and not NAN_SAFE:
        nonfinite = any_nonfinite(key_tile) | any_nonfinite(value_tile)
        present = present & (nonfinite == 0)
    grads = (
        tl.zeros([KV_TILE, HEAD_WIDTH], tl.float32), tl.zeros([KV_TILE, VALUE_WIDTH], tl.float32),
    )  # fmt: skip
    grads = sum_over_queries(
        forward, grad_query, rules, (batch, kv_head, slot, kv_start, query_len, kv_len),
        (key_tile, value_tile), grads, present, added_len,
        HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, QUERY_TILE, KV_TILE, PRECISION, NAN_SAFE,
        CHAINED,
    )  # fmt: skip
    if rules.mask.visible is not None and not NAN_SAFE:
        repeat = tl.where(
            any_nonfinite(grads[0], True) | any_nonfinite(grads[1], True), REPEAT, AS_IT_IS
        )
        tl.store(verdicts + program, tl.where(nonfinite, REPEAT_WITH_QUERIES, repeat))
    of_key = grads[0] * rules.scale
    store_tile(grad_key, batch, kv_head, kv_start, kv_len, of_key, HEAD_DIM)
    store_tile(grad_value, batch, kv_head, kv_start, kv_len, grads[1], VALUE_DIM)
    if CHAINED and rules.mask.visible is None:
        gdc_wait()


@triton.jit
def sum_over_queries(
    forward, grad_query, rules, at, tiles, grads, present, added_len,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
    NAN_SAFE: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Add what every visited tile of every query head gives; none if not `present`."""
    batch, kv_head, slot, kv_start, query_len, kv_len = at
    for group_head in range(0, HEADS_PER_KV_HEAD):
        query_head = kv_head * HEADS_PER_KV_HEAD + group_head
        tile_range = rules.mask.tile_range(
            rules.mask, batch, query_head, slot, kv_start, (kv_len, query_len),
            KV_TILE, QUERY_TILE, False,
        )  # fmt: skip
        tile_range = if_present(tile_range, present)
        if CHAINED and rules.mask.visible is not None:
            gdc_wait()
            gdc_launch_dependents()
        here = (batch, query_head, kv_start, query_len, kv_len, added_len)
        if NAN_SAFE:
            for index in tl.range(0, nan_safe_parts(tile_range, QUERY_TILE), num_stages=1):
                query_start = nan_safe_start(rules.mask, tile_range, index, QUERY_TILE)
                grads = add_tile(
                    forward, grad_query, rules, here, query_start, tiles, grads,
                    HEAD_DIM, VALUE_DIM, NAN_SAFE_ROWS, PRECISION, True, True,
                )  # fmt: skip
        else:
            # Without a mask, loops that need not run are not prepared: it takes fewer registers.
            if rules.mask.visible is not None or tile_range.num_full > 0:
                tile = rules.mask.tile(rules.mask, tile_range, 0, True)
                for index in range(0, tile_range.num_full):
                    following = rules.mask.tile(rules.mask, tile_range, index + 1, True)
                    grads = add_tile(
                        forward, grad_query, rules, here, tile * QUERY_TILE, tiles, grads,
                        HEAD_DIM, VALUE_DIM, QUERY_TILE, PRECISION, False, False,
                    )  # fmt: skip
                    tile = following
            if rules.mask.visible is not None or tile_range.num_partial > 0:
                tile = rules.mask.tile(rules.mask, tile_range, 0, False)
                for index in range(0, tile_range.num_partial):
                    following = rules.mask.tile(rules.mask, tile_range, index + 1, False)
                    grads = add_tile(
                        forward, grad_query, rules, here, tile * QUERY_TILE, tiles, grads,
                        HEAD_DIM, VALUE_DIM, QUERY_TILE, PRECISION, True, False,
                    )  # fmt: skip
                    tile = following
    return grads


@triton.jit
def add_tile(
    forward, grad_query, rules, at, query_start, tiles, grads,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, QUERY_TILE: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr, NAN_SAFE: tl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of a tile of keys and values.

    Pairs lie as [keys, queries]: then weights and grad_scores, as they stand in registers, are
    left operands of the products that give the gradients of values and keys.
    """
    batch, query_head, kv_start, query_len, kv_len, added_len = at
    key_tile, value_tile = tiles
    of_key, of_value = grads
    query_rows = query_start + tl.arange(0, QUERY_TILE)
    kv_rows = kv_start + tl.arange(0, key_tile.shape[0])
    query_tile = load_tile(  # [QUERY_TILE, HEAD_WIDTH]
        forward.query, batch, query_head, query_start, query_len, QUERY_TILE, HEAD_DIM,
        key_tile.shape[1], not PARTIAL, True,
    )  # fmt: skip
    grad_tile = load_tile(  # [QUERY_TILE, VALUE_WIDTH]
        forward.grad_output, batch, query_head, query_start, query_len, QUERY_TILE, VALUE_DIM,
        value_tile.shape[1], not PARTIAL, True,
    )  # fmt: skip
    if is_hopper() and QUERY_TILE >= 64 and key_tile.shape[0] <= QUERY_TILE:
        row_lse, row_dot = load_both_statistics(
            forward, batch, query_head, query_rows, query_len, not PARTIAL
        )
    else:
        row_lse, row_dot = load_statistics(
            forward, batch, query_head, query_rows, query_len, not PARTIAL
        )
    nonfinite, inside = None, None
    if NAN_SAFE:
        of_keys = nonfinite_rows(key_tile) | nonfinite_rows(value_tile)
        of_queries = nonfinite_rows(query_tile) | nonfinite_rows(grad_tile)
        nonfinite = of_keys[:, None] | of_queries[None, :]
        query_tile, grad_tile = without(of_queries, query_tile), without(of_queries, grad_tile)
        key_tile, value_tile = without(of_keys, key_tile), without(of_keys, value_tile)
    if PARTIAL:  # rows past the end are 0: they add nothing to finite sums, and no more is asked
        if NAN_SAFE or grad_query is not None or rules.score is not None:
            inside = (kv_rows < kv_len)[:, None] & (query_rows < query_len)[None, :]
        elif rules.mask.visible is not None:
            inside = True

    # Pairs, here and below: [KV_TILE, QUERY_TILE].
    scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
    pairs = (batch, query_head, query_rows[None, :], kv_rows[:, None], kv_len - query_len)
    lse_residual = load_residual(
        forward, batch, query_head, query_rows, query_len, row_lse, not PARTIAL
    )
    weights, derivative, visible = weigh(
        scores, row_lse[None, :], lse_residual[None, :], nonfinite, inside, rules, pairs
    )
    grad_weights = tl.dot(value_tile, tl.trans(grad_tile), input_precision=PRECISION)
    kept_weights = weights
    if rules.dropout is not None:
        factors = tl.trans(
            drop(rules.dropout, batch, query_head, query_rows, kv_start, key_tile.shape[0])
        )
        kept_weights = weights * factors
        grad_weights = grad_weights * factors
    of_value = tl.dot(  # [KV_TILE, VALUE_WIDTH]
        kept_weights.to(grad_tile.dtype), grad_tile, of_value, input_precision=PRECISION
    )
    if not NAN_SAFE and grad_query is None:
        visible = True  # 0 · NaN is NaN, which is seen in the end
    grad_scores = differentiate(weights, grad_weights, row_dot[None, :], derivative, visible)
    grad_scores = grad_scores.to(query_tile.dtype)
    # [KV_TILE, HEAD_WIDTH]
    of_key = tl.dot(grad_scores, query_tile, of_key, input_precision=PRECISION)
    if grad_query is not None:
        # [QUERY_TILE, HEAD_WIDTH]
        added = tl.dot(tl.trans(grad_scores), key_tile, input_precision=PRECISION) * rules.scale
        add_rows(grad_query, batch, query_head, query_rows, added_len, added, HEAD_DIM)
    return of_key, of_value
