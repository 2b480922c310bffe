"""A call over pages like one that was checked before is recalled, and never confused with another.

On a CPU lengths and tables are read and checked in every call; in most tests they pretend that they
cannot be read, as on a GPU.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade import masks, scores
from saccade.runtime import call_cache
from saccade.runtime.arguments import check_paged
from saccade.testing import assert_exact, make_paged_case
from saccade.testing.paged import PagedCase


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """One entry for each call that was checked."""
    seen: list[Any] = []

    def counted(inputs: Any) -> None:
        seen.append(inputs)
        check_paged(inputs)

    monkeypatch.setattr("saccade.runtime.validation.check_paged", counted)
    return seen


def right(case: PagedCase, **options: Any) -> None:
    found, wanted = case.run("cpu", **options), case.run("reference", torch.float64)
    for name, tensor in found.items():
        torch.testing.assert_close(tensor.double(), wanted[name], atol=1e-4, rtol=1e-4)


def test_an_alike_call_is_not_checked_again_and_has_its_own_answer(
    unreadable: None, checks: list[Any]
) -> None:
    lengths = [((1, 40), (1, 0), (1, 17)), ((1, 33), (1, 40), (1, 1)), ((1, 2), (1, 3), (1, 38))]
    cases = [make_paged_case(lengths=each, seed=n, mask="window") for n, each in enumerate(lengths)]
    slots = max(case.tensors["key_pages"].shape[0] for case in cases)
    for case in cases:  # the same sizes, so that lengths, tables and numbers differ only
        for name in ("key_pages", "value_pages"):
            pages = case.tensors[name]
            grown = torch.full((slots, *pages.shape[1:]), torch.nan)
            grown[: pages.shape[0]] = pages
            case.tensors[name] = grown
    assert len({case.table["page_table"].shape for case in cases}) == 1
    for case in (*cases, *cases):
        right(case)
    assert len(checks) == 2  # the first for "cpu", and the first for the reference


CHANGES: dict[str, dict[str, Any]] = {
    "mask": {"mask": "causal"},
    "score": {"score": "softcap"},
    "scale": {"scale": -0.3},
    "sinks": {"sinks": True},
    "packed": {"packed": True},
    "eight bits": {"page_dtype": torch.int8},
    "page size": {"page_size": 16},
    "memory": {"memory": "slots_first"},
    "dtype": {"dtype": torch.float64},
    "heads": {"group": 1},
}


@pytest.mark.parametrize("name", list(CHANGES))
def test_calls_that_differ_are_not_confused(unreadable: None, name: str) -> None:
    cases = [make_paged_case(), make_paged_case(**CHANGES[name])]
    for which in (0, 1, 0, 1):
        right(cases[which])
        right(cases[which], batch_invariant=True)
    assert_exact(cases[1], "cpu")


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_values_that_can_be_read_are_checked_every_time(
    checks: list[Any], implementation: str
) -> None:
    case = make_paged_case()
    for _ in range(3):
        case.run(implementation)
    assert len(checks) == 1  # all that follows from shapes
    case.table["kv_lens"][0] = 1000
    with pytest.raises(ValueError, match="kv_lens: got 1000"):
        case.run(implementation)


def test_offsets_that_can_be_read_are_validated_every_time(checks: list[Any]) -> None:
    case = make_paged_case(packed=True)
    for count in (1, 2, 3):
        case.run("cpu")
        assert len(checks) == count
    assert not call_cache._calls


WRONG: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "batch_invariant=1": ({"batch_invariant": 1}, TypeError, "batch_invariant: got 1"),
    "return_lse=1": ({"return_lse": 1}, TypeError, "return_lse: got 1"),
    "scale=True": ({"scale": True}, TypeError, "scale: got True"),
    "implementation": ({"implementation": "gpu"}, ValueError, "implementation: got 'gpu'"),
}


@pytest.mark.parametrize("name", list(WRONG))
def test_wrong_arguments_still_raise_after_a_like_call(unreadable: None, name: str) -> None:
    changes, error, message = WRONG[name]
    arguments = make_paged_case().arguments()
    saccade.attention_paged(**arguments)
    arguments |= {"scale": 1.0, "batch_invariant": True}
    saccade.attention_paged(**arguments)
    for _ in range(2):
        with pytest.raises(error) as caught:
            saccade.attention_paged(**{**arguments, **changes})
        assert message in str(caught.value)


def test_a_gradient_is_refused_after_a_like_call(unreadable: None) -> None:
    arguments = make_paged_case().arguments()
    for _ in range(2):
        saccade.attention_paged(**arguments)
        wanting = {**arguments, "query": arguments["query"].clone().requires_grad_()}
        with pytest.raises(NotImplementedError, match="a gradient of attention over pages"):
            saccade.attention_paged(**wanting)
        with torch.no_grad():
            saccade.attention_paged(**wanting)


SPECIAL: dict[str, dict[str, Any]] = {
    "captured by the mask": {"mask": masks.key_lengths(torch.tensor([3, 9, 4]))},
    "captured by the score": {"score": scores.alibi(torch.ones(4))},
    "whole scale": {"scale": 1},
}


@pytest.mark.parametrize("name", list(SPECIAL))
def test_what_is_out_of_the_ordinary_is_checked_every_time(
    unreadable: None, checks: list[Any], name: str
) -> None:
    arguments = {**make_paged_case().arguments(), **SPECIAL[name]}
    for count in (1, 2, 3):
        saccade.attention_paged(**arguments)
        assert len(checks) == count
    assert not call_cache._calls
