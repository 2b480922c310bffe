"""Linear attention backward on Hopper: gradients of queries, the state in registers.

With the roles of forward.py, two of which map keys (backward_rows.py). For a chunk of
64 rows, G the gradients of its output, V its values, K its features of keys, S and z the sums
before it, δ = (G · output) · ∂divisor/∂total:

    grad_query = φ'(query) · scale / divisor · (G Sᵀ − δ z + tril(G Vᵀ − δ) K)     S += Kᵀ V

Consumers keep Sᵀ: 64 channels of keys times all of values. The numbers of each row, 1 / divisor and
−δ, are left in memory for the gradients of keys and values.

Balanced (elu + 1, divided by the sum): K is elu alone, which is exact above 0 and small on average,
so what is rounded counts for less. What the ones of keys would add to the parentheses is one number
W in all channels, and it need not be summed up: a normalised row hardly changes as its features
grow together, so with E for what the parentheses are without it

    φ(query) · (E + W 1) = eps δ / scale        W = (eps δ / scale − φ(query) · E) / Σ φ(query)

That also undoes most of δ's error, and holds whatever part of S has ones, or any 1 ⊗ v: no sum of
values is kept, and a state to start from is centred. Two consumers with half of the channels each
exchange their parts of the dot product and of the sum.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.features import LOG2_E
from saccade.gpu.hopper.pipeline import (
    as_operand,
    here,
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
    keys_seen,
    make_sweep_rings,
    numbers_at,
    produce,
    queries_seeing,
    sum_at,
    what_to_take,
    within,
)
from saccade.ops.linear_attention.hopper.features import (
    COLUMNS,
    in_channels,
    less,
    mapped,
    narrowed,
    only,
    sum_in_threads,
    sum_over_threads,
    widened,
)
from saccade.ops.linear_attention.hopper.forward import (
    narrow_sums,
    row_of_output,
    settled,
    store_output,
    store_totals,
)
from saccade.ops.linear_attention.hopper.program import (
    BLOCK,
    FACTOR,
    GRADS,
    KEYS,
    MINUS_DELTA,
    OUTPUTS,
    QUERIES,
    SUM,
    VALUES,
    channel_of,
    chunks_of,
    head_of,
    is_balanced,
    keep_nonfinite,
    keys_there,
    start_sums,
    state_number,
    sums_at,
)
from saccade.ops.linear_attention.triton.chunk_scan import quotient_of


class QueryGradientMeta(NamedTuple):
    """What is known of the call, and how the kernel runs, when it is compiled."""

    HEADS_PER_QUERY: int
    HEADS_PER_KEY: int
    HEADS_PER_VALUE: int
    GROUP: int
    HEAD_DIM: int
    VALUE_DIM: int
    BLOCKS: int
    SEGMENTS: int
    BOTTOM_RIGHT: bool
    STARTED: bool
    FEATURE_MAP: str
    SCALE: Any
    NORMALIZE: str
    STAGES: int
    OUTPUT_STAGES: int
    CONSUMER_REGISTERS: int
    MAPPER_REGISTERS: int


@gluon.jit(do_not_specialize=["eps"])
def linear_backward_queries(
    query_desc, grad_desc, key_desc, value_desc, output_desc, result_desc, per_row, kept, before,
    sizes, eps, META: gl.constexpr,
):  # fmt: skip
    """One program: all rows of two blocks of keys' channels, or of one segment of them.

    output_desc: the output, where there is a normaliser; sums of scores lie in `kept`. per_row:
    RowNumbers, to be written. before: states (Sums) that the segment starts from, or None. So many
    (HEADS_PER_QUERY, …) output heads share one of queries, keys, values and states (GROUP).
    """
    WITHOUT: gl.constexpr = output_desc is None
    rings = make_sweep_rings(
        query_desc, 4 if WITHOUT else 5, META.BLOCKS, META.STAGES, META.OUTPUT_STAGES
    )
    gl.warp_specialize(
        [
            (consume, (
                result_desc, per_row, kept, before, sizes, eps, rings, META.GROUP, META.HEAD_DIM,
                META.VALUE_DIM, META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, META.STARTED,
                META.FEATURE_MAP, META.SCALE, META.NORMALIZE, 0,
            )),
            (consume, (
                result_desc, per_row, kept, before, sizes, eps, rings, META.GROUP, META.HEAD_DIM,
                META.VALUE_DIM, META.BLOCKS, META.SEGMENTS, META.BOTTOM_RIGHT, META.STARTED,
                META.FEATURE_MAP, META.SCALE, META.NORMALIZE, 1,
            )),
            (map_keys, (
                per_row, kept, before, sizes, eps, rings, META.GROUP, META.HEAD_DIM, META.BLOCKS,
                META.SEGMENTS, META.BOTTOM_RIGHT, META.STARTED, META.FEATURE_MAP, META.SCALE,
                META.NORMALIZE, 0,
            )),
            (map_keys, (
                per_row, kept, before, sizes, eps, rings, META.GROUP, META.HEAD_DIM, META.BLOCKS,
                META.SEGMENTS, META.BOTTOM_RIGHT, META.STARTED, META.FEATURE_MAP, META.SCALE,
                META.NORMALIZE, 1,
            )),
            (produce, (
                query_desc, grad_desc, key_desc, value_desc, output_desc, sizes, rings,
                META.HEADS_PER_QUERY, META.HEADS_PER_KEY, META.HEADS_PER_VALUE, META.BLOCKS,
                META.SEGMENTS, META.BOTTOM_RIGHT, False,
            )),
        ],
        [4, 4, 4, 1],
        [META.CONSUMER_REGISTERS, META.MAPPER_REGISTERS, META.MAPPER_REGISTERS, 24],
    )  # fmt: skip


@gluon.jit
def consume(
    result_desc, per_row, kept, before, sizes, eps, rings,
    GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr, BLOCKS: gl.constexpr,
    SEGMENTS: gl.constexpr, BOTTOM_RIGHT: gl.constexpr, STARTED: gl.constexpr,
    FEATURE_MAP: gl.constexpr, SCALE: gl.constexpr, NORMALIZE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """Compute 64 channels of the gradients, chunk by chunk."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    batch, head = head_of(sizes, WHICH, BLOCKS, 1, SEGMENTS)
    first, chunks, shift = chunks_of(sizes, SEGMENTS, BOTTOM_RIGHT)
    number = state_number(sizes, batch, head, GROUP, SEGMENTS)
    channel = channel_of(WHICH, BLOCKS, 1, SEGMENTS)
    there = batch < sizes.batches
    queries = queries_seeing(sizes, shift, keys_there(kept, sizes, batch), there, STARTED)
    sums = start_sums(before, number, there, channel, HEAD_DIM, VALUE_DIM, BLOCKS, True)
    if is_balanced(FEATURE_MAP, NORMALIZE) and before is not None:
        sums = centred(sums, before, number, there, HEAD_DIM, VALUE_DIM, WHICH)
    narrow_sums(sums, rings, WHICH, 0 * chunks)
    head_index = batch * sizes.heads + head
    for iteration in range(0, chunks):
        position = first + iteration * ROWS
        row = position - shift
        products = start_products(sums, rings, iteration, WHICH)
        sums, found, minus_delta = fold_chunk(
            products, rings, iteration, is_balanced(FEATURE_MAP, NORMALIZE), NORMALIZE, WHICH
        )
        if is_balanced(FEATURE_MAP, NORMALIZE):
            wanted = minus_delta * (eps * reciprocal(-SCALE))
            found = balanced(found, wanted, rings, iteration, HEAD_DIM, BLOCKS, WHICH)
        else:
            if FEATURE_MAP != "identity":
                rows = rings.tile_of(iteration, QUERIES, WHICH).load(LAYOUT).to(gl.float32)
                found = found * derivative(rows, FEATURE_MAP)
            if NORMALIZE != "none":
                factor = rings.numbers_of(iteration, WHICH, FACTOR).load(ROWS_OF)
                found = found * factor[:, None]
            else:
                found = found * SCALE
            rings.tiles.release_loaded(iteration)
        done = only(found.to(result_desc.dtype), within(queries, position, ROWS_OF))
        coordinates = row_of_output(sizes, batch, head, row, channel)
        store_output(result_desc, rings, coordinates, done, iteration, WHICH)
        if NORMALIZE != "none" and (WHICH == 0 or BLOCKS == 1):  # under the next products
            store_totals(per_row.minus_delta, sizes, head_index, row, there, minus_delta)
    keep_nonfinite(kept.nonfinite, sums, sizes, batch, head, there, BLOCKS, 1, SEGMENTS, WHICH)
    wait_for_stores()


