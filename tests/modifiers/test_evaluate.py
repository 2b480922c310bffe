"""Hidden numbers are put away whatever they are, and visible ones keep every bit.

Steps that write over others compute the same, and leave what was captured alone.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from saccade.modifiers.evaluate import BITS, change, hide_, index_range, keep_
from saccade.modifiers.expression import Coordinates
from saccade.scores import as_score

HOSTILE = [0.0, -0.0, 1.5, -2.0, math.inf, -math.inf, math.nan, 1e-45, 6e4]


def tile(dtype: torch.dtype) -> Tensor:
    return torch.tensor(HOSTILE, dtype=dtype).repeat(2, 3, 4, 1)


@pytest.mark.parametrize("dtype", BITS, ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 4, 9), (1, 1, 4, 9), (2, 1, 1, 9), (1, 1, 1, 1)])
def test_selection_is_where_to_the_bit(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    numbers, visible = tile(dtype), torch.rand(shape, generator=torch.manual_seed(3)) > 0.5
    bits = BITS[dtype]
    kept, expected = keep_(numbers.clone(), visible), torch.where(visible, numbers, 0)
    assert kept.dtype == dtype and kept.view(bits).equal(expected.to(dtype).view(bits))
    hidden, wanted = hide_(numbers.clone(), visible), torch.where(visible, numbers, -math.inf)
    torch.testing.assert_close(hidden, wanted.to(dtype), rtol=0, atol=0, equal_nan=True)


WRITTEN_OVER = {
    "what is captured": lambda table: lambda score, b, h, q, k: table[k],
    "a row of it, expanded": lambda table: lambda score, b, h, q, k: table[k] * 2,
    "the score": lambda table: lambda score, b, h, q, k: score,
    "a result that is read twice": lambda table: (
        lambda score, b, h, q, k: torch.tanh(score / 3) * 3 - torch.tanh(score / 3) + table[k]
    ),
    "the score, last": lambda table: lambda score, b, h, q, k: (score * 2 + table[k]) * score,
}


@pytest.mark.parametrize("name", WRITTEN_OVER)
def test_what_is_written_over_is_no_longer_read(name: str) -> None:
    """In-place steps give what others give, in memory that no captured tensor has."""
    table = torch.tensor([1.0, 4.0, 0.5, -1.0])
    score = as_score(WRITTEN_OVER[name](table))
    batch, head, query_row, kv_row = (index_range(0, 4 if dim > 1 else 2, dim) for dim in range(4))
    rows = Coordinates(batch, head, query_row, kv_row, 0)
    raw = torch.randn(2, 2, 4, 4, generator=torch.manual_seed(5))
    exact = change(score.key, score.captured, raw.clone(), rows)
    found = change(score.key, score.captured, raw.clone(), rows, overwrite=True)
    assert found.is_contiguous() and found.equal(exact)
    found.fill_(7.0)
    assert table.tolist() == [1.0, 4.0, 0.5, -1.0]
