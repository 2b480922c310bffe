"""Attention backward: gradients of keys and values in one kernel, of queries in it or in another.

`attention_backward_keys` stands at a tile of keys and walks along the queries that see it. It can
add the gradients of queries to memory on its way (atomic additions, in any order); or
backward_dq.py computes them in a pass of its own, which does two of the products again and
gives equal bits every time.

Source: FlashAttention-2 (Dao 2023), algorithm 2.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from saccade.gpu.target import is_hopper
from saccade.gpu.tensor_view import (
    add_rows,
    any_spoilt,
    load_rows,
    load_tile,
    num_rows,
    pad_rows,
    spoilt_rows,
    store_tile,
    without,
)
from saccade.gpu.tile_ranges import CAREFUL_ROWS, careful_parts, careful_start, if_present
from saccade.ops.attention.triton.backward_common import (
    differentiate,
    drop,
    load_both_statistics,
    load_statistics,
    weigh,
)

AS_IT_IS, AGAIN, AGAIN_WITH_QUERIES = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
VERDICTS_AT_ONCE = tl.constexpr(16)


@triton.jit(do_not_specialize=["rules"])
def attention_backward_keys(
    forward, grad_key, grad_value, grad_query, rules,  # grad_query: float32, or None
    verdicts, num_verdicts,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
    CAREFUL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: KV_TILE rows of one kv head, and every query row of its heads that sees them.

    Where pairs are hidden, NaN or inf may go where it must not (0 · NaN is NaN). A program that
    finds some writes a verdict, and its work is done again by a program of a second launch, which
    is CAREFUL and takes longer. As that seldom happens, a program there looks at many verdicts.

    CHAINED: it may start while kernels before it run. Where the one for queries makes the row
    statistics (under a mask), it is waited for before they are read; elsewhere they were there
    before that one's programs let this one start, and it is waited for at the end, so that who
    follows finds both done.
    """
    program = tl.program_id(0)
    if CAREFUL:
        if CHAINED:
            gdc_wait()
        first = program * VERDICTS_AT_ONCE
        several = first + tl.arange(0, VERDICTS_AT_ONCE)
        found = tl.load(verdicts + several, mask=several < num_verdicts, other=AS_IT_IS)
        if tl.max(found, 0) != AS_IT_IS:
            for place in range(first, tl.minimum(first + VERDICTS_AT_ONCE, num_verdicts)):
                verdict = tl.load(verdicts + place)
                if verdict != AS_IT_IS:
                    differentiate_keys(
                        forward, grad_key, grad_value, grad_query, rules, verdicts,
                        place, verdict,
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
    CAREFUL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """What one program does. verdict: that of the first launch, if this is the second."""
    batch, kv_head, tile, slot = forward.key.find(program, forward.key.data, KV_TILE)
    kv_start = tile * KV_TILE
    query_len, kv_len = num_rows(forward.query, batch), num_rows(forward.key, batch)
    present, added_len = kv_start < kv_len, query_len
    if CAREFUL:
        added_len = tl.where(verdict == AGAIN_WITH_QUERIES, query_len, 0)
    kv_rows = kv_start + tl.arange(0, KV_TILE)
    if not CAREFUL:
        pad_rows(grad_key, 0.0, HEAD_DIM, HEAD_WIDTH)
        pad_rows(grad_value, 0.0, VALUE_DIM, VALUE_WIDTH)
    key_tile = load_rows(forward.key, batch, kv_head, kv_rows, kv_len, HEAD_DIM, HEAD_WIDTH, False)
    value_tile = load_rows(
        forward.value, batch, kv_head, kv_rows, kv_len, VALUE_DIM, VALUE_WIDTH, False
    )
    spoilt = False  # these keys would spoil gradients of queries that do not see them
    if rules.mask.visible is not None and grad_query is not None and not CAREFUL:
        spoilt = any_spoilt(key_tile) | any_spoilt(value_tile)
        present = present & (spoilt == 0)
    grads = (
        tl.zeros([KV_TILE, HEAD_WIDTH], tl.float32), tl.zeros([KV_TILE, VALUE_WIDTH], tl.float32),
    )  # fmt: skip
    grads = sum_over_queries(
        forward, grad_query, rules, (batch, kv_head, slot, kv_start, query_len, kv_len),
        (key_tile, value_tile), grads, present, added_len,
        HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, QUERY_TILE, KV_TILE, PRECISION, CAREFUL,
        CHAINED,
    )  # fmt: skip
    if rules.mask.visible is not None and not CAREFUL:
        again = tl.where(any_spoilt(grads[0], True) | any_spoilt(grads[1], True), AGAIN, AS_IT_IS)
        tl.store(verdicts + program, tl.where(spoilt, AGAIN_WITH_QUERIES, again))
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
    CAREFUL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """Add what every visited tile of every query head gives; none if not `present`."""
    batch, kv_head, slot, kv_start, query_len, kv_len = at
    for group_head in range(0, HEADS_PER_KV_HEAD):
        query_head = kv_head * HEADS_PER_KV_HEAD + group_head
        walk = rules.mask.walk(
            rules.mask, batch, query_head, slot, kv_start, (kv_len, query_len),
            KV_TILE, QUERY_TILE, False,
        )  # fmt: skip
        walk = if_present(walk, present)
        if CHAINED and rules.mask.visible is not None:
            gdc_wait()
            gdc_launch_dependents()
        here = (batch, query_head, kv_start, query_len, kv_len, added_len)
        if CAREFUL:
            for index in tl.range(0, careful_parts(walk, QUERY_TILE), num_stages=1):
                query_start = careful_start(rules.mask, walk, index, QUERY_TILE)
                grads = add_tile(
                    forward, grad_query, rules, here, query_start, tiles, grads,
                    HEAD_DIM, VALUE_DIM, CAREFUL_ROWS, PRECISION, True, True,
                )  # fmt: skip
        else:
            # Without a mask, loops that need not run are not prepared: it takes fewer registers.
            if rules.mask.visible is not None or walk[5] > 0:
                tile = rules.mask.tile(rules.mask, walk, 0, True)
                for index in range(0, walk[5]):
                    following = rules.mask.tile(rules.mask, walk, index + 1, True)
                    grads = add_tile(
                        forward, grad_query, rules, here, tile * QUERY_TILE, tiles, grads,
                        HEAD_DIM, VALUE_DIM, QUERY_TILE, PRECISION, False, False,
                    )  # fmt: skip
                    tile = following
            if rules.mask.visible is not None or walk[3] > 0:
                tile = rules.mask.tile(rules.mask, walk, 0, False)
                for index in range(0, walk[3]):
                    following = rules.mask.tile(rules.mask, walk, index + 1, False)
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
    PRECISION: tl.constexpr, EDGE: tl.constexpr, CAREFUL: tl.constexpr,
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
    query_tile = load_tile(
        forward.query, batch, query_head, query_start, query_len, QUERY_TILE, HEAD_DIM,
        key_tile.shape[1], not EDGE, True,
    )  # fmt: skip
    grad_tile = load_tile(
        forward.grad_output, batch, query_head, query_start, query_len, QUERY_TILE, VALUE_DIM,
        value_tile.shape[1], not EDGE, True,
    )  # fmt: skip
    if is_hopper() and QUERY_TILE >= 64 and key_tile.shape[0] <= QUERY_TILE:
        lse_log2, row_dot = load_both_statistics(
            forward, batch, query_head, query_rows, query_len, not EDGE
        )
    else:
        lse_log2, row_dot = load_statistics(
            forward, batch, query_head, query_rows, query_len, not EDGE
        )
    spoilt, inside = None, None
    if CAREFUL:
        of_keys = spoilt_rows(key_tile) | spoilt_rows(value_tile)
        of_queries = spoilt_rows(query_tile) | spoilt_rows(grad_tile)
        spoilt = of_keys[:, None] | of_queries[None, :]
        query_tile, grad_tile = without(of_queries, query_tile), without(of_queries, grad_tile)
        key_tile, value_tile = without(of_keys, key_tile), without(of_keys, value_tile)
    if EDGE:  # rows past the end are 0: they add nothing to finite sums, and no more is asked
        if CAREFUL or grad_query is not None or rules.score is not None:
            inside = (kv_rows < kv_len)[:, None] & (query_rows < query_len)[None, :]
        elif rules.mask.visible is not None:
            inside = True

    scores = tl.dot(key_tile, tl.trans(query_tile), input_precision=PRECISION)
    pairs = (batch, query_head, query_rows[None, :], kv_rows[:, None], kv_len - query_len)
    weights, derivative, visible = weigh(scores, lse_log2[None, :], spoilt, inside, rules, pairs)
    grad_weights = tl.dot(value_tile, tl.trans(grad_tile), input_precision=PRECISION)
    kept_weights = weights
    if rules.dropout is not None:
        factors = tl.trans(
            drop(rules.dropout, batch, query_head, query_rows, kv_start, key_tile.shape[0])
        )
        kept_weights = weights * factors
        grad_weights = grad_weights * factors
    of_value = tl.dot(
        kept_weights.to(grad_tile.dtype), grad_tile, of_value, input_precision=PRECISION
    )
    if not CAREFUL and grad_query is None:
        visible = True  # 0 · NaN is NaN, which is seen in the end
    grad_scores = differentiate(weights, grad_weights, row_dot[None, :], derivative, visible)
    grad_scores = grad_scores.to(query_tile.dtype)
    of_key = tl.dot(grad_scores, query_tile, of_key, input_precision=PRECISION)
    if grad_query is not None:
        share = tl.dot(tl.trans(grad_scores), key_tile, input_precision=PRECISION) * rules.scale
        add_rows(grad_query, batch, query_head, query_rows, added_len, share, HEAD_DIM)
    return of_key, of_value
