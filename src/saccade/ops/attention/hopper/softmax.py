"""Softmax: from scores to weights, on tiles as products leave them in registers; and from sums to
output and lse.

A weight is 2 to the power of a score less the reference of its row. The reference is the largest
score that was met when it was last raised, and as long as no score exceeds it by more than a few
powers of 2 it stays: then all that was summed before stays as it is, too (as in FlashAttention-4).
For partial tiles, lazy maxima are raised before scores are weighed; for other tiles the sums tell
afterwards whether they should have been, which saves looking for the largest score.

Scores that the caller changed are natural, and so are their references; see
`saccade.gpu.online_softmax`.

Numbers of each row are held by thread: [rows, 8], of which a thread has two for each of its rows.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.hopper.pipeline import store, wait_for_stores
from saccade.gpu.hopper.tile_scheduler import tile_from_last
from saccade.gpu.language import gl, gluon
from saccade.gpu.online_softmax import LN_2, LOG2_E, load_sink, power
from saccade.gpu.rounding import residual_of
from saccade.gpu.tensor_view import row_pointers, store_numbers, wide

NOTHING = gl.constexpr(-3e38)  # the reference of a row that has seen no key
SMALLEST = gl.constexpr(-3.4028234663852886e38)  # the same where a score may be as small as that
SLACK = gl.constexpr(8.0)  # powers of 2 by which scores may exceed their reference: 256
ROWS = gl.constexpr(64)  # query rows of one consumer, as many as one WGMMA takes


@gluon.jit
def change_and_hide(scores, rules, at, tile_range, index, partials):
    """The scores of tile number `index` of a tile range that begins with so many partial tiles,
    ready to be weighed."""
    if rules.score is not None:
        scores = change(
            scores, rules, at, tile_from_last(rules, tile_range, index) * scores.shape[1]
        )
    if index < partials:  # all others run without mask arithmetic
        scores = hide(scores, rules, at, tile_from_last(rules, tile_range, index) * scores.shape[1])
    return scores


@gluon.jit
def change(scores, rules, at, kv_start):
    """The scores as the caller changes them."""
    batch, query_head, first_row, query_len, kv_len = at
    query_rows, kv_rows = places_of(scores, first_row, kv_start)
    return rules.score.change(
        scores * rules.scale, batch, query_head, query_rows, kv_rows, kv_len - query_len,
        rules.score.data,
    )  # fmt: skip


@gluon.jit
def hide(scores, rules, at, kv_start):
    """The scores with -inf where a pair is hidden, or a key row past the end."""
    batch, query_head, first_row, query_len, kv_len = at
    query_rows, kv_rows = places_of(scores, first_row, kv_start)
    if (
        kv_start + scores.shape[1] > kv_len
    ):  # few partial tiles do, and a comparison costs as a mask does
        scores = gl.where(kv_rows < kv_len, scores, float("-inf"))
    if rules.mask.visible is not None:
        visible = rules.mask.visible(
            batch, query_head, query_rows, kv_rows, kv_len - query_len, rules.mask.data
        )
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def no_lazy_max(scores, rules):
    """The lazy maxima of rows that have seen no key."""
    of_thread = sum_by_thread(scores)  # for its layout
    LAYOUT: gl.constexpr = of_thread.type.layout
    FIRST: gl.constexpr = NOTHING if rules.score is None else SMALLEST
    return gl.full([scores.shape[0], 8], FIRST, gl.float32, LAYOUT)


@gluon.jit
def raise_lazy_max(scores, rules, lazy_max, EXACT: gl.constexpr = False):
    """The lazy maxima that suit a tile (if EXACT, the largest scores so far), and what shrinks
    everything summed before.

    The maximum is taken in two steps: four short chains of instructions take less time than two
    long ones.
    """
    in_parts = gl.reshape(scores, [scores.shape[0], scores.shape[1] // 8, 8])
    largest = gl.max(in_parts, 1)
    LAYOUT: gl.constexpr = largest.type.layout
    nothing = gl.zeros([scores.shape[0], 8], gl.float32, LAYOUT)
    largest = gl.max(largest, 1)[:, None]
    if rules.score is None:
        largest = largest * (rules.scale * LOG2_E)
    largest = largest + nothing
    lazy_max = gl.convert_layout(lazy_max, LAYOUT)
    if EXACT:
        raised = gl.where(largest > lazy_max, largest, lazy_max)
    elif rules.score is None:
        raised = gl.where(largest > lazy_max + SLACK, largest, lazy_max)
    else:
        raised = gl.where(largest > lazy_max + SLACK * LN_2, largest, lazy_max)
    return raised, power(lazy_max - raised, rules.score is not None)


@gluon.jit
def weights_of(scores, rules, lazy_max):
    """The weights of scores."""
    if rules.score is None:
        weights = gl.exp2(scores * (rules.scale * LOG2_E) - spread(lazy_max, scores))
    else:
        weights = power(scores - spread(lazy_max, scores), True)
    return weights


# PTX of `lazy_rescale`. A thread has two numbers of one row ($8, $9) and two of another ($10, $11).
# It gives what shrinks each row ($0, $1 and $2, $3) and what raises its lazy maxima ($4, $5 and $6,
# $7). The four threads that have the same two rows are neighbours.
LAZY_RESCALE = gl.constexpr(
    "{ .reg .pred p; .reg .f32 a, b, t; .reg .b32 k; "
    "max.f32 a, $8, $9; "  # a, b: the larger number of each row
    "max.f32 b, $10, $11; "
    "mov.f32 $0, 0f3F800000; "  # 1 and 0, unless what follows finds something else
    "mov.f32 $2, 0f3F800000; "
    "mov.f32 $4, 0f00000000; "
    "mov.f32 $6, 0f00000000; "
    "max.f32 t, a, b; "
    "setp.gt.f32 p, t, 0f43800000; "  # is it above 256,
    "vote.sync.any.pred p, p, 0xffffffff; "  # here or in another thread of the warp?
    "@!p bra.uni DONE; "  # mostly in none, and the whole warp goes past the rest
    "shfl.sync.bfly.b32 t, a, 1, 0x1f, 0xffffffff; "  # the largest number of the first row,
    "max.f32 a, a, t; "  # in all four threads that have some of it
    "shfl.sync.bfly.b32 t, a, 2, 0x1f, 0xffffffff; "
    "max.f32 a, a, t; "
    "shfl.sync.bfly.b32 t, b, 1, 0x1f, 0xffffffff; "  # and of the second row
    "max.f32 b, b, t; "
    "shfl.sync.bfly.b32 t, b, 2, 0x1f, 0xffffffff; "
    "max.f32 b, b, t; "
    "mov.b32 k, a; "  # k: the exponent among the bits of a, that is log2 a rounded down,
    "shr.u32 k, k, 23; "
    "sub.s32 k, k, 127; "
    "setp.gt.f32 p, a, 0f43800000; "  # or 0 where the row has nothing above 256
    "selp.b32 k, k, 0, p; "
    "cvt.rn.f32.s32 $4, k; "  # the lazy maxima rise by k
    "sub.s32 k, 127, k; "  # the bits of 2 to the power of -k
    "shl.b32 k, k, 23; "
    "setp.ge.f32 p, a, 0f7B800000; "  # from 2^120 on NaN: the end of float32 is near
    "selp.b32 k, 0x7FFFFFFF, k, p; "
    "mov.b32 $0, k; "
    "mov.b32 k, b; "  # the same for the second row
    "shr.u32 k, k, 23; "
    "sub.s32 k, k, 127; "
    "setp.gt.f32 p, b, 0f43800000; "
    "selp.b32 k, k, 0, p; "
    "cvt.rn.f32.s32 $6, k; "
    "sub.s32 k, 127, k; "
    "shl.b32 k, k, 23; "
    "setp.ge.f32 p, b, 0f7B800000; "
    "selp.b32 k, 0x7FFFFFFF, k, p; "
    "mov.b32 $2, k; "
    "DONE: "
    "mov.f32 $1, $0; "  # both numbers of a row get the same
    "mov.f32 $3, $2; "
    "mov.f32 $5, $4; "
    "mov.f32 $7, $6; }"
)


@gluon.jit
def lazy_rescale(sums):
    """What shrinks a tile and everything before, as sums of its weights by thread tell, and by how
    much that raises the lazy maxima: 1 and 0, unless a sum of the row exceeds 256.

    Sums near the end of float32 are made NaN, and the tile of query rows is done once more. Tests
    compare it with plain Triton (`plain_lazy_rescale`, tests/ops/attention/hopper/test_softmax.py).
    """
    return gl.inline_asm_elementwise(
        LAZY_RESCALE, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f", [sums],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def sum_by_thread(weights):
    """Sums of each row, of what one thread holds of it: [rows, 8]."""
    return gl.sum(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 8]), 1)


@gluon.jit
def spread(numbers, tile):
    """Numbers of each row and thread, [rows, 8], beside a tile."""
    SHAPE: gl.constexpr = [tile.shape[0], tile.shape[1] // 8, 8]
    parts = gl.reshape(tile, SHAPE)
    LAYOUT: gl.constexpr = parts.type.layout
    numbers = gl.convert_layout(numbers, gl.SliceLayout(1, LAYOUT))
    wide = gl.expand_dims(numbers, 1) * gl.full(SHAPE, 1.0, gl.float32, LAYOUT)
    return gl.convert_layout(gl.reshape(wide, tile.shape), tile.type.layout)


@gluon.constexpr_function
def multiply_in_assembly(numbers):
    """PTX: so many numbers of a thread ($0 on) times as many factors ($(2 · numbers) on), unless
    all factors of the warp are 1. A thread has two rows, and two numbers of each by turns."""
    lines = ["{", ".reg .pred p;", ".reg .pred q;"]
    # p: the first row's factor is not 1 (or NaN), or the second row's
    lines += [f"setp.neu.f32 p, ${2 * numbers}, 0f3F800000;"]
    lines += [f"setp.neu.or.f32 p, ${2 * numbers + 2}, 0f3F800000, p;"]
    # q: p of any thread of the warp; mostly of none, and the whole warp goes past the products
    lines += ["vote.sync.any.pred q, p, 0xffffffff;", "@!q bra.uni DONE;"]
    lines += [f"mul.f32 ${n}, ${n}, ${2 * numbers + n};" for n in range(numbers)]
    return "\n".join([*lines, "DONE:", "}"])


@gluon.constexpr_function
def multiply_operands(numbers):
    """Its operands: results, which begin as the numbers; the numbers; the factors."""
    return ",".join(["=f"] * numbers + [str(n) for n in range(numbers)] + ["f"] * numbers)


@gluon.jit
def rescaled(tile, rescale):
    """A tile times numbers of each row; a warp that finds nothing but 1 among them goes past it.

    Tests compare it with a plain product (tests/ops/attention/hopper/test_softmax.py).
    """
    NUMBERS: gl.constexpr = tile.shape[0] * tile.shape[1] // (32 * gl.num_warps())
    ASSEMBLY: gl.constexpr = multiply_in_assembly(NUMBERS)
    OPERANDS: gl.constexpr = multiply_operands(NUMBERS)
    return gl.inline_asm_elementwise(
        ASSEMBLY, OPERANDS, [tile, spread(rescale, tile)], dtype=gl.float32, is_pure=False,
        pack=NUMBERS,
    )  # fmt: skip


@gluon.jit
def settle(row_max, row_sum, sinks, query_head, NATURAL: gl.constexpr = False):
    """What the weighted sums are multiplied by at last, and the natural lse.

    A sink joins the sum of the weights and has no value. A row that saw nothing has the lse -inf.
    """
    LAYOUT: gl.constexpr = row_max.type.layout
    shrink = gl.full([ROWS], 1.0, gl.float32, LAYOUT)
    if sinks is not None:
        sink = load_sink(sinks, query_head, NATURAL)
        new_max = gl.maximum(row_max, sink)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = power(row_max - shift, NATURAL)
        row_sum = row_sum * shrink + power(sink - shift, NATURAL)
        row_max = new_max
    divisor = gl.where(row_sum == 0, 1.0, row_sum)
    factor = shrink / divisor
    if NATURAL:  # noqa: SIM108
        lse = row_max + gl.log2(divisor) * LN_2
    else:
        lse = (row_max + gl.log2(divisor)) * LN_2
    return factor, lse


@gluon.jit
def along_rows(numbers, tile):
    """One number a row, as a column beside a tile."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def places_of(tile, first_row, first_column):
    """The coordinates of a tile's numbers: a column of rows, and a row of columns."""
    LAYOUT: gl.constexpr = tile.type.layout
    rows = first_row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    return rows[:, None], columns[None, :]


