"""The device functions that masks and scores call mean what their namesakes in PyTorch mean."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from saccade.gpu import device_ops
from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import plain

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

WIDTH = 1024
ULP = torch.finfo(torch.float32).eps


@triton.jit
def apply_one(function: tl.constexpr, given, result, WIDTH: tl.constexpr):
    positions = tl.arange(0, WIDTH)
    tl.store(result + positions, function(tl.load(given + positions)))


@triton.jit
def apply_two(function: tl.constexpr, first, second, result, WIDTH: tl.constexpr):
    positions = tl.arange(0, WIDTH)
    tl.store(result + positions, function(tl.load(first + positions), tl.load(second + positions)))


def on_device(function: Any, *given: Tensor) -> Tensor:
    """A device function of tensors of any length, in steps of WIDTH."""
    kernel: Any = apply_one if len(given) == 1 else apply_two
    length = given[0].numel()
    padded = [torch.nn.functional.pad(t, (0, -length % WIDTH), value=1) for t in given]
    results = []
    for pieces in zip(*(tensor.split(WIDTH) for tensor in padded), strict=True):
        results.append(torch.empty_like(pieces[0]))
        kernel[(1,)](function, *(piece.clone() for piece in pieces), results[-1], WIDTH)
    return torch.cat(results)[:length]


def test_tanh_is_within_four_ulps_of_float64() -> None:
    magnitudes = torch.logspace(-8, torch.tensor(30.0).log10().item(), 8000, dtype=torch.float64)
    around = torch.linspace(0.6, 0.65, 1000, dtype=torch.float64)  # where its two halves meet
    values = torch.cat([magnitudes, around, -magnitudes, -around]).float()
    exact = values.double().tanh()
    errors = (on_device(device_ops.tanh, values).double() - exact).abs() / exact.abs()
    assert float(errors.max()) <= 4 * ULP


def test_tanh_of_special_numbers() -> None:
    values = torch.tensor([0.0, -0.0, torch.inf, -torch.inf, torch.nan, 1e-45, 3e38, -3e38])
    found = on_device(device_ops.tanh, values)
    torch.testing.assert_close(found, values.tanh(), rtol=0, atol=0, equal_nan=True)


WHOLE = torch.cat([torch.arange(-25, 26), torch.tensor([2**31 - 1, -(2**31) + 1, 65536, -65535])])
PAIRS = torch.cartesian_prod(WHOLE, WHOLE[WHOLE != 0])


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64], ids=str)
def test_floor_divide_and_modulo_round_down(dtype: torch.dtype) -> None:
    dividend, divisor = (numbers.to(dtype).contiguous() for numbers in PAIRS.unbind(1))
    quotient = on_device(device_ops.floor_divide, dividend, divisor)
    rest = on_device(device_ops.floor_modulo, dividend, divisor)
    assert torch.equal(quotient, dividend // divisor)
    assert torch.equal(rest, dividend % divisor)
    assert int(quotient[(dividend == -7) & (divisor == 3)]) == (-7) // 3  # Python's own


@triton.jit
def divide(divisor, dividends, quotients, rests, WIDTH: tl.constexpr, NATURAL: tl.constexpr):
    positions = tl.arange(0, WIDTH)
    dividend = tl.load(dividends + positions)
    tl.store(quotients + positions, device_ops.quotient(dividend, divisor, NATURAL))
    tl.store(rests + positions, device_ops.remainder(dividend, divisor, NATURAL))


POWERS = [2**power for power in range(62)]
EDGES = [number for power in POWERS[1:] for number in (power - 1, power, power + 1)]


@pytest.mark.parametrize("bits", [32, 64])
@given(data=st.data())
@settings(max_examples=20, deadline=None)
def test_division_by_a_product_is_exact(bits: int, data: st.DataObject) -> None:
    """Of every dividend of so many bits, by 1, powers of 2 and their neighbours among others."""
    most = 2 ** (bits - 1) - 1
    widest = most if bits == 32 else 2**62 - 1
    some = st.one_of(st.sampled_from([1, most // 2, widest, *EDGES]), st.integers(1, widest))
    number = data.draw(some.filter(lambda divisor: divisor <= widest))
    multiples = data.draw(st.lists(st.integers(-most // number, most // number), max_size=9))
    near = [
        number * multiple + by for multiple in [*multiples, most // number] for by in (-1, 0, 1)
    ]
    drawn = data.draw(st.lists(st.integers(-most - 1, most), max_size=9))
    chosen = [-most - 1, -most, -2, -1, 0, 1, most - 1, most, *near, *drawn]
    dividends = [dividend for dividend in chosen if -most - 1 <= dividend <= most]
    natural = data.draw(st.booleans())
    dividends = [dividend for dividend in dividends if dividend >= 0 or not natural]
    dtype = torch.int32 if bits == 32 else torch.int64
    padded = torch.tensor(dividends + [0] * (64 - len(dividends)), dtype=dtype)
    quotients, rests = torch.empty_like(padded), torch.empty_like(padded)
    kernel: Any = divide
    of_blocks = data.draw(st.booleans())
    divisor = plain(device_ops.divisor_of(number, of_blocks))
    kernel[(1,)](divisor, padded, quotients, rests, 64, natural)
    found = zip(quotients.tolist(), rests.tolist(), strict=True)
    assert [*found][: len(dividends)] == [divmod(dividend, number) for dividend in dividends]


def test_a_multiplier_always_has_64_bits() -> None:
    """So kernels are compiled once for all divisors of 32 bits."""
    for number in (1, 2, 3, 2**15 + 1, 2**30 - 1, 2**30, 2**31 - 1):
        divisor = device_ops.divisor_of(number, False)
        assert isinstance(divisor, device_ops.Divisor) and divisor.multiplier < -(2**30)
    with pytest.raises(ValueError, match="got 0, takes one above 0"):
        device_ops.divisor_of(0, False)


@pytest.mark.parametrize("name", ["minimum", "maximum"])
def test_minimum_and_maximum_pass_nan_on(name: str) -> None:
    values = torch.tensor([torch.nan, -torch.inf, -1.0, 0.0, 2.0, torch.inf])
    first, second = (part.contiguous() for part in torch.cartesian_prod(values, values).unbind(1))
    found = on_device(getattr(device_ops, name), first, second)
    wanted = getattr(torch, name)(first, second)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, equal_nan=True)
    assert int(found.isnan().sum()) == 11


@pytest.mark.parametrize("name", ["exp", "log", "absolute"])
def test_plain_functions_equal_pytorchs(name: str) -> None:
    values = torch.tensor([0.0, 1e-30, 0.3, 1.0, 17.0, 80.0, 1e30, torch.inf, torch.nan, -2.0])
    found, wanted = on_device(getattr(device_ops, name), values), getattr(torch, name)(values)
    torch.testing.assert_close(found, wanted, rtol=2e-6, atol=0, equal_nan=True)
