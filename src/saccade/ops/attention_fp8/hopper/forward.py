"""fp8 attention forward on Hopper: one warp loads tiles by TMA, groups of four warps compute.

It is laid out as the kernel of 16 bits (`ops/attention/hopper/forward.py`), with three changes:

- Values come in tiles that a kernel before has transposed, as WGMMA takes e4m3 operands only if
  the numbers that are added up lie side by side, and with keys in the order in which registers
  hold the weights of a tile.
- What a tile of keys gives is summed from zero in the tensor core, and added to a float32 sum in
  registers (two-level accumulation): Hopper's products keep 13 bits of their sums.
- Keys are visited from the last to the first, so that the first keys, which often have the largest
  weights by far, do not push others under the smallest e4m3 number.

Source: FlashAttention-3 (Shah et al. 2024), section 3.3.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.hopper.pipeline import (
    flag_at,
    follow,
    here,
    wait_for_each_other,
    wait_for_stores,
    wait_for_sums,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.hopper.tile_scheduler import num_partial, num_visits, own_partial_tiles
from saccade.gpu.language import gl, gluon
from saccade.gpu.online_softmax import LOG2_E
from saccade.ops.attention.hopper.forward import (
    consumer_rows,
    load_queries,
    schedule_work,
    work_tile_of,
)
from saccade.ops.attention.hopper.nonfinite import note_nonfinite
from saccade.ops.attention.hopper.smem import make_rings
from saccade.ops.attention.hopper.softmax import (
    NOTHING,
    ROWS,
    as_matrix,
    finish,
    hide,
    spread,
    sum_by_thread,
)
from saccade.ops.attention_fp8.hopper.nonfinite import attend_nan_safe
from saccade.ops.attention_fp8.hopper.softmax import (
    as_operand,
    change,
    exponent_factor,
    raise_by_largest,
    shift_of,
    weigh_by_largest,
    weigh_by_reference,
)
from saccade.ops.attention_fp8.hopper.value_units import change_of_unit, in_numbers, load_unit
from saccade.ops.attention_fp8.triton.numbers import BLOCK, load_scale


class Fp8ForwardMeta(NamedTuple):
    """How the kernel runs, known when it is compiled; see `configs.Fp8Schedule`."""

    CONSUMERS: int
    STAGES: int
    QUERY_STAGES: int
    CONSUMER_REGISTERS: int
    PRODUCER_REGISTERS: int
    MAX_OF: str
    SKIP_MASKED_TILE: bool


class WaitingTile(NamedTuple):
    """A tile of keys whose products are there, and whose values are to be added."""

    scores: Any  # [ROWS, KV_TILE]; but for their factor, unless the caller changes scores
    factor: Any  # of the scores
    unit: Any  # in which sums are counted with this tile's values
    change_of_unit: Any  # what sums without them are multiplied by


class Sums(NamedTuple):
    """The running softmax of 64 query rows, without the tile that waits."""

    reference: Any  # [ROWS, 8], by thread: what is subtracted from scores (see `softmax.py`)
    row_sum: Any  # [ROWS, 8]
    weighted_sums: Any  # a tuple: [ROWS, part_of(VALUE_WIDTH)] for each part of the channels
    waiting: Any  # a WaitingTile


@gluon.jit(do_not_specialize=["rules"])
def attention_fp8_forward(
    query_desc, key_desc, value_desc, output_desc, query, key, values, output, logsumexp, scales,
    rules, sinks, schedule, HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr,
    VALUE_DIM: gl.constexpr, META: gl.constexpr,
):  # fmt: skip
    """One program: tiles of CONSUMERS · 64 rows of one head, one after the other.

    values: a View whose rows are tiles [VALUE_DIM, BLOCK], one for each block of keys. scales: see
    `triton/forward.py`.
    """
    rings = make_rings(
        query_desc, key_desc, value_desc, output_desc,
        META.CONSUMERS, META.STAGES, META.QUERY_STAGES,
    )  # fmt: skip
    follow()
    # A tuple that holds functions cannot be given a name, so arguments are written out each time.
    if META.CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume, (
                    output_desc, query, key, values, output, logsumexp, scales, rules, sinks,
                    schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM,
                    META.MAX_OF, META.SKIP_MASKED_TILE, 0,
                )),
                (consume, (
                    output_desc, query, key, values, output, logsumexp, scales, rules, sinks,
                    schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM,
                    META.MAX_OF, META.SKIP_MASKED_TILE, 1,
                )),
                (produce, (
                    query_desc, key_desc, value_desc, query, key, values, rules, schedule, rings,
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
                    output_desc, query, key, values, output, logsumexp, scales, rules, sinks,
                    schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM,
                    META.MAX_OF, META.SKIP_MASKED_TILE, 0,
                )),
                (consume, (
                    output_desc, query, key, values, output, logsumexp, scales, rules, sinks,
                    schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM,
                    META.MAX_OF, META.SKIP_MASKED_TILE, 1,
                )),
                (consume, (
                    output_desc, query, key, values, output, logsumexp, scales, rules, sinks,
                    schedule, rings, HEADS_PER_KV_HEAD, HEAD_DIM, VALUE_DIM,
                    META.MAX_OF, META.SKIP_MASKED_TILE, 2,
                )),
                (produce, (
                    query_desc, key_desc, value_desc, query, key, values, rules, schedule, rings,
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
def tile_backwards(rules, tile_range, index):
    """The tile of keys that is visited as number `index`: partial tiles come first, from the last
    one on, then full ones from the last one on.

    A tile range of no tiles is taken as one of a single partial tile, all of whose pairs are
    hidden.
    """
    partials, fulls = tile_range.num_partial, tile_range.num_full
    # Lists have no other places than these.
    place = gl.maximum(gl.minimum(partials - 1 - index, partials - 1), 0)
    partial = rules.mask.tile(rules.mask, tile_range, place, False)
    place = gl.maximum(gl.minimum(partials + fulls - 1 - index, fulls - 1), 0)
    full = rules.mask.tile(rules.mask, tile_range, place, True)
    tile = gl.where(index < partials, partial, full).to(gl.int32)
    return gl.where(partials + fulls == 0, 0, tile)


@gluon.jit
def produce(
    query_desc, key_desc, value_desc, query, key, values, rules, schedule, rings,
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
        first_block = schedule.first_block(batch, values.data)
        visits = num_visits(tile_range)
        for index in range(0, visits):
            kv_start = tile_backwards(rules, tile_range, index) * KV_TILE
            rings.keys.acquire(kv_iteration)
            rings.keys.load(kv_iteration, key_desc, [kv_batch, kv_head, kv_row + kv_start, 0])
            if index == 0:
                first = query_batch, query_head, query_row + query_start
                load_queries(query_desc, rings, first, tile_iteration, SKIP_MASKED_TILE)
            rings.values.acquire(kv_iteration)
            block = kv_head * schedule.blocks + first_block + kv_start // BLOCK
            rings.values.load(kv_iteration, value_desc, [kv_batch, block, 0, kv_start % BLOCK])
            if index == gl.maximum(visits - 2, 0):
                # Now is the time to schedule the next tile.
                rings.work_tiles.release(tile_iteration)
            kv_iteration += 1
        tile_iteration += 1
        position, query_len, _, tile_range = work_tile_of(rings, tile_iteration)


@gluon.jit
def consume(
    output_desc, query, key, values, output, logsumexp, scales, rules, sinks, schedule, rings,
    HEADS_PER_KV_HEAD: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    MAX_OF: gl.constexpr, SKIP_MASKED_TILE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 rows of each tile of query rows that is scheduled; MAX_OF and SKIP_MASKED_TILE: as
    in `configs.Fp8Schedule`."""
    tile_iteration, kv_iteration = 0, 0
    position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)
    while query_len > 0:
        rings.work_tiles.release(tile_iteration)
        batch, query_head, query_start = position
        rows = consumer_rows(WHICH, tile_iteration, len(rings.queries), SKIP_MASKED_TILE)
        first_row = query_start + rows * ROWS
        at = (batch, query_head, first_row, query_len, kv_len)
        kv_head = query_head // HEADS_PER_KV_HEAD
        # Rows past the end have no scale.
        factor = rules.scale * load_scale(
            scales.query, batch, query_head, gl.minimum(first_row, query_len - 1)
        )
        state = attend(
            rings.queries[WHICH], rings.keys, rings.values, scales, rules, at, kv_head, factor,
            tile_range, tile_iteration, kv_iteration, maxima(MAX_OF, rules.score is not None),
            SKIP_MASKED_TILE,
        )  # fmt: skip
        kv_iteration += num_visits(tile_range)
        # Behind the counter; computed anew, as there are no registers to keep it.
        nonfinite = schedule.nonfinite + (1 + here(gl.program_id(0)) * 4 + WHICH)
        note_nonfinite(nonfinite, state[2])
        wait_for_each_other()
        any_nonfinite = flag_at(nonfinite)  # it comes while the tile is finished
        finish(
            state, output_desc, output, logsumexp, None, None, sinks, schedule, at,
            rings.outputs[WHICH], VALUE_DIM,
        )  # fmt: skip
        if any_nonfinite != 0:
            # NaN or inf, perhaps from a hidden value row (0 · NaN is NaN), perhaps as scores left
            # their reference far behind: all once more.
            wait_for_sums()
            wait_for_each_other()
            gl.store(nonfinite, 0)
            attend_nan_safe(
                query, key, values, output, logsumexp, scales, rules, sinks, at, kv_head, factor,
                tile_range, rings.keys.memory.shape[3], HEAD_DIM, VALUE_DIM,
            )  # fmt: skip
            wait_for_each_other()
        tile_iteration += 1
        position, query_len, kv_len, tile_range = work_tile_of(rings, tile_iteration)
    wait_for_stores()


