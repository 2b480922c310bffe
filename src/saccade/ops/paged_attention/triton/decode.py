"""Attention over pages: programs that each compute a split of all keys, then what merges them.

A tile's rows are query rows × the query heads of one key head, so keys and values are read once
for a group of heads. Partial results of work tiles that were cut are added up in the order of the
keys. Sources: FlashAttention-2 (Dao 2023), algorithm 1; Flash-Decoding (Dao et al. 2023) for the
split along the keys; Milakov and Gimelshein 2018 for rescaling sums.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# Triton's own annotations make its functions look as if they never returned.
# pyright: reportAttributeAccessIssue=false, reportPossiblyUnboundVariable=false
# pyright: reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.fp8_numbers import as_half
from saccade.gpu.language import gdc_launch_dependents, gdc_wait, tl, triton
from saccade.gpu.online_softmax import (
    LOG2_E,
    finish_softmax,
    power,
    softmax_step,
    start_softmax,
)
from saccade.gpu.paged_view import (
    as_halves,
    as_numbers,
    find_page,
    load_scales,
    load_slots,
    slots_of,
)
from saccade.gpu.tensor_view import (
    nonfinite_rows,
    num_rows,
    pad_results,
    store_numbers,
    store_rows,
    wide,
    without,
)
from saccade.gpu.tile_ranges import next_in_range
from saccade.gpu.wide_heads import load_parts, load_rest_of_slots, within
from saccade.ops.paged_attention.triton.fp8_products import (
    LEAST,
    OF_FP8,
    add_fp8_values,
    finish_fp8_sums,
    fp8_query,
    fp8_scores,
    start_fp8_sums,
)
from saccade.ops.paged_attention.triton.split_kv import (
    BEGUN,
    GROUPS,
    NOTE_SIZE,
    PROGRAMS,
    note_of_program,
    part_of_range,
)

# ---- pairs ---------------------------------------------------------------------------------------
# Pages of eight bits, two channels at a time, multiplied as float16.
#
# float16 holds int8 and float8_e4m3fn exactly, and rounds less than bfloat16 does; only its range
# is small. So rows of queries are scaled by powers of two, and weights by the factors of the values
# they meet, in units of the largest that a program has met.

# What products are of: pairs taken apart in these ways, or numbers OF_FP8; 0: numbers as they are.
BY_TRITON, BY_PTX = tl.constexpr(1), tl.constexpr(2)
HEADROOM = tl.constexpr(16384.0)  # 2^14: times 448, and in units below 2, float16 still holds it


@triton.jit
def paired_query(rows):
    """Two tiles of float16, of the first channels of all pairs and of the second; and the factor
    of each row."""
    factors = tl.full([rows.shape[0]], 1.0, tl.float32)
    if rows.dtype == tl.bfloat16:
        numbers = rows.to(tl.float32)
        largest = tl.max(tl.abs(numbers), 1)
        exponents = largest.to(tl.int32, bitcast=True) & 0x7F800000
        powers = tl.maximum(exponents.to(tl.float32, bitcast=True), LEAST)
        powers = tl.where(largest < float("inf"), powers, HEADROOM)
        rows = (numbers * (HEADROOM / powers)[:, None]).to(tl.float16)
        factors = powers / HEADROOM
    first, second = tl.split(tl.reshape(rows, (rows.shape[0], rows.shape[1] // 2, 2)))
    return first, second, factors


@triton.jit
def paired_scores(query, stored_keys, PTX: tl.constexpr):
    """Scores of a tile, but for the factors of keys."""
    first, second = as_halves(stored_keys, PTX)
    scores = tl.dot(query[0], tl.trans(first))
    return tl.dot(query[1], tl.trans(second), scores) * query[2][:, None]


@triton.jit
def start_paired_sums(value_scales, ROWS: tl.constexpr, WIDTH: tl.constexpr):
    """Weighted sums of nothing: of first and second channels, in units of which peak."""
    zeros = tl.zeros([ROWS, WIDTH // 2], tl.float32)
    peak = tl.full([], 1.0 if value_scales is None else LEAST, tl.float32)
    return zeros, zeros, peak


@triton.jit
def add_paired_values(sums, first, second, factors, weights, rescale):
    """Weighted sums after one more tile of values, whose rows have factors (or None)."""
    peak = sums[2]
    if factors is not None:
        peak = tl.maximum(peak, tl.max(tl.abs(factors), 0))
        rescale = rescale * (sums[2] / peak)
        weights = weights * (factors * (HEADROOM / peak))[None, :]
    else:
        weights = weights * HEADROOM
    weights = weights.to(tl.float16)
    return (
        tl.dot(weights, first, sums[0] * rescale[:, None]),
        tl.dot(weights, second, sums[1] * rescale[:, None]),
        peak,
    )


@triton.jit
def finish_paired_sums(sums):
    """Weighted sums as one tile of numbers."""
    width: tl.constexpr = 2 * sums[0].shape[1]
    together = tl.reshape(tl.join(sums[0], sums[1]), (sums[0].shape[0], width))
    return together * (sums[2] / HEADROOM)


class Partials(NamedTuple):
    """Memory for partial results, by place and row of a tile."""

    sums: Any  # float32 [places, QUERY_TILE, VALUE_WIDTH]: weighted sums
    softmax: int  # where, behind them, [places, QUERY_TILE, 2] row_max and row_sum stand
    notes: Any  # int32 [programs, NOTE_SIZE]


class DecodeMeta(NamedTuple):
    """How the kernel runs, known when it is compiled; `attention_pages` says what each is."""

    PRECISION: str
    QUERY_TILE: int
    KV_TILE: int
    AT_ONCE: int
    LONG: bool
    LEAST: int
    SPLITS: int
    WORK_TILES: int
    PRODUCTS: int
    CHAINED: bool
    AHEAD: bool
    PARTIAL_STAGES: Any


@triton.jit(do_not_specialize=["rules"])
def attention_pages(
    query, query_scale, key, value, key_scales, value_scales, output, logsumexp, rules, sinks,
    schedule, partials, GROUP: tl.constexpr, HEADS_IN_TILE: tl.constexpr, HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    PAGE_SIZE: tl.constexpr, META: tl.constexpr,
):  # fmt: skip
    """One program: its payload, split by split (ops/paged_attention/triton/split_kv.py).

    WORK_TILES: of each group, where they are few, and merging finds them; 0: programs leave notes.
    PRODUCTS: of pairs of eight-bit numbers, taken apart BY_TRITON or BY_PTX; OF_FP8; 0: of numbers
    as they are. CHAINED: it may start while its plan is made, and waits for that here. The merging
    kernel is to start early too, and waits for this one. AHEAD: pages are looked up a tile
    ahead, for loops that wait for products and not for memory.
    """
    if META.CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    TOKENS: tl.constexpr = META.QUERY_TILE // HEADS_IN_TILE
    program = tl.program_id(0)
    group, index, offset, budget, payload, goes_on = schedule.begin(
        schedule, query, key, program, TOKENS, META.KV_TILE, META.AT_ONCE, META.LONG, META.LEAST,
        META.SPLITS, META.WORK_TILES > 0
    )  # fmt: skip
    pad_results(output, logsumexp, VALUE_DIM, VALUE_WIDTH)
    steps, work_tiles = schedule.count(schedule, query, key, group, TOKENS, META.KV_TILE)
    # Of offsets that descend there may be more rows than are counted right; else these are so.
    index, offset = tl.minimum(index, tl.maximum(work_tiles - 1, 0)), tl.minimum(offset, steps)
    if META.WORK_TILES == 0:
        note_of_program(
            schedule, partials.notes, program, group, index, offset, budget, payload, goes_on, steps
        )
    while budget > 0:
        end = tl.minimum(offset + budget, steps).to(tl.int32)
        batch, tiled_head, tile, tile_range = schedule.work_tile(
            schedule, query, key, group, index, TOKENS, META.KV_TILE
        )
        at = rows_of_tile(
            query, key, batch, tiled_head, tile, tl.arange(0, META.QUERY_TILE),
            GROUP, HEADS_IN_TILE, TOKENS,
        )  # fmt: skip
        query_tiles = load_parts(  # [QUERY_TILE, HEAD_WIDTH]
            query, batch, at[2][:, None], at[3], at[4], HEAD_DIM, HEAD_WIDTH
        )
        row_max, row_sum = start_softmax(sinks, at[2], META.QUERY_TILE, rules.score is not None)
        if sinks is not None:  # which belong to the first split
            row_max = tl.where(offset == 0, row_max, float("-inf"))
            row_sum = tl.where(offset == 0, row_sum, 0.0)
        query_tiles, sums = start_products(
            query_tiles, query_scale, value_scales, at, VALUE_WIDTH, META.PRODUCTS
        )
        state = (row_max, row_sum, sums)
        full_first, full_end, partial_first, partial_end = part_of_range(tile_range, offset, end)
        page = None
        if META.AHEAD:
            place = visited(full_first, full_first, full_end, META.PRODUCTS == OF_FP8)
            kv_start = next_in_range(None, tile_range, place, True) * META.KV_TILE
            page = find_page(key, batch, kv_start, at[5], META.KV_TILE, PAGE_SIZE, False)
        for number in range(full_first, full_end):  # full tiles: no mask arithmetic
            place = visited(number, full_first, full_end, META.PRODUCTS == OF_FP8)
            kv_start = next_in_range(None, tile_range, place, True) * META.KV_TILE
            if META.AHEAD:
                place = visited(number + 1, full_first, full_end, META.PRODUCTS == OF_FP8)
                next_start = next_in_range(None, tile_range, place, True) * META.KV_TILE
                next_page = find_page(key, batch, next_start, at[5], META.KV_TILE, PAGE_SIZE, False)
            state = fold_pages(
                key, value, key_scales, value_scales, rules, at, query_tiles, page, kv_start, state,
                HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, PAGE_SIZE, META.KV_TILE,
                META.PRECISION, False, META.PRODUCTS,
            )  # fmt: skip
            if META.AHEAD:
                page = next_page
        if META.AHEAD:
            kv_start = next_in_range(None, tile_range, partial_first, False) * META.KV_TILE
            page = find_page(key, batch, kv_start, at[5], META.KV_TILE, PAGE_SIZE, False)
        # Partial tiles: pair by pair. Without a mask there is one at most, which needs no pipeline.
        for number in tl.range(partial_first, partial_end, num_stages=META.PARTIAL_STAGES):
            kv_start = next_in_range(None, tile_range, number, False) * META.KV_TILE
            if META.AHEAD:
                next_start = next_in_range(None, tile_range, number + 1, False) * META.KV_TILE
                next_page = find_page(key, batch, next_start, at[5], META.KV_TILE, PAGE_SIZE, False)
            state = fold_pages(
                key, value, key_scales, value_scales, rules, at, query_tiles, page, kv_start, state,
                HEAD_DIM, VALUE_DIM, HEAD_WIDTH, VALUE_WIDTH, PAGE_SIZE, META.KV_TILE,
                META.PRECISION, True, META.PRODUCTS,
            )  # fmt: skip
            if META.AHEAD:
                page = next_page
        row_max, row_sum, sums = state
        weighted_sum = finish_sums(sums, META.PRODUCTS)
        if (offset == 0) & (end == steps):
            divisor, natural_lse = finish_softmax(row_max, row_sum, rules.score is not None)
            attended = weighted_sum / divisor[:, None]
            store_rows(output, batch, at[2][:, None], at[3], at[4], attended, VALUE_DIM)
            store_numbers(logsumexp, batch, at[2], at[3], at[4], natural_lse)
        else:
            position = program + tl.where(offset == 0, schedule.data[BEGUN], 0)
            keep_partial(partials, position, at[3] < at[4], (row_max, row_sum, weighted_sum))
        budget -= end - offset
        offset = offset * 0
        index += 1
        ended = (index >= work_tiles) & (budget > 0)
        while ended:  # groups without work tiles are passed over; none is behind the last
            group, index = group + 1, index * 0
            budget = tl.where(group < schedule.data[GROUPS], budget, 0)
            group = tl.minimum(group, schedule.data[GROUPS] - 1)
            steps, work_tiles = schedule.count(schedule, query, key, group, TOKENS, META.KV_TILE)
            ended = (work_tiles == 0) & (budget > 0)


@triton.jit
def visited(number, first, end, BACKWARDS: tl.constexpr):
    """The place that is visited as a number from `first` to `end` - 1; none is below 0."""
    if BACKWARDS:
        number = tl.maximum(first + end - 1 - number, 0)
    return number


@triton.jit
def start_products(
    query_tiles, query_scale, value_scales, at, WIDTH: tl.constexpr, PRODUCTS: tl.constexpr
):  # fmt: skip
    """Query tiles as products take them, and weighted sums of nothing."""
    ROWS: tl.constexpr = query_tiles[0].shape[0]
    if PRODUCTS == OF_FP8:
        query_tiles = fp8_query(query_tiles[0], query_scale, at[0], at[2])
        sums = start_fp8_sums(value_scales, ROWS, WIDTH)
    elif PRODUCTS:
        query_tiles = paired_query(query_tiles[0])
        sums = start_paired_sums(value_scales, ROWS, WIDTH)
    else:
        sums = tl.zeros([ROWS, WIDTH], tl.float32)
    return query_tiles, sums


@triton.jit
def finish_sums(sums, PRODUCTS: tl.constexpr):
    """Weighted sums as one tile of numbers."""
    if PRODUCTS == OF_FP8:
        sums = finish_fp8_sums(sums)
    elif PRODUCTS:
        sums = finish_paired_sums(sums)
    return sums


@triton.jit
def rows_of_tile(
    query, key, batch, tiled_head, tile, rows,
    GROUP: tl.constexpr, HEADS_IN_TILE: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Batch entry, key head, query heads and query rows of rows of a tile, and both lengths.

    tiled_head counts key heads, each as often as its group needs tiles. Rows that do not exist
    stand behind the end.
    """
    of_tile = rows // HEADS_IN_TILE
    PARTS: tl.constexpr = (GROUP + HEADS_IN_TILE - 1) // HEADS_IN_TILE
    kv_head = tiled_head // PARTS
    of_group = (tiled_head - kv_head * PARTS) * HEADS_IN_TILE + (rows - of_tile * HEADS_IN_TILE)
    query_len, kv_len = num_rows(query, batch), num_rows(key, batch)
    exists = (of_tile < TOKENS) & (of_group < GROUP)
    query_rows = tl.where(exists, tile * TOKENS + of_tile, query_len)
    query_heads = kv_head * GROUP + tl.minimum(of_group, GROUP - 1)
    return batch, kv_head, query_heads, query_rows, query_len, kv_len


