"""Values that validation makes of a call's tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from saccade.runtime.validation import cast, strides_fit_tma

SIDES = (1, 3, 8)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_tma_reads_rows_that_begin_at_whole_16_bytes(dtype: torch.dtype) -> None:
    step = 16 // dtype.itemsize
    for shape in itertools.product(SIDES, SIDES, SIDES, (1, 4, 8, 12)):
        rows = torch.empty(shape, dtype=dtype)
        for tensor in (rows, rows.transpose(1, 2), rows.mT, rows[..., ::2], rows[:, :1]):
            outer = zip(tensor.shape[:-1], tensor.stride(), strict=False)
            fits = all(size == 1 or stride % step == 0 for size, stride in outer)
            assert strides_fit_tma(tensor) == (fits and tensor.stride(-1) == 1)
    assert not strides_fit_tma(torch.empty(1, 1, 1, 64, dtype=dtype).expand(1, 1, 5, 64))


def test_autocast_narrows_what_is_real_and_no_float64() -> None:
    rows = torch.randn(3), torch.randn(3).double(), torch.arange(3)
    assert [each.dtype for each in cast(*rows)] == [each.dtype for each in rows]
    with torch.autocast("cpu", torch.bfloat16):
        found = [each.dtype for each in cast(*rows)]
        assert found == [torch.bfloat16, torch.float64, torch.int64]
        assert cast(torch.empty(2, device="meta"))[0].dtype == torch.float32