@gluon.constexpr_function
def maxima(max_of, scored):
    """MAX_OF of a call: scores that the caller changes are looked through in every tile."""
    return "all" if scored else max_of


@gluon.constexpr_function
def mma_layout(width):
    """How the four warps of a consumer hold 64 rows of a result."""
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, 32]
    )


@gluon.jit
def attend(
    queries, keys, values, scales, rules, at, kv_head, factor, tile_range, tile_iteration,
    kv_iteration, MAX_OF: gl.constexpr, SKIP_MASKED_TILE: gl.constexpr,
):  # fmt: skip
    """Visit the tiles of keys of a tile range: row_max, row_sum and weighted_sum of 64 query rows.

    What a step leaves behind is the scores of the next tile, not weights: these are made an operand
    and multiplied within one step, as a loop would take the operand's bytes apart to hand them on.
    """
    KV_TILE: gl.constexpr = keys.memory.shape[3]
    VALUE_WIDTH: gl.constexpr = values.memory.shape[3]
    PART: gl.constexpr = part_of(VALUE_WIDTH)
    SCORES: gl.constexpr = mma_layout(KV_TILE)
    batch = at[0]
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
    kv_start = tile_backwards(rules, tile_range, begin) * KV_TILE
    key_factor = factor * load_scale(scales.key, batch, kv_head, kv_start)
    unit = load_unit(scales.value, batch, kv_head, kv_start)
    token = multiply_keys(query_tile, as_matrix(keys.at(kv_iteration)), SCORES)
    scores = warpgroup_mma_wait(0, deps=[token])  # [ROWS, KV_TILE]
    keys.release(kv_iteration)
    scores = change_and_hide(scores, key_factor, scales, rules, at, kv_start, begin, partials)
    of_thread = sum_by_thread(scores)  # for its layout
    THREADS: gl.constexpr = of_thread.type.layout
    reference = gl.full([ROWS, 8], NOTHING, gl.float32, THREADS)
    if MAX_OF == "first":
        reference, _ = raise_by_largest(scores, exponent_factor(key_factor, rules), reference)
    no_change = change_of_unit(scales.value, unit, unit)  # 1, or NaN
    sums = Sums(
        reference,
        gl.zeros([ROWS, 8], gl.float32, THREADS),
        nothing_summed(VALUE_WIDTH),
        WaitingTile(scores, key_factor, unit, no_change),
    )
    for index in range(begin + 1, num_visits(tile_range)):
        sums = fold_tile(
            query_tile, keys, values, scales, rules, at, kv_head, factor, tile_range, index,
            partials, kv_iteration, sums, MAX_OF,
        )  # fmt: skip
        kv_iteration += 1
    queries.release(tile_iteration)
    # The last tile, after which there are no more scores.
    waiting = sums.waiting
    weights, reference, row_sum, rescale = weigh(
        sums, rules, tile_range, num_visits(tile_range) - 1, MAX_OF
    )
    operand = as_operand(weights, mma_layout(PART))
    values.wait(kv_iteration)
    rescale *= waiting.change_of_unit
    value_tile = as_matrix(values.at(kv_iteration))
    weighted_sums = add_values(sums.weighted_sums, operand, value_tile, rescale)
    values.release(kv_iteration)
    weighted_sum = joined(weighted_sums)
    # [ROWS] from here on
    row_max = gl.convert_layout(gl.max(reference, 1), gl.SliceLayout(1, SCORES))
    row_max = gl.where(row_max == NOTHING, float("-inf"), row_max)
    if scales.shift is not None and rules.score is None:
        shift = shift_of(scales, rules, at, gl.zeros([ROWS, KV_TILE], gl.float32, SCORES))
        row_max += gl.sum(shift, 1) * LOG2_E
    row_sum = gl.convert_layout(gl.sum(row_sum, 1), gl.SliceLayout(1, SCORES))
    weighted_sum = in_numbers(weighted_sum, waiting.unit, scales.value, batch, kv_head)
    return row_max, row_sum, weighted_sum


