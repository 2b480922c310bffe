"""Attention over pages on Hopper: the forward kernel, whose producer finds keys in pages.

For sequences of many new tokens, whose products decide. Pages change where a tile of keys comes
from, and nothing else: consumers, work tiles and schedules are those of
`ops/attention/hopper/forward.py`.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.gpu.hopper.tile_scheduler import num_visits, tile_from_last
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper.forward import consume, load_queries, schedule_work, work_tile_of
from saccade.ops.attention.hopper.smem import make_page_rings

NO_PAGE = gl.constexpr(-1)  # outside of any pool, where TMA finds zeros


class PrefillMeta(NamedTuple):
    """How the kernel runs, known when it is compiled."""

    KV_TILE: Any
    CONSUMERS: Any
    STAGES: Any
    QUERY_STAGES: Any
    CONSUMER_REGISTERS: Any
    PRODUCER_REGISTERS: Any


@gluon.jit(do_not_specialize=["rules"])
def attention_pages_forward(
    query_desc, key_desc, value_desc, output_desc, query, key, value, output, logsumexp, rules,
    sinks, schedule, HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, HEAD_WIDTH: gl.constexpr, VALUE_WIDTH: gl.constexpr,
    META: gl.constexpr, PAGE_SIZE: gl.constexpr, FEWEST: gl.constexpr,
):  # fmt: skip
    """One program: tiles of 128 rows of one head, one after the other, of all sequences that have
    more than FEWEST query rows."""
    gl.static_assert(META.CONSUMERS == 2)
    rings = make_page_rings(
        query_desc, output_desc, [1, 1, META.KV_TILE, HEAD_WIDTH], [1, 1, META.KV_TILE,
        VALUE_WIDTH], META.CONSUMERS, META.STAGES, META.QUERY_STAGES,
    )  # fmt: skip
    # A tuple that holds functions cannot be given a name.
    gl.warp_specialize(
        [
            (consume, (
                output_desc, query, key, value, output, logsumexp, rules, sinks, schedule,
                rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, PAGE_SIZE, True, False, False, 0,
            )),
            (consume, (
                output_desc, query, key, value, output, logsumexp, rules, sinks, schedule,
                rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, PAGE_SIZE, True, False, False, 1,
            )),
            (produce_pages, (
                query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
                HEADS_PER_KV_HEAD, PAGE_SIZE,
            )),
            (schedule_work, (
                query, key, output, logsumexp, rules, schedule, rings, VALUE_DIM, FEWEST,
            )),
        ],
        [4, 1, 1],
        [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS, META.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce_pages(
    query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, PAGE_SIZE: gl.constexpr,
):  # fmt: skip
    """As `forward.produce`. Pages of a tile are looked up before there is room for it."""
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    tile_iteration, kv_iteration = 0, 0
    position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)
    while query_len > 0:
        batch, query_head, query_start = position
        query_batch, query_row = schedule.origin(batch, query.data)
        kv_head = query_head // HEADS_PER_KV_HEAD
        visits = num_visits(tile_range)
        for index in range(0, visits):
            kv_start = tile_from_last(rules, tile_range, index) * KV_TILE
            pages = pages_of(key, batch, kv_start, kv_len, KV_TILE, PAGE_SIZE)
            slot = kv_start % PAGE_SIZE if PAGE_SIZE > KV_TILE else 0
            rings.keys.acquire(kv_iteration)
            rings.keys.load_boxes(kv_iteration, key_desc, pages, kv_head, slot)
            if index == 0:
                first = query_batch, query_head, query_row + query_start
                load_queries(query_desc, rings, first, tile_iteration, False)
            rings.values.acquire(kv_iteration)
            rings.values.load_boxes(kv_iteration, value_desc, pages, kv_head, slot)
            if index == gl.maximum(visits - 2, 0):
                rings.work_tiles.release(
                    tile_iteration
                )  # now is the time to schedule the next tile
            kv_iteration += 1
        tile_iteration += 1
        position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)


@gluon.jit
def pages_of(key, batch, kv_start, kv_len, KV_TILE: gl.constexpr, PAGE_SIZE: gl.constexpr):
    """The pages of a tile of keys, which is part of one or consists of several: a tuple."""
    table = key.data[0] + wide(batch) * key.data[1]
    pages = ()
    for first in gl.static_range(0, KV_TILE, min(PAGE_SIZE, KV_TILE)):
        row = kv_start + first
        found = gl.load(table + row // PAGE_SIZE, mask=row < kv_len, other=NO_PAGE)
        pages = pages + (found,)  # noqa: RUF005
    return pages
