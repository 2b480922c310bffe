"""The specification of the gated delta rule: two forms that are equal, and its gradients."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.ops.delta_rule import reference
from saccade.runtime.delta_spec import DECAY_KINDS, DeltaInputs, DeltaVariant


def drawn(decay: str, length: int, heads: tuple[int, int] = (1, 2)) -> DeltaInputs:
    """A call in float64, of few channels."""
    torch.manual_seed(length)
    query, key = torch.randn(2, 2, heads[0], length, 3, dtype=torch.float64)
    value = torch.randn(2, heads[1], length, 2, dtype=torch.float64)
    beta, factors = torch.rand(2, *value.shape[:3], dtype=torch.float64)
    if decay == "channels":
        factors = torch.rand(*value.shape[:3], 3, dtype=torch.float64)
    state = torch.randn(2, heads[1], 3, 2, dtype=torch.float64)
    return DeltaInputs(query, key / 2, value, beta, None if decay == "none" else -factors, state)


@pytest.mark.parametrize("decay", DECAY_KINDS)
def test_both_forms_are_equal(decay: str) -> None:
    for length, normalize_qk, chunk in itertools.product((0, 1, 9), (False, True), (1, 4, 16)):
        rows = reference.lay_out(
            drawn(decay, length), DeltaVariant(normalize_qk, 0.7), torch.float64
        )
        for one, two in zip(reference.recurrent(rows), reference.chunked(rows, chunk), strict=True):
            torch.testing.assert_close(one, two, atol=1e-12, rtol=1e-12)


def test_the_formula() -> None:
    """Against Yang et al. 2025, equation 10: S_t = S_{t-1} (α (1 − β k kᵀ)) + β v kᵀ."""
    query, key, value, beta, decay, state = drawn("heads", 4, (1, 1))[:6]
    assert decay is not None and state is not None
    found = saccade.gated_delta_rule(
        query, key, value, beta, decay=decay, scale=1.0, initial_state=state,
        implementation="reference",
    )  # fmt: skip
    for b in range(2):
        now = state[b, 0].T
        for t in range(4):
            k, v, rate = key[b, 0, t], value[b, 0, t], beta[b, 0, t]
            one = torch.eye(3, dtype=torch.float64)
            now = now @ (decay[b, 0, t].exp() * (one - rate * torch.outer(k, k)))
            now = now + rate * torch.outer(v, k)
            torch.testing.assert_close(found[b, 0, t], now @ query[b, 0, t])


@pytest.mark.parametrize("decay", DECAY_KINDS)
@pytest.mark.parametrize("implementation", ["reference", "cpu"])
def test_gradients(implementation: str, decay: str) -> None:
    """Of everything, beta, decay and states included, by finite differences."""
    inputs = [each for each in drawn(decay, 6) if each is not None]
    leaves = [each.requires_grad_() for each in inputs]
    config = None if implementation == "reference" else saccade.KernelConfig(kv_tile=4)

    def call(query: Tensor, key: Tensor, value: Tensor, beta: Tensor, *more: Any) -> Any:
        *decays, state = more
        return saccade.gated_delta_rule(
            query, key, value, beta, decay=decays[0] if decays else None, initial_state=state,
            normalize_qk=decay == "heads", return_state=True,
            implementation=implementation, config=config,
        )  # fmt: skip

    assert torch.autograd.gradcheck(call, leaves)
