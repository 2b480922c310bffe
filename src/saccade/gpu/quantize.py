"""Quantize: numbers as eight bits, as `saccade.kv_cache.quantization` and PyTorch round them."""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import triton
import triton.language as tl

LARGEST_INT8 = tl.constexpr(127.0)
LARGEST_FP8 = tl.constexpr(448.0)
SMALLEST = tl.constexpr(1.1754943508222875e-38)  # normal float32
ROUNDS = tl.constexpr(12582912.0)  # 1.5 · 2^23: a sum with it has no bits behind the point
TINIEST_NORMAL = tl.constexpr(0.015625)  # of e4m3: 2^-6
ROUNDS_TINY = tl.constexpr(16384.0)  # 2^14: the last bit of a sum with it is 2^-9, e4m3's smallest


@triton.jit
def row_scales(rows, FP8: tl.constexpr):
    """The factor of each row [rows, channels], whose largest number takes the whole range."""
    largest = tl.max(tl.abs(rows), 1, keep_dims=True)
    nonfinite = tl.max((tl.abs(rows) < float("inf")).to(tl.int32) ^ 1, 1, keep_dims=True) > 0
    scales = tl.div_rn(largest, largest * 0.0 + (LARGEST_FP8 if FP8 else LARGEST_INT8))
    scales = tl.maximum(scales, SMALLEST)
    return tl.where(nonfinite, float("nan"), scales)


@triton.jit
def divided(rows, scales):
    """Rows in units of their factors; 0 where a row is nonfinite."""
    units = tl.div_rn(rows, rows * 0.0 + scales)
    return tl.where(tl.abs(units) < float("inf"), units, 0.0)


@triton.jit
def as_int8(numbers):
    """Rounded to the nearest whole number, halves to even."""
    return ((numbers + ROUNDS) - ROUNDS).to(tl.int8)


@triton.jit
def as_fp8_bytes(numbers):
    """The bits of float8_e4m3fn: rounded to the nearest, halves to even; NaN beyond 464."""
    bits = numbers.to(tl.int32, bitcast=True)
    sign = (bits >> 24) & 0x80
    magnitude = bits & 0x7FFFFFFF
    # 20 bits of the mantissa go; exponents are biased by 127 in float32, by 7 in e4m3.
    normal = (magnitude + 0x7FFFF + ((magnitude >> 20) & 1)) >> 20
    normal = normal - (120 << 3)
    size = magnitude.to(tl.float32, bitcast=True)
    tiny = (size + ROUNDS_TINY).to(tl.int32, bitcast=True) & 0xFF
    found = tl.where(size < TINIEST_NORMAL, tiny, normal)
    found = tl.where(size <= 464.0, found, 0x7F)
    return (sign | found).to(tl.uint8)
