"""Gradients of more than 128 channels on Hopper, in two passes, and products of so many channels.

In the first pass a program stands at a tile of 64 keys and goes along the queries that see it. Each
of its two consumers owns one gradient, all channels of it, and computes what that one needs:

    the first     scores = keys · queriesᵀ → weights
                  of_value += weights · grad_outputs
    the second    grad_weights = values · grad_outputsᵀ → grad_scores
                  of_key += grad_scores · queries

Weights and grad_scores are left operands as they stand in registers. The one thing that the second
wants of the first, what grad_weights are multiplied by, goes through shared memory in 16 bits: 8 K
a tile. Partial sums of the gradients of queries would take eight times as much, and registers that
are not there. So a second pass computes those gradients, with two of the products done again: the
same bits each time. A program stands at 128 query rows there, 64 for each of its two consumers, and
goes along the keys that they see, as the forward pass does:

    scores = queries · keysᵀ, grad_weights = grad_outputs · valuesᵀ → grad_scores
    of_query += grad_scores · keys, one step late

A tensor has a power of two of channels, and so is 256 wide above 128. Where no more than 192 are
there, sums are two tensors, of 128 and 64 channels, and products leave out the rest.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import (
    as_operand,
    here,
    store,
    wait_for_each_other,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.hopper.tile_scheduler import is_partial, num_visits, tile_of
from saccade.gpu.language import gl, gluon
from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.tensor_view import load_numbers, row_pointers
from saccade.ops.attention.hopper.backward import next_work_tile, produce, starts_at, weigh
from saccade.ops.attention.hopper.forward import mma_layout, schedule_work, work_tile_of
from saccade.ops.attention.hopper.nonfinite import note_nonfinite
from saccade.ops.attention.hopper.smem import make_key_rings, make_query_rings
from saccade.ops.attention.hopper.softmax import (
    ROWS,
    as_matrix,
    change,
    hide,
    places_of,
)

WIDEST_PART = gl.constexpr(128)  # but for a single one


@gluon.constexpr_function
def parts_of(width, dim):
    """The widths of the tensors that so many channels are cut into."""
    return [128, 64] if width == 256 and dim <= 192 else [width]


@gluon.jit
def no_sums(PARTS: gl.constexpr):
    """Sums of 64 rows, as a tensor for each part."""
    sums = ()
    for index in gl.static_range(len(PARTS)):
        sums = sums + (_no_sums(PARTS[index]),)  # noqa: RUF005
    return sums


@gluon.jit
def _no_sums(WIDTH: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, mma_layout(WIDTH))


@gluon.jit
def multiply_channels(left, right, pairs, PARTS: gl.constexpr):
    """Start to add left · rightᵀ, both [rows, channels] in shared memory, to a tile of pairs: as
    many products as there are parts."""
    for index in gl.static_range(len(PARTS)):
        pairs = _multiply_channels(left, right, pairs, WIDEST_PART * index, PARTS[index])
    return pairs


@gluon.jit
def _multiply_channels(left, right, pairs, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    left, right = left.slice(FIRST, WIDTH, dim=1), right.slice(FIRST, WIDTH, dim=1)
    return warpgroup_mma(left, right.permute((1, 0)), pairs, is_async=True)


@gluon.jit
def add_rows(pairs, rows, sums):
    """Start to add pairs · rows, in 16 bits, to sums: as many products as there are parts."""
    found = ()
    for index in gl.static_range(len(sums)):
        part = _add_rows(pairs, rows, sums[index], WIDEST_PART * index)
        found = found + (part,)  # noqa: RUF005
    return found


@gluon.jit
def _add_rows(pairs, rows, sums, FIRST: gl.constexpr):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma_layout(sums.shape[1]), 2)
    left, right = gl.convert_layout(pairs, LEFT), rows.slice(FIRST, sums.shape[1], dim=1)
    return warpgroup_mma(left, right, sums, is_async=True)


@gluon.jit
def wait_for_sums_of(RUNNING: gl.constexpr, sums):
    """Wait until all but so many products, later ones, are done."""
    if len(sums) == 1:
        found = (warpgroup_mma_wait(RUNNING, deps=[sums[0]]),)
    else:
        found = warpgroup_mma_wait(RUNNING, deps=[sums[0], sums[1]])
    return found


@gluon.jit
def finish_wide(
    sums, factor, desc, view, schedule, at, memory, flag, DIM: gl.constexpr, NAN_SAFE: gl.constexpr
):  # fmt: skip
    """Write the gradients of 64 rows through memory that is read no more, and wait until
    it may be filled again."""
    batch, head, first_row, length = at
    wait_for_each_other()
    for index in gl.static_range(len(sums)):
        if NAN_SAFE:
            note_nonfinite(flag, sums[index])
        _finish(sums[index] * factor, desc.dtype, view, at, memory, WIDEST_PART * index, DIM)
    if first_row + ROWS <= length:
        entry, row = schedule.origin(batch, view.data)
        store(desc, [entry, head, row + first_row, 0], memory)
    wait_for_stores()
    wait_for_each_other()


@gluon.jit
def _finish(
    sums, dtype: gl.constexpr, view, at, memory, FIRST: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    batch, head, first_row, length = at
    numbers = sums.to(dtype)
    if first_row + ROWS <= length:
        as_matrix(memory).slice(FIRST, sums.shape[1], dim=1).store(numbers)
    else:  # rows past the end may be another sequence's
        row, channel = places_of(numbers, first_row, FIRST)
        pointers = row_pointers(view, batch, head, row, channel)
        gl.store(pointers, numbers, mask=(row < length) & (channel < DIM))


# ---- the pass for keys and values -------------------------------------------------------------


@gluon.jit(do_not_specialize=["rules"])
def attention_backward_keys(
    query_desc, key_desc, value_desc, grad_output_desc, starts_desc, dq_desc, grad_key_desc,
    grad_value_desc, query, key, grad_key, grad_value, rules, schedule, scratch,
    HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    META: gl.constexpr, NAN_SAFE: gl.constexpr,
):  # fmt: skip
    """One program: tiles of 64 keys of one head, one after the other. There are no partial sums."""
    gl.static_assert(dq_desc is None)
    rings = make_key_rings(
        query_desc, key_desc, value_desc, grad_output_desc, starts_desc,
        grad_key_desc, grad_value_desc, META.STAGES,
    )  # fmt: skip
    gl.warp_specialize(
        [
            (consume, (
                grad_value_desc, query, grad_value, rules, schedule, scratch, rings,
                HEADS_PER_KV_HEAD, VALUE_DIM, HEAD_DIM, NAN_SAFE, 0,
            )),
            (consume, (
                grad_key_desc, query, grad_key, rules, schedule, scratch, rings,
                HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, NAN_SAFE, 1,
            )),
            (produce, (
                query_desc, key_desc, value_desc, grad_output_desc, starts_desc, query, key,
                grad_key, grad_value, rules, schedule, scratch, rings,
                HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, True,
            )),
        ],
        [4, 1],
        [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def consume(
    grad_desc, query, grad, rules, schedule, scratch, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, DIM: gl.constexpr, OTHER_DIM: gl.constexpr,
    NAN_SAFE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute one gradient of each tile of keys that the producer schedules: that of values (0),
    from the keys, or that of keys (1), from the values."""
    PARTS: gl.constexpr = parts_of(grad_desc.block_type.shape[3], DIM)
    operand = rings.keys if WHICH == 0 else rings.values
    OTHERS: gl.constexpr = parts_of(operand.memory.shape[4], OTHER_DIM)
    tile_iteration, work_iteration, iteration = 0, 0, 0
    position, query_len, kv_len, tile_range = next_work_tile(rings, work_iteration)
    while kv_len > 0:
        operand.wait(tile_iteration)
        sums = no_sums(PARTS)
        for group_head in range(0, HEADS_PER_KV_HEAD):
            if HEADS_PER_KV_HEAD > 1:  # noqa: SIM102 (known when compiling; the next is not)
                if group_head > 0:
                    position, query_len, kv_len, tile_range = next_work_tile(rings, work_iteration)
            work_iteration += 1
            batch, query_head, kv_start = position
            at = (batch, query_head, kv_start, query_len, kv_len, 0)
            sums = sum_over_queries(
                rings, rules, scratch, at, tile_range, iteration, sums, OTHERS, WHICH
            )
            iteration += num_visits(tile_range)
        factor = 1.0 if WHICH == 0 else rules.scale
        batch, query_head, kv_start = position
        at = (batch, query_head // HEADS_PER_KV_HEAD, kv_start, kv_len)
        # It leaves through the memory of what was multiplied.
        finish_wide(
            sums, factor, grad_desc, grad, schedule, at, rings.outputs[WHICH], scratch.flag,
            DIM, NAN_SAFE,
        )  # fmt: skip
        operand.release(tile_iteration)
        tile_iteration += 1
        position, query_len, kv_len, tile_range = next_work_tile(rings, work_iteration)


@gluon.jit
def sum_over_queries(
    rings, rules, scratch, at, tile_range, iteration, sums, PARTS: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """Add what every visited tile of one query head gives, each one step late: its product and the
    first one of the next step follow each other without a pause."""
    if WHICH == 0:
        pairs, sums = add_weights(
            rings, rules, scratch, at, tile_range, 0, iteration, 0, sums, PARTS, False
        )
    else:
        pairs, sums = add_grad_scores(rings, rules, iteration, 0, sums, PARTS, False)
    for index in range(1, num_visits(tile_range)):
        iteration += 1
        if WHICH == 0:
            pairs, sums = add_weights(
                rings, rules, scratch, at, tile_range, index, iteration, pairs, sums, PARTS, True
            )
        else:
            pairs, sums = add_grad_scores(rings, rules, iteration, pairs, sums, PARTS, True)
    ring = rings.grad_outputs if WHICH == 0 else rings.queries
    ring.wait(iteration)
    sums = wait_for_sums_of(0, add_rows(pairs, as_matrix(ring.at(iteration)), sums))
    ring.release(iteration)
    return sums


@gluon.jit
def add_weights(
    rings, rules, scratch, at, tile_range, index, iteration, weights, of_value,
    PARTS: gl.constexpr, LATER: gl.constexpr,
):  # fmt: skip
    """Add what the tile of queries before gives to the gradients of values, from its weights; and
    make the weights of this one.

    PARTS: of the channels of keys. LATER: there is a tile before.
    """
    QUERY_TILE: gl.constexpr = rings.queries.memory.shape[3]
    PAIRS: gl.constexpr = mma_layout(QUERY_TILE)
    # [KV_TILE, HEAD_WIDTH]; a consumer has all 64 keys, so KV_TILE is ROWS
    key_tile = as_matrix(rings.keys.memory.index(here(iteration - iteration)))
    query_tile = as_matrix(rings.queries.at(iteration))  # [QUERY_TILE, HEAD_WIDTH]
    if LATER:
        rings.grad_outputs.wait(iteration - 1)
        of_value = add_rows(weights, as_matrix(rings.grad_outputs.at(iteration - 1)), of_value)
    rings.queries.wait(iteration)
    starts = starts_at(rings, rules, iteration)
    scores = gl.zeros([ROWS, QUERY_TILE], gl.float32, PAIRS)
    if rules.score is None:
        scores = scores + starts.slice(0, QUERY_TILE).load(gl.SliceLayout(0, PAIRS))[None, :]
    scores = multiply_channels(key_tile, query_tile, scores, PARTS)
    if LATER:
        of_value = wait_for_sums_of(len(PARTS), of_value)
        rings.grad_outputs.release(iteration - 1)
    scores = warpgroup_mma_wait(0, deps=[scores])
    rings.queries.release(iteration)
    weights, slopes = weigh(scores, starts, rules, scratch, at, tile_range, index)
    rings.slopes.acquire(iteration)
    rings.slopes.put(iteration, slopes.to(query_tile.dtype))
    return as_operand(weights, query_tile.dtype, PAIRS), of_value


@gluon.jit
def add_grad_scores(
    rings, rules, iteration, grad_scores, of_key, PARTS: gl.constexpr, LATER: gl.constexpr
):  # fmt: skip
    """Add an iteration to the gradients of keys, from grad_scores. PARTS: of channels of values."""
    QUERY_TILE: gl.constexpr = rings.queries.memory.shape[3]
    PAIRS: gl.constexpr = mma_layout(QUERY_TILE)
    # [KV_TILE, VALUE_WIDTH]
    value_tile = as_matrix(rings.values.memory.index(here(iteration - iteration)))
    grad_tile = as_matrix(rings.grad_outputs.at(iteration))  # [QUERY_TILE, VALUE_WIDTH]
    if LATER:
        of_key = add_rows(grad_scores, as_matrix(rings.queries.at(iteration - 1)), of_key)
    rings.queries.wait(iteration)
    starts = starts_at(rings, rules, iteration)
    grad_start = starts.slice(QUERY_TILE, QUERY_TILE).load(gl.SliceLayout(0, PAIRS))
    nothing = gl.zeros([ROWS, QUERY_TILE], gl.float32, PAIRS)
    rings.grad_outputs.wait(iteration)
    grad_weights = multiply_channels(value_tile, grad_tile, nothing + grad_start[None, :], PARTS)
    if LATER:
        of_key = wait_for_sums_of(len(PARTS), of_key)
        rings.queries.release(iteration - 1)
    grad_weights = warpgroup_mma_wait(0, deps=[grad_weights])
    rings.grad_outputs.release(iteration)
    rings.slopes.wait(iteration)
    slopes = rings.slopes.at(iteration).load(PAIRS).to(gl.float32)
    rings.slopes.release(iteration)
    return as_operand(slopes * grad_weights, grad_tile.dtype, PAIRS), of_key


# ---- gradients of queries -----------------------------------------------------------------------


@gluon.jit(do_not_specialize=["rules"])
def attention_backward_queries(
    query_desc, key_desc, value_desc, grad_output_desc, grad_query_desc, query, key, grad_query,
    row_lse, row_dot, lse_residual, rules, schedule, HEADS_PER_KV_HEAD: gl.constexpr,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, META: gl.constexpr, NAN_SAFE: gl.constexpr,
):  # fmt: skip
    """One program: tiles of 128 query rows of one head, one after the other."""
    rings = make_query_rings(query_desc, key_desc, value_desc, grad_output_desc, META.STAGES)
    gl.warp_specialize(
        [
            (consume_keys, (
                grad_query_desc, query, grad_query, row_lse, row_dot, lse_residual, rules,
                schedule, rings, HEAD_DIM, VALUE_DIM, NAN_SAFE, 0,
            )),
            (consume_keys, (
                grad_query_desc, query, grad_query, row_lse, row_dot, lse_residual, rules,
                schedule, rings, HEAD_DIM, VALUE_DIM, NAN_SAFE, 1,
            )),
            (produce_keys, (
                query_desc, key_desc, value_desc, grad_output_desc, query, key, rules, schedule,
                rings, HEADS_PER_KV_HEAD,
            )),
            (schedule_work, (query, key, grad_query, None, rules, schedule, rings, HEAD_DIM, 0)),
        ],
        [4, 1, 1],
        [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS, META.PRODUCER_REGISTERS],
    )  # fmt: skip


@gluon.jit
def produce_keys(
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
def consume_keys(
    grad_query_desc, query, grad_query, row_lse, row_dot, lse_residual, rules, schedule, rings,
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
        lse = load_numbers(row_lse, batch, query_head, rows, query_len, float("inf"))
        lost = lse  # not read where there is none
        if lse_residual is not None:
            lost = load_numbers(lse_residual, batch, query_head, rows, query_len, 0.0)
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
            (lse, lost),
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
    slopes = weigh_keys(scores, rules, at, tile_range, index, lse)
    # Values are there. Without this loop ptxas waits for grad_weights above the exponents.
    rings.values.wait(iteration)
    grad_weights, slopes = warpgroup_mma_wait(0, deps=[grad_weights, slopes])
    rings.values.release(iteration)
    return as_operand(slopes * (grad_weights - dot[:, None]), rings.keys.memory.dtype, PAIRS), sums


@gluon.jit
def weigh_keys(scores, rules, at, tile_range, index, lse):
    """What grad_weights - row_dot of a tile of pairs are multiplied by. lse: with its residual."""
    batch, query_head, first_row, query_len, kv_len = at
    kv_start = tile_of(rules, tile_range, index) * scores.shape[1]
    changed = scores
    if rules.score is not None:
        changed = change(scores, rules, at, kv_start)
    if is_partial(tile_range, index):  # all others run without mask arithmetic
        changed = hide(changed, rules, at, kv_start)
    if rules.score is None:
        slopes = gl.exp2(changed * (rules.scale * LOG2_E) - lse[0][:, None])
    else:
        slopes = gl.exp2((changed - lse[0][:, None]) * LOG2_E - lse[1][:, None])
        query_rows, key_rows = places_of(scores, first_row, kv_start)
        slopes = slopes * rules.score.derivative(
            scores * rules.scale, batch, query_head, query_rows, key_rows, kv_len - query_len,
            rules.score.data,
        )  # fmt: skip
    return slopes