@gluon.jit
def start_products(sums, rings, iteration, WHICH: gl.constexpr):
    """Start all products of a chunk that need nothing but what lies in memory: scores, what rows
    find in the sums so far, and the sums with the chunk added."""
    BLOCKS: gl.constexpr = len(sums)
    LEFT: gl.constexpr = 0 if BLOCKS == 2 else WHICH  # the first block of this head's rows
    nothing = gl.zeros([ROWS, BLOCK], gl.float32, mma_layout(BLOCK))
    origin = here(iteration - iteration)
    rings.wait_for_mapped(iteration)
    scores, found, added = nothing, nothing, ()
    for block in gl.static_range(BLOCKS):
        grads = rings.tile_of(iteration, GRADS, LEFT + block)
        values = rings.tile_of(iteration, VALUES, LEFT + block)
        scores = warpgroup_mma(
            grads, values.permute((1, 0)), scores, use_acc=block > 0, is_async=True
        )
    for block in gl.static_range(BLOCKS):
        grads = rings.tile_of(iteration, GRADS, LEFT + block)
        state = rings.narrowed.index(origin + (BLOCKS * WHICH + block))
        found = warpgroup_mma(grads, state, found, use_acc=block > 0, is_async=True)
    features = rings.tile_of(iteration, KEYS, WHICH)
    for block in gl.static_range(BLOCKS):
        values = rings.tile_of(iteration, VALUES, LEFT + block)
        token = warpgroup_mma(values.permute((1, 0)), features, sums[block], is_async=True)
        added = added + (token,)  # noqa: RUF005
    return scores, found, added


