"""Attention backward on Hopper: gradients of keys and values, and partial sums of those of queries.

A program stands at a tile of keys, of which each of its two consumers owns one half, and tile
ranges along the queries that see it. Pairs lie as [keys, queries]: then weights and grad_scores, as
they stand in registers, are left operands of the products that give the gradients of values and
keys.
grad_scores go through shared memory too, where both halves meet: each consumer multiplies half of
a tile's partial sum of the gradients of queries, and TMA adds it to memory in float32.

Source: FlashAttention-3 (Shah et al. 2024), appendix B; its algorithm is FlashAttention-2's.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import NamedTuple

from saccade.gpu.hopper.pipeline import (
    as_operand,
    here,
    store,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.hopper.tile_scheduler import (
    next_number,
    num_tiles,
    num_visits,
    program_of,
    program_of_keys,
    write_work_tile,
)
from saccade.gpu.language import gl, gluon
from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.tensor_view import num_rows, row_pointers
from saccade.gpu.tile_ranges import TileRange
from saccade.ops.attention.hopper.dq_accumulate import (
    add_partial_dq,
    advance_semaphore,
    may_hide,
    may_wait,
    multiply_grad_scores,
    query_tile_of,
    read_semaphore,
    starts_of,
)
from saccade.ops.attention.hopper.forward import mma_layout, work_tile_of
from saccade.ops.attention.hopper.nonfinite import note_nonfinite
from saccade.ops.attention.hopper.smem import make_backward_rings
from saccade.ops.attention.hopper.softmax import ROWS, as_matrix, pad_rows, places_of


class BackwardMeta(NamedTuple):
    """How the kernels of the backward pass run, known when they are compiled."""

    STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int


@gluon.jit(do_not_specialize=["rules"])
def attention_backward(
    query_desc, key_desc, value_desc, grad_output_desc, starts_desc, dq_desc, grad_key_desc,
    grad_value_desc, query, key, grad_key, grad_value, rules, schedule, scratch,
    HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    META: gl.constexpr, NAN_SAFE: gl.constexpr,
):  # fmt: skip
    """One program: tiles of 128 keys of one head, one after the other."""
    rings = make_backward_rings(
        query_desc, key_desc, value_desc, grad_output_desc, starts_desc, dq_desc,
        grad_value_desc, META.STAGES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (
                dq_desc, grad_key_desc, grad_value_desc, query, key, grad_key, grad_value,
                rules, schedule, scratch, rings,
                HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, NAN_SAFE, 0,
            )),
            (consume, (
                dq_desc, grad_key_desc, grad_value_desc, query, key, grad_key, grad_value,
                rules, schedule, scratch, rings,
                HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, NAN_SAFE, 1,
            )),
            (produce, (
                query_desc, key_desc, value_desc, grad_output_desc, starts_desc, query, key,
                grad_key, grad_value, rules, schedule, scratch, rings,
                HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, False,
            )),
        ],
        [4, 1],
        [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce(
    query_desc, key_desc, value_desc, grad_output_desc, starts_desc, query, key,
    grad_key, grad_value, rules, schedule, scratch, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    APART: gl.constexpr,
):  # fmt: skip
    """Load what consumers will need, as soon as there is room for it.

    APART: gradients of outputs are released apart from queries. Gradients of keys and values then
    leave through the memory of keys and values, so these are loaded last.

    In the end it writes gradients of rows that belong to no sequence.
    """
    KV_TILE: gl.constexpr = key_desc.block_type.shape[2]
    QUERY_TILE: gl.constexpr = query_desc.block_type.shape[2]
    ROWS_OF_STARTS: gl.constexpr = starts_desc.block_type.shape[0]
    tile_iteration, work_iteration, iteration = 0, 0, 0
    number = gl.program_id(0)
    sound = number >= 0
    if scratch.semaphores is not None:
        sound = may_wait(query, key)
    while number < num_tiles(schedule):
        if scratch.semaphores is None:
            program = program_of_keys(schedule, number)
        else:  # last tiles add first, so they come first: a program waits for running ones only
            program = program_of(schedule, number)
        # Where the query heads of a kv head are split over programs, gradients have a head for each
        # part, and so have these numbers.
        batch, kv_head, tile, slot = grad_key.find(program, grad_key.data, KV_TILE)
        kv_start = tile * KV_TILE
        query_len, kv_len = num_rows(query, batch), num_rows(key, batch)
        if (kv_start < kv_len) & sound:  # packed sequences have slots without rows
            kv_batch, kv_row = schedule.origin(batch, key.data)
            query_batch, query_row = schedule.origin(batch, query.data)
            keys_at = [kv_batch, loaded_head(scratch, kv_head), kv_row + kv_start, 0]
            for group_head in range(0, HEADS_PER_KV_HEAD):
                query_head = kv_head * HEADS_PER_KV_HEAD + group_head
                tile_range = rules.mask.tile_range(
                    rules.mask, batch, query_head, slot, kv_start, (kv_len, query_len),
                    KV_TILE, QUERY_TILE, False,
                )  # fmt: skip
                rings.work_tiles.acquire(work_iteration)
                position = (batch, query_head, kv_start)
                rings.work_tiles.put(
                    work_iteration, write_work_tile(position, query_len, kv_len, tile_range)
                )
                first_slot = scratch.slot(batch, query_head, query.data, QUERY_TILE)
                for index in range(0, num_visits(tile_range)):
                    query_tile = query_tile_of(rules, scratch, tile_range, index)
                    queries_at = [query_batch, query_head, query_row + query_tile * QUERY_TILE, 0]
                    begins = (group_head == 0) & (index == 0)
                    if not APART:  # noqa: SIM102 (known when compiling; the next is not)
                        if begins:
                            rings.keys.acquire(tile_iteration)
                            rings.keys.load(tile_iteration, key_desc, keys_at)
                    rings.queries.acquire(iteration)
                    rings.queries.load_with(
                        iteration, query_desc, queries_at,
                        starts_desc, [(first_slot + query_tile) * ROWS_OF_STARTS, 0], rings.starts,
                    )  # fmt: skip
                    if APART:
                        rings.grad_outputs.acquire(iteration)
                        rings.grad_outputs.load(iteration, grad_output_desc, queries_at)
                        if begins:
                            rings.keys.acquire(tile_iteration)
                            rings.keys.load(tile_iteration, key_desc, keys_at)
                    if begins:
                        rings.values.acquire(tile_iteration)
                        rings.values.load(tile_iteration, value_desc, keys_at)
                    if not APART:
                        rings.grad_outputs.load(iteration, grad_output_desc, queries_at)
                    iteration += 1
                work_iteration += 1
            tile_iteration += 1
        # No sooner: a program with a number that does not begin may keep others waiting.
        number = next_number(schedule, number)
    # A work tile for no keys: there is nothing left.
    rings.work_tiles.acquire(work_iteration)
    none = work_iteration * 0
    nothing = TileRange(none, none, none, none, none, none)
    rings.work_tiles.put(work_iteration, write_work_tile((none, none, none), none, none, nothing))
    pad_rows(grad_key, 0.0, HEAD_DIM)
    pad_rows(grad_value, 0.0, VALUE_DIM)


@gluon.jit
def consume(
    dq_desc, grad_key_desc, grad_value_desc, query, key, grad_key, grad_value,
    rules, schedule, scratch, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    NAN_SAFE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute half of the keys of each tile that the producer schedules."""
    HEAD_WIDTH: gl.constexpr = rings.keys.memory.shape[4]
    VALUE_WIDTH: gl.constexpr = rings.values.memory.shape[4]
    QUERY_TILE: gl.constexpr = rings.queries.memory.shape[3]
    tile_iteration, work_iteration, iteration = 0, 0, 0
    added = -1
    position, query_len, kv_len, tile_range = next_work_tile(rings, work_iteration)
    while kv_len > 0:
        rings.keys.wait(tile_iteration)
        rings.values.wait(tile_iteration)
        of_key = gl.zeros([ROWS, HEAD_WIDTH], gl.float32, mma_layout(HEAD_WIDTH))
        of_value = gl.zeros([ROWS, VALUE_WIDTH], gl.float32, mma_layout(VALUE_WIDTH))
        for group_head in range(0, HEADS_PER_KV_HEAD):
            if HEADS_PER_KV_HEAD > 1:  # noqa: SIM102 (known when compiling; the next is not)
                if group_head > 0:
                    position, query_len, kv_len, tile_range = next_work_tile(rings, work_iteration)
            work_iteration += 1
            batch, query_head, kv_start = position
            first_slot = scratch.slot(batch, query_head, query.data, QUERY_TILE)
            at = (batch, query_head, kv_start + WHICH * ROWS, query_len, kv_len, first_slot)
            of_key, of_value, added = sum_over_queries(
                dq_desc,
                rings,
                rules,
                scratch,
                at,
                tile_range,
                iteration,
                added,
                of_key,
                of_value,
                WHICH,
            )
            iteration += num_visits(tile_range)
        rings.values.release(tile_iteration)
        rings.keys.release(tile_iteration)
        tile_iteration += 1
        batch, query_head, kv_start = position
        kv_head = query_head // HEADS_PER_KV_HEAD
        at = (batch, kv_head, kv_start + WHICH * ROWS, kv_len)
        if NAN_SAFE:
            note_nonfinite(scratch.flag, of_key)
            note_nonfinite(scratch.flag, of_value)
        memory = rings.outputs[WHICH]
        finish(of_value, grad_value_desc, grad_value, schedule, at, memory, VALUE_DIM)
        finish(of_key * rules.scale, grad_key_desc, grad_key, schedule, at, memory, HEAD_DIM)
        position, query_len, kv_len, tile_range = next_work_tile(rings, work_iteration)
        if scratch.semaphores is not None:
            added = advance_semaphore(rings, scratch, kv_start, added)
    wait_for_stores()


