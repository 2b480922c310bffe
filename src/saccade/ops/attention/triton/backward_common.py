"""Weights and gradients of a tile of pairs, as every backward kernel computes them.

A tile lies either way: query rows as a column and key rows as a row, or the other way round. All
that depends on rows comes in already shaped, so nothing here knows which way it lies.

    weights      = exp(scores - lse - lse_residual)
    grad_scores  = weights · (grad_weights - row_dot)

The residual of the lse is what rounding took from it, which matters beside the large scores that a
caller may make (backward_lse.py). Scores that are not changed have none.

Source: FlashAttention-2 (Dao 2023), algorithm 2, lines 11 to 14.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import gdc_launch_dependents, tl, triton
from saccade.gpu.online_softmax import LOG2_E
from saccade.gpu.rounding import restored
from saccade.gpu.tensor_view import load_numbers, load_rows, num_rows, row_pointers, store_numbers


class SavedForward(NamedTuple):
    """What a backward kernel reads, as Views."""

    query: Any
    key: Any
    value: Any
    grad_output: Any
    row_lse: Any
    row_dot: Any
    lse_residual: Any  # None unless the caller changes scores


@triton.jit
def load_statistics(forward, batch, head, query_rows, query_len, WHOLE: tl.constexpr):
    """row_lse and row_dot of each row. Unless WHOLE, rows past the end get 0, which copies into
    shared memory can fill in; with queries and gradients of 0 nothing comes of them."""
    if WHOLE:
        row_lse = tl.load(row_pointers(forward.row_lse, batch, head, query_rows, 0))
        row_dot = tl.load(row_pointers(forward.row_dot, batch, head, query_rows, 0))
    else:
        row_lse = load_numbers(forward.row_lse, batch, head, query_rows, query_len, 0.0)
        row_dot = load_numbers(forward.row_dot, batch, head, query_rows, query_len, 0.0)
    return row_lse, row_dot


@triton.jit
def load_residual(forward, batch, head, query_rows, query_len, row_lse, WHOLE: tl.constexpr):
    """The residual of the lse of each row; where there is none, row_lse, which nothing reads then:
    a function cannot give None."""
    lse_residual = row_lse
    if forward.lse_residual is not None:
        if WHOLE:
            lse_residual = tl.load(row_pointers(forward.lse_residual, batch, head, query_rows, 0))
        else:
            lse_residual = load_numbers(
                forward.lse_residual, batch, head, query_rows, query_len, 0.0
            )
    return lse_residual


@triton.jit
def load_both_statistics(forward, batch, head, query_rows, query_len, WHOLE: tl.constexpr):
    """Load lse and row_dot of a tile of queries in a loop, as one load of [rows, 2].

    Triton has each thread load all numbers that it needs itself where they are fewer than threads,
    which makes most of a loop's copies copies of statistics; together they are as many.
    """
    rows, second = query_rows[:, None], tl.arange(0, 2)[None, :] == 1
    pointers = tl.where(
        second,
        row_pointers(forward.row_dot, batch, head, rows, 0),
        row_pointers(forward.row_lse, batch, head, rows, 0),
    )
    if WHOLE:  # noqa: SIM108
        both = tl.load(pointers)
    else:
        both = tl.load(pointers, mask=rows < query_len, other=0.0)
    return tl.split(both)


@triton.jit
def weigh(scores, row_lse, lse_residual, nonfinite, inside, rules, at):
    """The weights of a tile, the derivative of its scores, and which pairs are visible.

    Where nothing changes scores the derivative is a plain 1, and where nothing is hidden visible
    is a plain True; the compiler removes both.

    at: (batch, head, query rows, key rows, shift). nonfinite: pairs that hold NaN or inf, or None.
    inside: pairs inside the sequences on a partial tile, True where nothing comes of others,
    or None where all pairs are visible.
    """
    batch, head, query_rows, kv_rows, shift = at
    derivative, visible = 1.0, True
    if rules.score is None:
        weights = tl.exp2(scores * (rules.scale * LOG2_E) - row_lse)
    else:
        scaled = scores * rules.scale
        changed = rules.score.change(
            scaled, batch, head, query_rows, kv_rows, shift, rules.score.data
        )
        derivative = rules.score.derivative(
            scaled, batch, head, query_rows, kv_rows, shift, rules.score.data
        )
        weights = tl.exp2((changed - row_lse) * LOG2_E - lse_residual)
    if nonfinite is not None:
        weights = tl.where(nonfinite, float("nan"), weights)
    if inside is not None:
        visible = inside
        if rules.mask.visible is not None:
            visible = inside & rules.mask.visible(
                batch, head, query_rows, kv_rows, shift, rules.mask.data
            )
        weights = tl.where(visible, weights, 0.0)
    return weights, derivative, visible


@triton.jit
def differentiate(weights, grad_weights, row_dot, derivative, visible):
    """The gradients of the scores; 0 where a pair is hidden."""
    grad_scores = weights * (grad_weights - row_dot) * derivative
    return tl.where(visible, grad_scores, 0.0)


@triton.jit
def drop(dropout, batch, head, query_rows, kv_start, KV_TILE: tl.constexpr):
    """What each weight is multiplied by, [queries, keys]: growth, or 0 where a pair is dropped."""
    keep = dropout.kept(dropout, batch, head, query_rows, kv_start, KV_TILE)
    return tl.where(keep, dropout.data.dropout_scale, 0.0)


# ---- backward preprocess -------------------------------------------------------------------------
# Two numbers of each query row that every kernel of the backward pass reads.
#
# row_dot is Σ grad_output · output, of the output before it was rounded where its residual was kept
# (`runtime/rounding.py`); the gradient of the lse enters there and nowhere else. row_lse is the
# lse as weights are computed from it: in base 2, made here once and not again for every tile, or
# natural beside scores that the caller changed. Source: FlashAttention-2 (Dao 2023), algorithm 2,
# line 4 (D there).


@triton.jit
def attention_row_statistics(
    output, residual, grad_output, logsumexp, grad_lse, row_lse, row_dot,  # Views
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, QUERY_TILE: tl.constexpr,
    NATURAL: tl.constexpr, CHAINED: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head. NATURAL: so is row_lse. CHAINED: the next kernel
    may start early.

    residual and grad_lse may be None. A row that saw nothing gets row_dot 0 and row_lse +inf,
    which makes all its weights 0.
    """
    if CHAINED:
        gdc_launch_dependents()
    batch, head, tile, _ = output.find(tl.program_id(0), output.data, QUERY_TILE)
    query_len = num_rows(output, batch)
    rows = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)
    lse, dot, saw_nothing = statistics_of(
        output, residual, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    of_weights = lse_of_weights(lse, saw_nothing, NATURAL)
    store_numbers(row_lse, batch, head, rows, query_len, of_weights)
    store_numbers(row_dot, batch, head, rows, query_len, dot)


@triton.jit
def statistics_of(
    output, residual, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """The natural lse of some rows, their row_dot, and which of them saw nothing."""
    results = load_results(
        output, residual, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
        VALUE_DIM, VALUE_WIDTH,
    )  # fmt: skip
    return statistics_from(results, residual is not None)


@triton.jit
def load_results(
    output, residual, grad_output, logsumexp, grad_lse, batch, head, rows, query_len,
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr,
):  # fmt: skip
    """What the statistics of some rows are made from: output, its residual (or None), its
    gradient, lse, its gradient."""
    attended = load_rows(output, batch, head, rows, query_len, VALUE_DIM, VALUE_WIDTH, False)
    lost = attended  # a function cannot give None
    if residual is not None:
        lost = load_rows(residual, batch, head, rows, query_len, VALUE_DIM, VALUE_WIDTH, False)
    grad = load_rows(grad_output, batch, head, rows, query_len, VALUE_DIM, VALUE_WIDTH, False)
    lse, of_lse = load_numbers(logsumexp, batch, head, rows, query_len, 0.0), 0.0
    if grad_lse is not None:
        of_lse = load_numbers(grad_lse, batch, head, rows, query_len, 0.0)
    return attended, lost, grad, lse, of_lse


@triton.jit
def statistics_from(results, RESIDUAL: tl.constexpr):
    """`statistics_of` what `load_results` gave: loads may wait together with others."""
    attended, lost, grad, lse, of_lse = results
    exact = restored(attended, lost) if RESIDUAL else attended.to(tl.float32)
    dot = tl.sum(exact * grad.to(tl.float32), 1) - of_lse
    saw_nothing = lse == float("-inf")
    return lse, tl.where(saw_nothing, 0.0, dot), saw_nothing


@triton.jit
def lse_of_weights(lse, saw_nothing, NATURAL: tl.constexpr):
    """row_lse, as kernels that compute weights again want it."""
    if not NATURAL:
        lse = lse * LOG2_E
    return tl.where(saw_nothing, float("inf"), lse)