@gluon.jit
def fold_chunk(
    products, rings, iteration, TWICE: gl.constexpr, NORMALIZE: gl.constexpr, WHICH: gl.constexpr
):  # fmt: skip
    """The sums with a chunk added, narrowed beside that; weighted sums of its rows, and −δ.

    TWICE: weights are multiplied as two numbers, rounded and what that lacks.
    """
    scores, found, added = products
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    ROWS_OF: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    BLOCKS: gl.constexpr = len(added)
    minus_delta = gl.zeros([ROWS], gl.float32, ROWS_OF)
    if NORMALIZE != "none":
        minus_delta = rings.numbers_of(iteration, WHICH, MINUS_DELTA).load(ROWS_OF)
        if BLOCKS == 2:  # half of the channels each
            minus_delta += rings.numbers_of(iteration, 1 - WHICH, MINUS_DELTA).load(ROWS_OF)
    scores = warpgroup_mma_wait(2 * BLOCKS, deps=[scores])
    if NORMALIZE != "none":
        scores = scores + minus_delta[:, None]
    row = gl.arange(0, ROWS, ROWS_OF)
    column = gl.arange(0, ROWS, gl.SliceLayout(0, LAYOUT))
    scores = gl.where(row[:, None] >= column[None, :], scores, 0.0)
    features = rings.tile_of(iteration, KEYS, WHICH)
    high = narrowed(scores)
    weights = as_operand(high, features.dtype, LAYOUT)
    if TWICE:
        rest = as_operand(narrowed(scores - widened(high)), features.dtype, LAYOUT)
        found = warpgroup_mma(weights, features, found, is_async=True)
        found = warpgroup_mma(rest, features, found, is_async=True)
        sums = settled(added, 2)
    else:
        found = warpgroup_mma(weights, features, found, is_async=True)
        sums = settled(added, 1)
    narrow_sums(sums, rings, WHICH, here(iteration - iteration))
    found = warpgroup_mma_wait(0, deps=[found])
    if NORMALIZE != "none":
        total = rings.numbers_of(iteration, WHICH, SUM).load(gl.SliceLayout(0, LAYOUT))
        found = found + minus_delta[:, None] * total[None, :]
    return sums, found, minus_delta


