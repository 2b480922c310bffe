"""The gated delta rule on Hopper, inverses of blocks of 16 rows, each by the warp that holds it.

A warp holds 16 rows of a square in registers, hence one block on its diagonal. It inverts it by
blocks of 2, 4, 8 and 16 rows as `saccade.ops.delta_rule.triton.chunk_system.inverse_by_blocks`
does, by products of 16 × 8 × 16 (mma.sync) between its own registers: without shared memory, and
without waiting for other warps. Triton has no name for products of a single warp's registers, so
this is PTX.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false

from __future__ import annotations

from collections.abc import Iterator

from saccade.gpu.language import gl, gluon


def inverse_of_16() -> str:
    """PTX: $0 … $31 become the inverses of I − L, with zeros beside them; $32 … $47 hold the strict
    lower triangle L, $48 … $63 what it lacks, both in bfloat16.

    A thread has rows r and r + 8 of its warp's 16, r = lane / 4, and of each 8 columns those at
    c = 2 (lane % 4) and c + 1. Its numbers lie 8 columns after 8 columns: row r, twice, then row
    r + 8. Two neighbours in bfloat16 share a register, the first in its lower half; four such
    registers are the left operand of a product. A right operand of 8 columns is two, in which rows
    and columns are swapped (movmatrix).

    d0, d1 are the numbers of row r and d2, d3 those of row r + 8 in the first 8 columns; d6, d7
    those of row r + 8 in the last 8. Row r has none there.
    """
    return "{\n" + "\n".join(f"    {line};" for line in _lines()) + "\n}"


def _lines() -> Iterator[str]:
    yield ".reg .pred w0, w1, w2, w3, on, odd, even, p"
    yield ".reg .b32 lane, r, q, half, t, zero"
    yield ".reg .b32 h0, h1, h3, l0, l1, l3, a, b, ta, tb, y0, y1, z0, z1"
    yield ".reg .f32 d0, d1, d2, d3, d6, d7, e0, e1, e2, e3, f0, f1, f2, f3, g0, g1, g2, g3"
    yield "mov.u32 t, %tid.x"
    yield "bfe.u32 t, t, 5, 2"
    for warp in range(4):
        yield f"setp.eq.u32 w{warp}, t, {warp}"
    for name, first in (("h", 32), ("l", 48)):  # the block on the diagonal
        for place in (0, 1, 3):
            yield f"selp.b32 {name}{place}, ${first + place}, ${first + 4 + place}, w0"
            yield f"@w2 mov.b32 {name}{place}, ${first + 8 + place}"
            yield f"@w3 mov.b32 {name}{place}, ${first + 12 + place}"
    yield "mov.b32 zero, 0"
    yield "mov.u32 lane, %laneid"
    yield "shr.u32 r, lane, 2"
    yield "and.b32 q, lane, 3"
    yield "shr.u32 half, r, 1"
    # Blocks of two rows: 1 on the diagonal, and L itself below it.
    yield "setp.eq.u32 on, q, half"
    yield "and.b32 t, r, 1"
    yield "setp.eq.and.u32 odd, t, 1, on"
    yield "setp.eq.and.u32 even, t, 0, on"
    for number, place in ((0, 0), (6, 3)):
        yield f"shl.b32 t, h{place}, 16"
        yield f"mov.b32 d{number}, t"
        yield f"shl.b32 t, l{place}, 16"
        yield "mov.b32 e0, t"
        yield f"add.f32 d{number}, d{number}, e0"
        yield f"selp.f32 d{number}, d{number}, 0f00000000, odd"
        yield f"selp.f32 d{number}, 0f3F800000, d{number}, even"
        yield f"selp.f32 d{number + 1}, 0f3F800000, 0f00000000, odd"
    # Blocks of 4 and of 8, both of each pair of 8 rows by one product: D + D L D, in the pairs of
    # rows that meet first in blocks of that size.
    for level in (1, 2):
        yield from _product("h0, zero, zero, h3", "l0, zero, zero, l3", "a", "b")
        if level == 1:
            yield "setp.gt.u32 p, half, q"
            yield "shr.u32 t, r, 2"
            yield "shr.u32 a, q, 1"
            yield "setp.eq.and.u32 p, t, a, p"
        else:
            yield "shr.u32 t, r, 2"
            yield "shr.u32 a, q, 1"
            yield "setp.gt.u32 p, t, a"
        for into, found in ((0, 0), (1, 1), (6, 2), (7, 3)):
            yield f"@p mov.f32 d{into}, e{found}"
    # The block of 16: rows r + 8 in the first 8 columns.
    yield from _product("h1, zero, zero, zero", "l1, zero, zero, zero", "b", "zero")
    yield "mov.f32 d2, e0"
    yield "mov.f32 d3, e1"
    numbers = "d0", "d1", "d2", "d3", "0f00000000", "0f00000000", "d6", "d7"
    for warp in range(4):
        for place, number in enumerate(numbers):
            into = f"${8 * warp + place}"
            if number.startswith("d"):
                yield f"selp.f32 {into}, {number}, 0f00000000, w{warp}"
            else:
                yield f"mov.f32 {into}, {number}"


def _product(high: str, low: str, first: str, second: str) -> Iterator[str]:
    """D L D, of which e0, e1 are the upper and e2, e3 the lower rows; high, low: parts of L.

    Of D, 8 × 8 blocks on the diagonal; on the left `first` and `second` of them ("a": the upper
    one).
    """
    yield "cvt.rn.bf16x2.f32 a, d1, d0"
    yield "cvt.rn.bf16x2.f32 b, d7, d6"
    yield "movmatrix.sync.aligned.m8n8.trans.b16 ta, a"
    yield "movmatrix.sync.aligned.m8n8.trans.b16 tb, b"
    of_second = "tb" if second != "zero" else "zero"
    yield from _multiply("e", low, f"ta, {of_second}", None)
    yield from _multiply("e", high, f"ta, {of_second}", "e")
    # In two parts: the first is the upper half of each number.
    for number in range(4):
        yield f"mov.b32 t, e{number}"
        yield "and.b32 t, t, 0xffff0000"
        yield f"mov.b32 f{number}, t"
        yield f"sub.f32 g{number}, e{number}, f{number}"
    for name, parts in (("y", "f"), ("z", "g")):
        for half in range(2):
            yield f"cvt.rn.bf16x2.f32 {name}{half}, {parts}{2 * half + 1}, {parts}{2 * half}"
            yield f"movmatrix.sync.aligned.m8n8.trans.b16 {name}{half}, {name}{half}"
    left = f"{first}, zero, zero, {second}"
    yield from _multiply("e", left, "z0, z1", None)
    yield from _multiply("e", left, "y0, y1", "e")


def _multiply(into: str, left: str, right: str, sums: str | None) -> Iterator[str]:
    """One product of 16 × 16 with 16 × 8, added to sums or to 0."""
    found = ", ".join(f"{into}{number}" for number in range(4))
    added = ", ".join(f"{sums}{number}" if sums else "0f00000000" for number in range(4))
    yield (
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
        f"{{{found}}}, {{{left}}}, {{{right}}}, {{{added}}}"
    )


INVERSE_OF_16 = gl.constexpr(inverse_of_16())
CONSTRAINTS = gl.constexpr(",".join(["=f"] * 32 + ["r"] * 32))


@gluon.jit
def inverses_of_16(high, low):
    """The inverses of I − L for the four blocks of 16 rows on the diagonal of [64, 64], and zeros
    beside them; L = high + low is strictly lower triangular."""
    return gl.inline_asm_elementwise(
        INVERSE_OF_16, CONSTRAINTS, [high, low], dtype=gl.float32, is_pure=False, pack=32
    )
