"""e4m3 numbers in kernels: how numbers become such, and what products take.

Triton's interpreter converts to e4m3 wrongly (it rounds halves up, and a carry into the exponent is
lost) and reads e4m3's NaN as 480. There bits are put together by hand, and products are of float16,
which holds all e4m3 numbers exactly; a GPU has instructions for both.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from saccade.gpu.device_ops import as_fp8_bytes
from saccade.gpu.language import builtin_of_ours, tl, triton


@builtin_of_ours
def interpreted(_semantic: Any = None) -> Any:
    """Whether Triton's interpreter runs the kernel."""
    return True if _semantic is None else tl.constexpr(False)


@triton.jit
def as_e4m3(numbers):
    """float32 numbers of at most 448, rounded to the nearest, halves to even; NaN stays."""
    if interpreted():
        rounded = as_fp8_bytes(numbers).to(tl.float8e4nv, bitcast=True)
    else:
        rounded = numbers.to(tl.float8e4nv)
    return rounded


@triton.jit
def as_e4m3_words(tiles):
    """Four tiles' numbers, as `as_e4m3` has them or e4m3 already, in the bytes of one tile's."""
    if tiles[0].dtype != tl.float32 or interpreted():
        words = tl.zeros(tiles[0].shape, tl.uint32)
        for byte in tl.static_range(4):
            numbers = tiles[byte]
            if numbers.dtype == tl.float32:
                numbers = as_e4m3(numbers)
            words = words | (numbers.to(tl.uint8, bitcast=True).to(tl.uint32) << (8 * byte))
        words = words.to(tl.int32, bitcast=True)
    else:  # cvt puts its first operand into the upper half
        words = tl.inline_asm_elementwise(
            "{ .reg .b16 low, high; cvt.rn.satfinite.e4m3x2.f32 low, $2, $1; "
            "cvt.rn.satfinite.e4m3x2.f32 high, $4, $3; mov.b32 $0, {low, high}; }",
            "=r,f,f,f,f", [tiles[0], tiles[1], tiles[2], tiles[3]],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    return words


@triton.jit
def as_half(numbers):
    """e4m3 numbers as float16, exactly."""
    if interpreted():
        bits = numbers.to(tl.uint8, bitcast=True).to(tl.uint16)
        # float16's layout but for a shorter mantissa and a bias of 7 instead of 15.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        exact = (half.to(tl.float32) * 256.0).to(tl.float16)
        exact = tl.where((bits & 0x7F) == 0x7F, float("nan"), exact)
    else:
        exact = numbers.to(tl.float16)
    return exact


@triton.jit
def operand(numbers, EXACT: tl.constexpr):
    """e4m3 numbers as a product takes them; EXACT: as float16, whose sums are of float32."""
    if EXACT or interpreted():  # noqa: SIM108
        made = as_half(numbers)
    else:
        made = numbers
    return made
