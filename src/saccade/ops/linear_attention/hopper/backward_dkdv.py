"""Linear attention backward on Hopper: gradients of keys and values, in one sweep backwards.

Both read one state, R = Σ φ̂(query) gradᵀ over the rows behind a chunk. For a chunk of 64 rows, K
and Q its features, V its values, G the gradients of its output, and w = Σ −δ φ̂(query):

    grad_value = K R + hidden(K Qᵀ) G
    grad_key   = φ'(key) (V Rᵀ + w + hidden(V Gᵀ − δ) Q)        R += Qᵀ G, w += Σ −δ Q

Each consumer sums up 64 channels of values of R, and has both gradients of one head of up to 64
channels; or, of a head of up to 128, the first has grad_key and the second grad_value. Then both
read all of R, so each says when it has written its part and when it has read the other's. Others
map queries and keys, and load all rows (backward_rows.py).

Of elu + 1, Q and R have elu alone: what the ones of queries add is in features.py.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.features import elu_plus_one_less
from saccade.gpu.hopper.pipeline import (
    as_operand,
    here,
    store,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.language import gl, gluon
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.backward_rows import (
    base_of,
    clear_hidden,
    factors_at,
    keys_seen,
    make_sweep_rings,
    mapped_wide,
    numbers_at,
    position_of,
    produce,
    queries_seeing,
    sum_at,
    what_to_take,
    within,
)
from saccade.ops.linear_attention.hopper.features import (
    COLUMNS,
    add_to_line,
    at_most_one,
    in_channels,
    keep_line,
    mapped,
    narrowed,
    no_rows,
    no_sums,
    only,
    put_ones,
    start_line,
    start_sizes,
    sum_in_threads,
    sum_over_threads,
    summed,
    widened,
    with_line,
    without_line,
)
from saccade.ops.linear_attention.hopper.forward import narrow_sums, row_of_output, settled
from saccade.ops.linear_attention.hopper.program import (
    ACROSS,
    BLOCK,
    FACTOR,
    GRADS,
    KEYS,
    LINE,
    MINUS_DELTA,
    ONES,
    QUERIES,
    SUM,
    VALUES,
    channel_of,
    chunks_of,
    head_of,
    keep_nonfinite,
    keep_sums,
    keys_there,
    start_sums,
    state_number,
)


class KeyGradientMeta(NamedTuple):
    """What is known of the call, and how the kernel runs, when it is compiled."""

    HEADS_PER_QUERY: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCKS: int
    SEGMENTS: int
    BOTTOM_RIGHT: bool
    STARTED: bool
    FEATURE_MAP: str
    SCALE: Any
    STAGES: int
    CONSUMER_REGISTERS: int
    MAPPER_REGISTERS: int


@gluon.jit
def linear_backward_keys(
    query_desc, grad_desc, key_desc, value_desc, grad_key_desc, grad_value_desc, per_row, kept,
    before, after, sizes, META: gl.constexpr,
):  # fmt: skip
    """One program: all rows of a head, or of two, or one segment of them.

    per_row: RowNumbers. before, after: states (Sums) that the segment starts from, at its end, and
    ends with, at its beginning, or None. Output heads share queries at most (HEADS_PER_QUERY).
    """
    rings = make_sweep_rings(
        query_desc, 4, META.BLOCKS, META.STAGES, 2, META.FEATURE_MAP == "elu+1"
    )
    gl.warp_specialize(
        [
            (consume, (
                grad_key_desc, grad_value_desc, kept, before, after, sizes, rings, META.HEAD_DIM,
                META.VALUE_DIM, META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, META.FEATURE_MAP, 0,
            )),
            (consume, (
                grad_key_desc, grad_value_desc, kept, before, after, sizes, rings, META.HEAD_DIM,
                META.VALUE_DIM, META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, META.FEATURE_MAP, 1,
            )),
            (map_queries, (
                per_row, kept, before, after, sizes, rings, META.HEAD_DIM, META.VALUE_DIM,
                META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, META.STARTED, META.FEATURE_MAP,
                META.SCALE, True, 0,
            )),
            (map_queries, (
                per_row, kept, before, after, sizes, rings, META.HEAD_DIM, META.VALUE_DIM,
                META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, META.STARTED, META.FEATURE_MAP,
                META.SCALE, True, 1,
            )),
            (produce, (
                query_desc, grad_desc, key_desc, value_desc, None, sizes, rings,
                META.HEADS_PER_QUERY, 1, 1, META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, True,
            )),
        ],
        [4, 4, 4, 1],
        [META.CONSUMER_REGISTERS, META.MAPPER_REGISTERS, META.MAPPER_REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def consume(
    grad_key_desc, grad_value_desc, kept, before, after, sizes, rings,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr,
    SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, FEATURE_MAP: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Compute two tiles of gradients, chunk by chunk: grad_key and grad_value of a head, or both
    halves of one of them."""
    # What the tiles are of.
    ONE: gl.constexpr = is_of_values(BLOCKS, WHICH, 0)
    TWO: gl.constexpr = is_of_values(BLOCKS, WHICH, 1)
    LESS_ONE: gl.constexpr = FEATURE_MAP == "elu+1"
    batch, head = head_of(sizes, WHICH, BLOCKS, 1, SEGMENTS)
    first, chunks, _ = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, True)
    number = state_number(sizes, batch, head, 1, SEGMENTS)
    channel = channel_of(WHICH, BLOCKS, 1, SEGMENTS)
    there = batch < sizes.batches
    keys = keys_seen(keys_there(kept, sizes, batch))
    sums = start_sums(before, number, there, channel, HEAD_DIM, VALUE_DIM, BLOCKS)
    if LESS_ONE:
        put_ones(rings, HEAD_DIM, BLOCKS, WHICH)
        if before is not None:
            sums = without_line(sums, HEAD_DIM)
    narrow_sums(sums, rings, WHICH, 0 * chunks)
    if BLOCKS == 2:
        rings.say_written(0 * chunks)
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, True)
        rings.wait_for_mapped(iteration)
        sums, one, two = fold_chunk(sums, rings, iteration, LESS_ONE, WHICH)
        if BLOCKS == 2:
            rings.say_read(iteration)
        at = row_of_output(sizes, batch, head, position, 0)
        one = finished(one, rings, iteration, position, keys, ONE, 0, FEATURE_MAP, BLOCKS, WHICH)
        two = finished(two, rings, iteration, position, keys, TWO, 1, FEATURE_MAP, BLOCKS, WHICH)
        rings.tiles.release_loaded(iteration)
        wait_for_stores()
        store_tile(grad_key_desc, grad_value_desc, rings, at, one, ONE, 0, BLOCKS, WHICH)
        store_tile(grad_key_desc, grad_value_desc, rings, at, two, TWO, 1, BLOCKS, WHICH)
        if BLOCKS == 2:
            rings.wait_for_read(iteration)
        narrow_sums(sums, rings, WHICH, here(iteration - iteration))
        if BLOCKS == 2:
            rings.say_written(iteration + 1)
    keep_nonfinite(kept.nonfinite, sums, sizes, batch, head, there, BLOCKS, 1, SEGMENTS, WHICH)
    if after is not None:
        if LESS_ONE:
            sums = with_line(sums, rings, chunks, WHICH)
        keep_sums(after, sums, number, there, channel, HEAD_DIM, VALUE_DIM)
    wait_for_stores()


