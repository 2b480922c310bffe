"""Residuals: 8 bits more of numbers in 16, on the host and in kernels."""

from __future__ import annotations

import pytest
import torch

from saccade.gpu import rounding as on_device
from saccade.gpu.language import INTERPRETED, tl, triton
from saccade.runtime.rounding import restored, rounded, steps_per_one

HALVES = [torch.bfloat16, torch.float16]


def exact() -> torch.Tensor:
    chance = torch.Generator().manual_seed(0)
    return torch.randn(64, 64, generator=chance) * torch.logspace(-4, 4, 64)


@pytest.mark.parametrize("dtype", HALVES)
def test_eight_bits_more_are_kept(dtype):
    numbers = exact()
    output = numbers.to(dtype)
    found = restored(output, rounded(numbers, output))
    normal = output.abs() >= torch.finfo(dtype).tiny
    off = ((found.double() - numbers) / numbers.double()).abs()[normal]
    # Half a step, a float32's own rounding, and what the number itself was rounded by.
    assert off.max() <= 0.51 / steps_per_one(dtype) + 2**-23
    assert off.max() > 0.4 / steps_per_one(dtype)
    odd = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-30, 3e38])
    output = odd.to(dtype)
    kept = restored(output, rounded(odd, output))
    assert torch.equal(kept.isfinite(), output.isfinite())
    assert torch.equal(kept == 0, output == 0)


@triton.jit
def both_ways(numbers, residuals, found, HALF: tl.constexpr):
    at = tl.arange(0, 4096)
    exact = tl.load(numbers + at)
    output = exact.to(HALF)
    residual = on_device.residual_of(exact, output)
    tl.store(residuals + at, residual)
    tl.store(found + at, on_device.restored(output, residual))


@pytest.mark.skipif(not INTERPRETED, reason="on GPUs the shared suite tests it")
def test_kernels_keep_the_same():
    numbers = exact().flatten()
    residuals, found = torch.empty(4096, dtype=torch.int8), torch.empty(4096)
    both_ways[(1,)](numbers, residuals, found, tl.float16)  # pyright: ignore[reportArgumentType]
    output = numbers.half()
    normal = output.abs() >= torch.finfo(torch.float16).tiny
    wanted = rounded(numbers, output)
    assert (residuals.int() - wanted.int()).abs()[normal].max() <= 1  # ties
    torch.testing.assert_close(found, restored(output, residuals), rtol=1e-6, atol=0)
