"""Combine: partial results of work tiles that were cut, added up in the order of the keys.

Source: Flash-Decoding (Dao et al. 2023); Milakov and Gimelshein 2018 for rescaling sums.
"""

# Triton's own annotations make its functions look as if they never returned.
# pyright: reportAttributeAccessIssue=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.language import gdc_wait, tl, triton
from saccade.gpu.online_softmax import finish_softmax
from saccade.gpu.tensor_view import store_numbers, store_rows, wide
from saccade.ops.paged_attention.triton.decode import rows_of_tile
from saccade.ops.paged_attention.triton.split_kv import BEGUN, NOTE_SIZE, PROGRAMS


class CombineMeta(NamedTuple):
    """How the kernel runs, known when it is compiled; `merge_partials` says what each is."""

    ROWS: int
    ROW_PARTS: int
    PARTIALS: int
    AT_ONCE: int
    LONG: bool
    LEAST: int
    SPLITS: int
    WORK_TILES: int
    CHAINED: bool


@triton.jit
def merge_partials(
    query, key, output, logsumexp, schedule, partials, GROUP: tl.constexpr,
    HEADS_IN_TILE: tl.constexpr, VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows of a work tile that was cut, one after the other.

    Grid: ROW_PARTS programs a work tile, of which each group has WORK_TILES; or, if that is 0, as
    many for each program's note. PARTIALS results are added together, in their order.
    CHAINED: it starts while the attention kernel still runs, and waits for its results here, after
    all that can be known before.
    """
    TOKENS: tl.constexpr = QUERY_TILE // HEADS_IN_TILE
    number = tl.program_id(0) // META.ROW_PARTS
    first_row = (tl.program_id(0) - number * META.ROW_PARTS) * META.ROWS
    if META.WORK_TILES > 0:
        group, index = number // META.WORK_TILES, number % META.WORK_TILES
        parts, begun = schedule.cut(
            schedule,
            query,
            key,
            group,
            index,
            TOKENS,
            KV_TILE,
            META.AT_ONCE,
            META.LONG,
            META.LEAST,
            META.SPLITS,
        )
    else:
        if META.CHAINED:
            gdc_wait()
        note, begun = partials.notes + number * NOTE_SIZE, number - 1
        parts, group, index = tl.load(note), tl.load(note + 1), tl.load(note + 2)
        parts = tl.minimum(parts, schedule.data[PROGRAMS] + 1 - number)  # for what is there
    first_position, next_position = begun + schedule.data[BEGUN], begun + 1
    work_tile = schedule.work_tile(schedule, query, key, group, index, TOKENS, KV_TILE)
    channels = tl.arange(0, VALUE_WIDTH)[None, :]
    if META.CHAINED and META.WORK_TILES > 0:
        gdc_wait()
    for row in range(first_row, tl.where(parts > 0, first_row + META.ROWS, first_row)):
        batch, _, query_heads, query_rows, query_len, _ = rows_of_tile(
            query, key, work_tile[0], work_tile[1], work_tile[2], row + tl.arange(0, 1),
            GROUP, HEADS_IN_TILE, TOKENS,
        )  # fmt: skip
        row_max = tl.full([1], float("-inf"), tl.float32)
        row_sum = tl.zeros([1], tl.float32)
        weighted_sum = tl.zeros([VALUE_WIDTH], tl.float32)
        for first in range(0, parts, META.PARTIALS):
            part = first + tl.arange(0, META.PARTIALS)
            position = tl.where(part == 0, first_position, next_position + part - 1)
            entry, exists = wide(position) * QUERY_TILE + row, part < parts
            maxima = tl.load(
                partials.sums + partials.softmax + entry * 2,
                mask=exists,
                other=float("-inf"),
            )
            sums = tl.load(partials.sums + partials.softmax + entry * 2 + 1, mask=exists, other=0.0)
            weighted = tl.load(  # [PARTIALS, VALUE_WIDTH]
                partials.sums + (entry[:, None] * VALUE_WIDTH + channels),
                mask=exists[:, None], other=0.0,
            )  # fmt: skip
            new_max = tl.maximum(row_max, tl.max(maxima, 0))
            shift = tl.where(new_max == float("-inf"), 0.0, new_max)
            rescale, shares = tl.exp2(row_max - shift), tl.exp2(maxima - shift)
            row_sum = row_sum * rescale + tl.sum(shares * sums, 0)
            weighted_sum = weighted_sum * rescale + tl.sum(shares[:, None] * weighted, 0)
            row_max = new_max
        divisor, natural_lse = finish_softmax(row_max, row_sum)
        attended = (weighted_sum / divisor)[None, :]
        heads = query_heads[:, None]
        store_rows(output, batch, heads, query_rows, query_len, attended, VALUE_DIM)
        store_numbers(logsumexp, batch, query_heads, query_rows, query_len, natural_lse)