@gluon.constexpr_function
def is_of_values(blocks, which, tile):
    """Whether a consumer's tile is one of gradients of values, and not of keys."""
    return (tile if blocks == 1 else which) == 1


@gluon.jit
def fold_chunk(sums, rings, iteration, LESS_ONE: gl.constexpr, WHICH: gl.constexpr):
    """The sums with a chunk added, and both tiles of gradients, each with numbers of its rows.

    Scores become weights before gradients are begun: registers hold no more at once."""
    BLOCKS: gl.constexpr = len(sums)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH  # the first block of this head's rows
    ONE: gl.constexpr = is_of_values(BLOCKS, WHICH, 0)
    TWO: gl.constexpr = is_of_values(BLOCKS, WHICH, 1)
    THIN: gl.constexpr = 1 if LESS_ONE else 0  # products of eight columns
    origin = here(iteration - iteration)
    scores, others = start_scores(rings, iteration, ONE, BLOCKS, LEFT), 0.0
    if BLOCKS == 1:  # else both tiles have the same scores
        others = start_scores(rings, iteration, TWO, BLOCKS, LEFT)
    size = no_sums()
    if LESS_ONE and TWO:
        size = start_sizes(rings, iteration, BLOCKS, LEFT, WHICH)
    grads, added = rings.tile_of(iteration, GRADS, WHICH), ()
    for block in gl.static_range(BLOCKS):
        queries = rings.tile_of(iteration, QUERIES, LEFT + block)
        token = warpgroup_mma(queries.permute((1, 0)), grads, sums[block], is_async=True)
        added = added + (token,)  # noqa: RUF005
    if BLOCKS == 1:
        scores = warpgroup_mma_wait(2 + THIN, deps=[scores])
        weights, of_one = weights_of(scores, size, rings, iteration, ONE, LESS_ONE, BLOCKS, WHICH)
        others, size = warpgroup_mma_wait(1, deps=[others, size])
        others, of_two = weights_of(others, size, rings, iteration, TWO, LESS_ONE, BLOCKS, WHICH)
    else:
        scores, size = warpgroup_mma_wait(2, deps=[scores, size])
        weights, of_one = weights_of(scores, size, rings, iteration, ONE, LESS_ONE, BLOCKS, WHICH)
        others, of_two = weights, of_one
        rings.wait_for_written(iteration)
    one = start_tile(rings, iteration, weights, origin, ONE, 0, BLOCKS, LEFT)
    two = start_tile(rings, iteration, others, origin, TWO, 1, BLOCKS, LEFT)
    sums = settled(added, 2 * (BLOCKS + 1))
    one, two = warpgroup_mma_wait(0, deps=[one, two])
    return sums, (one, of_one), (two, of_two)