@gluon.jit
def fold_tile(
    query_tile, keys, values, scales, rules, at, kv_head, factor, tile_range, index, partials,
    kv_iteration, sums, MAX_OF: gl.constexpr,
):  # fmt: skip
    """Weigh the scores of the tile that waits, add up its values, and multiply the tile of keys of
    number `index`, which waits next.

    While one consumer computes exponents, the products of the other one run.
    """
    SCORES: gl.constexpr = mma_layout(keys.memory.shape[3])
    PART: gl.constexpr = part_of(values.memory.shape[3])
    batch, waiting = at[0], sums.waiting
    weights, reference, row_sum, rescale = weigh(sums, rules, tile_range, index - 1, MAX_OF)
    kv_start = tile_backwards(rules, tile_range, index) * keys.memory.shape[3]
    key_factor = factor * load_scale(scales.key, batch, kv_head, kv_start)
    unit = load_unit(scales.value, batch, kv_head, kv_start)
    new_change = change_of_unit(scales.value, waiting.unit, unit)
    rescale *= waiting.change_of_unit  # of the weighted sums alone
    operand = as_operand(weights, mma_layout(PART))
    values.wait(kv_iteration)
    value_tile = as_matrix(values.at(kv_iteration))
    if values.memory.shape[3] == PART:
        keys.wait(kv_iteration + 1)
        sum_token = multiply_values(operand, value_tile, mma_layout(PART))
        scores_token = multiply_keys(query_tile, as_matrix(keys.at(kv_iteration + 1)), SCORES)
        product = warpgroup_mma_wait(1, deps=[sum_token])
        only = add_product(sums.weighted_sums[0], product, rescale)
        scores, only = warpgroup_mma_wait(0, deps=[scores_token, only])
        weighted_sums = (only,)
        values.release(kv_iteration)
    else:  # no registers are left for scores beside the product of a part
        weighted_sums = add_values(sums.weighted_sums, operand, value_tile, rescale)
        values.release(kv_iteration)
        keys.wait(kv_iteration + 1)
        scores_token = multiply_keys(query_tile, as_matrix(keys.at(kv_iteration + 1)), SCORES)
        scores = warpgroup_mma_wait(0, deps=[scores_token])
    keys.release(kv_iteration + 1)
    if MAX_OF != "first":
        scores = change_and_hide(scores, key_factor, scales, rules, at, kv_start, index, partials)
    waiting = WaitingTile(scores, key_factor, unit, new_change)
    return Sums(reference, row_sum, weighted_sums, waiting)


