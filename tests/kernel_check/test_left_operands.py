"""Registers of WGMMA: constants that machine code lacks, and what it writes too early."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from types import SimpleNamespace

import pytest

from saccade.kernel_check import left_operands, worker
from saccade.kernel_check.calls import DeltaCall
from saccade.kernel_check.catalogue import Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

PTX = """
    mov.b32 	%r1, -2147450880;
    cvt.rn.bf16x2.f32 	%r2, %r8, %r9;
    mov.b32 %r3, %r2;
    mov.b32 %r4, %r1;
    mov.b32 	%r5, 0;
    mov.b32 %r6, %r2;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r20,%r21}, {%r3,%r4,%r5,%r6}, %rd1, 1;
    wgmma.commit_group.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r20,%r21}, %rd2, %rd1, 1;
    wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {%r20,%r21}, {%r3,%r4,%r5,%r6}, %rd3, 1;
"""
# As ptxas has it where nothing is lost.
MOVED = "/*0010*/ IMAD.MOV.U32 R129, RZ, RZ, -0x7fff8000 ;"
CLEARED = "/*0020*/ IMAD.U32 R130, RZ, RZ, UR4 ;"
FIRST = "/*0050*/ HGMMA.64x64x16.F32.BF16 R56, R128, gdesc[UR4].tnspB, R56, gsb0 ;"
LISTING = [
    "/*0000*/ UMOV UR4, URZ ;",
    MOVED,
    CLEARED,
    "/*0030*/ PRMT R128, R135, 0x5410, R132 ;",
    FIRST,
    "/*0060*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;",
    "/*0070*/ HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56 ;",
    "/*0080*/ HGMMA.64x64x16.F32.BF16 R56, R128, gdesc[UR12].tnspB, R56, gsb0 ;",
]
WRITTEN = ["", "0x80008000", "0x0", ""]


def after(line: str) -> Callable[[list[str]], list[str]]:
    """The same code, but for a line that stands behind the first product."""

    def changed(listing: list[str]) -> list[str]:
        rest = [each for each in listing if each != line]
        place = rest.index(FIRST) + 1
        return [*rest[:place], line, *rest[place:]]

    return changed


def test_constants_are_read_from_ptx() -> None:
    assert left_operands.of_ptx(PTX) == [WRITTEN, WRITTEN]
    twice = PTX.replace("wgmma.commit", "mov.b32 %r4, %r2;\n wgmma.commit")
    assert left_operands.of_ptx(twice) == [["", "", "0x0", ""]] * 2
    assert left_operands.of_ptx("ret;") == []


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (list, 0),
        (after(MOVED), 1),
        (after(CLEARED), 1),
        (lambda listing: [line for line in listing if line != MOVED], 2),
        (lambda listing: [line.replace("-0x7fff8000", "0x80008000") for line in listing], 0),
        (lambda listing: [line.replace("-0x7fff8000", "0x3f803f80") for line in listing], 2),
        # What loads four registers overwrites the constants.
        (lambda listing: [*listing[:4], "/*0040*/ LDSM.16.M88.4 R128, [R7] ;", *listing[4:]], 4),
        (lambda listing: [*listing[:4], "/*0040*/ LDS.64 R130, [R7] ;", *listing[4:]], 2),
    ],
)
def test_constants_are_looked_for_in_machine_code(
    change: Callable[[list[str]], list[str]], lost: int
) -> None:
    operands = left_operands.of_ptx(PTX)
    assert left_operands.lost_constants(operands, change(LISTING)) == lost


def test_other_products_than_those_of_ptx_are_an_error() -> None:
    operands = left_operands.of_ptx(PTX)
    with pytest.raises(ValueError, match=r"1 products of machine code .*, 2 of PTX"):
        left_operands.lost_constants(operands, LISTING[:-1])


def test_a_kernel_that_lost_some_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = SimpleNamespace(asm={"ptx": PTX, "cubin": b""})
    monkeypatch.setattr(left_operands, "disassembled", lambda cubin: LISTING)
    left_operands.check(compiled)
    monkeypatch.setattr(left_operands, "disassembled", lambda cubin: after(MOVED)(LISTING))
    with pytest.raises(ValueError, match="left out 1 constants"):
        left_operands.check(compiled)
    monkeypatch.setattr(left_operands, "disassembled", lambda cubin: [*LISTING, MOVED])
    with pytest.raises(ValueError, match=r"does not wait for WGMMA: IMAD\.MOV.* writes R129"):
        left_operands.check(compiled)
    left_operands.check(SimpleNamespace(asm={"amdgcn": ""}))


WAIT = "/*0060*/ WARPGROUP.DEPBAR.LE gsb0, 0x0 ;"
ONE_LEFT = "/*0060*/ WARPGROUP.DEPBAR.LE gsb0, 0x1 ;"
SECOND = "/*0070*/ HGMMA.64x64x16.F32.BF16 R88, gdesc[UR8], R88, gsb0 ;"
EITHER = "/*0000*/ @P0 BRA `(.L_x_1) ;"


@pytest.mark.parametrize(
    ("listing", "found"),
    [
        ([FIRST, MOVED, WAIT], ["writes R129"]),
        ([FIRST, WAIT, MOVED], []),
        ([FIRST, "/*0070*/ LDS.128 R128, [R7] ;", WAIT], ["writes R128"]),
        ([FIRST, "/*0070*/ F2FP.BF16.F32.PACK_AB R9, R57, R56 ;", WAIT], ["reads R57"]),
        ([FIRST, "/*0070*/ STG.E desc[UR4][R2.64], R60 ;", WAIT], ["reads R60"]),
        ([FIRST, "/*0070*/ FADD R9, R128, R129.reuse ;", WAIT], []),  # operands may be read
        ([FIRST, "/*0070*/ ISETP.GT.AND P0, PT, R129, R3, PT ;", WAIT], []),
        # A wait for all groups but the last retires the first one alone.
        ([FIRST, SECOND, ONE_LEFT, MOVED], []),
        ([SECOND, FIRST, ONE_LEFT, MOVED], ["writes R129"]),
        ([FIRST, SECOND, ONE_LEFT, "/*0080*/ FADD R9, R88, R3 ;"], ["reads R88"]),
        # One path waits and the other does not.
        ([FIRST, EITHER, WAIT, ".L_x_1:", MOVED], ["writes R129"]),
        ([FIRST, EITHER, MOVED, "/*0080*/ EXIT ;", ".L_x_1:", WAIT], ["writes R129"]),
        ([FIRST, EITHER, "/*0080*/ EXIT ;", MOVED, ".L_x_1:", WAIT], []),  # nothing leads there
        # A loop writes it for the product of its next turn.
        ([".L_x_1:", MOVED, FIRST, EITHER, WAIT], ["writes R129"]),
        ([".L_x_1:", MOVED, FIRST, WAIT, EITHER], []),
        ([], []),
    ],
)
def test_registers_of_a_running_product_are_left_alone(
    listing: list[str], found: list[str]
) -> None:
    early = left_operands.too_early(listing)
    assert len(early) == len(found)
    for said, wanted in zip(early, found, strict=True):
        assert said.endswith(wanted)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_systems_of_the_delta_rule_lose_none(dtype: str) -> None:
    """By Triton 3.8 a product of theirs did in most forms, where ptxas was 12.9."""
    calls = [DeltaCall(128, dtype, decay) for decay in ("none", "heads", "channels")]
    jobs = [Job("sm_90", call, "delta", ("delta_system",)) for call in calls]
    found = worker.compile_all(jobs, 1)
    assert len(found) == len(jobs)
    assert [each.error for each in found] == [""] * len(jobs)
