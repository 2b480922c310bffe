"""Rows of fp8 attention all of whose scores are large, as a mask that is added as -1e9 makes them.

Equal scores give the mean of the values; sinks of their size count as one key more, with a value
of 0. The log of how many keys there are has no room beside such a score.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade import scores
from saccade.gpu import language

INTERPRETED = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
    ),
)
SMALLEST = torch.finfo(torch.float32).min
KEYS = 300  # several tiles
call: Any = saccade.attention_fp8


def rows_of(dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key and value of three query heads over one."""
    generator = torch.Generator().manual_seed(0)
    shapes = (1, 3, 5, 16), (1, 1, KEYS, 16), (1, 1, KEYS, 8)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]


@pytest.mark.parametrize("implementation", ["cpu", "reference", INTERPRETED])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16])
@pytest.mark.parametrize("sinks", [None, "like them", 0.5])
@pytest.mark.parametrize("size", [-1e9, 1e9, SMALLEST, SMALLEST / 2])
def test_equal_scores_give_means(
    size: float, sinks: str | float | None, dtype: torch.dtype, implementation: str
) -> None:
    query, key, value = rows_of(dtype)
    bias = torch.zeros(5, KEYS)
    bias[1:4] = size
    bias[3, 7] = 0  # one ordinary key: all of the weight beside small ones, none beside large ones
    sink = size if sinks == "like them" else sinks
    given = None if sink is None else torch.full((3,), float(sink))
    found, lse = call(
        query, key, value, score=scores.bias(bias), sinks=given, return_lse=True,
        implementation=implementation, out_dtype=torch.float16,
    )  # fmt: skip
    values = value.double()
    of_all, of_others = values.sum(2), values.sum(2) - values[:, :, 7]
    beside, largest = sinks == "like them", size if sink is None else max(size, float(sink))
    wanted = of_all / (KEYS + beside)
    if sinks == 0.5 and size < 0:
        wanted = torch.zeros_like(wanted)
    slack = 2.0**-11  # of rounding means, which are below 1, to float16
    if dtype == torch.float16:  # e4m3 numbers of values are off by 2^-4 of them
        slack += 2.0**-4 * float(values.abs().mean())
    for row in (1, 2):
        off = (found[:, :, row].double() - wanted).abs().max()
        assert off <= slack
    if size > 0:
        wanted = of_others / (KEYS - 1 + beside)
        assert (found[:, :, 3].double() - wanted).abs().max() <= slack
    torch.testing.assert_close(
        lse[:, :, 1], torch.full_like(lse[:, :, 1], largest), rtol=1e-6, atol=2.0
    )
    assert bool(found.isfinite().all()) and bool(lse.isfinite().all())