@gluon.jit
def weigh(sums, rules, tile_range, index, MAX_OF: gl.constexpr):
    """The weights of the tile that waits, number `index`; references and sums of weights with them;
    and what shrinks everything before.

    MAX_OF says in which tiles references are raised before: "all", "first" (so in none of these),
    or "unseen".
    """
    reference, scores = sums.reference, sums.waiting.scores
    factor = exponent_factor(sums.waiting.factor, rules)
    if MAX_OF == "all":
        weights, added, reference, rescale = weigh_by_largest(scores, factor, reference)
    elif MAX_OF == "first":
        weights, added, reference, rescale = weigh_by_reference(scores, factor, reference)
    else:
        if index > tile_range.num_partial:
            weights, added, reference, rescale = weigh_by_reference(scores, factor, reference)
        else:
            weights, added, reference, rescale = weigh_by_largest(scores, factor, reference)
    return weights, reference, sums.row_sum * rescale + added, rescale


@gluon.jit
def change_and_hide(scores, factor, scales, rules, at, kv_start, index, partials):
    """The scores of tile number `index`, of which so many may hold hidden pairs."""
    if rules.score is not None:
        scores = change(scores, factor, scales, rules, at, kv_start)
    if index < partials:  # all others run without mask arithmetic
        scores = hide(scores, rules, at, kv_start)
    return scores