@triton.jit
def fold_pages(
    key, value, key_scales, value_scales, rules, at, query_tiles, page, kv_start, state,
    HEAD_DIM: tl.constexpr, VALUE_DIM: tl.constexpr, HEAD_WIDTH: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, PAGE_SIZE: tl.constexpr, ROWS: tl.constexpr,
    PRECISION: tl.constexpr, PARTIAL: tl.constexpr, PRODUCTS: tl.constexpr,
):  # fmt: skip
    """Fold ROWS keys and values into the state (row_max, row_sum, weighted sums).

    PARTIAL: pairs may be hidden, and rows lie past the end. page: where the keys lie, or None. Then
    it is looked up here, so that Triton's pipeline asks for pages as many tiles ahead of their keys
    as for keys ahead of their use.
    """
    batch, kv_head, query_heads, query_rows, query_len, kv_len = at
    row_max, row_sum, sums = state
    DTYPE: tl.constexpr = query_tiles[0].dtype
    IN_PAIRS: tl.constexpr = PRODUCTS > 0 and PRODUCTS != OF_FP8
    PACKED: tl.constexpr = 1 + IN_PAIRS  # channels that one number of a page holds
    if page is None:
        page = find_page(key, batch, kv_start, kv_len, ROWS, PAGE_SIZE, not PARTIAL)
    position = slots_of(page, kv_start, ROWS, PAGE_SIZE)
    kv_rows = kv_start + tl.arange(0, ROWS)
    exists = (kv_rows < kv_len)[:, None]
    stored_keys = load_slots(  # [ROWS, HEAD_WIDTH // PACKED]
        key, kv_head, position, exists, within(HEAD_DIM, HEAD_WIDTH) // PACKED,
        HEAD_WIDTH // PACKED, not PARTIAL,
    )  # fmt: skip
    if HEAD_DIM > HEAD_WIDTH:
        stored_rest = load_rest_of_slots(
            key, kv_head, position, exists, HEAD_DIM, HEAD_WIDTH, not PARTIAL
        )
    if value is None:  # a value is the first channels of its key
        stored_values = stored_keys
    else:
        stored_values = load_slots(  # [ROWS, VALUE_WIDTH // PACKED]
            value, kv_head, position, exists, VALUE_DIM // PACKED, VALUE_WIDTH // PACKED,
            not PARTIAL,
        )  # fmt: skip
    value_factors = None
    if value_scales is not None:
        value_factors = load_scales(value_scales, kv_head, position, exists, ROWS)
    if IN_PAIRS:
        values = as_halves(stored_values, PRODUCTS == BY_PTX)
    elif PRODUCTS == OF_FP8:
        values = stored_values
    else:
        values = value_numbers(stored_values, value_factors, DTYPE)
    if PARTIAL and rules.mask.visible is not None:
        # Hidden is selected away, but 0 · NaN is NaN: a nonfinite value becomes 0, its score NaN.
        if IN_PAIRS:
            nonfinite = nonfinite_rows(values[0]) | nonfinite_rows(values[1])
        elif PRODUCTS == OF_FP8:
            nonfinite = nonfinite_rows(as_half(values))
        else:
            nonfinite = nonfinite_rows(values)
        if value_scales is not None:
            nonfinite = nonfinite | ((tl.abs(value_factors) < float("inf")) == 0)
            value_factors = tl.where(nonfinite, 0.0, value_factors)
        if IN_PAIRS:
            values = (without(nonfinite, values[0]), without(nonfinite, values[1]))
        else:
            values = without(nonfinite, values)

    if IN_PAIRS:  # scores: [QUERY_TILE, ROWS]
        scores = paired_scores(query_tiles, stored_keys, PRODUCTS == BY_PTX)
    elif PRODUCTS == OF_FP8:
        scores = fp8_scores(query_tiles, stored_keys)
    else:
        key_tile = as_numbers(stored_keys, DTYPE)
        scores = tl.dot(query_tiles[0], tl.trans(key_tile), input_precision=PRECISION)
        if HEAD_DIM > HEAD_WIDTH:
            key_rest = as_numbers(stored_rest, DTYPE)
            scores = tl.dot(query_tiles[1], tl.trans(key_rest), scores, input_precision=PRECISION)
    if key_scales is not None:
        scores = scores * load_scales(key_scales, kv_head, position, exists, ROWS)[None, :]
    shift = kv_len - query_len
    if rules.score is not None:
        scores = rules.score.change(
            scores * rules.scale, batch, query_heads[:, None], query_rows[:, None],
            kv_rows[None, :], shift, rules.score.data,
        )  # fmt: skip
    if PARTIAL:
        visible = (kv_rows < kv_len)[None, :]
        if rules.mask.visible is not None:
            scores = tl.where(nonfinite[None, :], float("nan"), scores)
            visible = visible & rules.mask.visible(
                batch, query_heads[:, None], query_rows[:, None], kv_rows[None, :], shift,
                rules.mask.data,
            )  # fmt: skip
        scores = tl.where(visible, scores, float("-inf"))

    factor = None if rules.score is not None else rules.scale * LOG2_E
    weights, rescale, row_max, row_sum = softmax_step(
        scores, factor, row_max, row_sum, PARTIAL or rules.score is not None
    )
    if PRODUCTS == OF_FP8:
        sums = add_fp8_values(sums, values, value_factors, weights, rescale)
    elif PRODUCTS:
        sums = add_paired_values(sums, values[0], values[1], value_factors, weights, rescale)
    else:
        if value_scales is not None and tl.float16 != DTYPE:
            weights = weights * value_factors[None, :]
        sums = tl.dot(  # [QUERY_TILE, VALUE_WIDTH]
            weights.to(DTYPE), values, sums * rescale[:, None],
            input_precision=PRECISION,
        )  # fmt: skip
    return row_max, row_sum, sums


