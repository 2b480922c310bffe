"""PTX of the softmax gives what plain Triton does, which runs without a GPU as well."""

# Triton's language has no types that a checker follows.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false, reportCallIssue=false
# pyright: reportAttributeAccessIssue=false, reportIndexIssue=false, reportAssignmentType=false
# pyright: reportFunctionMemberAccess=false, reportPrivateImportUsage=false

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")
from saccade.gpu.language import INTERPRETED, gl, gluon, tl, triton
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.softmax import lazy_rescale, rescaled, sum_by_thread

WARP = 16  # rows of a warp


@triton.jit
def plain_lazy_rescale(sums):
    """What `lazy_rescale` gives, for each row of sums [rows, 8]: what shrinks it, and the number
    that its lazy maximum rises by."""
    largest = tl.max(sums, 1)
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) - 127
    raised = tl.where(largest > 256.0, exponent, 0)
    shrink = ((127 - raised) << 23).to(tl.float32, bitcast=True)
    near_the_end = largest >= 1.329227995784916e36  # 2^120
    return tl.where(near_the_end, float("nan"), shrink), raised.to(tl.float32)


@triton.jit
def plain(tile, shrunk, raises, results, WIDTH: tl.constexpr):
    """What `assembled` writes."""
    rows, eight = tl.arange(0, 64)[:, None], tl.arange(0, 8)[None, :]
    shrink, raised = plain_lazy_rescale(tl.load(tile + rows * WIDTH + eight))
    tl.store(shrunk + rows * 8 + eight, tl.zeros([64, 8], tl.float32) + shrink[:, None])
    tl.store(raises + rows * 8 + eight, tl.zeros([64, 8], tl.float32) + raised[:, None])
    places = rows * WIDTH + tl.arange(0, WIDTH)[None, :]
    tl.store(results + places, tl.load(tile + places) * shrink[:, None])


@gluon.jit
def assembled(tile, shrunk, raises, results, WIDTH: gl.constexpr):
    """`lazy_rescale` of a tile whose channels from 8 on are 0, so that its sums by thread are the
    first 8; and the tile `rescaled`."""
    LAYOUT: gl.constexpr = mma_layout(WIDTH)
    numbers = gl.load(tile + places(LAYOUT, WIDTH))
    shrink, raised = lazy_rescale(sum_by_thread(numbers))
    BY_THREAD: gl.constexpr = shrink.type.layout
    gl.store(shrunk + places(BY_THREAD, 8), shrink)
    gl.store(raises + places(BY_THREAD, 8), raised)
    gl.store(results + places(LAYOUT, WIDTH), rescaled(numbers, shrink))


@gluon.jit
def places(LAYOUT: gl.constexpr, WIDTH: gl.constexpr):
    """Where the numbers of a tile [64, WIDTH] lie in memory."""
    rows = gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))[:, None]
    return rows * WIDTH + gl.arange(0, WIDTH, gl.SliceLayout(0, LAYOUT))[None, :]


def tile_of(width: int, large: str) -> torch.Tensor:
    """Sums of 64 rows; in some, or all, or none of a warp's rows some are above 256."""
    tile = torch.zeros(64, width)
    tile[:, :8] = torch.rand(64, 8, generator=torch.Generator().manual_seed(width)) * 256
    sizes = torch.tensor([256.0, 257.0, 511.9, 2.0**20, 2.0**119, 2.0**120, 2.0**127, torch.inf])
    rows = {"none": [], "some": range(3, WARP + 3), "all": range(64)}[large]
    for row in rows:
        tile[row, row % 8] = sizes[row // 8 % 8] if row % 3 else sizes[row % 8]
    return tile


def run(kernel, tile: torch.Tensor, **options: int) -> list[torch.Tensor]:
    found = [torch.full((64, width), -1.0) for width in (8, 8, tile.shape[1])]
    found = [each.to(tile.device) for each in found]
    kernel[(1,)](tile, *found, tile.shape[1], **options)
    return [each.cpu() for each in found]


@pytest.mark.skipif(not INTERPRETED, reason="it takes the interpreter")
@pytest.mark.parametrize("large", ["none", "some", "all"])
def test_plain_triton_raises_by_whole_powers_of_two(large: str) -> None:
    tile = tile_of(64, large)
    shrunk, raises, results = run(plain, tile)
    largest = tile.amax(1, keepdim=True).double()
    wanted = largest.log2().floor().where(largest > 256, 0)
    near_the_end = (largest >= 2.0**120).expand(64, 8)
    assert shrunk.isnan().equal(near_the_end)
    wanted = wanted.float().expand(64, 8)
    assert torch.equal(raises[~near_the_end], wanted[~near_the_end])
    assert torch.equal(shrunk[~near_the_end], (2.0**-wanted)[~near_the_end])
    torch.testing.assert_close(results, tile * shrunk[:, :1], rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("large", ["none", "some", "all"])
def test_assembly_gives_what_plain_triton_does(large: str, width: int) -> None:
    if torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    tile = tile_of(width, large).cuda()
    for wanted, found in zip(run(plain, tile), run(assembled, tile, num_warps=4), strict=True):
        torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