@gluon.constexpr_function
def part_of(value_width):
    """Channels of values that are summed at once: registers hold two sums of so many."""
    return min(value_width, 128)


@gluon.jit
def nothing_summed(VALUE_WIDTH: gl.constexpr):
    """Weighted sums before any key: one for each part of the channels."""
    PART: gl.constexpr = part_of(VALUE_WIDTH)
    LAYOUT: gl.constexpr = mma_layout(PART)
    weighted_sums = ()
    for _ in gl.static_range(VALUE_WIDTH // PART):
        weighted_sums = weighted_sums + (gl.zeros([ROWS, PART], gl.float32, LAYOUT),)  # noqa: RUF005
    return weighted_sums


@gluon.jit
def joined(weighted_sums):
    """The weighted sums of all channels."""
    whole = weighted_sums[0]
    if len(weighted_sums) == 2:
        WIDTH: gl.constexpr = 2 * whole.shape[1]
        both = gl.permute(gl.join(whole, weighted_sums[1]), (0, 2, 1))
        whole = gl.convert_layout(gl.reshape(both, [ROWS, WIDTH]), mma_layout(WIDTH))
    return whole


@gluon.jit
def add_values(weighted_sums, operand, value_tile, rescale):
    """Multiply weights by the values of a tile, [VALUE_WIDTH, KV_TILE], and add that up, one part
    after the other."""
    PART: gl.constexpr = weighted_sums[0].shape[1]
    LAYOUT: gl.constexpr = mma_layout(PART)
    found = ()
    for part in gl.static_range(len(weighted_sums)):
        values = value_tile.slice(part * PART, PART, dim=0)
        token = multiply_values(operand, values, LAYOUT)
        product = warpgroup_mma_wait(0, deps=[token])
        found = found + (add_product(weighted_sums[part], product, rescale),)  # noqa: RUF005
    return found


@gluon.jit
def add_product(weighted_sum, product, rescale):
    """The float32 sum of all tiles before, shrunk, and the product of one tile."""
    return weighted_sum * spread(rescale, weighted_sum) + product


@gluon.jit
def multiply_keys(query_tile, key_tile, LAYOUT: gl.constexpr):
    """Start query · keyᵀ."""
    KV_TILE: gl.constexpr = key_tile.shape[0]
    nothing = gl.zeros([ROWS, KV_TILE], gl.float32, LAYOUT)
    return warpgroup_mma(
        query_tile, key_tile.permute((1, 0)), nothing, use_acc=False, is_async=True
    )


@gluon.jit
def multiply_values(weights, value_tile, LAYOUT: gl.constexpr):
    """Start weights · values, from zero; value_tile: [VALUE_WIDTH, KV_TILE]."""
    VALUE_WIDTH: gl.constexpr = value_tile.shape[0]
    nothing = gl.zeros([ROWS, VALUE_WIDTH], gl.float32, LAYOUT)
    return warpgroup_mma(weights, value_tile.permute((1, 0)), nothing, use_acc=False, is_async=True)