@gluon.jit
def centred(
    sums, before, number, exists, HEAD_DIM: gl.constexpr, VALUE_DIM: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """A state less its mean over channels of keys, which both consumers find alike."""
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    FIRST_CHANNEL: gl.constexpr = WHICH * BLOCK if len(sums) == 2 else 0
    channels = FIRST_CHANNEL + gl.arange(0, BLOCK, gl.SliceLayout(0, LAYOUT))
    rest = ()
    for block in gl.static_range(len(sums)):
        mean = gl.sum(sums[block], 1)
        if len(sums) == 2:
            position, inside = sums_at(
                number, exists, block, BLOCK - FIRST_CHANNEL, HEAD_DIM, VALUE_DIM, True
            )
            mean += gl.sum(gl.load(before.matrix + position, mask=inside, other=0.0), 1)
        mean = (mean / HEAD_DIM)[:, None]
        part = sums[block] - gl.where((channels < HEAD_DIM)[None, :], mean, 0.0)
        rest = rest + (part,)  # noqa: RUF005
    return rest


@gluon.constexpr_function
def reciprocal(scale):
    """Of a scale; of 0, by which all is multiplied in the end, any number."""
    return 1.0 / scale if scale else 0.0


@gluon.jit
def balanced(
    found, wanted, rings, iteration, HEAD_DIM: gl.constexpr, BLOCKS: gl.constexpr, WHICH:
    gl.constexpr
):  # fmt: skip
    """Gradients of queries, of what keys less 1 make of those of φ(query); see above.

    wanted: what φ(query) · that is with the ones. The chunk is given back.
    """
    LAYOUT: gl.constexpr = mma_layout(BLOCK)
    rows = rings.tile_of(iteration, QUERIES, WHICH).load(LAYOUT).to(gl.float32)
    slope = derivative(rows, "elu+1")
    features = slope + gl.maximum(rows, 0.0)
    features = in_channels(features, HEAD_DIM, BLOCKS, WHICH)
    dot, size = gl.sum(features * found, 1), gl.sum(features, 1)
    if BLOCKS == 2:  # half of the channels each
        rings.parts_of(iteration, WHICH, 0).store(dot)
        rings.parts_of(iteration, WHICH, 1).store(size)
        rings.say_written(iteration)
    factor = rings.numbers_of(iteration, WHICH, FACTOR).load(gl.SliceLayout(1, LAYOUT))
    rings.tiles.release_loaded(iteration)
    if BLOCKS == 2:
        rings.wait_for_written(iteration)
        dot += rings.parts_of(iteration, 1 - WHICH, 0).load(gl.SliceLayout(1, LAYOUT))
        size += rings.parts_of(iteration, 1 - WHICH, 1).load(gl.SliceLayout(1, LAYOUT))
    lacking = (wanted - dot) / gl.where(size > 0, size, 1.0)
    return (found * factor[:, None] + (lacking * factor)[:, None]) * slope


@gluon.jit
def derivative(rows, FEATURE_MAP: gl.constexpr):
    """The derivative of a feature map at rows; see `saccade.gpu.features`."""
    if FEATURE_MAP == "elu+1":
        slope = gl.minimum(gl.exp2(rows * LOG2_E), 1.0)
    elif FEATURE_MAP == "relu":
        slope = gl.where(rows > 0, 1.0, 0.0)
    else:
        gl.static_assert(FEATURE_MAP == "exp")
        slope = gl.exp2(rows * LOG2_E)
    return slope


# ---- mapping -----------------------------------------------------------------------------------


# ---- mapping ------------------------------------------------------------------------------------


@gluon.jit
def map_keys(
    per_row, kept, before, sizes, eps, rings,
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
    base = base_of(sizes, batch, head, shift)
    if NORMALIZE != "none":
        scores = numbers_at(kept.normaliser, base, queries, first, ROWS_OF)
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
                rows = base + position + gl.arange(0, ROWS, ROWS_OF)
                gl.store(per_row.factors + rows, factor, mask=seeing)
            rings.numbers_of(iteration, WHICH, FACTOR).store(factor * SCALE)
            # Asked for early, as nothing hides how long it takes.
            scores = numbers_at(kept.normaliser, base, queries, position + ROWS, ROWS_OF)
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
