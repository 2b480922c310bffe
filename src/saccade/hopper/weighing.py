"""Weighing: from scores to weights, on tiles in any layout of registers."""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.hopper.schedule import is_edge, tile_of
from saccade.kernels.softmax import LN_2, LOG2_E

ROWS = gl.constexpr(64)  # query rows of one consumer, as many as one WGMMA takes


@gluon.jit
def change_and_hide(scores, rules, at, walk, index):
    """The scores of tile number `index` of a walk, ready to be weighed."""
    if rules.score is not None:
        scores = change(scores, rules, at, tile_of(rules, walk, index) * scores.shape[1])
    if is_edge(walk, index):  # all others run without mask arithmetic
        scores = hide(scores, rules, at, tile_of(rules, walk, index) * scores.shape[1])
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
    if kv_start + scores.shape[1] > kv_len:  # few edges do, and a comparison costs as a mask does
        scores = gl.where(kv_rows < kv_len, scores, float("-inf"))
    if rules.mask.visible is not None:
        visible = rules.mask.visible(
            batch, query_head, query_rows, kv_rows, kv_len - query_len, rules.mask.data
        )
        scores = gl.where(visible, scores, float("-inf"))
    return scores


@gluon.jit
def weigh(scores, rules, row_max):
    """Weights of a tile, what shrinks everything summed before it, and the new row_max.

    As `softmax.softmax_step`, but no thread waits for another one, except for the maximum.
    """
    new_max, shift, rescale = raise_maximum(scores, rules, row_max)
    return weights_of(scores, rules, shift), rescale, new_max


@gluon.jit
def raise_maximum(scores, rules, row_max):
    """The new row_max, what exponents are shifted by, and what shrinks everything summed before.

    The maximum is taken in two steps: four short chains of instructions take less time than two
    long ones.
    """
    in_parts = gl.reshape(scores, [scores.shape[0], scores.shape[1] // 8, 8])
    tile_max = gl.max(gl.max(in_parts, 1), 1)
    tile_max = gl.convert_layout(tile_max, row_max.type.layout) * exponent_factor(rules)
    new_max = gl.maximum(row_max, tile_max)
    shift = gl.where(new_max == float("-inf"), 0.0, new_max)
    return new_max, shift, gl.exp2(row_max - shift)


@gluon.jit
def weights_of(scores, rules, shift):
    """The weights of scores."""
    return gl.exp2(scores * exponent_factor(rules) - shift[:, None])


@gluon.jit
def exponent_factor(rules):
    """What turns scores into exponents of 2; scores that the caller changed are scaled already."""
    return LOG2_E if rules.score is not None else rules.scale * LOG2_E


@gluon.jit
def sum_by_thread(weights):
    """Sums of each row, of what one thread holds of it: [rows, 8]."""
    return gl.sum(gl.reshape(weights, [weights.shape[0], weights.shape[1] // 8, 8]), 1)


@gluon.jit
def settle(row_max, row_sum, sinks, query_head):
    """What the weighted sums are multiplied by at last, and the natural lse.

    A sink joins the sum of the weights and has no value. A row that saw nothing has the lse -inf.
    """
    LAYOUT: gl.constexpr = row_max.type.layout
    shrink = gl.full([ROWS], 1.0, gl.float32, LAYOUT)
    if sinks is not None:
        sink = gl.load(sinks + query_head).to(gl.float32) * LOG2_E
        new_max = gl.maximum(row_max, sink)
        shift = gl.where(new_max == float("-inf"), 0.0, new_max)
        shrink = gl.exp2(row_max - shift)
        row_sum = row_sum * shrink + gl.exp2(sink - shift)
        row_max = new_max
    divisor = gl.where(row_sum == 0, 1.0, row_sum)
    return shrink / divisor, (row_max + gl.log2(divisor)) * LN_2


@gluon.jit
def along_rows(numbers, tile):
    """One number a row, as a column beside a tile."""
    return gl.convert_layout(numbers, gl.SliceLayout(1, tile.type.layout))[:, None]


@gluon.jit
def places_of(tile, first_row, first_column):
    """The places of a tile's numbers: a column of rows, and a row of columns."""
    LAYOUT: gl.constexpr = tile.type.layout
    rows = first_row + gl.arange(0, tile.shape[0], gl.SliceLayout(1, LAYOUT))
    columns = first_column + gl.arange(0, tile.shape[1], gl.SliceLayout(0, LAYOUT))
    return rows[:, None], columns[None, :]
