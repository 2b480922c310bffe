"""Attention backward, gradient of a tensor that a score reads anywhere: each pair adds its share.

Pairs of a tile that read one entry add up before they touch memory; programs meet in atomic
additions, so the order of sums differs from run to run. A bias over pairs has a kernel without
them (`backward_dbias.py`).
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.tensor_view import num_rows
from saccade.ops.attention.triton.backward_dbias import add_pairs


@triton.jit(do_not_specialize=["rules", "grad_table"])
def attention_backward_reads(
    forward, grad_table, rules, PLACE: tl.constexpr,
    ALONG_QUERIES: tl.constexpr, ALONG_KEYS: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of query rows of one head, over all tiles of keys.

    grad_table: (address, sizes, strides) of float32. PLACE: where the entry of each pair lies
    there. ALONG_QUERIES, ALONG_KEYS: whether pairs of other rows, or keys, read other entries.
    """
    batch, head, tile, _ = forward.query.find(tl.program_id(0), forward.query.data, QUERY_TILE)
    lengths = (num_rows(forward.query, batch), num_rows(forward.key, batch))
    query_start = tile * QUERY_TILE
    query_rows = query_start + tl.arange(0, QUERY_TILE)[:, None]
    exist = query_rows < lengths[0]
    total = tl.zeros([QUERY_TILE, KV_TILE], tl.float32)
    num_tiles = tl.where(query_start < lengths[0], tl.cdiv(lengths[1], KV_TILE), 0)
    for kv_index in range(0, num_tiles):
        if ALONG_KEYS:
            total = tl.zeros([QUERY_TILE, KV_TILE], tl.float32)
        total = add_pairs(
            forward, rules, batch, head, query_start, kv_index, lengths, total,
            HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
            QUERY_TILE, KV_TILE, PRECISION,
        )  # fmt: skip
        if ALONG_KEYS:
            kv_rows = kv_index * KV_TILE + tl.arange(0, KV_TILE)[None, :]
            here = kv_rows < lengths[1]
            add_entries(
                grad_table, rules, batch, head, query_rows, kv_rows, lengths, total, exist & here,
                PLACE, ALONG_QUERIES, True,
            )  # fmt: skip
    if not ALONG_KEYS:
        kv_rows = tl.arange(0, 1)[None, :]
        add_entries(
            grad_table, rules, batch, head, query_rows, kv_rows, lengths, total, exist,
            PLACE, ALONG_QUERIES, False,
        )  # fmt: skip


@triton.jit
def add_entries(
    grad_table, rules, batch, head, query_rows, kv_rows, lengths, total, exist,
    PLACE: tl.constexpr, ALONG_QUERIES: tl.constexpr, ALONG_KEYS: tl.constexpr,
):  # fmt: skip
    """Add what pairs give to the entries that they read; rows and keys that read one add up."""
    if not ALONG_KEYS:
        total = tl.sum(total, 1)[:, None]
    if not ALONG_QUERIES:
        total = tl.sum(tl.where(exist, total, 0.0), 0)[None, :]
        exist = (kv_rows < lengths[1]) | (kv_rows == 0)
        query_rows = tl.arange(0, 1)[:, None]
    place = PLACE(
        0.0, batch, head, query_rows, kv_rows, lengths[1] - lengths[0], rules.score.data,
        grad_table,
    )  # fmt: skip
    place = place + (query_rows + kv_rows) * 0
    tl.atomic_add(grad_table[0] + place, total, mask=exist)
