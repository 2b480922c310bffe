"""Decay so strong that nothing is left: what comes behind it fades as in a sequence of its own."""

import pytest
import torch

import saccade
from saccade.gpu import language

START, LENGTH = 21, 50  # inside of a chunk


interpreted = pytest.mark.skipif(
    not language.INTERPRETED, reason="CPU tensors take kernels under the interpreter only"
)


@pytest.mark.parametrize(
    "implementation", ["reference", "cpu", pytest.param("triton", marks=interpreted)]
)
@pytest.mark.parametrize("reset", [-1e8, -1e30, -3e38])
def test_a_reset_begins_a_sequence(reset: float, implementation: str) -> None:
    torch.manual_seed(0)
    rows = torch.randn(3, 1, 2, LENGTH, 16)
    decay = -torch.rand(1, 2, LENGTH)
    decay[..., START] = reset
    tensors = [each.clone().requires_grad_() for each in (*rows, decay)]
    query, key, value, given = tensors
    output = saccade.linear_attention(query, key, value, decay=given, implementation=implementation)
    found = torch.autograd.grad(output[:, :, START:].square().sum(), tensors)

    alone = [each[:, :, START:].double().requires_grad_() for each in (*rows, decay)]
    query, key, value, given = alone
    wanted = saccade.linear_attention(query, key, value, decay=given, implementation="reference")
    gradients = torch.autograd.grad(wanted.square().sum(), alone)
    torch.testing.assert_close(output[:, :, START:].double(), wanted, rtol=1e-5, atol=1e-5)
    for each, right in zip(found, gradients, strict=True):
        torch.testing.assert_close(each[:, :, START:].double(), right, rtol=1e-4, atol=1e-4)
    for each in found[:3]:
        assert not each[:, :, :START].any()  # nothing flows over it
    assert found[3][:, :, :START].abs().max() < 1e-4  # a difference of sums
