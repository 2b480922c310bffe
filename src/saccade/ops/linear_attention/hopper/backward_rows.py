"""Linear attention backward on Hopper, rows: they are loaded, and features take their place.

Products read their operands from shared memory, so features are put there, by warps that do nothing
else. They also find the numbers that a row has, and keep the sum of features before a chunk.
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

from saccade.gpu.features import LOG2_E, elu_plus_one, elu_plus_one_less, exponential, relu
from saccade.gpu.tensor_view import wide
from saccade.ops.attention.hopper.softmax import ROWS
from saccade.ops.linear_attention.hopper.elu_correction import add_to_line, keep_line, start_line
from saccade.ops.linear_attention.hopper.features import (
    COLUMNS,
    in_channels,
    less,
    mapped,
    no_rows,
    only,
    sum_in_threads,
    sum_over_threads,
    widened,
)
from saccade.ops.linear_attention.hopper.program import (
    BLOCK,
    FACTOR,
    GRADS,
    KEYS,
    MINUS_DELTA,
    ONES,
    OUTPUTS,
    QUERIES,
    SUM,
    VALUES,
    chunks_of,
    head_of,
    is_balanced,
    keys_there,
    state_number,
)
from saccade.ops.linear_attention.triton.chunk import quotient_of

# The mean slope of φ from which on 1 is taken from features. Below 0, e^x and e^x − 1 are rounded
# alike where x has a slope of 1/2; above 0 only what is less 1 is not rounded.
LEAST_SLOPE = gl.constexpr(0.4)


class RowNumbers(NamedTuple):
    """What each query row has, float32 [batch, heads, query_len]."""

    factors: Any  # 1 / divisor; None without a normaliser
    minus_delta: Any


# ---- places -------------------------------------------------------------------------------------


@gluon.jit
def position_of(first, chunks, iteration, BACKWARDS: gl.constexpr):
    """The first place of the chunk that is visited in a turn."""
    if BACKWARDS:
        iteration = chunks - 1 - iteration
    return first + iteration * ROWS


@gluon.jit
def keys_seen(num_keys):
    """From which place on, and up to which one, keys are there to be seen."""
    return 0 * num_keys, num_keys


@gluon.jit
def queries_seeing(sizes, shift, num_keys, exists, STARTED: gl.constexpr):
    """From which place on, and up to which one, queries exist and see something: nothing before
    the first key, unless a state came before it (STARTED)."""
    begin, end = shift, shift + sizes.query_len
    if not STARTED:
        begin = gl.maximum(begin, 0)
        end = gl.where(num_keys > 0, end, begin)
    return begin, gl.where(exists, end, begin)


@gluon.jit
def within(bounds, position, ROWS_OF: gl.constexpr):
    """Which of 64 places lie in such bounds, rows as in a layout."""
    positions = position + gl.arange(0, ROWS, ROWS_OF)
    return (positions >= bounds[0]) & (positions < bounds[1])


# ---- loading ------------------------------------------------------------------------------------


@gluon.jit
def produce(
    query_desc, grad_desc, key_desc, value_desc, output_desc, sizes, rings,
    HEADS_PER_QUERY: gl.constexpr, HEADS_PER_KEY: gl.constexpr, HEADS_PER_VALUE: gl.constexpr,
    BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr,
    BACKWARDS: gl.constexpr,
):  # fmt: skip
    """Load the rows of chunk after chunk, as soon as there is room: those that are asked for."""
    one = head_of(sizes, 0, BLOCKS, 1, SEGMENTS)
    other = head_of(sizes, 1, BLOCKS, 1, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT, BACKWARDS)
    for iteration in range(0, chunks):
        position = position_of(first, chunks, iteration, BACKWARDS)
        row = position - shift
        rings.tiles.acquire(iteration)
        rings.tiles.expect(iteration, query_desc)
        if key_desc is not None:
            load_pair(
                rings.tiles, iteration, KEYS, key_desc, one, other, position, HEADS_PER_KEY, BLOCKS
            )
        load_pair(
            rings.tiles, iteration, QUERIES, query_desc, one, other, row, HEADS_PER_QUERY, BLOCKS
        )
        load_pair(rings.tiles, iteration, GRADS, grad_desc, one, other, row, 1, BLOCKS)
        if output_desc is not None:
            load_pair(rings.tiles, iteration, OUTPUTS, output_desc, one, other, row, 1, BLOCKS)
        if value_desc is not None:
            load_pair(
                rings.tiles,
                iteration,
                VALUES,
                value_desc,
                one,
                other,
                position,
                HEADS_PER_VALUE,
                BLOCKS,
            )


@gluon.jit
def load_pair(
    tiles, iteration, WHAT: gl.constexpr, desc, one, other, row, HEADS_PER: gl.constexpr,
    BLOCKS: gl.constexpr,
):  # fmt: skip
    """Load two tiles of a stage: of one head and another, or of channels of one head."""
    tiles.load_tile(iteration, 2 * WHAT, desc, [one[0], one[1] // HEADS_PER, row, 0])
    if BLOCKS == 1:
        tiles.load_tile(iteration, 2 * WHAT + 1, desc, [other[0], other[1] // HEADS_PER, row, 0])
    else:
        tiles.load_tile(iteration, 2 * WHAT + 1, desc, [one[0], one[1] // HEADS_PER, row, BLOCK])


# ---- mapping ------------------------------------------------------------------------------------


@gluon.jit
def map_keys(
    given, kept, before, sizes, eps, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, STARTED: gl.constexpr, FEATURE_MAP: gl.constexpr,
    SCALE: gl.constexpr, NORMALIZE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Put features in place of a block of keys, going forwards; find what queries have as numbers:
    factors, which go to memory too, and the parts of −δ that this block of channels has."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BALANCED: gl.constexpr = is_balanced(FEATURE_MAP, NORMALIZE)
    batch, head = head_of(sizes, WHICH, BLOCKS, 1, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT)
    exists = batch < sizes.batches
    num_keys = keys_there(kept, sizes, batch)
    queries, keys = queries_seeing(sizes, shift, num_keys, exists, STARTED), keys_seen(num_keys)
    at, inside = sum_at(
        sizes, batch, head, exists, HEAD_DIM, GROUP, BLOCKS, SEGMENTS, WHICH, COLUMNS
    )
    total = gl.zeros([BLOCK], gl.float32, gl.SliceLayout(0, COLUMNS))
    if before is not None:
        total = gl.load(before.vector + at, mask=inside, other=0.0)
    unit = unit_of(sizes, batch, head, shift)
    if NORMALIZE != "none":
        scores = numbers_at(kept.normaliser, unit, queries, first, ROWS_OF)
    if BALANCED:
        taken = what_to_take(rings, keys, first, 0 * chunks, KEYS, HEAD_DIM, BLOCKS, WHICH, LAYOUT)
    for iteration in range(0, chunks):
        position = first + iteration * ROWS
        rings.tiles.wait(iteration)
        clear_hidden(rings, iteration, position, keys, VALUES, WHICH, LAYOUT)
        if NORMALIZE != "none":
            seeing = within(queries, position, ROWS_OF)
            factor, slope = quotient_of(scores, eps, NORMALIZE)
            if WHICH == 0 or BLOCKS == 1:
                rows = unit + position + gl.arange(0, ROWS, ROWS_OF)
                gl.store(given.factors + rows, factor, mask=seeing)
            rings.numbers_of(iteration, WHICH, FACTOR).store(factor * SCALE)
            # Asked for early, as nothing hides how long it takes.
            scores = numbers_at(kept.normaliser, unit, queries, position + ROWS, ROWS_OF)
            grads = widened(rings.tile_of(iteration, GRADS, WHICH).load(LAYOUT))
            outputs = widened(rings.tile_of(iteration, OUTPUTS, WHICH).load(LAYOUT))
            minus_delta = gl.where(seeing, -slope * gl.sum(grads * outputs, 1), 0.0)
            rings.numbers_of(iteration, WHICH, MINUS_DELTA).store(minus_delta)
        rings.numbers_of(iteration, WHICH, SUM).store(total)
        tile = rings.tile_of(iteration, KEYS, WHICH)
        if BALANCED:
            features = less(tile.load(LAYOUT), taken)
        else:
            features = mapped(tile.load(LAYOUT), FEATURE_MAP)
        features = only(features, within(keys, position, ROWS_OF))
        tile.store(features)
        rings.say_mapped(iteration)
        sums = sum_in_threads(widened(features), LAYOUT)
        total += sum_over_threads(sums, rings.scratch.index(WHICH))


@gluon.jit
def map_queries(
    given, kept, before, after, sizes, rings,
    HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr,
    BOTTOM_RIGHT: gl.constexpr, STARTED: gl.constexpr, FEATURE_MAP: gl.constexpr,
    SCALE: gl.constexpr, KEYS_TOO: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Put features, each row's times its factor, in place of a block of queries, going backwards;
    features of keys in place of them if KEYS_TOO. Then those of queries are less 1 where that is
    better, and numbers say what the ones add: see elu_correction.py."""
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
    unit = unit_of(sizes, batch, head, shift)
    position = position_of(first, chunks, 0, True)
    if LESS_ONE:
        number = state_number(sizes, batch, head, 1, SEGMENTS)
        line = start_line(before, number, exists, HEAD_DIM, VALUE_DIM, BLOCKS, WHICH)
        taken = what_to_take(
            rings, queries, position, 0 * chunks, QUERIES, HEAD_DIM, BLOCKS, WHICH, LAYOUT
        )
    factor = factors_at(given, unit, queries, position, SCALE, EACH_ONCE)
    minus_delta = numbers_at(given.minus_delta, unit, queries, position, EACH_ONCE)
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
        factor = factors_at(given, unit, queries, position - ROWS, SCALE, EACH_ONCE)
        minus_delta = numbers_at(given.minus_delta, unit, queries, position - ROWS, EACH_ONCE)
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
    if not KEYS_TOO:  # nobody needs the sum before the end
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
    """The same of features less what is taken from them; but what is added up has that, and is not
    rounded. Hidden queries were cleared, and so were their gradients."""
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    tile = rings.tile_of(iteration, QUERIES, WHICH)
    factors = rings.numbers_of(iteration, WHICH, FACTOR).load(ROWS_OF)[:, None]
    deltas = rings.numbers_of(iteration, WHICH, MINUS_DELTA).load(ROWS_OF)[:, None]
    features = elu_plus_one_less(widened(tile.load(LAYOUT)), taken) * factors
    features = in_channels(features, HEAD_DIM, BLOCKS, WHICH)
    tile.store(features.to(tile.dtype))
    return sum_in_threads((features + factors * taken) * deltas, LAYOUT)