@triton.jit
def value_numbers(stored, factors, DTYPE: tl.constexpr):
    """Values in the dtype of products, times their factors where weights cannot take these."""
    values = as_numbers(stored, DTYPE)
    if factors is not None and tl.float16 == DTYPE:  # weights times factors may be too small
        values = (as_numbers(stored, tl.float32) * factors[:, None]).to(DTYPE)
    return values


@triton.jit
def keep_partial(partials, position, exist, state):
    """Write a partial result."""
    row_max, row_sum, weighted_sum = state
    rows = wide(position) * row_max.shape[0] + tl.arange(0, row_max.shape[0])
    channels = tl.arange(0, weighted_sum.shape[1])[None, :]
    tl.store(partials.sums + partials.softmax + rows * 2, row_max, mask=exist)
    tl.store(partials.sums + partials.softmax + rows * 2 + 1, row_sum, mask=exist)
    sums = partials.sums + (rows[:, None] * weighted_sum.shape[1] + channels)
    tl.store(sums, weighted_sum, mask=exist[:, None])


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
    NATURAL: bool


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
    all that can be known before. NATURAL: so is row_max (gpu/online_softmax.py).
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
            rescale = power(row_max - shift, META.NATURAL)
            rescales = power(maxima - shift, META.NATURAL)
            row_sum = row_sum * rescale + tl.sum(rescales * sums, 0)
            weighted_sum = weighted_sum * rescale + tl.sum(rescales[:, None] * weighted, 0)
            row_max = new_max
        divisor, natural_lse = finish_softmax(row_max, row_sum, META.NATURAL)
        attended = (weighted_sum / divisor)[None, :]
        heads = query_heads[:, None]
        store_rows(output, batch, heads, query_rows, query_len, attended, VALUE_DIM)
        store_numbers(logsumexp, batch, query_heads, query_rows, query_len, natural_lse)