@gluon.jit
def start_scores(
    rings, iteration, OF_VALUES: gl.constexpr, BLOCKS: gl.constexpr, LEFT: gl.constexpr
):
    """Start the scores that weigh gradients of the output, for those of values; or queries."""
    ROWS_OF: gl.constexpr = KEYS if OF_VALUES else VALUES
    OTHERS_OF: gl.constexpr = QUERIES if OF_VALUES else GRADS
    scores = gl.zeros([ROWS, ROWS], gl.float32, mma_layout(BLOCK))
    for block in gl.static_range(BLOCKS):
        rows = rings.tile_of(iteration, ROWS_OF, LEFT + block)
        others = rings.tile_of(iteration, OTHERS_OF, LEFT + block)
        scores = warpgroup_mma(
            rows, others.permute((1, 0)), scores, use_acc=block > 0, is_async=True
        )
    return scores


@gluon.jit
def weights_of(
    scores, size, rings, iteration, OF_VALUES: gl.constexpr, LESS_ONE: gl.constexpr,
    BLOCKS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Scores as weights; a key is seen by the queries of its own position and later ones. With them
    the number of each row that ones add something by: see features.py."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH
    number = 0.0
    if LESS_ONE:
        factors = rings.numbers_of(iteration, WHICH, ONES).load(gl.SliceLayout(0, LAYOUT))
    if not OF_VALUES:
        beta = rings.numbers_of(iteration, WHICH, MINUS_DELTA).load(gl.SliceLayout(0, LAYOUT))
        scores = scores + beta[None, :]
    elif LESS_ONE:
        number = summed(size)
        scores = scores + number[:, None] * factors[None, :]
    row = gl.arange(0, ROWS, gl.SliceLayout(1, LAYOUT))[:, None]
    column = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))[None, :]
    scores = gl.where(row <= column, scores, 0.0)
    if LESS_ONE and not OF_VALUES:
        number = gl.sum(scores * factors[None, :], 1)
        for block in gl.static_range(BLOCKS):
            across = rings.numbers_of(iteration, LEFT + block, ACROSS)
            number += across.load(gl.SliceLayout(1, LAYOUT))
    return as_operand(narrowed(scores), gl.bfloat16, LAYOUT), number


@gluon.jit
def start_tile(
    rings, iteration, weights, origin, OF_VALUES: gl.constexpr, TILE: gl.constexpr,
    BLOCKS: gl.constexpr, LEFT: gl.constexpr,
):  # fmt: skip
    """Start a tile of gradients: what its rows find in the state, and in their own chunk."""
    ROWS_OF: gl.constexpr = KEYS if OF_VALUES else VALUES
    WEIGHED: gl.constexpr = GRADS if OF_VALUES else QUERIES
    TILE_BLOCK: gl.constexpr = TILE if BLOCKS == 2 else 0
    found = gl.zeros([ROWS, BLOCK], gl.float32, mma_layout(BLOCK))
    for block in gl.static_range(BLOCKS):
        rows = rings.tile_of(iteration, ROWS_OF, LEFT + block)
        if OF_VALUES:
            state = rings.narrowed.index(origin + (BLOCKS * (LEFT + TILE_BLOCK) + block))
        else:
            state = rings.narrowed.index(origin + (BLOCKS * (LEFT + block) + TILE_BLOCK))
            state = state.permute((1, 0))
        found = warpgroup_mma(rows, state, found, use_acc=block > 0, is_async=True)
    weighed = rings.tile_of(iteration, WEIGHED, LEFT + TILE_BLOCK)
    return warpgroup_mma(weights, weighed, found, is_async=True)


