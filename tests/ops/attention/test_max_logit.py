"""The option return_max_logit: what is refused, what it changes in a call, what compiles.

That its numbers are right is tested by the shared suite.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.runtime.max_logit import of_heads

attention: Any = saccade.attention
attention_varlen: Any = saccade.attention_varlen


def rows(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    chance = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 9, 8, generator=chance).to(dtype)
    return query, key, value


def largest(query: Tensor, key: Tensor) -> Tensor:
    hidden = ~torch.ones(9, 9, dtype=torch.bool).tril()
    scores = (query @ key.mT / 8**0.5).masked_fill(hidden, -torch.inf)
    return scores.amax((2, 3))


def test_only_flags_are_taken():
    with pytest.raises(TypeError, match="return_max_logit: got 1, takes True or False"):
        attention(*rows(), return_max_logit=1)
    with pytest.raises(TypeError, match="return_max_logit: got None"):
        attention_varlen(
            *(each[0].transpose(0, 1) for each in rows()), torch.tensor([0, 9], dtype=torch.int32),
            return_max_logit=None,
        )  # fmt: skip
    with pytest.raises(TypeError, match="return_max_logit"):
        saccade.explain(attention, *rows(), return_max_logit="yes")
    assert saccade.explain(attention, *rows(), return_max_logit=True).chosen == "cpu"


@pytest.mark.parametrize("with_gradients", [False, True])
def test_calls_with_and_without_it_are_told_apart(with_gradients):
    query, key, value = (each.requires_grad_(with_gradients) for each in rows())
    for _ in range(2):  # the second time from the call cache
        output = attention(query, key, value, causal=True)
        pair = attention(query, key, value, causal=True, return_max_logit=True)
        three = attention(query, key, value, causal=True, return_lse=True, return_max_logit=True)
        for found in (pair, three):
            assert torch.equal(found[0], output)
            torch.testing.assert_close(found[-1], largest(query, key).detach())
            assert found[-1].requires_grad is False
        assert three[1].shape == (2, 4, 9)


def test_one_graph_gives_it_beside_gradients():
    def call(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return attention(query, key, value, causal=True, return_max_logit=True)

    given = [each.requires_grad_() for each in rows(torch.float16)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    results = [(*found, *torch.autograd.grad(found[0].sum(), given))
               for found in (call(*given), compiled(*given))]  # fmt: skip
    for eager, traced in zip(*results, strict=True):
        assert torch.equal(eager, traced)


def test_a_row_whose_lse_is_nan_makes_its_head_nan():
    scores, lse = torch.randn(2, 3, 5), torch.zeros(2, 3, 5)
    lse[0, 1, 4] = torch.nan
    found = of_heads(scores, lse, None)
    assert found.isnan().nonzero().tolist() == [[0, 1]]
    offsets = torch.tensor([0, 2, 2, 4], dtype=torch.int32)
    found = of_heads(scores[0], lse[0], offsets)  # the last of five tokens is padding
    assert found.tolist() == [
        scores[0, :, :2].amax(1).tolist(), [-torch.inf] * 3, scores[0, :, 2:4].amax(1).tolist()
    ]  # fmt: skip