# ---- epilogue ------------------------------------------------------------------------------------
# From the sums of 64 query rows to their output and lse, in memory.


@gluon.jit
def finish(
    state, output_desc, output, logsumexp, residual, largest, sinks, schedule, at, memory,
    VALUE_DIM: gl.constexpr, NATURAL: gl.constexpr = False,
):  # fmt: skip
    """Divide by the sums of the weights; write output and lse, and what else there is to write."""
    row_max, row_sum, weighted_sum = state
    batch, query_head, first_row, query_len, _ = at
    factor, natural_lse = settle(row_max, row_sum, sinks, query_head, NATURAL)
    exact = weighted_sum * along_rows(factor, weighted_sum)
    attended = exact.to(output_desc.dtype)
    if residual is not None:
        store_residual(residual, exact, attended, at, VALUE_DIM)
    rows = first_row + gl.arange(0, ROWS, row_max.type.layout)
    store_numbers(logsumexp, batch, query_head, rows, query_len, natural_lse)
    if largest is not None:
        natural_max = row_max if NATURAL else row_max * LN_2
        store_numbers(largest, batch, query_head, rows, query_len, natural_max)
    if first_row + ROWS <= query_len:
        output_batch, output_row = schedule.origin(batch, output.data)
        position = (output_batch, query_head, output_row + first_row)
        store_in_parts(output_desc, position, attended, memory)
    else:  # rows past the end may be another sequence's
        row, channel = places_of(attended, first_row, 0)
        pointers = row_pointers(output, batch, query_head, row, channel)
        gl.store(pointers, attended, mask=(row < query_len) & (channel < VALUE_DIM))