@gluon.jit
def what_to_take(
    rings, bounds, position, iteration, WHAT: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCKS:
    gl.constexpr, WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """What is to be taken from features: 1, or 0 where most are nearer to 0 than to 1 in the first
    chunk. Both mappers of a head look at all of it, before either changes it."""
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH
    rings.tiles.wait(iteration)
    seen = within(bounds, position, gl.SliceLayout(1, LAYOUT))
    total = 0.0
    for block in gl.static_range(BLOCKS):
        rows = widened(only(rings.tile_of(iteration, WHAT, LEFT + block).load(LAYOUT), seen))
        slope = gl.minimum(gl.exp2(rows * LOG2_E), 1.0) - LEAST_SLOPE
        channels = block * BLOCK + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
        slope = gl.where(seen[:, None] & (channels < HEAD_DIM)[None, :], slope, 0.0)
        total += gl.sum(gl.sum(slope, 1), 0)
    if BLOCKS == 2:
        rings.meet(iteration)
    return gl.where(total < 0, 0.0, 1.0)


@gluon.jit
def sum_at(
    sizes, batch, head, exists, HEAD_DIM: gl.constexpr, GROUP: gl.constexpr,
    BLOCKS: gl.constexpr, SEGMENTS: gl.constexpr, WHICH: gl.constexpr, LAYOUT: gl.constexpr,
):  # fmt: skip
    """Where the sum of features of a block lies in memory, and what of it exists."""
    FIRST: gl.constexpr = WHICH * BLOCK if BLOCKS == 2 else 0
    channels = FIRST + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    number = state_number(sizes, batch, head, GROUP, SEGMENTS)
    return number * HEAD_DIM + channels, (channels < HEAD_DIM) & exists


@gluon.jit
def unit_of(sizes, batch, head, shift):
    """Where a head's numbers begin, counted by place."""
    return wide(batch * sizes.heads + head) * sizes.query_len - shift


@gluon.jit
def numbers_at(numbers, unit, queries, position, ROWS_OF: gl.constexpr):
    """Numbers of the queries at 64 places, 0 where these see nothing."""
    rows = unit + position + gl.arange(0, ROWS, ROWS_OF)
    return gl.load(numbers + rows, mask=within(queries, position, ROWS_OF), other=0.0)


@gluon.jit
def factors_at(given, unit, queries, position, SCALE: gl.constexpr, ROWS_OF: gl.constexpr):
    """scale / divisor of the queries at 64 places."""
    factor = gl.full([ROWS], SCALE, gl.float32, ROWS_OF)
    if given.factors is not None:
        factor = factor * numbers_at(given.factors, unit, queries, position, ROWS_OF)
    return factor


@gluon.jit
def clear_hidden(
    rings, iteration, position, bounds, WHAT: gl.constexpr, WHICH, LAYOUT: gl.constexpr
):
    """Put zeros in hidden rows that stand beside features of 0, as a product does not hide what is
    not finite (0 · NaN is NaN)."""
    if (position < bounds[0]) | (position + ROWS > bounds[1]):
        rows = rings.tile_of(iteration, WHAT, WHICH)
        rows.store(only(rows.load(LAYOUT), within(bounds, position, gl.SliceLayout(1, LAYOUT))))


@gluon.jit
def mapped_wide(rows, FEATURE_MAP: gl.constexpr):
    """Rows in float32 through a feature map."""
    features = rows
    if FEATURE_MAP == "elu+1":
        features = elu_plus_one(rows, 0.0)
    elif FEATURE_MAP == "relu":
        features = relu(rows, 0.0)
    elif FEATURE_MAP == "exp":
        features = exponential(rows, 0.0)
    return features
