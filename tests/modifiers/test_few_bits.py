"""Whole numbers of 8 and 16 bits wrap in a traced function where they do in PyTorch."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from interpreted import coordinates, mask_of_kernel
from torch import Tensor

from saccade import masks
from saccade.masks import as_mask
from saccade.modifiers import evaluate

SHAPE = (1, 2, 7, 9)
NARROW = (torch.int8, torch.uint8, torch.int16)


def table(dtype: torch.dtype, seed: int) -> Tensor:
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(seed)
    found = torch.randint(info.min, info.max + 1, (9,), generator=generator).to(dtype)
    return torch.cat([found[:-2], torch.tensor([info.min, info.max], dtype=dtype)])


def functions(dtype: torch.dtype) -> dict[str, Any]:
    """Functions of two tables of a dtype."""
    a, b, three = table(dtype, 1), table(dtype, 2), torch.tensor(3, dtype=dtype)
    wide, flags = table(dtype, 3).int(), table(dtype, 4) > 9
    return {
        "difference": lambda x, h, i, j: (a[i] - b[j]) <= 1,
        "sum": lambda x, h, i, j: a[i] + b[j] > 5,
        "product": lambda x, h, i, j: a[i] * 3 - b[j] > 0,
        "negative": lambda x, h, i, j: -a[i] > b[j],
        "distance": lambda x, h, i, j: (a[i] - b[j]).abs() < 9,
        "inverse": lambda x, h, i, j: ~a[i] > b[j],
        "shifted": lambda x, h, i, j: (a[i] << 1) > b[j],
        "number": lambda x, h, i, j: a[i] + 100 > b[j],
        "number first": lambda x, h, i, j: 5 - a[i] > b[j],
        "scalar tensor": lambda x, h, i, j: a[i] * three > b[j],
        "truth": lambda x, h, i, j: a[i] + flags[j] > b[j],
        "chosen": lambda x, h, i, j: torch.where(i > j, a[i], b[j]) + a[j] > 4,
        "smaller": lambda x, h, i, j: torch.minimum(a[i], b[j]) - 1 < 0,
        "quotient": lambda x, h, i, j: a[i] // 3 - b[j] > 0,
        "in place": lambda x, h, i, j: (a[i] - b[j]).add_(5) > 0,
        "made wide": lambda x, h, i, j: a[i].long() - b[j].long() <= 1,
        "beside wide": lambda x, h, i, j: a[i] - wide[j] <= 1,
        "beside a row": lambda x, h, i, j: a[i] - j < 3,
        "real": lambda x, h, i, j: a[i] * 1.5 - b[j] > 0,
        "made narrow": lambda x, h, i, j: ((i - j) * 5000).to(dtype) > 0,
        "as another": lambda x, h, i, j: (i - 3 * j).type_as(a[i]) > 0,
        "short": lambda x, h, i, j: ((i - j) * 9000).short() > 0,
    }


@pytest.mark.parametrize("name", functions(torch.int8))
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_what_pytorch_gives(dtype, name):
    function = functions(dtype)[name]
    wanted = torch.empty(SHAPE, dtype=torch.bool)
    for at in itertools.product(*map(range, SHAPE)):
        wanted[at] = function(*map(torch.tensor, at))
    mask = as_mask(function)
    found = evaluate.visible(mask.key, mask.captured, coordinates(SHAPE)).expand(SHAPE)
    assert torch.equal(found, wanted)


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("dtype", NARROW, ids=str)
def test_kernels(dtype):
    mask = as_mask(functions(dtype)["difference"])
    wanted = evaluate.visible(mask.key, mask.captured, coordinates(SHAPE)).expand(SHAPE)
    assert torch.equal(mask_of_kernel(mask, SHAPE), wanted)


def test_take():
    a, b = table(torch.uint8, 1), table(torch.uint8, 2)
    mask = as_mask(lambda x, h, i, j: masks.take(a, i) - masks.take(b, j) > 3)
    found = mask.to_dense(1, 1, 7, 9)[0, 0]
    assert torch.equal(found, (a[:7, None] - b) > 3)