@gluon.jit
def store_residual(residual, exact, attended, at, VALUE_DIM: gl.constexpr):
    """Write what rounding took from 64 rows of the output."""
    # A product leaves two neighbouring numbers of eight to each thread, which would write 2 bytes
    # at a time. The four threads of a row trade theirs for a quarter of it each: first by pairs of
    # threads, then pairs with each other, as Triton does by shuffles what it would do at once
    # through shared memory, of which there is none left.
    PAIRS: gl.constexpr = traded(exact.shape[1], False)
    QUARTERS: gl.constexpr = traded(exact.shape[1], True)
    taken = as_it_is(gl.convert_layout(residual_of(exact, attended), PAIRS))
    taken = gl.convert_layout(taken, QUARTERS)
    batch, query_head, first_row, query_len, _ = at
    row, channel = places_of(taken, 0, 0)
    first, _ = residual.position(batch, residual.strides, residual.step, residual.data)
    first += wide(query_head) * residual.strides[1] + wide(first_row) * residual.step
    # What threads add to it has 32 bits: as many pointers would take twice the registers.
    pointers = residual.ptr + first + (row * residual.step + channel)
    exist = row < query_len - first_row
    if exact.shape[1] != VALUE_DIM:
        exist = exist & (channel < VALUE_DIM)
    gl.store(pointers, taken, mask=exist)


