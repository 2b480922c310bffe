"""Units of weighted sums: scales by blocks of values, at one number a tile.

A sum of weights · values is counted in units of the scale of the values that were added last. So
what is added needs no scale, and what shrinks the sum before, where a larger score came, is
multiplied by the ratio of two scales. Where all keys have one scale, sums have the unit 1, and are
multiplied by it in the end.
"""

# Triton's language has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false

from __future__ import annotations

from saccade.gpu.language import gl, gluon
from saccade.ops.attention_fp8.triton.numbers import load_scale

# Units are from 1 / WIDEST to WIDEST: products of two e4m3 numbers are from 2^-18 to 2^18, and 2^27
# of them times WIDEST^2, or one over it, fit float32.
WIDEST = gl.constexpr(2.0**40)


@gluon.jit
def load_unit(scale, batch, kv_head, kv_start):
    """The unit of the sums once a tile of values is added; 1 where all keys have one scale."""
    unit = 1.0
    if scale is not None:  # noqa: SIM102 (known when compiling)
        if scale.step != 0:
            unit = load_safe_scale(scale, batch, kv_head, kv_start)
    return unit


@gluon.jit
def load_safe_scale(scale, batch, kv_head, kv_start):
    """The scale of a tile of values, or NaN, so that all is done again (`nonfinite.py`), where sums
    in such units might leave float32."""
    found = load_scale(scale, batch, kv_head, kv_start)
    return gl.where((found >= 1.0 / WIDEST) & (found <= WIDEST), found, float("nan"))


@gluon.jit
def change_of_unit(scale, unit, new_unit):
    """What a sum counted in one unit is multiplied by to be counted in a new one."""
    factor = 1.0
    if scale is not None:  # noqa: SIM102 (known when compiling)
        if scale.step != 0:
            factor = unit / new_unit
    return factor


@gluon.jit
def in_numbers(weighted_sum, unit, scale, batch, kv_head):
    """A sum that is counted in a unit as numbers."""
    if scale is not None:
        if scale.step == 0:  # one for all keys
            unit = load_safe_scale(scale, batch, kv_head, 0)
        weighted_sum = weighted_sum * unit
    return weighted_sum
