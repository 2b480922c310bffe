"""Tensors on a CPU are computed there, whatever device new tensors lie on by default."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade import masks, scores
from saccade.testing import make_paged_case

OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.causal()},
    "window": {"mask": masks.window(30) & ~masks.prefix(torch.tensor([1, 2]))},
    "lengths": {"mask": masks.key_lengths(torch.tensor([3, 290]))},
    "table": {"mask": masks.dense(torch.rand(1, 2, 300, 300) > 0.5)},
    "score": {"mask": masks.causal(), "score": scores.softcap(3.0), "dropout_p": 0.1},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_dense(name: str) -> None:
    rows = [torch.randn(2, 2, 300, 16, requires_grad=True) for _ in range(3)]
    with torch.device("meta"):
        output = saccade.attention(*rows, implementation="cpu", **OPTIONS[name])
        found = torch.autograd.grad(output.square().sum(), rows)
    assert all(tensor.device.type == "cpu" for tensor in (output, *found))


def test_packed() -> None:
    query, key, value = (torch.randn(600, 2, 16, requires_grad=True) for _ in range(3))
    offsets, options = torch.tensor([0, 260, 600], dtype=torch.int32), OPTIONS["causal"]
    with torch.device("meta"):
        output = saccade.attention_varlen(query, key, value, offsets, **options)
        found = torch.autograd.grad(output.square().sum(), (query, key, value))
    assert all(tensor.device.type == "cpu" for tensor in (output, *found))


@pytest.mark.parametrize("lengths", [((1, 40),) * 3, ((5, 700), (5, 30))])
@pytest.mark.parametrize("page_dtype", [torch.float32, torch.float8_e4m3fn])
def test_pages(lengths: tuple[tuple[int, int], ...], page_dtype: torch.dtype) -> None:
    case = make_paged_case(lengths=lengths, page_dtype=page_dtype)
    with torch.device("meta"):
        output = case.run("cpu")["output"]
    assert output.device.type == "cpu"


def test_a_cache() -> None:
    row = torch.randn(20, 2, 16)
    with torch.device("meta"):
        cache = saccade.PagedCache(8, 16, num_layers=1, kv_heads=2, head_dim=16)
        sequence = cache.allocate()
        slots = cache.append({sequence: 20})
        cache.write(0, row, row, slots)
        output = cache.attend(0, row[-1:].unsqueeze(2), [sequence])
        copy = cache.fork(sequence)
        cache.append({copy: 3})
    assert output.device.type == "cpu"
