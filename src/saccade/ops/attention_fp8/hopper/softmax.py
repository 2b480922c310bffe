"""Softmax of fp8 attention: from scores to weights as e4m3 numbers, the operand of a product.

As in `ops/attention/hopper/softmax.py` a weight is 2 to the power of a score less the reference of
its row, and references are raised for the largest score of a tile, or afterwards, where sums of
weights ask for it. Here a reference is LIFT below the largest score: weights are up to 2^LIFT then,
so that small ones survive as e4m3 numbers, and sums have no need to be told.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from saccade.gpu.language import gl, gluon
from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.tensor_view import load_numbers
from saccade.ops.attention.hopper.softmax import (
    LAZY_RESCALE,
    ROWS,
    places_of,
    rescaled,
    spread,
    sum_by_thread,
)
from saccade.runtime.fp8_spec import WEIGHTS_LOG2

LIFT = gl.constexpr(float(WEIGHTS_LOG2))
LIFTED = gl.constexpr(2.0**WEIGHTS_LOG2)


@gluon.jit
def change(scores, factor, scales, rules, at, kv_start):
    """Products of a tile as the caller changes them; factor: what makes scores of them."""
    batch, query_head, first_row, query_len, kv_len = at
    query_rows, kv_rows = places_of(scores, first_row, kv_start)
    scores = scores * factor
    if scales.shift is not None:
        scores += shift_of(scales, rules, at, scores)
    return rules.score.change(
        scores, batch, query_head, query_rows, kv_rows, kv_len - query_len, rules.score.data
    )


@gluon.jit
def shift_of(scales, rules, at, scores):
    """What smoothing took from the scores of each row, as a column beside them."""
    batch, query_head, first_row, query_len, _ = at
    rows = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, scores.type.layout))
    shift = load_numbers(scales.shift, batch, query_head, rows, query_len, 0.0)
    return (rules.scale * shift)[:, None]


@gluon.jit
def exponent_factor(factor, rules):
    """What turns scores into exponents of 2; scores that the caller changed are scaled already."""
    return LOG2_E if rules.score is not None else factor * LOG2_E


@gluon.jit
def raise_by_largest(scores, factor, reference):
    """References of rows that suit the largest scores of a tile, and what shrinks everything
    before. Numbers of each row are held by thread, [ROWS, 8]."""
    largest = gl.max(gl.reshape(scores, [scores.shape[0], scores.shape[1] // 8, 8]), 1)
    LAYOUT: gl.constexpr = largest.type.layout
    lift = gl.full([scores.shape[0], 8], LIFT, gl.float32, LAYOUT)
    largest = gl.max(largest, 1)[:, None] * factor - lift
    reference = gl.convert_layout(reference, LAYOUT)
    raised = gl.where(largest > reference, largest, reference)
    return raised, gl.exp2(reference - raised)


@gluon.jit
def weigh_by_largest(scores, factor, reference):
    """Weights of a tile, their sums by thread, references that its largest scores ask for, and what
    shrinks everything before."""
    reference, rescale = raise_by_largest(scores, factor, reference)
    weights = gl.exp2(scores * factor - spread(reference, scores))
    return weights, sum_by_thread(weights), reference, rescale


@gluon.jit
def weigh_by_reference(scores, factor, reference):
    """Weights of a tile, and the rest, where every row has seen a key: sums tell whether references
    should have been raised."""
    weights = gl.exp2(scores * factor - spread(reference, scores))
    sums = sum_by_thread(weights)
    rescale, raised = lazy_rescale(sums)
    return rescaled(weights, rescale), sums * rescale, reference + raised, rescale


@gluon.constexpr_function
def with_limit(assembly):
    """`LAZY_RESCALE` for weights that become e4m3 numbers, of 448 at most: a sum of 16 weights that
    exceeds it is made one of 64 to 128."""
    limits, exponents = assembly.count("0f43800000"), assembly.count("sub.s32 k, k, 127;")
    assert (limits, exponents) == (3, 2)
    assembly = assembly.replace("0f43800000", "0f43E00000")
    return assembly.replace("sub.s32 k, k, 127;", "sub.s32 k, k, 133;")


@gluon.jit
def lazy_rescale(sums):
    """What shrinks a tile and everything before, as sums of its weights by thread tell, and by how
    much that raises the references: 1 and 0, unless a sum of the row exceeds 448."""
    ASSEMBLY: gl.constexpr = with_limit(LAZY_RESCALE)
    return gl.inline_asm_elementwise(
        ASSEMBLY, "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f", [sums],
        dtype=(gl.float32, gl.float32), is_pure=False, pack=4,
    )  # fmt: skip


@gluon.jit
def as_operand(weights, SUMS: gl.constexpr):
    """Weights as e4m3 numbers, as a product takes them from registers.

    Keys of each 16 are taken in the order in which a thread holds them, so that no number leaves
    its thread; values lie in the same order (`operand_order`, triton/quantise.py).
    """
    KEYS: gl.constexpr = weights.shape[1]
    # A thread of a quad holds keys 2t, 2t + 1, 2t + 8 and 2t + 9, and an operand's four in a row.
    parts = gl.reshape(weights, [ROWS, KEYS // 16, 2, 4, 2])
    moved = gl.reshape(gl.permute(parts, (0, 1, 3, 2, 4)), [ROWS, KEYS])
    moved = gl.convert_layout(moved, gl.DotOperandLayout(0, SUMS, 4))
    # $1 to $4: four neighbours of a row. cvt puts its first operand into the upper half.
    return gl.inline_asm_elementwise(
        "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
        "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
        "=r,f,f,f,f", [moved], dtype=gl.float8e4nv, is_pure=True, pack=4,
    )  # fmt: skip
