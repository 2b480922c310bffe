"""Attention forward on Hopper: one warp loads tiles by TMA, groups of four warps compute.

Source: FlashAttention-3 (Shah et al. 2024), algorithm 2 without its ping-pong; the online softmax
is that of `saccade.gpu.online_softmax`. What is fed to it, and in which order, is in `produce`; the
algorithm is in `consume` and `fold_tile`.
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
    flag_at,
    follow,
    here,
    pinned,
    wait_for_each_other,
    wait_for_stores,
    wait_for_sums,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.hopper.tile_scheduler import (
    next_number,
    num_partial,
    num_tiles,
    num_visits,
    own_partial_tiles,
    program_of,
    read_work_tile,
    tile_from_last,
    write_work_tile,
)
from saccade.gpu.language import gl, gluon
from saccade.gpu.tensor_view import num_rows
from saccade.gpu.tile_ranges import TileRange
from saccade.ops.attention.hopper.nonfinite import attend_nan_safe, note_nonfinite
from saccade.ops.attention.hopper.smem import make_rings
from saccade.ops.attention.hopper.softmax import (
    NOTHING,
    ROWS,
    as_matrix,
    change_and_hide,
    finish,
    lazy_rescale,
    no_lazy_max,
    pad_numbers,
    pad_rows,
    raise_lazy_max,
    rescaled,
    sum_by_thread,
    weights_of,
)


class ForwardMeta(NamedTuple):
    """How the kernel runs, known when it is compiled; see `configs.KernelSchedule`."""

    CONSUMERS: int
    STAGES: int
    QUERY_STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    OVERLAP_SOFTMAX: bool
    MAX_OF: str
    SKIP_MASKED_TILE: bool


@gluon.jit(do_not_specialize=["rules"])
def attention_forward(
    query_desc, key_desc, value_desc, output_desc, query, key, value, output, logsumexp, residual,
    largest, rules, sinks, schedule, HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """One program: tiles of CONSUMERS · 64 rows of one head, one after the other.

    residual, if there is one, takes what rounding takes from the output (`runtime/rounding.py`),
    and largest the largest score of each row, if MAX_OF is "exact".
    """
    rings = make_rings(
        query_desc,
        key_desc,
        value_desc,
        output_desc,
        META.CONSUMERS,
        META.STAGES,
        META.QUERY_STAGES,
    )
    follow()
    # A tuple that holds functions cannot be given a name, so arguments are written out each time.
    if META.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    output_desc, query, key, value, output, logsumexp, residual, largest, rules,
                    sinks, schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, 0,
                    META.OVERLAP_SOFTMAX, META.MAX_OF, META.SKIP_MASKED_TILE, 0,
                )),
                (consume, (
                    output_desc, query, key, value, output, logsumexp, residual, largest, rules,
                    sinks, schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, 0,
                    META.OVERLAP_SOFTMAX, META.MAX_OF, META.SKIP_MASKED_TILE, 1,
                )),
                (produce, (
                    query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
                    HEADS_PER_KV_HEAD, META.SKIP_MASKED_TILE,
                )),
                (schedule_work, (
                    query, key, output, logsumexp, rules, schedule, rings, VALUE_DIM, 0,
                )),
            ],
            [4, 1, 1],
            [META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS, META.PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.static_assert(META.CONSUMERS == 3)
        gl.warp_specialize(
            [
                (consume, (
                    output_desc, query, key, value, output, logsumexp, residual, largest, rules,
                    sinks, schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, 0,
                    META.OVERLAP_SOFTMAX, META.MAX_OF, META.SKIP_MASKED_TILE, 0,
                )),
                (consume, (
                    output_desc, query, key, value, output, logsumexp, residual, largest, rules,
                    sinks, schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, 0,
                    META.OVERLAP_SOFTMAX, META.MAX_OF, META.SKIP_MASKED_TILE, 1,
                )),
                (consume, (
                    output_desc, query, key, value, output, logsumexp, residual, largest, rules,
                    sinks, schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM, 0,
                    META.OVERLAP_SOFTMAX, META.MAX_OF, META.SKIP_MASKED_TILE, 2,
                )),
                (produce, (
                    query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
                    HEADS_PER_KV_HEAD, META.SKIP_MASKED_TILE,
                )),
                (schedule_work, (
                    query, key, output, logsumexp, rules, schedule, rings, VALUE_DIM, 0,
                )),
            ],
            [4, 4, 1, 1],
            [
                META.CONSUMER_REGISTERS, META.CONSUMER_REGISTERS, META.PRODUCER_REGISTERS,
                META.PRODUCER_REGISTERS,
            ],
        )  # fmt: skip


@gluon.jit
def schedule_work(
    query, key, output, logsumexp, rules, schedule, rings,
    VALUE_DIM: gl.constexpr, FEWEST: gl.constexpr,
):  # fmt: skip
    """Say which tile of query rows comes next, and which tiles of keys it visits.

    This takes as long as some tiles do, so a warp of its own does it, while others work on the tile
    before. It asks for a number no sooner: another program may be done by then. Sequences of FEWEST
    query rows or fewer are passed over. In the end it writes the results (the second of which may
    be None) of rows that belong to no sequence.
    """
    QUERY_TILE: gl.constexpr = len(rings.queries) * ROWS
    KV_TILE: gl.constexpr = rings.keys.memory.shape[3]
    iteration = 0
    number = gl.program_id(0)
    while number < num_tiles(schedule):
        batch, query_head, tile, slot = query.find(
            program_of(schedule, number), query.data, QUERY_TILE
        )
        query_start = tile * QUERY_TILE
        query_len, kv_len = num_rows(query, batch), num_rows(key, batch)
        # Packed sequences have slots without rows.
        if (query_start < query_len) & (query_len > FEWEST):
            tile_range = rules.mask.tile_range(
                rules.mask, batch, query_head, slot, query_start, (query_len, kv_len),
                QUERY_TILE, KV_TILE, True,
            )  # fmt: skip
            position = (batch, query_head, query_start)
            rings.work_tiles.put(
                iteration, write_work_tile(position, query_len, kv_len, tile_range)
            )
            iteration += 1
            rings.work_tiles.acquire(iteration)
        number = next_number(schedule, number)
    # A work tile for no rows: there is nothing left.
    none = number * 0
    nothing = TileRange(none, none, none, none, none, none)
    rings.work_tiles.put(iteration, write_work_tile((none, none, none), none, none, nothing))
    pad_rows(output, 0.0, VALUE_DIM)
    if logsumexp is not None:
        pad_numbers(logsumexp, float("-inf"))


@gluon.jit
def produce(
    query_desc, key_desc, value_desc, query, key, rules, schedule, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, SKIP_MASKED_TILE: gl.constexpr,
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
            kv_start = tile_from_last(rules, tile_range, index) * KV_TILE
            coordinates = [kv_batch, kv_head, kv_row + kv_start, 0]
            rings.keys.acquire(kv_iteration)
            rings.keys.load(kv_iteration, key_desc, coordinates)
            if index == 0:
                first = query_batch, query_head, query_row + query_start
                load_queries(query_desc, rings, first, tile_iteration, SKIP_MASKED_TILE)
            rings.values.acquire(kv_iteration)
            rings.values.load(kv_iteration, value_desc, coordinates)
            if index == gl.maximum(visits - 2, 0):
                rings.work_tiles.release(
                    tile_iteration
                )  # now is the time to schedule the next tile
            kv_iteration += 1
        tile_iteration += 1
        position, query_len, _, tile_range = work_tile_of(rings, tile_iteration)


@gluon.jit
def load_queries(query_desc, rings, first, iteration, SKIP_MASKED_TILE: gl.constexpr):
    """Load each consumer's rows of a tile, whose first one lies there: batch entry, head, row."""
    batch, head, row = first
    for which in gl.static_range(len(rings.queries)):
        rings.queries[which].acquire(iteration)
        rows = consumer_rows(which, iteration, len(rings.queries), SKIP_MASKED_TILE)
        first_row = row + rows * ROWS
        rings.queries[which].load(iteration, query_desc, [batch, head, first_row, 0])


