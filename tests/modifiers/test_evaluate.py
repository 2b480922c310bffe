"""Hidden numbers are put away whatever they are, and visible ones keep every bit."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from saccade.modifiers.evaluate import BITS, hide, keep

HOSTILE = [0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 1e-45, 6e4]


def tile(dtype: torch.dtype) -> Tensor:
    return torch.tensor(HOSTILE, dtype=dtype).repeat(2, 3, 4, 1)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 9), (1, 1, 4, 9), (2, 1, 1, 9), (1, 1, 1, 1)])
def test_selection_is_where_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers, visible = tile(dtype), torch.rand(shape, generator=torch.manual_seed(3)) > 0.5
    before = numbers.clone()
    bits = BITS[dtype]
    kept, expected = keep(numbers, visible), torch.where(visible, numbers, 0)
    assert kept.dtype == dtype and kept.view(bits).equal(expected.to(dtype).view(bits))
    hidden, wanted = hide(numbers, visible), torch.where(visible, numbers, -math.inf)
    torch.testing.assert_close(hidden, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)
    assert numbers.view(bits).equal(before.view(bits))


def test_what_is_expanded_is_not_written_to() -> None:
    """Scores and masks may be memory that a caller keeps, with strides of 0."""
    row = torch.tensor([1.0, math.nan, 3.0])
    seen = torch.tensor([[True], [False]]).expand(2, 3)
    found = hide(row.expand(2, 3), seen)
    assert found[1].eq(-math.inf).all() and found[0, 0] == 1 and found[0, 1].isnan()
    assert row[0] == 1 and row[2] == 3
