"""Gradients of queries on Hopper, as a pass of their own: the same bits each time, and no partial
sums.

A program stands at 128 query rows, 64 for each of its two consumers, and goes along the keys that
they see, as the forward pass does:

    scores = queries · keysᵀ, grad_weights = grad_outputs · valuesᵀ → grad_scores
    of_query += grad_scores · keys, one step late
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import as_operand, here, warpgroup_mma_wait
from saccade.gpu.hopper.tile_scheduler import is_partial, num_visits, tile_of
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import load_numbers
from saccade.ops.attention.hopper.backward import next_work_tile
from saccade.ops.attention.hopper.backward_d256 import (
    add_rows,
    finish_wide,
    multiply_channels,
    no_sums,
    parts_of,
    wait_for_sums_of,
)
from saccade.ops.attention.hopper.forward import mma_layout, schedule_work, work_tile_of
from saccade.ops.attention.hopper.smem import make_query_rings
from saccade.ops.attention.hopper.softmax import (
    ROWS,
    as_matrix,
    change,
    exponent_factor,
    hide,
    places_of,
)


@gluon.jit(do_not_specialize=["rules"])
def attention_backward_queries(
    query_desc, key_desc, value_desc, grad_output_desc, grad_query_desc, query, key, grad_query,
    lse_log2, row_dot, rules, schedule, HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, META: gl.constexpr, NAN_SAFE: gl.constexpr,
):  # fmt: skip
    """One program: tiles of 128 query rows of one head, one after the other."""
    rings = make_query_rings(query_desc, key_desc, value_desc, grad_output_desc, META.STAGES)
    gl.warp_specialize(
        [
            (consume, (
                grad_query_desc, query, grad_query, lse_log2, row_dot, rules, schedule, rings,
                HEAD_DIM, VALUE_DIM, NAN_SAFE, 0,
            )),
            (consume, (
                grad_query_desc, query, grad_query, lse_log2, row_dot, rules, schedule, rings,
                HEAD_DIM, VALUE_DIM, NAN_SAFE, 1,
            )),
            (produce, (
                query_desc, key_desc, value_desc, grad_output_desc, query, key, rules, schedule,
                rings, HEADS_PER_KV_HEAD,
            )),
            (schedule_work, (query, key, grad_query, None, rules, schedule, rings, HEAD_DIM, 0)),
        ],
        [4, 1, 1],
        [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS, META.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce(
    query_desc, key_desc, value_desc, grad_output_desc, query, key, rules, schedule, rings,
    HEADS_PER_KV_HEAD: gl.constexpr,
):  # fmt: skip
    """Load what consumers will need, as soon as there is room for it."""
    KV_TILE: gl.constexpr = key_desc.block_type.shape[2]
    tile_iteration, kv_iteration = 0, 0
    position, query_len, _, tile_range = work_tile_of(rings, tile_iteration)
    while query_len > 0:
        batch, query_head, query_start = position
        query_batch, query_row = schedule.origin(batch, query.data)
        kv_batch, kv_row = schedule.origin(batch, key.data)
        kv_head = query_head // HEADS_PER_KV_HEAD
        visits = num_visits(tile_range)
        for index in range(0, visits):
            kv_start = tile_of(rules, tile_range, index) * KV_TILE
            coordinates = [kv_batch, kv_head, kv_row + kv_start, 0]
            rings.keys.acquire(kv_iteration)
            rings.keys.load(kv_iteration, key_desc, coordinates)
            rings.values.acquire(kv_iteration)
            rings.values.load(kv_iteration, value_desc, coordinates)
            if index == 0:
                # Their memory is the last to come free: what they leave behind goes out of it.
                for which in gl.static_range(2):
                    first = [query_batch, query_head, query_row + query_start + which * ROWS, 0]
                    rings.queries[which].acquire(tile_iteration)
                    rings.queries[which].load(tile_iteration, query_desc, first)
                    rings.grad_outputs[which].load(tile_iteration, grad_output_desc, first)
            if index == gl.maximum(visits - 2, 0):
                rings.work_tiles.release(
                    tile_iteration
                )  # now is the time to schedule the next tile
            kv_iteration += 1
        tile_iteration += 1
        position, query_len, _, tile_range = work_tile_of(rings, tile_iteration)


@gluon.jit
def consume(
    grad_query_desc, query, grad_query, lse_log2, row_dot, rules, schedule, rings,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, NAN_SAFE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each tile of query rows that is scheduled."""
    PARTS: gl.constexpr = parts_of(rings.keys.memory.shape[4], HEAD_DIM)
    OTHERS: gl.constexpr = parts_of(rings.values.memory.shape[4], VALUE_DIM)
    OF_ROWS: gl.constexpr = gl.SliceLayout(1, mma_layout(rings.keys.memory.shape[3]))
    tile_iteration, kv_iteration = 0, 0
    position, query_len, kv_len, tile_range = next_work_tile(rings, tile_iteration)
    while query_len > 0:
        batch, query_head, query_start = position
        first_row = query_start + WHICH * ROWS
        rows = first_row + gl.arange(0, ROWS, OF_ROWS)
        # +inf makes all weights of a row 0.
        lse = load_numbers(lse_log2, batch, query_head, rows, query_len, float("inf"))
        dot = load_numbers(row_dot, batch, query_head, rows, query_len, 0.0)  # [ROWS], as lse
        at = (batch, query_head, first_row, query_len, kv_len)
        queries, grad_outputs = rings.queries[WHICH], rings.grad_outputs[WHICH]
        queries.wait(tile_iteration)
        grad_outputs.wait(tile_iteration)
        sums = sum_over_keys(
            rings,
            rules,
            at,
            tile_range,
            kv_iteration,
            lse,
            dot,
            no_sums(PARTS),
            PARTS,
            OTHERS,
            WHICH,
        )
        kv_iteration += num_visits(tile_range)
        at = (batch, query_head, first_row, query_len)
        # They leave through the memory of the queries.
        finish_wide(
            sums, rules.scale, grad_query_desc, grad_query, schedule, at,
            queries.at(tile_iteration), schedule.nonfinite, HEAD_DIM, NAN_SAFE,
        )  # fmt: skip
        queries.release(tile_iteration)
        tile_iteration += 1
        position, query_len, kv_len, tile_range = next_work_tile(rings, tile_iteration)