@gluon.constexpr_function
def traded(channels, both):
    """A layout of [64, channels]: that of a product after its threads traded channels by pairs
    and, of both, pairs with each other too: then each has a quarter of the channels of two rows,
    neighbours, which it writes 16 bytes at a time."""
    powers = [1 << power for power in range(channels.bit_length() - 1)]
    of_lanes = [channels // 4, channels // 2 if both else 4]
    of_registers = [power for power in powers if power not in of_lanes]
    return gl.DistributedLinearLayout(
        reg_bases=[*([0, power] for power in of_registers), [8, 0]],
        lane_bases=[*([0, power] for power in of_lanes), [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, channels],
    )


@gluon.jit
def as_it_is(numbers):
    """Numbers of 8 bits, which the compiler cannot look through."""
    return gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [numbers], dtype=gl.int8, is_pure=False, pack=4
    )


@gluon.jit
def store_in_parts(output_desc, position, attended, memory):
    """Write a tile by TMA through shared memory that may hold half of its channels only."""
    WIDTH: gl.constexpr = memory.shape[-1]
    if attended.shape[1] == WIDTH:
        store_part(output_desc, position, 0, attended, memory)
    else:
        gl.static_assert(attended.shape[1] == 2 * WIDTH)
        halves = gl.split(gl.permute(gl.reshape(attended, [ROWS, 2, WIDTH]), (0, 2, 1)))
        store_part(output_desc, position, 0, halves[0], memory)
        store_part(output_desc, position, WIDTH, halves[1], memory)


@gluon.jit
def store_part(output_desc, position, channel, part, memory):
    """Start to write some channels of 64 rows, once the shared memory is free."""
    wait_for_stores()
    as_matrix(memory).store(part)
    store(output_desc, [position[0], position[1], position[2], channel], memory)


@gluon.jit
def pad_rows(view, number, DIM: gl.constexpr):
    """Write a number to the rows behind the last sequence, by one warp that has few registers."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [1, 1], [1, 0])
    rows = gl.arange(0, 4, gl.SliceLayout(1, LAYOUT))[:, None]
    channels = gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    view.pad(view, number, rows, channels, DIM)


@gluon.jit
def pad_numbers(view, number):
    """Write a number for each row behind the last sequence, by one warp."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 1], [1, 0])
    rows = gl.arange(0, 32, gl.SliceLayout(1, LAYOUT))[:, None]
    channels = gl.arange(0, 1, gl.SliceLayout(0, LAYOUT))[None, :]
    view.pad(view, number, rows, channels, 1)


@gluon.jit
def as_matrix(memory):
    """Shared memory of one tile without its batch and head: [rows, channels]."""
    return memory.reshape([memory.shape[-2], memory.shape[-1]])
