"""Attention backward: what rounding took from an lse, where weights would show it.

Scores of -1e9 and n keys, as a mask that is added makes them where it hides a whole row, have the
lse -1e9: float32 has no room for the log of n beside it, and exp(score - lse) would be n times each
weight. So where the caller changes scores, the sums of rows of large lse are computed anew, by the
inputs that the backward pass has: a forward pass that kept them could not serve callers that bring
an lse of their own. Scores that are products and nothing else are left as they are.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from saccade.gpu.language import tl, triton
from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.tensor_view import load_numbers, load_rows, num_rows, store_numbers
from saccade.gpu.tile_ranges import may_see

# An lse below is rounded by 2^-12 at most, and weights by as much of their own size.
LARGE = tl.constexpr(8192.0)
# What rounding may take from an lse of 1, in base 2, with a score of the largest weight that came
# out one float32 apart: more than that is not rounding.
MOST_LOST = tl.constexpr(2 * 2.0**-23 * 1.4426950408889634)


@triton.jit(do_not_specialize=["rules"])
def attention_lse_residual(
    query, key, logsumexp, lse_residual, rules, sinks,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head, and every key if the lse of some of them is large.

    lse_residual: log2 Σ exp(score - lse) of each row, 0 where the lse is not large. Rows whose lse
    is that of more keys than these, as in a ring, keep what they have, and so does NaN.
    """
    batch, head, tile, _ = query.find(tl.program_id(0), query.data, QUERY_TILE)
    query_start = tile * QUERY_TILE
    lengths = (num_rows(query, batch), num_rows(key, batch))
    query_rows = query_start + tl.arange(0, QUERY_TILE)
    lse = load_numbers(logsumexp, batch, head, query_rows, lengths[0], 0.0)
    size = tl.abs(lse)
    large = (size >= LARGE) & (size < float("inf"))
    residual = tl.zeros([QUERY_TILE], tl.float32)
    if tl.max(large.to(tl.int32), 0) > 0:
        total = tl.zeros([QUERY_TILE], tl.float32)
        if sinks is not None:
            sink = tl.load(sinks + head).to(tl.float32)
            total += tl.exp2((sink - lse) * LOG2_E)
        query_tile = load_rows(  # [QUERY_TILE, HEAD_WIDTH]
            query, batch, head, query_rows, lengths[0], HEAD_DIM, HEAD_WIDTH, False
        )
        for kv_index in range(0, tl.cdiv(lengths[1], KV_TILE)):
            total = add_weights(
                key, rules, batch, head, head // HEADS_PER_KV_HEAD, query_start, kv_index, lengths,
                query_tile, lse, total, HEAD_DIM, KV_TILE, PRECISION,
            )  # fmt: skip
        lost = tl.log2(total)
        residual = tl.where(large & (tl.abs(lost) <= size * MOST_LOST), lost, 0.0)
    store_numbers(lse_residual, batch, head, query_rows, lengths[0], residual)


@triton.jit
def add_weights(
    key, rules, batch, head, kv_head, query_start, kv_index, lengths, query_tile, lse, total,
    HEAD_DIM: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add exp(score - lse) of one tile of keys, if any of its pairs can be visible."""
    QUERY_TILE: tl.constexpr = query_tile.shape[0]
    if may_see(rules.mask, batch, head, query_start, lengths, kv_index, QUERY_TILE, KV_TILE):
        query_rows = query_start + tl.arange(0, QUERY_TILE)[:, None]
        kv_rows = kv_index * KV_TILE + tl.arange(0, KV_TILE)
        key_tile = load_rows(  # [KV_TILE, HEAD_WIDTH]
            key, batch, kv_head, kv_rows, lengths[1], HEAD_DIM, query_tile.shape[1], False
        )
        # Pairs, here and below: [QUERY_TILE, KV_TILE].
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        kv_rows, shift = kv_rows[None, :], lengths[1] - lengths[0]
        changed = rules.score.change(
            scores * rules.scale, batch, head, query_rows, kv_rows, shift, rules.score.data
        )
        visible = kv_rows < lengths[1]
        if rules.mask.visible is not None:
            visible = visible & rules.mask.visible(
                batch, head, query_rows, kv_rows, shift, rules.mask.data
            )
        weights = tl.exp2((changed - lse[:, None]) * LOG2_E)
        total += tl.sum(tl.where(visible, weights, 0.0), 1)
    return total
