"""Tensors whose numbers memory does not hold: negatives, and zeros that PyTorch has not written."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade import scores
from saccade.gpu import language
from saccade.runtime.call_cache import unobserved

INTERPRETED = pytest.param(
    "triton",
    marks=pytest.mark.skipif(
        not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
    ),
)
every = pytest.mark.parametrize("implementation", ["cpu", INTERPRETED])
# Private names of PyTorch, which a checker does not find.
negative: Any = vars(torch)["_neg_view"]
zeros_of: Any = vars(torch)["_efficientzerotensor"]


def rows_of(*heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(1, each, 9, 16, generator=generator) for each in heads]


def test_what_pytorch_makes() -> None:
    imaginary = torch.zeros(3, dtype=torch.complex64).conj().imag
    assert imaginary.is_neg() and not unobserved([imaginary])
    assert not unobserved([None, zeros_of((3,))])
    assert unobserved([None, imaginary.clone()])


@every
def test_queries_and_values(implementation: str) -> None:
    query, key, value = rows_of(2, 1, 1)
    options: dict[str, Any] = {"causal": True, "implementation": implementation}
    wanted = saccade.attention(-query, key, -value, **options)
    for _ in range(3):  # calls that are alike are not validated again
        found = saccade.attention(negative(query), key, negative(value), **options)
        torch.testing.assert_close(found, wanted)


@every
def test_all_tensors_of_a_gradient(implementation: str) -> None:
    bias, sinks, grad_lse = torch.randn(9, 9), torch.randn(2), torch.randn(1, 2, 9)
    (grad_output,) = rows_of(2)
    found = []
    for change in (negative, torch.neg):
        leaves = [
            each.requires_grad_() for each in (*rows_of(2, 1, 1), change(bias), change(sinks))
        ]
        query, key, value, table, sink = leaves
        results = saccade.attention(
            query, key, value, score=scores.bias(table), sinks=sink, return_lse=True,
            implementation=implementation,
        )  # fmt: skip
        arrived = change(grad_output), change(grad_lse)
        found.append(torch.autograd.grad(results, leaves, arrived))
    torch.testing.assert_close(*found)


@every
def test_gradients_that_are_not_written(implementation: str) -> None:
    leaves = [each.requires_grad_() for each in rows_of(2, 1, 1)]
    output, lse = saccade.attention(*leaves, return_lse=True, implementation=implementation)
    zeros, ones = zeros_of(output.shape), torch.ones_like(lse)
    found = torch.autograd.grad((output, lse), leaves, (zeros, ones), retain_graph=True)
    wanted = torch.autograd.grad((output, lse), leaves, (torch.zeros_like(output), ones))
    torch.testing.assert_close(found, wanted)


@every
def test_decay(implementation: str) -> None:
    decay = torch.complex(torch.zeros(1, 2, 9), torch.rand(1, 2, 9)).conj().imag
    query, key, value = rows_of(2, 2, 2)
    beta = torch.rand(1, 2, 9)

    def results(decay: torch.Tensor) -> list[torch.Tensor]:
        delta = saccade.gated_delta_rule(
            query, key, value, beta, decay=decay, normalize_qk=True, implementation=implementation
        )
        return [
            delta,
            saccade.linear_attention(query, key, value, decay=decay, implementation=implementation),
        ]

    assert decay.is_neg()
    torch.testing.assert_close(results(decay), results(decay.clone()))


def test_states_that_a_step_changes_are_refused() -> None:
    query, key, value = (each[:, :, :1] for each in rows_of(2, 2, 2))
    state = negative(torch.zeros(1, 2, 16, 16))
    with pytest.raises(ValueError, match="state: got the negative of what its memory holds"):
        saccade.gated_delta_rule_step(state, query, key, value, torch.ones(1, 2, 1))
    states = saccade.LinearState(state, torch.zeros(1, 2, 16))
    with pytest.raises(ValueError, match=r"state\.kv: got the negative of what its memory holds"):
        saccade.linear_attention_step(states, query, key, value)
