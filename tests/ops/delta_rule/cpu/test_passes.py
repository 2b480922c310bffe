"""What only the CPU's passes do: segments of sequences, chunks of any size, NaN in its place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import saccade
from saccade.ops.delta_rule.cpu import backward, decay, forward, host
from saccade.runtime.delta_spec import DECAY_KINDS
from saccade.testing import make_delta_case

F64 = torch.float64
rule: Any = saccade.gated_delta_rule


@pytest.mark.parametrize("kind", DECAY_KINDS)
def test_segments_of_a_long_sequence_make_its_states_again(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of eleven spans in segments of three, the last one short."""
    case = make_delta_case(lengths=(85,), dtype=F64, decay=kind, state=True)
    config = saccade.KernelConfig(kv_tile=4)
    whole = case.run("cpu", config=config)
    monkeypatch.setattr(host, "CHUNKS_AT_ONCE", 2)
    monkeypatch.setattr(backward, "SEGMENT", 3)
    made = case.run("cpu", config=config)
    for name, each in whole.items():
        torch.testing.assert_close(made[name], each, atol=1e-11, rtol=1e-11, msg=name)


def test_segments_are_about_as_long_as_there_are_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that states at their starts and inside of one take equally much memory."""
    held: list[int] = []
    make = forward.states_before

    def states_before(dense: Any, spans: list[Any], state: Any) -> Any:
        held.append(len(spans))
        return make(dense, spans, state)

    monkeypatch.setattr(backward, "states_before", states_before)
    monkeypatch.setattr(backward, "SEGMENT", 1)
    monkeypatch.setattr(host, "CHUNKS_AT_ONCE", 1)
    case = make_delta_case(lengths=(144,), batch=1, heads=(1, 1))
    case.run("cpu", config=saccade.KernelConfig(kv_tile=1))
    assert held == [12] * (11 + 12)  # once to the last segment, then each, from the last on


@pytest.mark.parametrize("kind", DECAY_KINDS)
def test_results_do_not_depend_on_the_chunk(kind: str) -> None:
    case = make_delta_case(lengths=(70,), dtype=F64, decay=kind, normalize_qk=True)
    whole = case.run("cpu")
    for chunk in (1, 5, 1000):
        found = case.run("cpu", config=saccade.KernelConfig(kv_tile=chunk))
        for name, each in whole.items():
            torch.testing.assert_close(found[name], each, atol=1e-11, rtol=1e-11, msg=name)


@pytest.mark.parametrize("trash", [torch.nan, torch.inf])
@pytest.mark.parametrize("nonfinite", ["query", "key", "value", "beta"])
@pytest.mark.parametrize("kind", DECAY_KINDS)
def test_tokens_before_a_nonfinite_one_do_not_see_it(
    kind: str, nonfinite: str, trash: float
) -> None:
    case = make_delta_case(lengths=(70,), decay=kind)
    clean = rule(**case.tensors)
    case.tensors[nonfinite][:, :, 40] = trash
    found = rule(**case.tensors)
    torch.testing.assert_close(found[:, :, :40], clean[:, :, :40], atol=1e-5, rtol=1e-4)
    after = found[:, :, 40:] if nonfinite != "query" else found[:, :, 40:41]
    assert not bool(after.isfinite().all(-1).any())
    if nonfinite == "query":
        torch.testing.assert_close(found[:, :, 41:], clean[:, :, 41:], atol=1e-5, rtol=1e-4)


def test_factors_of_channels_are_products_of_halves() -> None:
    """Each pair's factor is that between its tokens, of any strength, and none is more than 1."""
    for strength in (0.1, 100.0):
        logs = -strength * torch.rand(1, 1, 8, 3, dtype=F64)
        made = decay.ChannelDecay(logs)
        for channel in range(3):
            one = torch.zeros(1, 1, 1, 8, 3, dtype=F64)
            one[..., channel] = 1
            found = made.of_pairs(one, one[:, :, 0])[0, 0, 0]
            for i in range(8):
                for j in range(8):
                    wanted = logs[0, 0, j + 1 : i + 1, channel].sum().exp() if j <= i else 0.0
                    assert float(found[i, j]) == pytest.approx(float(wanted), rel=1e-12)
        assert all(bool((each <= 1).all()) for level in made.levels for each in level[1:])


def test_a_step_of_many_tokens_is_one_call() -> None:
    """Beyond a few tokens they are a chunk."""
    case = make_delta_case(lengths=(20,), decay="channels", state=True, dtype=F64)
    tensors: dict[str, Any] = dict(case.tensors)
    state = tensors.pop("initial_state")
    wanted, last = rule(**tensors, initial_state=state, return_state=True)
    output = saccade.gated_delta_rule_step(state, **tensors)
    torch.testing.assert_close((output, state), (wanted, last))


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("kind", DECAY_KINDS)
def test_a_call_leaves_its_tensors_as_they_are(kind: str, dtype: torch.dtype) -> None:
    """Of one whole chunk, which is read as it lies, and where decay is less than is counted."""
    case = make_delta_case(lengths=(4,), dtype=dtype, decay=kind, state=True)
    if "decay" in case.tensors:
        case.tensors["decay"][:, :, 2] = -1e30
    tensors = {name: each.clone().requires_grad_() for name, each in case.tensors.items()}
    rule(**tensors, config=saccade.KernelConfig(kv_tile=4)).sum().backward()
    for name, each in tensors.items():
        assert each._version == 0, name
        assert torch.equal(each, case.tensors[name]), name


def test_large_states_of_a_pool_change_where_they_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_delta_case(lengths=(3,), decay="heads", state=True)
    tensors: dict[str, Any] = dict(case.tensors)
    state = tensors.pop("initial_state")
    wanted = state.clone()
    output = saccade.gated_delta_rule_step(wanted, **tensors)
    monkeypatch.setattr(host, "LARGE_STATE", 1)
    for dtype, bound in ((torch.float32, 1e-6), (torch.bfloat16, 3e-2)):
        pool = torch.zeros(5, *state.shape[1:], dtype=dtype)
        slots = torch.tensor([4, 0])
        pool[slots] = state.to(dtype)
        found = saccade.gated_delta_rule_step(pool, **tensors, state_index=slots)
        torch.testing.assert_close(found, output, atol=bound, rtol=bound)
        torch.testing.assert_close(pool[slots].float(), wanted, atol=bound, rtol=bound)
        assert not bool(pool[1:4].any())
