"""Device ops: what mask and score functions may call, as device functions.

Each one means exactly what its namesake in `saccade.modifiers.evaluate` means on torch tensors;
operators whose meaning differs between Python and C (``//`` and ``%`` of negative numbers) stand
here too.
"""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

from typing import Any, NamedTuple

from saccade.gpu.language import is_hopper, tl, triton
from saccade.gpu.signature import ALIGNMENT, FIXED, Length, fixed
from saccade.gpu.tensor_view import wide


@triton.jit
def absolute(value):
    """Magnitude."""
    return tl.abs(value)


@triton.jit
def exp(value):
    """e to the power of a number."""
    return tl.exp(value.to(tl.float32))


@triton.jit
def exp2(value):
    """2 to the power of a number."""
    return tl.exp2(value.to(tl.float32))


@triton.jit
def log(value):
    """Natural logarithm."""
    return tl.log(value.to(tl.float32))


@triton.jit
def log2(value):
    """Logarithm to base 2."""
    return tl.log2(value.to(tl.float32))


@triton.jit
def log1p(value):
    """log(1 + value), also where the sum rounds most of the value away (Kahan): then the logarithm
    of the sum is corrected by as much as the sum is off."""
    value = value.to(tl.float32)
    total = 1.0 + value
    rounded = total - 1.0
    near = tl.log(total) * (value / tl.where(rounded == 0, 1.0, rounded))
    return tl.where(rounded == 0, value, tl.where(total < float("inf"), near, total))


@triton.jit
def expm1(value):
    """exp(value) - 1, also where the difference leaves few digits (Kahan)."""
    value = value.to(tl.float32)
    grown = tl.exp(value)
    less = grown - 1.0
    usual = (less > -1.0) & (grown < float("inf")) & (less != 0)
    near = less * (value / tl.log(tl.where(usual, grown, 2.0)))
    return tl.where(less == 0, value, tl.where(usual, near, less))


@triton.jit
def sin(value):
    """Sine."""
    return tl.sin(value.to(tl.float32))


@triton.jit
def cos(value):
    """Cosine."""
    return tl.cos(value.to(tl.float32))


@triton.jit
def erf(value):
    """The error function."""
    return tl.erf(value.to(tl.float32))


@triton.jit
def sqrt(value):
    """Square root."""
    return tl.sqrt_rn(value.to(tl.float32))


@triton.jit
def sigmoid(value):
    """1 / (1 + exp(-value))."""
    return 1.0 / (1.0 + tl.exp(-value.to(tl.float32)))


@triton.jit
def tanh(value):
    """Near 0 an odd polynomial, which keeps the relative error small (Cephes, Moshier 1992)."""
    value = value.to(tl.float32)
    square = value * value
    slope = -5.70498872745e-3
    slope = slope * square + 2.06390887954e-2
    slope = slope * square - 5.37397155531e-2
    slope = slope * square + 1.33314422036e-1
    slope = slope * square - 3.33332819422e-1
    near = value + value * (square * slope)
    magnitude = tl.abs(value)
    far = 1.0 - 2.0 / (tl.exp(2.0 * magnitude) + 1.0)
    far = tl.where(value < 0, -far, far)
    return tl.where(magnitude < 0.625, near, far)


