"""Preprocess: two numbers of each query row that every kernel of the backward pass reads.

row_dot is Σ grad_output · output; the gradient of the lse enters there and nowhere else. lse_log2
is the lse in base 2, made here once and not again for every tile. Source: FlashAttention-2 (Dao
2023), algorithm 2, line 4 (D there).
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents

from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.tensor_view import load_numbers, load_rows, num_rows, store_numbers


@triton.jit
def attention_row_statistics(
    output, grad_output, logsumexp, grad_lse, lse_log2, row_dot,  # Views; grad_lse may be None
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, QUERY_TILE: tl.constexpr,
    CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head. CHAINED: the next kernel may start early.

    A row that saw nothing gets row_dot 0 and lse_log2 +inf, which makes all its weights 0.
    """
    if CHAINED:
        gdc_launch_dependents()
    batch, head, tile, _ = output.find(tl.program_id(0), output.data, QUERY_TILE)
    query_len = num_rows(output, batch)
    rows = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)
    lse, dot, saw_nothing = statistics_of(
        output, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    base_2 = in_base_2(lse, saw_nothing)
    store_numbers(lse_log2, batch, head, rows, query_len, base_2)
    store_numbers(row_dot, batch, head, rows, query_len, dot)


@triton.jit
def statistics_of(
    output, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """The natural lse of some rows, their row_dot, and which of them saw nothing."""
    given = load_given(
        output, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    return statistics_from(given)


@triton.jit
def load_given(
    output, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """What the statistics of some rows are made from: output, its gradient, lse, its gradient."""
    attended = load_rows(output, batch, head, rows, query_len, VALUE_DIM, VALUE_WIDTH, False)
    grad = load_rows(grad_output, batch, head, rows, query_len, VALUE_DIM, VALUE_WIDTH, False)
    lse, of_lse = load_numbers(logsumexp, batch, head, rows, query_len, 0.0), 0.0
    if grad_lse is not None:
        of_lse = load_numbers(grad_lse, batch, head, rows, query_len, 0.0)
    return attended, grad, lse, of_lse


@triton.jit
def statistics_from(given):
    """`statistics_of` what `load_given` gave: loads may wait together with others."""
    attended, grad, lse, of_lse = given
    dot = tl.sum(attended.to(tl.float32) * grad.to(tl.float32), 1) - of_lse
    saw_nothing = lse == float("-inf")
    return lse, tl.where(saw_nothing, 0.0, dot), saw_nothing


@triton.jit
def in_base_2(lse, saw_nothing):
    """lse_log2, as kernels that compute weights again want it."""
    return tl.where(saw_nothing, float("inf"), lse * LOG2_E)
