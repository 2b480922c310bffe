"""A packed call like one that was checked before is recalled, and never confused with another.

On a CPU offsets are read and checked in every call; here they pretend that they cannot be read, as
on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from saccade import attention_varlen, masks

call: Any = attention_varlen


def tensors(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(24, heads, 16, generator=generator) for heads in (4, 2, 2)]


def offsets(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def results(given: list[Tensor], *sides: Tensor, **options: Any) -> list[Tensor]:
    """Output, lse, and gradients of a sum of both."""
    leaves = [tensor.detach().requires_grad_() for tensor in given]
    output, lse = call(*leaves, *sides, return_lse=True, **options)
    total = output.square().sum() + lse.sum()
    return [output.detach(), lse.detach(), *torch.autograd.grad(total, leaves)]


CUTS = [(0, 5, 24), (0, 20, 24), (0, 0, 24)]


def test_an_alike_call_is_not_checked_again_and_has_its_own_answer(
    unreadable: None, checks: list[Any]
) -> None:
    options: dict[str, Any] = {"mask": masks.causal(), "max_seqlen_q": 24}
    for seed, cut in enumerate(CUTS):
        given, sides = tensors(seed), (offsets(*cut), offsets(*CUTS[seed - 1]))
        found = results(given, *sides, **options)
        alone = call(*given, *sides, **options)
        assert torch.equal(alone, found[0])
        wide = [tensor.double() for tensor in given]
        wanted = results(wide, *sides, implementation="reference", **options)
        for mine, theirs in zip(found, wanted, strict=True):
            torch.testing.assert_close(mine.double(), theirs, atol=1e-5, rtol=1e-4)
    assert len(checks) == 2  # the first, and the first of the reference


def test_calls_that_differ_are_not_confused(unreadable: None) -> None:
    given, cut = tensors(0), offsets(0, 5, 24)
    choices: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((cut,), {}),
        ((cut,), {"mask": masks.causal()}),
        ((cut, offsets(0, 24, 24)), {}),
        ((offsets(0, 5, 9, 24),), {}),
        ((cut,), {"scale": 0.5}),
    ]
    for _ in range(2):
        for sides, options in choices:
            found = call(*given, *sides, **options)
            wide = [tensor.double() for tensor in given]
            wanted = call(*wide, *sides, implementation="reference", **options)
            torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)


def test_offsets_that_can_be_read_are_checked_every_time(checks: list[Any]) -> None:
    given = tensors(0)
    for _ in range(2):
        call(*given, offsets(0, 5, 24))
    assert len(checks) == 2
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        call(*given, offsets(0, 25, 24))


def test_what_is_no_length_is_refused_every_time(unreadable: None) -> None:
    given, cut = tensors(0), offsets(0, 5, 24)
    call(*given, cut, max_seqlen_q=19)
    with pytest.raises(TypeError, match="max_seqlen_q"):
        call(*given, cut, max_seqlen_q=True)


def test_other_lengths_are_not_checked_again_and_have_their_own_answers(
    unreadable: None, checks: list[Any]
) -> None:
    generator = torch.Generator().manual_seed(0)
    call(*tensors(0), offsets(0, 5, 24), mask=masks.causal())
    for ends in ((0, 7), (0, 1, 3, 9), (0, 24), (0, 7), (0, 2, 9)):
        given = [torch.randn(ends[-1], heads, 16, generator=generator) for heads in (4, 2, 2)]
        found = call(*given, offsets(*ends), mask=masks.causal())
        wide = [tensor.double() for tensor in given]
        wanted = call(*wide, offsets(*ends), mask=masks.causal(), implementation="reference")
        torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-4)
    assert len(checks) == 2  # the first, and the first of the reference


WRONG: dict[str, tuple[Any, type[Exception], str]] = {
    "dtype": ((offsets(0, 5, 24).long(),), TypeError, "cu_seqlens_q: got torch.int64"),
    "dimensions": ((offsets(0, 5, 24)[None],), ValueError, "cu_seqlens_q: got shape"),
    "number": ((offsets(0, 5, 24), offsets(0, 24)), ValueError, "cu_seqlens_k: got shape"),
    "none": ((offsets(0),), ValueError, "cu_seqlens_q: got no sequence"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_offsets_that_do_not_fit_are_refused_in_a_known_kind(unreadable: None, name: str) -> None:
    given = tensors(0)
    call(*given, offsets(0, 5, 24))
    sides, error, message = WRONG[name]
    for _ in range(2):
        with pytest.raises(error) as caught:
            call(*given, *sides)
        assert message in str(caught.value)
    with pytest.raises(ValueError, match="value: got 23 rows"):
        call(*given[:2], given[2][1:], offsets(0, 5, 24))