@gluon.jit
def loaded_head(scratch, kv_head):
    """The head of keys and values that belongs to a head of their gradients."""
    return kv_head if scratch.splits is None else kv_head // scratch.splits


@gluon.jit
def next_work_tile(rings, iteration):
    """What to do next; its memory may take another work tile now."""
    work_tile = work_tile_of(rings, iteration)
    rings.work_tiles.release(iteration)
    return work_tile


@gluon.jit
def sum_over_queries(
    dq_desc, rings, rules, scratch, at, tile_range, iteration, added, of_key, of_value,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Add what every visited tile of one query head gives.

    The product that gives partial sums of the gradients of queries needs the grad_scores of both
    consumers. It starts one tile late, so that neither waits for the other. Without a descriptor
    of partial sums there are none.
    """
    ACCUMULATE_DQ: gl.constexpr = dq_desc is not None
    of_key, of_value, added = add_tile(
        dq_desc,
        rings,
        rules,
        scratch,
        at,
        tile_range,
        0,
        iteration,
        added,
        of_key,
        of_value,
        False,
        WHICH,
    )
    for index in range(1, num_visits(tile_range)):
        iteration += 1
        of_key, of_value, added = add_tile(
            dq_desc, rings, rules, scratch, at, tile_range, index, iteration, added, of_key,
            of_value, ACCUMULATE_DQ, WHICH,
        )  # fmt: skip
    if ACCUMULATE_DQ:
        partial_dq = multiply_grad_scores(rings, iteration, WHICH)
        partial_dq = warpgroup_mma_wait(0, deps=[partial_dq])
        last = num_visits(tile_range) - 1
        semaphore = read_semaphore(rules, scratch, at, tile_range, last, WHICH)
        added = add_partial_dq(
            dq_desc,
            rings,
            rules,
            scratch,
            at,
            tile_range,
            last,
            partial_dq,
            semaphore,
            added,
            WHICH,
        )
    return of_key, of_value, added


@gluon.jit
def add_tile(
    dq_desc, rings, rules, scratch, at, tile_range, index, iteration, added, of_key, of_value,
    LATER: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Add what one tile of queries gives to the gradients of the keys and values.

    Whatever the consumer computes itself, it computes while a product runs:

        scores and grad_weights → exponents, under grad_weights → of_value → grad_scores, under
        of_value → partial sum of the tile before, of_key → add it, under of_key

    LATER: the partial sum of the tile before is to be computed.
    """
    QUERY_TILE: gl.constexpr = rings.queries.memory.shape[3]
    PAIRS: gl.constexpr = mma_layout(QUERY_TILE)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, PAIRS)
    OF_KEY: gl.constexpr = mma_layout(rings.keys.memory.shape[4])
    OF_VALUE: gl.constexpr = mma_layout(rings.values.memory.shape[4])
    # Half of the keys and values: [ROWS, HEAD_WIDTH] and [ROWS, VALUE_WIDTH].
    key_half = as_matrix(rings.keys.memory.index(here(iteration - iteration))).slice(
        WHICH * ROWS, ROWS
    )
    value_half = as_matrix(rings.values.memory.index(here(iteration - iteration))).slice(
        WHICH * ROWS, ROWS
    )
    query_tile = as_matrix(rings.queries.at(iteration))  # [QUERY_TILE, HEAD_WIDTH]
    grad_tile = as_matrix(rings.grad_outputs.at(iteration))  # [QUERY_TILE, VALUE_WIDTH]
    nothing = gl.zeros([ROWS, QUERY_TILE], gl.float32, PAIRS)  # pairs, here and below
    # The sooner the better, but twice as many pairs leave no registers for it any sooner.
    SOON: gl.constexpr = QUERY_TILE == ROWS
    if LATER and SOON:
        semaphore = read_semaphore(rules, scratch, at, tile_range, index - 1, WHICH)

    rings.queries.wait(iteration)
    starts = starts_at(rings, rules, iteration)
    scores = nothing
    if rules.score is None:
        scores = nothing + starts.slice(0, QUERY_TILE).load(COLUMNS)[None, :]
    scores = warpgroup_mma(key_half, query_tile.permute((1, 0)), scores, is_async=True)
    grad_start = starts.slice(QUERY_TILE, QUERY_TILE).load(COLUMNS)
    rings.grad_outputs.wait(iteration)
    grad_weights = warpgroup_mma(
        value_half, grad_tile.permute((1, 0)), nothing + grad_start[None, :], is_async=True
    )
    scores = warpgroup_mma_wait(1, deps=[scores])
    weights, slopes = weigh(scores, starts, rules, scratch, at, tile_range, index)
    operand = as_operand(weights, query_tile.dtype, OF_VALUE)
    # [ROWS, VALUE_WIDTH]
    of_value = warpgroup_mma(operand, grad_tile, of_value, is_async=True)
    grad_weights, slopes = warpgroup_mma_wait(1, deps=[grad_weights, slopes])
    grad_scores = (slopes * grad_weights).to(query_tile.dtype)
    operand = gl.convert_layout(grad_scores, gl.DotOperandLayout(0, OF_KEY, 2))
    if LATER and SOON:
        partial_dq = multiply_grad_scores(rings, iteration - 1, WHICH)
    if dq_desc is not None:
        rings.queries.acquire(iteration + 1)  # then both have read what lay here two tiles before
        rings.grad_scores.put_rows(iteration, WHICH * ROWS, grad_scores)
    if LATER and not SOON:
        semaphore = read_semaphore(rules, scratch, at, tile_range, index - 1, WHICH)
        partial_dq = multiply_grad_scores(rings, iteration - 1, WHICH)
    of_key = warpgroup_mma(operand, query_tile, of_key, is_async=True)  # [ROWS, HEAD_WIDTH]
    if LATER:
        of_value, partial_dq = warpgroup_mma_wait(1, deps=[of_value, partial_dq])
        added = add_partial_dq(
            dq_desc,
            rings,
            rules,
            scratch,
            at,
            tile_range,
            index - 1,
            partial_dq,
            semaphore,
            added,
            WHICH,
        )
        of_key = warpgroup_mma_wait(0, deps=[of_key])
    else:
        of_value, of_key = warpgroup_mma_wait(0, deps=[of_value, of_key])
    rings.queries.release(iteration)
    return of_key, of_value, added