@gluon.jit
def sum_over_keys(
    rings, rules, at, tile_range, iteration, lse, dot, sums,
    PARTS: gl.constexpr, OTHERS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Add what every visited tile of keys gives, each one step late."""
    grad_scores, sums = add_tile(
        rings, rules, at, tile_range, 0, iteration, lse, dot, 0, sums, PARTS, OTHERS, False, WHICH
    )
    for index in range(1, num_visits(tile_range)):
        iteration += 1
        grad_scores, sums = add_tile(
            rings, rules, at, tile_range, index, iteration, lse, dot, grad_scores, sums, PARTS,
            OTHERS, True, WHICH,
        )  # fmt: skip
    sums = wait_for_sums_of(0, add_rows(grad_scores, as_matrix(rings.keys.at(iteration)), sums))
    rings.keys.release(iteration)
    return sums


@gluon.jit
def add_tile(
    rings, rules, at, tile_range, index, iteration, lse, dot, grad_scores, sums,
    PARTS: gl.constexpr, OTHERS: gl.constexpr, LATER: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Add what the tile of keys before gives, and make the grad_scores of this one.

    PARTS, OTHERS: of the channels of keys, and of values. LATER: there is a tile before.
    """
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    PAIRS: gl.constexpr = mma_layout(KV_TILE)
    # [ROWS, HEAD_WIDTH] and [ROWS, VALUE_WIDTH]
    query_tile = as_matrix(rings.queries[WHICH].memory.index(here(iteration - iteration)))
    grad_tile = as_matrix(rings.grad_outputs[WHICH].memory.index(here(iteration - iteration)))
    nothing = gl.zeros([ROWS, KV_TILE], gl.float32, PAIRS)  # pairs, here and below
    if LATER:
        sums = add_rows(grad_scores, as_matrix(rings.keys.at(iteration - 1)), sums)
    rings.keys.wait(iteration)
    scores = multiply_channels(query_tile, as_matrix(rings.keys.at(iteration)), nothing, PARTS)
    if LATER:
        sums = wait_for_sums_of(len(PARTS), sums)
        rings.keys.release(iteration - 1)
    rings.values.wait(iteration)
    grad_weights = multiply_channels(
        grad_tile, as_matrix(rings.values.at(iteration)), nothing, OTHERS
    )
    scores = warpgroup_mma_wait(len(OTHERS), deps=[scores])
    slopes = weigh(scores, rules, at, tile_range, index, lse)
    # Values are there. Without this loop ptxas waits for grad_weights above the exponents.
    rings.values.wait(iteration)
    grad_weights, slopes = warpgroup_mma_wait(0, deps=[grad_weights, slopes])
    rings.values.release(iteration)
    return as_operand(slopes * (grad_weights - dot[:, None]), rings.keys.memory.dtype, PAIRS), sums


@gluon.jit
def weigh(scores, rules, at, tile_range, index, lse):
    """What grad_weights - row_dot of a tile of pairs are multiplied by."""
    batch, query_head, first_row, query_len, kv_len = at
    kv_start = tile_of(rules, tile_range, index) * scores.shape[1]
    changed = scores
    if rules.score is not None:
        changed = change(scores, rules, at, kv_start)
    if is_partial(tile_range, index):  # all others run without mask arithmetic
        changed = hide(changed, rules, at, kv_start)
    slopes = gl.exp2(changed * exponent_factor(rules) - lse[:, None])
    if rules.score is not None:
        query_rows, key_rows = places_of(scores, first_row, kv_start)
        slopes = slopes * rules.score.derivative(
            scores * rules.scale, batch, query_head, query_rows, key_rows, kv_len - query_len,
            rules.score.data,
        )  # fmt: skip
    return slopes
