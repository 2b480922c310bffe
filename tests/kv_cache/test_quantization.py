"""Numbers of eight bits: how far from the rows they may be, and what nonfinite rows become."""

import pytest
import torch

from saccade.kv_cache.storage import quantised

DTYPES = (torch.int8, torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 1e30])
def test_error_of_each_number(dtype, size):
    rows = torch.randn(50, 4, 32, generator=torch.Generator().manual_seed(0)) * size
    numbers, scales = quantised(rows, dtype)
    assert numbers.shape == rows.shape and scales.shape == rows.shape[:-1]
    assert numbers.dtype == dtype and scales.dtype == torch.float32
    error = (numbers.double() * scales.double().unsqueeze(-1) - rows.double()).abs()
    step = scales.double().unsqueeze(-1)
    if dtype == torch.int8:  # half a step, and a rounding of the division
        allowed = step * (0.5 + 127 * 2**-23)
    else:  # three bits of mantissa; below 2^-6 steps of 2^-9
        allowed = (rows.double().abs() * (2**-4 + 2**-20)).clamp_min(2**-10 * step)
    assert bool((error <= allowed).all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_zeros_stay_zeros(dtype):
    numbers, scales = quantised(torch.zeros(3, 8), dtype)
    assert not bool((numbers.float() * scales.unsqueeze(-1)).any())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf])
def test_a_nonfinite_row_is_nan(dtype, trash):
    rows = torch.ones(3, 8)
    rows[1, 4] = trash
    numbers, scales = quantised(rows, dtype)
    read = numbers.float() * scales.unsqueeze(-1)
    assert bool(read[1].isnan().all())
    assert bool(read[[0, 2]].isfinite().all())


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_channels(dtype):
    numbers, scales = quantised(torch.zeros(3, 0), dtype)
    assert numbers.shape == (3, 0) and bool(scales.isfinite().all())
