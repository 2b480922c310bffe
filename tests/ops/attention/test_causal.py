"""`causal=True` is the mask `masks.causal()`, beside whatever mask a call has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import saccade
from saccade import masks

QUERY = torch.randn(2, 4, 5, 16, generator=torch.Generator().manual_seed(0))
KEY = torch.randn(2, 2, 9, 16, generator=torch.Generator().manual_seed(1))
OFFSETS = torch.tensor([0, 3, 7], dtype=torch.int32)
PAGES = torch.randn(6, 2, 4, 16, generator=torch.Generator().manual_seed(2))
TABLE = torch.tensor([[0, 3, 5], [4, 1, 2]], dtype=torch.int32)
LENS = torch.tensor([9, 12], dtype=torch.int32)


def dense(**options: Any) -> torch.Tensor:
    return saccade.attention(QUERY, KEY, KEY, **options)


def varlen(**options: Any) -> torch.Tensor:
    rows = torch.randn(7, 2, 16, generator=torch.Generator().manual_seed(3))
    return saccade.attention_varlen(rows, rows, rows, OFFSETS, **options)


def paged(**options: Any) -> torch.Tensor:
    return saccade.attention_paged(QUERY, PAGES, PAGES, TABLE, LENS, **options)


CALLS = pytest.mark.parametrize("call", [dense, varlen, paged])


@CALLS
@pytest.mark.parametrize("implementation", ["cpu", "reference"])
@pytest.mark.parametrize("mask", [None, masks.window(2), masks.causal()], ids=str)
def test_it_is_a_mask_beside_the_others(
    call: Callable[..., torch.Tensor], implementation: str, mask: Any
) -> None:
    both = masks.causal() if mask is None else mask & masks.causal()
    wanted = call(mask=both, implementation=implementation)
    for _ in range(2):  # also as a call that was made before
        found = call(mask=mask, causal=True, implementation=implementation)
        assert torch.equal(found, wanted)
    assert not torch.equal(call(causal=False, implementation=implementation), wanted)


def test_a_tensor_and_a_function_are_masks_too() -> None:
    seen = torch.rand(5, 9, generator=torch.Generator().manual_seed(4)) < 0.7
    wanted = dense(mask=seen & torch.ones(5, 9).tril(4).bool())
    torch.testing.assert_close(dense(mask=seen, causal=True), wanted)
    by_function = dense(mask=lambda batch, head, i, j: seen[i, j], causal=True)
    torch.testing.assert_close(by_function, wanted)


@CALLS
@pytest.mark.parametrize("given", [1, None, "yes"])
def test_it_takes_true_or_false(call: Callable[..., torch.Tensor], given: Any) -> None:
    with pytest.raises(TypeError, match=r"causal: got .*, takes True or False"):
        call(causal=given)


def test_a_compiled_call_takes_it() -> None:
    compiled = torch.compile(dense, backend="eager", fullgraph=True)
    assert torch.equal(compiled(causal=True), dense(causal=True))


def test_explain_takes_it() -> None:
    found = saccade.explain(saccade.attention, QUERY, KEY, KEY, causal=True)
    assert (
        found.problem
        == saccade.explain(saccade.attention, QUERY, KEY, KEY, mask=masks.causal()).problem
    )
