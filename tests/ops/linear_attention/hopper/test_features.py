"""PTX of the features gives what plain Triton does, which runs without a GPU as well."""

# Triton's language has no types that a checker follows.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportFunctionMemberAccess=false, reportPrivateImportUsage=false

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from saccade.gpu.language import INTERPRETED, gl, gluon, tl, triton
from saccade.ops.linear_attention.hopper.features import (
    at_most_one,
    mapped,
    narrowed,
    only,
    widened,
)

ALL = tl.constexpr(tl.PropagateNan.ALL)


@triton.jit
def plain(rows, wide, narrow):
    """What `assembled` writes: [2, 64, 64] in float32, [4, 64, 64] in bfloat16."""
    places = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    numbers = tl.load(rows + places).to(tl.float32)
    tl.store(wide + places, numbers)
    tl.store(wide + 4096 + places, tl.minimum(numbers, 1.0, propagate_nan=ALL))
    for taken in tl.static_range(2):  # elu + 1, and elu
        grown = (tl.exp(numbers) - taken).to(tl.bfloat16).to(tl.float32)
        above = (tl.maximum(numbers, 0.0) + (1 - taken)).to(tl.bfloat16).to(tl.float32)
        features = tl.minimum(grown, above, propagate_nan=ALL)
        tl.store(narrow + taken * 4096 + places, features.to(tl.bfloat16))
    there = (tl.arange(0, 64) % 3 != 0)[:, None]
    tl.store(narrow + 8192 + places, tl.where(there, numbers, 0.0).to(tl.bfloat16))
    tl.store(narrow + 12288 + places, (numbers * 1.00390625).to(tl.bfloat16))  # 1 + 2^-8


@gluon.jit
def assembled(rows, wide, narrow):
    """Each piece of PTX on a tile [64, 64] of bfloat16, of which a thread has neighbours."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 2], [4, 8], [4, 1], [1, 0])
    row = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    places = row[:, None] * 64 + gl.arange(0, 64, gl.SliceLayout(0, LAYOUT))[None, :]
    numbers = gl.load(rows + places)
    gl.store(wide + places, widened(numbers))
    gl.store(wide + 4096 + places, at_most_one(numbers))
    gl.store(narrow + places, mapped(numbers, "elu+1"))
    gl.store(narrow + 4096 + places, mapped(numbers, "elu"))
    gl.store(narrow + 8192 + places, only(numbers, row % 3 != 0))
    gl.store(narrow + 12288 + places, narrowed(numbers.to(gl.float32) * 1.00390625))


def rows() -> torch.Tensor:
    """Numbers of all sizes, of both signs, and NaN in rows that are kept."""
    found = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    found = found * 2.0 ** torch.arange(-32, 32).clamp(max=6)
    found[1, 5], found[4, 6] = torch.nan, -torch.inf
    return found.to(torch.bfloat16)


def run(kernel, device: str, **options: int) -> tuple[torch.Tensor, torch.Tensor]:
    wide = torch.full((2, 64, 64), -9.0, device=device)
    narrow = torch.full((4, 64, 64), -9.0, dtype=torch.bfloat16, device=device)
    kernel[(1,)](rows().to(device), wide, narrow, **options)
    return wide.cpu(), narrow.cpu()


def same(found: torch.Tensor, wanted: torch.Tensor, rtol: float = 0.0, atol: float = 0.0) -> None:
    torch.testing.assert_close(found, wanted, rtol=rtol, atol=atol, equal_nan=True)


@pytest.mark.skipif(not INTERPRETED, reason="it takes the interpreter")
def test_plain_triton_maps_as_torch_does() -> None:
    wide, narrow = run(plain, "cpu")
    numbers = rows().float()
    same(wide[0], numbers)
    same(wide[1], numbers.minimum(torch.ones(())))
    exponential, large = numbers.double().exp(), numbers.abs() > 0.1
    wanted = torch.where(numbers > 0, numbers.double() + 1, exponential)
    same(narrow[0][exponential > 1e-30].double(), wanted[exponential > 1e-30], 2.0**-7)
    same(narrow[1][large].double(), (wanted - 1)[large], 2.0**-6)
    same(narrow[2], torch.where((torch.arange(64) % 3 != 0)[:, None], rows(), 0.0))
    # The interpreter cuts off what a GPU rounds.
    same(narrow[3].float(), numbers * (1 + 2.0**-8), 2.0**-7)


@pytest.mark.gpu
def test_assembly_gives_what_plain_triton_does() -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    wanted, found = run(plain, "cuda"), run(assembled, "cuda", num_warps=4)
    same(found[0], wanted[0])
    # e^x may be rounded otherwise, which shows where 1 is taken from it.
    same(found[1][:2], wanted[1][:2], 2.0**-7, 2.0**-22)
    same(found[1][2:], wanted[1][2:])
