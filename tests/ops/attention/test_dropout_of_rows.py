"""Dropout in a part of a call: rows and heads drop what they drop in the whole."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from implementations import IMPLEMENTATIONS, Implementation, fixture_of
from torch import Tensor

import saccade
from saccade import masks, scores
from saccade.ops.attention.api import attention_of_rows
from saccade.runtime.dropout import Numbers
from saccade.runtime.spec import Inputs
from saccade.runtime.validation import new_seed

every = fixture_of([one for one in IMPLEMENTATIONS if one.drops])
ROWS, KEYS, SEED, DROPOUT_P = 50, 72, 11, 0.4
PARTS = {
    "groups of keys": (torch.arange(24, 50), torch.arange(72).roll(32)),
    "keys one by one": (torch.arange(50)[1::2], torch.randperm(72, generator=torch.Generator())),
}


def rows(one: Implementation, *shape: int) -> Tensor:
    chance = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=chance).to(one.device, one.dtypes[0]).requires_grad_()


def on(one: Implementation, numbers: Numbers) -> Numbers:
    return numbers.to(torch.device(one.device))


def seeded(one: Implementation) -> Tensor:
    torch.manual_seed(SEED)
    return new_seed(torch.device(one.device))


def options(one: Implementation, **more: Any) -> dict[str, Any]:
    plain = {
        "mask": None,
        "score": None,
        "scale": None,
        "deterministic": False,
        "config": one.small,
    }
    return {**plain, "dropout_p": DROPOUT_P, "implementation": one.name, **more}


def assert_equal(found: list[Any], wanted: list[Any]) -> None:
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("name", PARTS)
def test_rows_of_a_dense_call(every: Implementation, name: str) -> None:
    query, key, value = (rows(every, 2, h, n, 16) for h, n in ((2, ROWS), (1, KEYS), (1, KEYS)))
    bias = rows(every, 2, 2, ROWS, KEYS)
    picked, order = (index.to(every.device) for index in PARTS[name])
    torch.manual_seed(SEED)
    output, lse = saccade.attention(
        query, key, value, score=scores.bias(bias), return_lse=True,
        **{name: options(every)[name] for name in ("dropout_p", "implementation", "config")},
    )  # fmt: skip
    places = torch.arange(KEYS)
    numbers = Numbers.of_rows(
        0, PARTS[name][0], torch.zeros(len(picked), dtype=torch.long), PARTS[name][1], places
    )
    assert numbers.grouped == (name == "groups of keys")
    part = query[:, :, picked], key[:, :, order], value[:, :, order]
    score = scores.bias(bias[:, :, picked][..., order].contiguous())
    found = attention_of_rows(
        Inputs(*part, None, seeded(every)), (None, None), on(every, numbers),
        **options(every, score=score),
    )  # fmt: skip
    whole = output[:, :, picked], lse[:, :, picked]
    weights = [torch.randn_like(each) for each in whole]
    leaves = query, key, value, bias
    assert_equal(
        [*found, *torch.autograd.grad(found, leaves, weights)],
        [*whole, *torch.autograd.grad(whole, leaves, weights)],
    )


@pytest.mark.parametrize("start", [8, 6], ids=["groups of keys", "keys one by one"])
def test_rows_of_packed_sequences(every: Implementation, start: int) -> None:
    """The second and third of three sequences, the second from some row on, without its first keys:
    those are hidden."""
    query, key, value = (rows(every, 90, h, 16) for h in (2, 1, 1))
    ends = torch.tensor([0, 7, 60, 90], dtype=torch.int32)
    torch.manual_seed(SEED)
    output, lse = saccade.attention_varlen(
        query, key, value, ends.to(every.device), return_lse=True,
        mask=masks.causal() & masks.window(20),
        **{name: options(every)[name] for name in ("dropout_p", "implementation", "config")},
    )  # fmt: skip
    first, first_key = 7 + start + 20, 7 + start
    offsets = (
        torch.tensor([0, 60 - first, 90 - first], dtype=torch.int32),
        torch.tensor([0, 60 - first_key, 90 - first_key], dtype=torch.int32),
    )
    of_queries = torch.cat([torch.arange(first - 7, 53), torch.arange(30)])
    of_keys = torch.cat([torch.arange(start, 53), torch.arange(30)])
    places = torch.cat([torch.arange(53 - start), torch.arange(30)])
    numbers = Numbers.of_rows(0, of_queries, torch.ones_like(of_queries), of_keys, places)
    assert numbers.grouped == (start == 8)
    found = attention_of_rows(
        Inputs(
            query[first:], key[first_key:], value[first_key:], None, seeded(every),
            *(each.to(every.device) for each in offsets),
        ),
        (None, None), on(every, numbers),
        **options(every, mask=masks.causal() & masks.window(20)),
    )  # fmt: skip
    whole = output[first:], lse[:, first:]
    weights = [torch.randn_like(each) for each in whole]
    leaves = query, key, value
    assert_equal(
        [*found, *torch.autograd.grad(found, leaves, weights)],
        [*whole, *torch.autograd.grad(whole, leaves, weights)],
    )


def test_some_heads(every: Implementation) -> None:
    query, key, value = (rows(every, 1, h, 40, 16) for h in (4, 2, 2))
    torch.manual_seed(SEED)
    output, lse = saccade.attention(
        query, key, value, causal=True, return_lse=True,
        **{name: options(every)[name] for name in ("dropout_p", "implementation", "config")},
    )  # fmt: skip
    found = attention_of_rows(
        Inputs(query[:, 2:], key[:, 1:], value[:, 1:], None, seeded(every)), (None, None),
        on(every, Numbers.of_heads(2)), **options(every, mask=masks.causal()),
    )  # fmt: skip
    whole = output[:, 2:], lse[:, 2:]
    weights = [torch.randn_like(each) for each in whole]
    assert_equal(
        [*found, *torch.autograd.grad(found, (query, key, value), weights)],
        [*whole, *torch.autograd.grad(whole, (query, key, value), weights)],
    )
