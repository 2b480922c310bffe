"""FlexAttention's calls on a GPU: forty masks and scores with gradients, beside float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from flex_cases import BATCH, CASES, HEADS, LENGTH, FlexCase, plain, rows
from torch import Tensor

from saccade.integrations import flex_attention as ours
from saccade.testing.oracle import assert_within, bounds

pytestmark = pytest.mark.gpu


def called(case: FlexCase, tensors: Any, learned: list[Tensor]) -> Tensor:
    """By the kernels; functions are made where tables lie on the GPU."""
    with torch.device("cuda"):
        mask = None if case.mask is None else case.mask()
        score = None if case.score is None else case.score(*learned)
    block_mask = mask and ours.create_block_mask(mask, BATCH, HEADS, LENGTH, LENGTH, device="cuda")
    return ours.flex_attention(*tensors, score_mod=score, block_mask=block_mask)


def in_plain_pytorch(case: FlexCase, tensors: Any, learned: list[Tensor]) -> Tensor:
    with torch.device("cuda"):
        return plain(case, tensors, learned)


def results(case: FlexCase, call: Callable[..., Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """The output and all gradients, from numbers that float32 holds."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # of numbers that functions make of rows
    try:
        tensors = [x.float().to("cuda", dtype).requires_grad_() for x in rows(1)]
        learned = [x.float().to("cuda", dtype).requires_grad_() for x in case.learned]
        output = call(case, tensors, learned)
        given = torch.randn(output.shape, generator=torch.Generator().manual_seed(2), device="cpu")
        gradients = torch.autograd.grad(output, [*tensors, *learned], given.to(output))
    finally:
        torch.set_default_dtype(before)
    names = ["output", "query", "key", "value", *(f"learned {n}" for n in range(len(learned)))]
    return dict(zip(names, [output, *gradients], strict=True))


@pytest.mark.parametrize("name", CASES)
def test_results_are_those_of_float64(name: str) -> None:
    case = CASES[name]
    exact = results(case, in_plain_pytorch, torch.float64)
    rounded = results(case, in_plain_pytorch, torch.float32)
    # A number is a sum over rows, learned ones one over pairs, of which each term is rounded. Terms
    # of learned ones may cancel (what is added to a whole row), and are as large as gradients are.
    unit = torch.finfo(torch.float32).eps / 2
    largest = max(truth.abs().max() for truth in exact.values())
    spread = {
        each: unit * math.sqrt(BATCH) * LENGTH * largest if each.startswith("learned")
        else unit * math.sqrt(LENGTH) * truth.abs().max()
        for each, truth in exact.items()
    }  # fmt: skip
    allowed = bounds(exact, rounded, spread, torch.float32)
    assert_within(results(case, called, torch.float32), exact, allowed, name)
