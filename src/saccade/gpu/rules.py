"""Rules: what a kernel does to pairs, beside multiplying: one argument for all of it."""

from __future__ import annotations

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false
from typing import Any, NamedTuple

from saccade.gpu.language import tl, triton


class Rules(NamedTuple):
    """Which pairs are visible, how scores change, which weights are dropped; the scores' scale."""

    mask: Any  # a Mask (tile_ranges.py)
    score: Any  # a Score, or None
    dropout: Any  # a Dropout, or None
    scale: float


class Score(NamedTuple):
    """A change of the scaled score; a kernel whose scores do not change gets None instead."""

    change: Any  # from (score, batch, head, query rows, key rows, shift, data)
    derivative: Any  # of the same arguments; None where there is none
    data: tuple[Any, ...]  # what the score captured


@triton.jit
def unchanged(score, batch, head, query_row, kv_row, shift, data):
    """The score as it is: for scales of 0 or less, which softmax_step cannot fold in."""
    return score


@triton.jit
def one(score, batch, head, query_row, kv_row, shift, data):
    """The derivative of `unchanged`."""
    return score * 0.0 + 1.0


class Dropout(NamedTuple):
    """What a kernel needs to drop the pairs that `runtime/dropout.py` drops; None: drops none."""

    seed: Any  # int64 scalar in memory
    threshold: int  # a random word below it drops its pair
    dropout_scale: float  # what kept weights are multiplied by: 1 / (1 - dropout_p)


# Triton (3.6) mixes up the words of fewer groups than a program has threads, so a tile smaller than
# this draws for each pair.
SMALL_TILE = tl.constexpr(4 * 512)


@triton.jit
def kept(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """True where a pair is kept: [query rows, KV_TILE]."""
    if query_rows.shape[0] * KV_TILE < SMALL_TILE:
        kv_rows = kv_start + tl.arange(0, KV_TILE)[None, :]
        word_0, word_1, word_2, word_3 = draw(dropout, batch, head, query_rows, kv_rows // 4)
        low_bit, high_bit = kv_rows % 2 == 0, kv_rows % 4 < 2
        words = tl.where(
            high_bit, tl.where(low_bit, word_0, word_1), tl.where(low_bit, word_2, word_3)
        )
    else:
        groups = kv_start // 4 + tl.arange(0, KV_TILE // 4)[None, :]
        word_0, word_1, word_2, word_3 = draw(dropout, batch, head, query_rows, groups)
        # join adds a last dimension: [rows, groups, 2 (high bit), 2 (low bit)] → word number.
        pairs = tl.join(tl.join(word_0, word_2), tl.join(word_1, word_3))
        words = tl.reshape(pairs, (query_rows.shape[0], KV_TILE))
    return words.to(tl.int64) >= dropout.threshold


@triton.jit
def draw(dropout, batch, head, query_rows, groups):
    """The four random words of each query row and group of four keys."""
    rows = query_rows[:, None]
    zero = (rows + groups) * 0
    counter = (zero + groups).to(tl.uint32), (zero + rows).to(tl.uint32)
    of_head, of_batch = (zero + head).to(tl.uint32), (zero + batch).to(tl.uint32)
    return tl.philox(tl.load(dropout.seed), counter[0], counter[1], of_head, of_batch)