@gluon.jit
def starts_at(rings, rules, iteration):
    """What `attention_backward_begin` wrote of the queries of an iteration, number by number."""
    QUERY_TILE: gl.constexpr = rings.queries.memory.shape[3]
    NUMBERS: gl.constexpr = starts_of(rules.score is not None)
    return rings.starts.index(rings.queries.stage(iteration)).reshape([NUMBERS * QUERY_TILE])


@gluon.jit
def weigh(scores, starts, rules, scratch, at, tile_range, index):
    """Weights of a tile of pairs, and what grad_weights - row_dot are multiplied by."""
    batch, query_head, first_key, query_len, kv_len, _ = at
    query_tile = query_tile_of(rules, scratch, tile_range, index)
    key_rows, query_rows = places_of(scores, first_key, query_tile * scores.shape[1])
    if rules.score is None:
        weights = gl.exp2(scores * (rules.scale * LOG2_E))  # they started at -lse
    else:
        scaled = scores * rules.scale
        changed = rules.score.change(
            scaled, batch, query_head, query_rows, key_rows, kv_len - query_len, rules.score.data
        )
        COLUMNS: gl.constexpr = gl.SliceLayout(0, scores.type.layout)
        score_start = starts.slice(0, scores.shape[1]).load(COLUMNS)  # -lse
        residual = starts.slice(2 * scores.shape[1], scores.shape[1]).load(COLUMNS)
        weights = gl.exp2((changed + score_start[None, :]) * LOG2_E + residual[None, :])
    if may_hide(scratch, tile_range, index, query_tile):  # all others run without mask arithmetic
        visible = (key_rows < kv_len) & (query_rows < query_len)
        if rules.mask.visible is not None:
            visible = visible & rules.mask.visible(
                batch, query_head, query_rows, key_rows, kv_len - query_len, rules.mask.data
            )
        weights = gl.where(visible, weights, 0.0)
    if rules.score is None:
        slopes = weights
    else:
        slopes = weights * rules.score.derivative(
            scaled, batch, query_head, query_rows, key_rows, kv_len - query_len, rules.score.data
        )
    return weights, slopes


@gluon.jit
def finish(sums, desc, view, schedule, at, memory, DIM: gl.constexpr):
    """Write the gradients of 64 rows of keys or values. Without a descriptor no rows go by TMA."""
    batch, kv_head, first_row, kv_len = at
    numbers = sums.to(view.ptr.dtype.element_ty)
    wait_for_stores()
    if desc is None:
        store_rows(numbers, view, batch, kv_head, first_row, kv_len, DIM)
    elif first_row + ROWS <= kv_len:
        as_matrix(memory).store(numbers)
        kv_batch, kv_row = schedule.origin(batch, view.data)
        store(desc, [kv_batch, kv_head, kv_row + first_row, 0], memory)
    else:  # rows past the end may be another sequence's
        store_rows(numbers, view, batch, kv_head, first_row, kv_len, DIM)


@gluon.jit
def store_rows(numbers, view, batch, kv_head, first_row, kv_len, DIM: gl.constexpr):
    """Write the rows of these that exist, from registers."""
    row, channel = places_of(numbers, first_row, 0)
    pointers = row_pointers(view, batch, kv_head, row, channel)
    gl.store(pointers, numbers, mask=(row < kv_len) & (channel < DIM))