@gluon.jit
def consumer_rows(
    WHICH: gl.constexpr, iteration, CONSUMERS: gl.constexpr, SKIP_MASKED_TILE: gl.constexpr
):  # fmt: skip
    """Which 64 rows of a tile a consumer takes: in turns if some have less to do."""
    return (WHICH + iteration) % CONSUMERS if SKIP_MASKED_TILE else WHICH


@gluon.jit
def consume(
    output_desc, query, key, value, output, logsumexp, residual, largest, rules, sinks, schedule,
    rings, HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    PAGE_SIZE: gl.constexpr, OVERLAP_SOFTMAX: gl.constexpr, MAX_OF: gl.constexpr, SKIP_MASKED_TILE:
    gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each tile of query rows that is scheduled. PAGE_SIZE: 0 without pages;
    OVERLAP_SOFTMAX, MAX_OF, SKIP_MASKED_TILE: as in configs.KernelSchedule."""
    tile_iteration, kv_iteration = 0, 0
    position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)
    while query_len > 0:
        rings.work_tiles.release(tile_iteration)
        batch, query_head, query_start = position
        rows = consumer_rows(WHICH, tile_iteration, len(rings.queries), SKIP_MASKED_TILE)
        first_row = query_start + rows * ROWS
        at = (batch, query_head, first_row, query_len, kv_len)
        state = attend(
            rings.queries[WHICH], rings.keys, rings.values, rules, at, tile_range, tile_iteration,
            kv_iteration, OVERLAP_SOFTMAX, maxima(MAX_OF, rules.score is not None),
            SKIP_MASKED_TILE,
        )  # fmt: skip
        kv_iteration += num_visits(tile_range)
        # Behind the counter; computed anew, as there are no registers to keep it.
        nonfinite = schedule.nonfinite + (1 + here(gl.program_id(0)) * 4 + WHICH)
        note_nonfinite(nonfinite, state[2])
        wait_for_each_other()
        any_nonfinite = flag_at(nonfinite)  # it comes while the tile is finished
        finish(
            state, output_desc, output, logsumexp, residual, largest, sinks, schedule, at,
            rings.outputs[WHICH], VALUE_DIM, rules.score is not None,
        )  # fmt: skip
        if any_nonfinite != 0:
            # NaN or inf, perhaps from a hidden value row (0 · NaN is NaN), perhaps as scores left
            # their reference far behind: all once more.
            wait_for_sums()
            wait_for_each_other()
            gl.store(nonfinite, 0)
            attend_nan_safe(
                query, key, value, output, logsumexp, residual, largest, rules, sinks, at,
                tile_range, rings.keys.memory.shape[3], HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM,
                PAGE_SIZE,
            )  # fmt: skip
            wait_for_each_other()
        tile_iteration += 1
        position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)
    wait_for_stores()


@gluon.jit
def work_tile_of(rings, iteration):
    """The work tile of an iteration, as it was scheduled."""
    rings.work_tiles.wait(iteration)
    LAYOUT: gl.constexpr = gl.BlockedLayout([16], [32], [gl.num_warps()], [0])
    return read_work_tile(rings.work_tiles.at(iteration).load(LAYOUT))


@gluon.jit
def attend(
    queries, keys, values, rules, at, tile_range, tile_iteration, kv_iteration, OVERLAP_SOFTMAX:
    gl.constexpr, MAX_OF: gl.constexpr, SKIP_MASKED_TILE: gl.constexpr,
):  # fmt: skip
    """Visit the tiles of keys of a tile range: row_max, row_sum and weighted_sum of 64 query rows.

    The product of weights and values runs under the softmax of the next tile, so it is always one
    tile late: what a step leaves behind is the weights of its own tile.
    """
    KV_TILE: gl.constexpr = keys.memory.shape[3]
    VALUE_WIDTH: gl.constexpr = values.memory.shape[4]
    SCORES: gl.constexpr = mma_layout(KV_TILE)
    SUMS: gl.constexpr = mma_layout(VALUE_WIDTH)
    query_tile = as_matrix(queries.at(tile_iteration))  # [ROWS, HEAD_WIDTH], in shared memory
    begin, partials = 0, num_partial(tile_range)
    if SKIP_MASKED_TILE:
        begin, partials = own_partial_tiles(rules, at, tile_range, KV_TILE)
        if begin > 0:
            keys.wait(kv_iteration)
            keys.release(kv_iteration)
            values.wait(kv_iteration)
            values.release(kv_iteration)
        kv_iteration += begin
    queries.wait(tile_iteration)
    keys.wait(kv_iteration)
    token = multiply_keys(query_tile, as_matrix(keys.at(kv_iteration)), SCORES)
    scores = warpgroup_mma_wait(0, deps=[token])  # [ROWS, KV_TILE]
    keys.release(kv_iteration)
    scores = change_and_hide(scores, rules, at, tile_range, begin, partials)
    lazy_max = no_lazy_max(scores, rules)  # [ROWS, 8]: numbers of each row by thread
    lazy_max, rescale = raise_lazy_max(scores, rules, lazy_max, MAX_OF == "exact")
    weights = weights_of(scores, rules, lazy_max)
    weighted_sum = gl.zeros([ROWS, VALUE_WIDTH], gl.float32, SUMS)
    state = (
        lazy_max,
        sum_by_thread(weights),  # [ROWS, 8]
        weighted_sum,
        as_operand(weights, query_tile.dtype, SUMS),
        rescale,  # 0, unknown to the compiler: else it moves the product with it elsewhere
    )
    for index in range(begin + 1, num_visits(tile_range)):
        state = fold_tile(
            query_tile, keys, values, rules, at, tile_range, index, partials, kv_iteration, state,
            OVERLAP_SOFTMAX, MAX_OF,
        )  # fmt: skip
        kv_iteration += 1
    queries.release(tile_iteration)
    lazy_max, row_sum, weighted_sum, weights, rescale = state
    values.wait(kv_iteration)
    weighted_sum = rescaled(weighted_sum, rescale)
    token = warpgroup_mma(weights, as_matrix(values.at(kv_iteration)), weighted_sum, is_async=True)
    # [ROWS] from here on
    row_max = gl.convert_layout(gl.max(lazy_max, 1), gl.SliceLayout(1, SCORES))
    if rules.score is None:
        row_max = gl.where(row_max == NOTHING, float("-inf"), row_max)
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, SCORES))
    if rules.score is not None:  # one as small as the first reference weighs 1
        row_max = gl.where(row_sum == 0.0, float("-inf"), row_max)
    weighted_sum, row_sum = warpgroup_mma_wait(0, deps=[token, row_sum])
    values.release(kv_iteration)
    return row_max, row_sum, weighted_sum


@gluon.jit
def fold_tile(
    query_tile, keys, values, rules, at, tile_range, index, partials, kv_iteration, state,
    OVERLAP_SOFTMAX: gl.constexpr, MAX_OF: gl.constexpr,
):  # fmt: skip
    """Weigh the tile of keys after kv_iteration, while the values of kv_iteration are summed
    up.

    If OVERLAP_SOFTMAX, the exponents are computed under that sum; else other consumers' are.
    MAX_OF, as in configs.KernelSchedule, says in which tiles pairs may be hidden and lazy maxima
    are raised before scores are weighed: "all", "exact" (in all, and by however little), "first"
    (so in none of these), or "unseen".
    """
    SCORES: gl.constexpr = mma_layout(keys.memory.shape[3])
    SUMS: gl.constexpr = mma_layout(values.memory.shape[4])
    lazy_max, row_sum, weighted_sum, weights, rescale = state
    keys.wait(kv_iteration + 1)
    scores_token = multiply_keys(query_tile, as_matrix(keys.at(kv_iteration + 1)), SCORES)
    values.wait(kv_iteration)
    weighted_sum = rescaled(weighted_sum, pinned(rescale))
    sum_token = warpgroup_mma(
        weights, as_matrix(values.at(kv_iteration)), weighted_sum, is_async=True
    )
    scores = warpgroup_mma_wait(1, deps=[scores_token])  # [ROWS, KV_TILE]
    if MAX_OF != "first":
        scores = change_and_hide(scores, rules, at, tile_range, index, partials)
    if not OVERLAP_SOFTMAX:
        weighted_sum, scores = warpgroup_mma_wait(0, deps=[sum_token, scores])
        values.release(kv_iteration)
    # A branch keeps the exponents above the wait for the sum: else ptxas has that first.
    if MAX_OF == "all" or MAX_OF == "exact":
        new_weights, sums, lazy_max, rescale = weigh_by_largest(
            scores, rules, lazy_max, MAX_OF == "exact"
        )
    elif MAX_OF == "first":
        new_weights, sums, lazy_max, rescale = weigh_by_reference(scores, rules, lazy_max)
    else:
        if index > tile_range.num_partial:
            new_weights, sums, lazy_max, rescale = weigh_by_reference(scores, rules, lazy_max)
        else:
            new_weights, sums, lazy_max, rescale = weigh_by_largest(scores, rules, lazy_max, False)
    row_sum = row_sum * rescale + sums
    if OVERLAP_SOFTMAX:
        if MAX_OF == "all" or MAX_OF == "exact":  # no branch, but this wait is a loop
            values.wait(kv_iteration + 1)
        weighted_sum, new_weights, row_sum, rescale = warpgroup_mma_wait(
            0, deps=[sum_token, new_weights, row_sum, rescale]
        )
        values.release(kv_iteration)
    keys.release(kv_iteration + 1)
    new_weights = as_operand(new_weights, query_tile.dtype, SUMS)
    return lazy_max, row_sum, weighted_sum, new_weights, rescale


@gluon.jit
def weigh_by_largest(scores, rules, lazy_max, EXACT: gl.constexpr):
    """Weights of a tile, their sums by thread, lazy maxima that were raised if its largest scores
    ask for it, and what shrinks everything before."""
    lazy_max, rescale = raise_lazy_max(scores, rules, lazy_max, EXACT)
    weights = weights_of(scores, rules, lazy_max)
    return weights, sum_by_thread(weights), lazy_max, rescale


@gluon.jit
def weigh_by_reference(scores, rules, lazy_max):
    """Weights of a tile, and the rest, where every row has seen a key: sums tell whether lazy
    maxima should have been raised."""
    weights = weights_of(scores, rules, lazy_max)
    sums = sum_by_thread(weights)
    rescale, raised = lazy_rescale(sums)
    return rescaled(weights, rescale), sums * rescale, lazy_max + raised, rescale


@gluon.jit
def multiply_keys(query_tile, key_tile, LAYOUT: gl.constexpr):
    """Start query · keyᵀ."""
    KV_TILE: gl.constexpr = key_tile.shape[0]
    nothing = gl.zeros([ROWS, KV_TILE], gl.float32, LAYOUT)
    return warpgroup_mma(
        query_tile, key_tile.permute((1, 0)), nothing, use_acc=False, is_async=True
    )


@gluon.constexpr_function
def maxima(max_of, scored):
    """MAX_OF of a call: scores that the caller changes are looked through in every tile."""
    return "all" if scored and max_of != "exact" else max_of


@gluon.constexpr_function
def mma_layout(width):
    """How the four warps of a consumer hold 64 rows of a result."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 16]
    )
