"""fp8 attention on the CPU against the model of it, and the contract of hidden rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fp8_cases import Case, assert_close, expected, make_case

import saccade
from saccade import masks, scores
from saccade.runtime.fp8_spec import E4M3
from saccade.testing import poisoned

CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one number": {"form": "number", "causal": True},
    "heads": {"form": "heads", "lengths": (130, 200), "causal": True, "heads": (4, 2)},
    "blocks": {"form": "blocks", "lengths": (260, 300), "dims": (16, 48), "scale": 0.4},
    "window": {"form": "blocks", "mask": masks.causal() & masks.window(100), "lengths": (300, 300)},
    "lengths": {"mask": masks.key_lengths(torch.tensor([150, 0]))},
}


@pytest.mark.parametrize("name", CASES)
def test_rounds_as_the_model_does(name: str) -> None:
    case = make_case(**CASES[name])
    with poisoned():
        found = case.run("cpu")
    assert_close(found, expected(case), float(case.rows[2].float().abs().max()) * 1.5)


@pytest.mark.parametrize("implementation", ["cpu", "reference"])
def test_a_packed_call_is_its_sequences(implementation: str) -> None:
    torch.manual_seed(0)
    ends = torch.tensor([0, 130, 130, 300], dtype=torch.int32)
    rows = [torch.randn(310, heads, 32, dtype=torch.bfloat16) for heads in (4, 2, 2)]
    options: dict[str, Any] = {
        "causal": True, "sinks": torch.randn(4), "implementation": implementation,
    }  # fmt: skip
    call: Any = saccade.attention_fp8_varlen
    output, lse = call(*rows, ends, return_lse=True, **options)
    assert not output[300:].any() and bool((lse[:, 300:] == -torch.inf).all())
    for first, end in ((0, 130), (130, 300)):
        alone = [part[first:end].transpose(0, 1).unsqueeze(0) for part in rows]
        wanted = saccade.attention_fp8(*alone, return_lse=True, **options)
        torch.testing.assert_close(output[first:end].transpose(0, 1), wanted[0][0])
        torch.testing.assert_close(lse[:, first:end], wanted[1][0])


@pytest.mark.parametrize("score", [None, scores.softcap(3.0)], ids=["plain", "softcap"])
def test_smoothing_changes_neither_lse_nor_sinks_nor_scores(score: Any) -> None:
    torch.manual_seed(1)
    query, key, value = torch.randn(3, 1, 2, 150, 64, dtype=torch.float16)
    key = key + 3 * torch.randn(64)  # a mean far from 0
    options: dict[str, Any] = {"causal": True, "score": score, "sinks": torch.tensor([0.0, 2.0])}
    wanted = saccade.attention(query, key.half(), value, return_lse=True, **options)
    for implementation in ("cpu", "reference"):
        found = saccade.attention_fp8(
            query, key.half(), value, return_lse=True, implementation=implementation, **options
        )
        assert float((found[0] - wanted[0]).float().square().mean().sqrt()) < 0.03
        assert float((found[1] - wanted[1]).square().mean().sqrt()) < 0.05


@pytest.mark.parametrize("given", [True, False], ids=["e4m3", "16 bits"])
def test_what_is_hidden_cannot_leak(given: bool) -> None:
    case = make_case(mask=masks.key_lengths(torch.tensor([120, 80])), dims=(16, 16), heads=(1, 1))
    rows = list(case.rows if given else [rows.half() for rows in case.rows])
    for batch, end in enumerate((120, 80)):
        for tensor in rows[1:]:
            tensor[batch, :, end:] = torch.nan if given else 0.0
    options: dict[str, Any] = {} if given else {"quantize": "block"}
    wanted = saccade.attention_fp8(*rows, **case.options, **options)
    assert bool(wanted.isfinite().all())
    if not given:
        for tensor in rows[1:]:
            tensor[1, :, 80:] = torch.nan
        torch.testing.assert_close(saccade.attention_fp8(*rows, **case.options, **options), wanted)
    rows[1][0, :, 5] = torch.nan  # and what is seen shows
    found = saccade.attention_fp8(*rows, **case.options, **options)
    assert bool(found[0].isnan().all()) and torch.equal(found[1], wanted[1])


def test_a_row_that_sees_nothing() -> None:
    case = make_case(lengths=(5, 3), causal=True)
    output, lse = case.run("cpu")
    assert not output[:, :, :2].any() and bool((lse[:, :, :2] == -torch.inf).all())
    sinks = torch.tensor([1.0, -1.0])
    found = Case(case.rows, {}, {**case.options, "sinks": sinks}).run("cpu")
    assert not found[0][:, :, :2].any()
    torch.testing.assert_close(found[1][:, :, 0], sinks.expand(2, 2))
    empty = [torch.zeros(1, 2, rows, 16).to(E4M3) for rows in (4, 0, 0)]
    output, lse = saccade.attention_fp8(*empty, return_lse=True)
    assert not output.any() and bool((lse == -torch.inf).all())
