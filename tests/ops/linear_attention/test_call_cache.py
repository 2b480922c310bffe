"""Calls of linear attention are validated once where nothing in them may change."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import validations

import saccade
from saccade import feature_maps
from saccade.ops.linear_attention import api
from saccade.runtime import call_cache


@pytest.fixture
def validated(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call that is validated."""
    return validations.noted(monkeypatch, api)


ROWS = [torch.randn(1, 2, 9, 8) for _ in range(3)]
STATE = saccade.linear_attention(*ROWS, return_state=True)[1]
FAVOR = feature_maps.Favor(8)
SCALED_STATE = saccade.linear_attention(*ROWS, feature_map=FAVOR, return_state=True)[1]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"normalize": "abs", "eps": 0.5, "scale": 0.3},
        {"feature_map": "relu", "align": "top_left", "return_state": True},
        {"implementation": "reference"},
        {"config": saccade.KernelConfig(kv_tile=4)},
        {"initial_state": STATE},
        {"initial_state": STATE, "implementation": "reference"},
    ],
    ids=lambda options: ", ".join(options),
)
def test_a_plain_call_is_validated_once(validated: list[Any], options: dict[str, Any]) -> None:
    results = [saccade.linear_attention(*ROWS, **options) for _ in range(3)]
    assert len(validated) == 1
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=0)
    leaves = [rows.clone().requires_grad_() for rows in ROWS]
    result: Any = saccade.linear_attention(*leaves, **options)
    (result[0] if options.get("return_state") else result).sum().backward()
    assert len(validated) == 1
    assert all(leaf.grad is not None for leaf in leaves)


@pytest.mark.parametrize(
    "options",
    [
        {"decay": -torch.ones(2)},
        {"key_lengths": torch.tensor([4])},
        {"initial_state": SCALED_STATE, "feature_map": FAVOR},
        {"feature_map": torch.exp},
        {"feature_map": "softmax"},
        {"feature_map": FAVOR},
        {"feature_map": "identity", "normalize": "abs", "eps": 1.0},
    ],
    ids=lambda options: next(iter(options)),
)
def test_any_other_is_validated_each_time(validated: list[Any], options: dict[str, Any]) -> None:
    for _ in range(2):
        saccade.linear_attention(*ROWS, **options)
    assert len(validated) == 2


def test_decay_and_lengths_that_cannot_be_read_are_validated_once(
    validated: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "values_readable", lambda tensor: False)
    for name, first, second in (
        ("decay", -torch.ones(2), -2 * torch.ones(2)),
        ("decay", -torch.rand(1, 2, 9), -torch.rand(1, 2, 9)),
        ("key_lengths", torch.tensor([4]), torch.tensor([7])),
    ):
        validated.clear()
        for initial in (None, STATE):
            for given in (first, second):
                options = {name: given, "initial_state": initial}
                found = saccade.linear_attention(*ROWS, **options)
                wanted = saccade.linear_attention(*ROWS, **options, implementation="reference")
                torch.testing.assert_close(found, wanted)
        assert len(validated) == 4, name  # two kinds of calls by each of two implementations
    leaves = [each.clone().requires_grad_() for each in (-torch.ones(2), *STATE[:2])]
    of_state = saccade.LinearState(*leaves[1:])
    saccade.linear_attention(*ROWS, decay=leaves[0], initial_state=of_state).sum().backward()
    assert all(leaf.grad is not None and leaf.grad.any() for leaf in leaves)


def test_a_state_of_nothing_is_refused_after_a_call_without_one(validated: list[Any]) -> None:
    saccade.linear_attention(*ROWS)
    nothing: Any = saccade.LinearState(None, None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"initial_state\.kv"):
        saccade.linear_attention(*ROWS, initial_state=nothing)
    with pytest.raises(TypeError, match="initial_state: got tuple"):
        saccade.linear_attention(*ROWS, initial_state=tuple(STATE))  # pyright: ignore
    assert len(validated) == 3


def test_what_is_equal_and_not_the_same_is_refused_after_a_call_that_was_kept(
    validated: list[Any],
) -> None:
    saccade.linear_attention(*ROWS, causal=True, eps=1.0)
    for wrong in ({"causal": 1}, {"eps": True}):
        options: dict[str, Any] = {"causal": True, "eps": 1.0, **wrong}
        with pytest.raises(TypeError, match=next(iter(wrong))):
            saccade.linear_attention(*ROWS, **options)


def test_offsets_that_can_be_read_are_validated_each_time(validated: list[Any]) -> None:
    rows = [each[0].transpose(0, 1).contiguous() for each in ROWS]
    call: Any = saccade.linear_attention_varlen
    call(*rows, torch.tensor([0, 4, 9], dtype=torch.int32))
    with pytest.raises(ValueError, match="cu_seqlens_q"):
        call(*rows, torch.tensor([0, 4, 10], dtype=torch.int32))


def test_under_autocast_inputs_are_cast_each_time(validated: list[Any]) -> None:
    wanted = saccade.linear_attention(*ROWS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert saccade.linear_attention(*ROWS).dtype == torch.bfloat16
    assert torch.equal(saccade.linear_attention(*ROWS), wanted)
