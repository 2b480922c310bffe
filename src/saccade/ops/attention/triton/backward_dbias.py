"""Attention backward, gradient of a bias: each entry sums the pairs that read it.

Every program owns entries of the table and recomputes the pairs that read them, over all that the
table broadcasts: nothing of size length² beside the table itself, nothing atomic.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from saccade.gpu.language import tl, triton
from saccade.gpu.tensor_view import load_rows, num_rows, wide
from saccade.gpu.tile_ranges import may_see
from saccade.ops.attention.triton.backward_common import (
    differentiate,
    drop,
    load_residual,
    load_statistics,
    weigh,
)


@triton.jit(do_not_specialize=["rules", "grad_table", "sizes", "extents"])
def attention_backward_bias(
    forward, grad_table, sizes, extents, rules,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the table, for one of its batch entries and one of its heads.

    grad_table is contiguous float32 of four `sizes`; extents are (batch entries, query heads).
    """
    program = tl.program_id(0)
    kv_tiles, query_tiles = tl.cdiv(sizes[3], KV_TILE), tl.cdiv(sizes[2], QUERY_TILE)
    kv_tile, query_tile = program % kv_tiles, (program // kv_tiles) % query_tiles
    of_head = (program // kv_tiles // query_tiles) % sizes[1]
    of_batch = program // kv_tiles // query_tiles // sizes[1]

    total = tl.zeros([QUERY_TILE, KV_TILE], tl.float32)
    batches = broadcast_range(of_batch, sizes[0], extents[0])
    heads = broadcast_range(of_head, sizes[1], extents[1])
    for batch in range(batches[0], batches[1]):
        lengths = (num_rows(forward.query, batch), num_rows(forward.key, batch))
        over_queries = broadcast_range(query_tile, sizes[2], tl.cdiv(lengths[0], QUERY_TILE))
        over_keys = broadcast_range(kv_tile, sizes[3], tl.cdiv(lengths[1], KV_TILE))
        for head in range(heads[0], heads[1]):
            for query_index in range(over_queries[0], over_queries[1]):
                for kv_index in range(over_keys[0], over_keys[1]):
                    total = add_pairs(
                        forward, rules, batch, head, query_index * QUERY_TILE, kv_index, lengths,
                        total,
                        HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH,
                        QUERY_TILE, KV_TILE, PRECISION,
                    )  # fmt: skip

    rows = query_tile * QUERY_TILE + tl.arange(0, QUERY_TILE)[:, None]
    columns = kv_tile * KV_TILE + tl.arange(0, KV_TILE)[None, :]
    if sizes[2] == 1:  # every query row reads the same entries
        total = tl.where(rows == 0, tl.sum(total, 0)[None, :], 0.0)
    if sizes[3] == 1:
        total = tl.where(columns == 0, tl.sum(total, 1)[:, None], 0.0)
    position = wide(of_batch * sizes[1] + of_head) * sizes[2]
    offsets = (position + rows) * sizes[3] + columns
    tl.store(grad_table + offsets, total, mask=(rows < sizes[2]) & (columns < sizes[3]))


@triton.jit
def broadcast_range(index, size, extent):
    """Which indices read an entry: its own, or all of them where the table has only one."""
    return tl.where(size == 1, 0, index), tl.where(size == 1, extent, tl.minimum(index + 1, extent))


@triton.jit
def add_pairs(
    forward, rules, batch, head, query_start, kv_index, lengths, total,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Add the gradients of the scores of one tile of pairs, if any of them can be visible."""
    query_len, kv_len = lengths
    if may_see(rules.mask, batch, head, query_start, lengths, kv_index, QUERY_TILE, KV_TILE):
        kv_start = kv_index * KV_TILE
        query_rows = query_start + tl.arange(0, QUERY_TILE)
        kv_rows = kv_start + tl.arange(0, KV_TILE)
        kv_head = head // HEADS_PER_KV_HEAD
        query_tile = load_rows(  # [QUERY_TILE, HEAD_WIDTH]
            forward.query, batch, head, query_rows, query_len, HEAD_DIM, HEAD_WIDTH, False
        )
        grad_tile = load_rows(  # [QUERY_TILE, VALUE_WIDTH]
            forward.grad_output, batch, head, query_rows, query_len, VALUE_DIM, VALUE_WIDTH, False
        )
        key_tile = load_rows(  # [KV_TILE, HEAD_WIDTH]
            forward.key, batch, kv_head, kv_rows, kv_len, HEAD_DIM, HEAD_WIDTH, False
        )
        value_tile = load_rows(  # [KV_TILE, VALUE_WIDTH]
            forward.value, batch, kv_head, kv_rows, kv_len, VALUE_DIM, VALUE_WIDTH, False
        )
        row_lse, row_dot = load_statistics(forward, batch, head, query_rows, query_len, False)
        lse_residual = load_residual(forward, batch, head, query_rows, query_len, row_lse, False)
        # Pairs, here and below: [QUERY_TILE, KV_TILE].
        scores = tl.dot(query_tile, tl.trans(key_tile), input_precision=PRECISION)
        pairs = (batch, head, query_rows[:, None], kv_rows[None, :], kv_len - query_len)
        inside = (kv_rows < kv_len)[None, :] & (query_rows < query_len)[:, None]
        weights, derivative, visible = weigh(
            scores, row_lse[:, None], lse_residual[:, None], None, inside, rules, pairs
        )
        grad_weights = tl.dot(grad_tile, tl.trans(value_tile), input_precision=PRECISION)
        if rules.dropout is not None:
            grad_weights *= drop(rules.dropout, batch, head, query_rows, kv_start, KV_TILE)
        total += differentiate(weights, grad_weights, row_dot[:, None], derivative, visible)
    return total


# ---- backward captured ---------------------------------------------------------------------------
# The gradient of any other captured tensor: each pair adds what it gives to the entry it reads.
#
# Pairs of a tile that read one entry add up before they touch memory; programs meet in atomic
# additions, so the order of sums differs from run to run. A bias over pairs has a kernel without
# them (`backward_dbias.py`).


@triton.jit(do_not_specialize=["rules", "grad_table"])
def attention_backward_reads(
    forward, grad_table, rules, POSITION: tl.constexpr,
    ALONG_QUERIES: tl.constexpr, ALONG_KEYS: tl.constexpr,
    HEADS_PER_KV_HEAD: tl.constexpr, HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr,
    HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of query rows of one head, over all tiles of keys.

    grad_table: (address, sizes, strides) of float32. POSITION: where the entry of each pair lies
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
                POSITION, ALONG_QUERIES, True,
            )  # fmt: skip
    if not ALONG_KEYS:
        kv_rows = tl.arange(0, 1)[None, :]
        add_entries(
            grad_table, rules, batch, head, query_rows, kv_rows, lengths, total, exist,
            POSITION, ALONG_QUERIES, False,
        )  # fmt: skip


@triton.jit
def add_entries(
    grad_table, rules, batch, head, query_rows, kv_rows, lengths, total, exist,
    POSITION: tl.constexpr, ALONG_QUERIES: tl.constexpr, ALONG_KEYS: tl.constexpr,
):  # fmt: skip
    """Add what pairs give to the entries that they read; rows and keys that read one add up."""
    if not ALONG_KEYS:
        total = tl.sum(total, 1)[:, None]
    if not ALONG_QUERIES:
        total = tl.sum(tl.where(exist, total, 0.0), 0)[None, :]
        exist = (kv_rows < lengths[1]) | (kv_rows == 0)
        query_rows = tl.arange(0, 1)[:, None]
    position = POSITION(
        0.0, batch, head, query_rows, kv_rows, lengths[1] - lengths[0], rules.score.data,
        grad_table,
    )  # fmt: skip
    position = position + (query_rows + kv_rows) * 0
    tl.atomic_add(grad_table[0] + position, total, mask=exist)