@triton.jit
def minimum(first, second):
    """The smaller one; NaN if either is."""
    return tl.minimum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def maximum(first, second):
    """The larger one; NaN if either is."""
    return tl.maximum(first, second, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def where(condition, first, second):
    """The first where the condition holds, else the second."""
    return tl.where(condition, first, second)


@triton.jit
def floor_divide(dividend, divisor):
    """Python's ``//`` of whole numbers: rounds down, where the machine rounds towards 0."""
    quotient = dividend // divisor
    rest = dividend - quotient * divisor
    return quotient - ((rest != 0) & ((rest < 0) != (divisor < 0))).to(tl.int32)


@triton.jit
def floor_modulo(dividend, divisor):
    """Python's ``%`` of whole numbers: has the divisor's sign, where the machine's has not."""
    rest = dividend % divisor
    return tl.where((rest != 0) & ((rest < 0) != (divisor < 0)), rest + divisor, rest)


@triton.jit
def floor_divide_real(dividend, divisor):
    """Python's ``//`` of real numbers, from the rest: a rounded quotient may be the next number."""
    rest = dividend % divisor
    quotient = (dividend - rest) / divisor - tl.where(is_opposite(rest, divisor), 1.0, 0.0)
    below = tl.floor(quotient)
    whole = tl.where(quotient - below > 0.5, below + 1.0, below)
    return tl.where(divisor == 0, dividend / divisor, whole)


@triton.jit
def floor_modulo_real(dividend, divisor):
    """Python's ``%`` of real numbers."""
    rest = dividend % divisor
    return tl.where(is_opposite(rest, divisor), rest + divisor, rest)


@triton.jit
def is_opposite(rest, divisor):
    """Whether a rest has another sign than the divisor, as Python's never has."""
    return (rest != 0) & ((rest < 0) != (divisor < 0))


@triton.jit
def within(row, first, last):
    """Whether a row is one from a first to a last one: one comparison, as what lies before the
    first is a large number without a sign. The two may lie farther apart than signed numbers count.
    """
    distance, span = row - first, last - first
    if span.dtype == tl.int64:
        distance = distance.to(tl.int64).to(tl.uint64, bitcast=True)
        span = span.to(tl.uint64, bitcast=True)
    else:
        distance, span = distance.to(tl.uint32, bitcast=True), span.to(tl.uint32, bitcast=True)
    return distance < tl.where(last < first, span * 0, span + 1)


@triton.jit
def near(first, second, most):
    """Whether two numbers lie at most so far apart: one comparison, as in `within`."""
    distance, span = (first + most) - second, most + most
    if distance.dtype == tl.int64:
        distance = distance.to(tl.uint64, bitcast=True)
        span = (span + 0 * first).to(tl.uint64, bitcast=True)
    else:
        distance, span = distance.to(tl.uint32, bitcast=True), span.to(tl.uint32, bitcast=True)
    return distance < tl.where(most < 0, span * 0, span + 1)


class Divisor(NamedTuple):
    """A captured number that divides, with what makes a division by it a product.

    With 2^(length - 1) < number <= 2^length, the multiplier is 2^(63 + length) / number, rounded
    up: it has 64 bits, and dividend · multiplier / 2^(63 + length) rounds down to the quotient of
    every dividend of 63 bits. Its upper half, rounded up, does the same for dividends of 31 bits.

    Attributes:
        multiplier: as a signed number, as kernels are handed numbers.
        shift: length.

    Source: Granlund & Montgomery 1994, theorem 4.2.
    """

    number: Any
    multiplier: Any
    shift: Any


class BlockSize(NamedTuple):
    """A multiple of 16 whose quotients number blocks of rows, of which a table has entries.

    Kernels are compiled for that: Triton divides, and reads the table, once for 16 neighbours. Of
    a quotient that is a product it does not know that neighbours have the same.
    """

    number: Any


def divisor_of(number: int, of_blocks: bool) -> Divisor | BlockSize:
    """A captured number that divides, as the host hands it over.

    Raises:
        ValueError: unless it is greater than 0.
    """
    if number < 1:
        raise ValueError(f"a captured number that divides: got {number}, takes one above 0")
    if of_blocks and number % ALIGNMENT == 0:
        return BlockSize(Length(number, FIXED))
    length = (number - 1).bit_length()
    multiplier = -(-(1 << (63 + length)) // number) - (1 << 64)
    return Divisor(fixed(number), fixed(multiplier), fixed(length))


@triton.jit
def quotient(dividend, divisor, NATURAL: tl.constexpr):
    """Python's ``//`` by a `Divisor` or a `BlockSize`. NATURAL: no dividend is below 0."""
    if len(divisor) > 1:
        found = by_product(dividend, divisor, NATURAL)
    elif NATURAL:
        found = dividend // divisor.number
    else:
        found = floor_divide(dividend, divisor.number)
    return found


@triton.jit
def remainder(dividend, divisor, NATURAL: tl.constexpr):
    """Python's ``%`` by one of them."""
    if len(divisor) > 1:
        rest = dividend - by_product(dividend, divisor, NATURAL) * divisor.number
        rest = rest.to(divisor.number.dtype)
    elif NATURAL:
        rest = dividend % divisor.number
    else:
        rest = floor_modulo(dividend, divisor.number)
    return rest


@triton.jit
def by_product(dividend, divisor, NATURAL: tl.constexpr):
    """The quotient by a `Divisor`.

    A dividend below 0 is turned over, bit by bit, to one that is not, and so is its quotient:
    -1 - ((-1 - n) // d) is n // d, rounded down.
    """
    dividend = dividend + divisor.number * 0  # with as many bits as the wider one
    if dividend.dtype == tl.int64:
        sign = dividend >> 63
        doubled = ((dividend if NATURAL else dividend ^ sign) << 1).to(tl.uint64, bitcast=True)
        multiplier = divisor.multiplier.to(tl.int64).to(tl.uint64, bitcast=True)
        found = tl.umulhi(doubled, multiplier) >> divisor.shift.to(tl.uint64)
        found = found.to(tl.int64, bitcast=True)
    else:
        sign = dividend >> 31
        doubled = ((dividend if NATURAL else dividend ^ sign) << 1).to(tl.uint32, bitcast=True)
        multiplier = divisor.multiplier.to(tl.int64).to(tl.uint64, bitcast=True)
        upper_half = ((multiplier - 1) >> 32).to(tl.uint32) + 1
        found = tl.umulhi(doubled, upper_half) >> divisor.shift.to(tl.uint32)
        found = found.to(tl.int32, bitcast=True)
    return found if NATURAL else found ^ sign


# ---- kinds of numbers ------------------------------------------------------------------------


@triton.jit
def to_real(value):
    """A truth or a whole number, or one of another width, as a real number."""
    return value.to(tl.float32)


@triton.jit
def to_whole(value):
    """A real number without what stands behind its point."""
    return value.to(tl.int64)


@triton.jit
def to_int32(value):
    """A whole number of a narrow table: 8 and 16 bits would wrap round, uint8 meets no int8."""
    return value.to(tl.int32)


@triton.jit
def widened(value):
    """A whole number with 64 bits, where sums and products may pass 32."""
    return value.to(tl.int64)


# ---- captured tensors: (pointer, sizes, strides) ---------------------------------------------


@triton.jit
def nearest(index, table, DIM: tl.constexpr):
    """Where the entry nearest to an index lies along one dimension of a table, in elements."""
    inside = tl.minimum(tl.maximum(index, 0), table[1][DIM] - 1)
    return wide(inside) * table[2][DIM]


@triton.jit
def up_to_last(index, table, DIM: tl.constexpr):
    """`nearest` of an index that is counted from 0."""
    return wide(tl.minimum(index, table[1][DIM] - 1)) * table[2][DIM]


@triton.jit
def entry(index, table, DIM: tl.constexpr):
    """The offset of an index that counts from the end where it is below 0, as in Python.

    One outside of the table's entries is brought inside by one comparison of numbers without signs.
    """
    counted = tl.where(index < 0, index + table[1][DIM], index)
    last = table[1][DIM] - 1 + 0 * counted
    if last.dtype == tl.int64:
        inside = tl.minimum(
            counted.to(tl.int64).to(tl.uint64, bitcast=True), last.to(tl.uint64, bitcast=True)
        ).to(tl.int64, bitcast=True)
    else:
        inside = tl.minimum(
            counted.to(tl.uint32, bitcast=True), last.to(tl.uint32, bitcast=True)
        ).to(tl.int32, bitcast=True)
    return wide(inside) * table[2][DIM]


@triton.jit
def read(table, offset, DIMS: tl.constexpr):
    """The entries of a table at offsets in elements."""
    tl.static_assert(len(table[1]) == DIMS, "take: needs one index for each dimension of a table")
    return tl.load(table[0] + offset)


LOAD_4_BYTES: Any = tl.constexpr("ld.global.b32 $0, [$1];")
LOAD_8_BYTES: Any = tl.constexpr("ld.global.b64 $0, [$1];")


@triton.jit
def gather(table, offset, DIMS: tl.constexpr):
    """`read` of entries that do not lie side by side.

    As a load of Triton's, the entries of coming tiles would go to shared memory one by one and wait
    there, a tile of them for each stage, so that fewer programs share a multiprocessor. What was
    timed is Hopper; 16 bits and fewer are not loaded ahead anyway.
    """
    tl.static_assert(len(table[1]) == DIMS, "take: needs one index for each dimension of a table")
    pointers = table[0] + offset
    DTYPE: tl.constexpr = pointers.dtype.element_ty
    if is_hopper() and DTYPE.primitive_bitwidth == 32:  # pyright: ignore[reportAttributeAccessIssue]
        entries = tl.inline_asm_elementwise(
            LOAD_4_BYTES, "=r,l", [pointers.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
        ).to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
    elif is_hopper() and DTYPE.primitive_bitwidth == 64:  # pyright: ignore[reportAttributeAccessIssue]
        entries = tl.inline_asm_elementwise(
            LOAD_8_BYTES, "=l,l", [pointers.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
        ).to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
    else:
        entries = tl.load(pointers)
    return entries


# ---- quantize ------------------------------------------------------------------------------------
# Numbers as eight bits, as `saccade.kv_cache.storage` and PyTorch round them.

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
