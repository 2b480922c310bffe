"""PTX of the pipeline gives what plain Triton does; it runs on a GPU only, plain Triton everywhere.

What waits (`wait_for_sums`) gives nothing to compare; the tests of gradients in key order show it.
"""

# Triton's language has no types that a checker follows.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportFunctionMemberAccess=false, reportPrivateImportUsage=false

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from saccade.gpu.hopper.pipeline import as_operand, count_at, flag_at, here
from saccade.gpu.language import INTERPRETED, gl, gluon, tl, triton
from saccade.ops.attention.hopper.forward import mma_layout

interpreted = pytest.mark.skipif(not INTERPRETED, reason="it takes the interpreter")
NUMBERS = torch.tensor([3, -7, 2**31 - 1, -(2**31)], dtype=torch.int32)


@triton.jit
def plain_numbers(numbers, found):
    """What `here`, `count_at` and `flag_at` give in `assembled_numbers`."""
    program = tl.program_id(0)
    number = tl.load(numbers + program)
    for copy in tl.static_range(3):
        tl.store(found + program * 3 + copy, number)


@gluon.jit
def assembled_numbers(numbers, found):
    """A number in memory, by three ways."""
    program = gl.program_id(0)
    gl.store(found + program * 3, here(gl.load(numbers + program)))
    gl.store(found + program * 3 + 1, count_at(numbers + program))
    gl.store(found + program * 3 + 2, flag_at(numbers + program))


@triton.jit
def plain_operand(weights, found, SIZE: tl.constexpr):
    """What `as_operand` gives in `assembled_operand`."""
    numbers = tl.arange(0, SIZE)
    tl.store(found + numbers, tl.load(weights + numbers).to(found.dtype.element_ty))


@gluon.jit
def assembled_operand(weights, found, BY_TWOS: gl.constexpr):
    """Weights [64, 64] as a left operand of a product whose sums have 64 columns. BY_TWOS: whether
    assembly converts them, so that Triton takes the two forms for two kernels."""
    SUMS: gl.constexpr = mma_layout(64)
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 2)
    tile = gl.load(weights + places(SUMS))
    gl.store(found + places(LEFT), as_operand(tile, found.dtype.element_ty, SUMS))


@gluon.jit
def places(LAYOUT: gl.constexpr):
    """Where the numbers of a tile [64, 64] lie in memory."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    return rows * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]


def weights() -> torch.Tensor:
    """Numbers of all sizes, and some halfway between two of 16 bits."""
    random = torch.Generator().manual_seed(0)
    found = torch.randn(64, 64, generator=random) * 2.0 ** torch.arange(-32, 32)
    found[:, :8] = 1 + torch.arange(8) * 2.0**-9
    return found


@interpreted
def test_plain_triton_reads_numbers_as_they_are() -> None:
    found = torch.zeros(4, 3, dtype=torch.int32)
    plain_numbers[(4,)](NUMBERS, found)
    assert torch.equal(found, NUMBERS.unsqueeze(1).expand(4, 3))


@interpreted
def test_plain_triton_rounds_as_torch_does() -> None:
    found = torch.empty(64, 64, dtype=torch.float16)
    plain_operand[(1,)](weights(), found, 64 * 64)
    assert torch.equal(found, weights().to(torch.float16))


@pytest.mark.gpu
class TestOnGpu:
    def test_numbers(self) -> None:
        numbers, plain, assembled = NUMBERS.cuda(), *torch.zeros(2, 4, 3, dtype=torch.int32).cuda()
        plain_numbers[(4,)](numbers, plain)
        assembled_numbers[(4,)](numbers, assembled, num_warps=4)
        assert torch.equal(plain, assembled)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    @pytest.mark.parametrize("by_twos", [True, False])
    def test_operands(
        self, by_twos: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        if torch.cuda.get_device_capability()[0] != 9:
            pytest.skip("this GPU is no Hopper")
        names = as_operand.jit.fn.__globals__
        workarounds = names["INSTALLED"]._replace(conversions=by_twos)
        monkeypatch.setitem(names, "INSTALLED", workarounds)
        plain, assembled = torch.zeros(2, 64, 64, dtype=dtype, device="cuda")
        plain_operand[(1,)](weights().cuda(), plain, 64 * 64)
        assembled_operand[(1,)](weights().cuda(), assembled, by_twos, num_warps=4)
        assert torch.equal(plain, assembled)
