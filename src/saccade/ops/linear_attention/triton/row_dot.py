"""Linear attention, row dot: what all sweeps of a backward pass need of each query row.

    factor = 1 / divisor
    minus_delta = −(grad_output · output) · ∂divisor/∂total

Source: the derivative of a quotient; see chunk_scan.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.gpu.tensor_view import load_numbers, load_rows, num_rows, store_numbers
from saccade.ops.linear_attention.triton.finish import quotient_of


@triton.jit
def linear_row_dot(
    output, grad_output, totals, factors, minus_delta, eps,  # Views, and a number
    VALUE_DIM: tl.constexpr, VALUE_WIDTH: tl.constexpr, QUERY_TILE: tl.constexpr,
    NORMALIZE: tl.constexpr,
):  # fmt: skip
    """One program: QUERY_TILE rows of one head."""
    batch, head, tile, _ = output.find(tl.program_id(0), output.data, QUERY_TILE)
    length = num_rows(output, batch)
    rows = tile * QUERY_TILE + tl.arange(0, QUERY_TILE)
    attended = load_rows(output, batch, head, rows, length, VALUE_DIM, VALUE_WIDTH, False)
    grad = load_rows(grad_output, batch, head, rows, length, VALUE_DIM, VALUE_WIDTH, False)
    total = load_numbers(totals, batch, head, rows, length, 0.0)
    factor, slope = quotient_of(total, eps, NORMALIZE)
    dot = tl.sum(attended.to(tl.float32) * grad.to(tl.float32), 1) * slope
    store_numbers(factors, batch, head, rows, length, factor)
    store_numbers(minus_delta, batch, head, rows, length, -dot)