@gluon.jit
def finished(
    tile, rings, iteration, position, keys, OF_VALUES: gl.constexpr, TILE: gl.constexpr,
    FEATURE_MAP: gl.constexpr, BLOCKS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """A tile of gradients as it is stored: those of keys through the feature map; 0 if hidden.

    tile: with the number of each row that ones add something by.
    """
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    found, number = tile
    if not OF_VALUES:
        SOURCE: gl.constexpr = TILE if BLOCKS == 2 else WHICH  # block, and the mapper of it
        vector = rings.numbers_of(iteration, SOURCE, SUM).load(gl.SliceLayout(0, LAYOUT))
        found = found + vector[None, :]
        if FEATURE_MAP == "elu+1":
            found = found + number[:, None]
        if FEATURE_MAP != "identity":
            features = rings.tile_of(iteration, KEYS, SOURCE).load(LAYOUT)
            found = found * derivative_at(features, FEATURE_MAP)
    elif FEATURE_MAP == "elu+1":
        OWNER: gl.constexpr = TILE if BLOCKS == 2 else WHICH
        line = rings.numbers_of(iteration, OWNER, LINE).load(gl.SliceLayout(0, LAYOUT))
        found = found + number[:, None] * line[None, :]
    seen = within(keys, position, gl.SliceLayout(1, LAYOUT))
    return only(found.to(gl.bfloat16), seen)


@gluon.jit
def derivative_at(features, FEATURE_MAP: gl.constexpr):
    """The derivative of a feature map, from its result; see `saccade.gpu.features`."""
    if FEATURE_MAP == "elu+1":
        slope = at_most_one(features)
    elif FEATURE_MAP == "relu":
        slope = gl.where(features.to(gl.float32) > 0, 1.0, 0.0)
    else:
        slope = features.to(gl.float32)
    return slope


@gluon.jit
def store_tile(
    grad_key_desc, grad_value_desc, rings, at, done, OF_VALUES: gl.constexpr, TILE: gl.constexpr,
    BLOCKS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Start to write a tile of gradients."""
    memory = rings.outputs.index(at[2] * 0 + (2 * WHICH + TILE))
    memory.store(done)
    CHANNEL: gl.constexpr = TILE * BLOCK if BLOCKS == 2 else 0
    coordinates = [at[0], at[1], at[2], CHANNEL]
    if OF_VALUES:
        store(grad_value_desc, coordinates, memory.reshape(grad_value_desc.block_type.shape))
    else:
        store(grad_key_desc, coordinates, memory.reshape(grad_key_desc.block_type.shape))


# ---- mapping -----------------------------------------------------------------------------------


@gluon.jit
def map_queries(
    per_row, kept, before, after, sizes, rings,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, STARTED: gl.constexpr, FEATURE_MAP: gl.constexpr,
    SCALE: gl.constexpr, KEYS_TOO: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Put features, each row's times its factor, in place of a block of queries, going backwards;
    features of keys in place of them if KEYS_TOO. Then those of queries are less 1 where that is
    better, and numbers say what the ones add: see features.py."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    # Numbers come in few registers, and go to their rows through shared memory.
    EACH_ONCE: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    LESS_ONE: gl.constexpr = KEYS_TOO and FEATURE_MAP == "elu+1"
    batch, head = head_of(sizes, WHICH, BLOCKS, 1, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, True)
    exists = batch < sizes.batches
    num_keys = keys_there(kept, sizes, batch)
    queries = queries_seeing(sizes, shift, num_keys, exists, STARTED)
    at, inside = sum_at(sizes, batch, head, exists, HEAD_DIM, 1, BLOCKS, SEGMENTS, WHICH, COLUMNS)
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, COLUMNS))
    if before is not None:
        total = gl.load(before.vector + at, mask=inside, other=0.0)
    parts = no_rows(LAYOUT)
    base = base_of(sizes, batch, head, shift)
    position = position_of(first, chunks, 0, True)
    if LESS_ONE:
        number = state_number(sizes, batch, head, 1, SEGMENTS)
        line = start_line(before, number, exists, HEAD_DIM, VALUE_DIM, BLOCKS, WHICH)
        taken = what_to_take(
            rings, queries, position, 0 * chunks, QUERIES, HEAD_DIM, BLOCKS, WHICH, LAYOUT
        )
    factor = factors_at(per_row, base, queries, position, SCALE, EACH_ONCE)
    minus_delta = numbers_at(per_row.minus_delta, base, queries, position, EACH_ONCE)
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, True)
        rings.tiles.wait(iteration)
        clear_hidden(rings, iteration, position, queries, GRADS, WHICH, LAYOUT)
        if LESS_ONE:
            clear_hidden(rings, iteration, position, queries, QUERIES, WHICH, LAYOUT)
        rings.numbers_of(iteration, WHICH, FACTOR).store(factor)
        if LESS_ONE:
            rings.numbers_of(iteration, WHICH, ONES).store(factor * taken)
        rings.numbers_of(iteration, WHICH, MINUS_DELTA).store(minus_delta)
        if KEYS_TOO:
            rings.numbers_of(iteration, WHICH, SUM).store(total)
        # Asked for early, as nothing hides how long it takes.
        factor = factors_at(per_row, base, queries, position - ROWS, SCALE, EACH_ONCE)
        minus_delta = numbers_at(per_row.minus_delta, base, queries, position - ROWS, EACH_ONCE)
        if LESS_ONE:
            line = add_to_line(line, rings, iteration, WHICH)
        if KEYS_TOO:
            keys = rings.tile_of(iteration, KEYS, WHICH)
            keys.store(mapped(keys.load(LAYOUT), FEATURE_MAP))
        if LESS_ONE:
            added = put_less_one(rings, iteration, taken, HEAD_DIM, BLOCKS, WHICH, LAYOUT)
        else:
            added = put_features(
                rings, iteration, within(queries, position, ROWS_OF), HEAD_DIM, BLOCKS, FEATURE_MAP,
                WHICH, LAYOUT,
            )  # fmt: skip
        rings.say_mapped(iteration)
        if KEYS_TOO:
            total += sum_over_threads(added, rings.scratch.index(WHICH))
        else:
            parts += added
    if not KEYS_TOO:  # the sum is not needed before the end
        total += sum_over_threads(parts, rings.scratch.index(WHICH))
    if after is not None:
        gl.store(after.vector + at, total, mask=inside)
        if LESS_ONE:
            keep_line(line, rings, chunks, WHICH)


@gluon.jit
def put_features(
    rings, iteration, seen, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, FEATURE_MAP: gl.constexpr,
    WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Put features, each row's times its factor, in place of queries; −δ times them, added up."""
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    tile = rings.tile_of(iteration, QUERIES, WHICH)
    features = mapped_wide(widened(tile.load(LAYOUT)), FEATURE_MAP)
    factors = rings.numbers_of(iteration, WHICH, FACTOR).load(ROWS_OF)
    features = (features * factors[:, None]).to(tile.dtype)
    features = in_channels(features, HEAD_DIM, BLOCKS, WHICH)
    features = only(features, seen)
    tile.store(features)
    deltas = rings.numbers_of(iteration, WHICH, MINUS_DELTA).load(ROWS_OF)
    return sum_in_threads(widened(features) * deltas[:, None], LAYOUT)


@gluon.jit
def put_less_one(
    rings, iteration, taken, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, WHICH: gl.constexpr,
    LAYOUT: gl.constexpr,
):  # fmt: skip
    """Put features less what is taken from them; what is added up has that again, and is not
    rounded. Hidden queries were cleared, and so were their gradients."""
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    tile = rings.tile_of(iteration, QUERIES, WHICH)
    factors = rings.numbers_of(iteration, WHICH, FACTOR).load(ROWS_OF)[:, None]
    deltas = rings.numbers_of(iteration, WHICH, MINUS_DELTA).load(ROWS_OF)[:, None]
    features = elu_plus_one_less(widened(tile.load(LAYOUT)), taken) * factors
    features = in_channels(features, HEAD_DIM, BLOCKS, WHICH)
    tile.store(features.to(tile.dtype))
    return sum_in_threads((features + factors * taken) * deltas, LAYOUT)
