"""Nan-safe sweeps: Triton sweeps of linear attention, where a row may have spoilt rows before it.

NaN or inf in a row, a value say, reaches all rows of its chunk in a product, as 0 · NaN is NaN.
Where the sums of a head hold such, all of its rows are computed once more, with the care of
Triton kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl

from saccade.ops.linear_attention.triton.chunk_scan import linear_sweep


@triton.jit
def linear_again(
    spoilt, a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before,
    A_SHARE: tl.constexpr, B_SHARE: tl.constexpr, C_SHARE: tl.constexpr,
    THROUGH_SHARE: tl.constexpr, GROUP: tl.constexpr, STATE_HEADS: tl.constexpr,
    SEGMENTS: tl.constexpr,
    INNER: tl.constexpr, INNER_WIDTH: tl.constexpr, OUTER: tl.constexpr, OUTER_TILE: tl.constexpr,
    TILES: tl.constexpr, CHUNK: tl.constexpr, PASS: tl.constexpr, CAUSAL: tl.constexpr,
    BOTTOM_RIGHT: tl.constexpr, STARTED: tl.constexpr, NORMALIZE: tl.constexpr,
    PRECISION: tl.constexpr, BEFORE: tl.constexpr, AFTER: tl.constexpr, NUMBERS: tl.constexpr,
    PARTS: tl.constexpr,
):  # fmt: skip
    """As `linear_sweep`, of segments of which one of PARTS numbers is not 0. States after segments
    stay as they are: NaN in either case."""
    segment = tl.program_id(0) // TILES
    part = tl.arange(0, triton.next_power_of_2(PARTS))
    flags = tl.load(spoilt + segment * PARTS + part, mask=part < PARTS, other=0)
    if tl.max(flags, 0) > 0:
        linear_sweep(
            a, b, c, factors, minus_delta, result, numbers, through, eps, sequence, before, None,
            A_SHARE, B_SHARE, C_SHARE, THROUGH_SHARE, GROUP, STATE_HEADS, SEGMENTS,
            INNER, INNER_WIDTH, OUTER, OUTER_TILE, TILES, CHUNK, PASS, CAUSAL, BOTTOM_RIGHT,
            STARTED, NORMALIZE, PRECISION, BEFORE, False, NUMBERS,
        )  # fmt: skip
