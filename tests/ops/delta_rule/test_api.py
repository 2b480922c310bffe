"""What the calls of the gated delta rule refuse by name, take, validate once, and explain."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import validations
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

import saccade
from saccade.ops.delta_rule import api
from saccade.testing import make_delta_case

rule: Any = saccade.gated_delta_rule
varlen: Any = saccade.gated_delta_rule_varlen
step: Any = saccade.gated_delta_rule_step


def given(**changes: Any) -> dict[str, Any]:
    """A call's tensors, some of them others."""
    torch.manual_seed(0)
    tensors = {
        "query": torch.randn(2, 2, 9, 16),
        "key": torch.randn(2, 2, 9, 16) / 4,
        "value": torch.randn(2, 4, 9, 8),
        "beta": torch.rand(2, 4, 9),
    }
    return tensors | changes


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "key's head_dim": ({"key": torch.ones(2, 2, 9, 8)}, "key: got head_dim 8, takes query's 16"),
    "key's heads": ({"key": torch.ones(2, 4, 9, 16)}, "key: got 4 heads, takes query's 2"),
    "key's rows": ({"key": torch.ones(2, 2, 8, 16)}, "key: got 8 rows, takes query's 9"),
    "value's batch": ({"value": torch.ones(1, 4, 9, 8)}, "value: got batch 1, takes key's 2"),
    "value's rows": ({"value": torch.ones(2, 4, 8, 8)}, "value: got 8 rows, takes key's 9"),
    "value's heads": (
        {"value": torch.ones(2, 3, 9, 8)}, "value: got 3 heads, takes a multiple of key's 2",
    ),
    "beta's shape": ({"beta": torch.ones(2, 2, 9)}, r"beta: got shape \(2, 2, 9\), takes"),
    "beta's dtype": ({"beta": torch.ones(2, 4, 9).int()}, "beta: got torch.int32, takes"),
    "no beta": ({"beta": None}, "beta: got NoneType, takes a floating-point tensor"),
    "decay's shape": (
        {"decay": torch.ones(2, 4, 9, 8)},
        r"decay: got shape \(2, 4, 9, 8\), takes .*\(2, 4, 9\) or \(2, 4, 9, 16\)",
    ),
    "decay's dtype": ({"decay": torch.ones(2, 4, 9).bool()}, "decay: got torch.bool, takes"),
    "state's shape": (
        {"initial_state": torch.ones(2, 4, 8, 16)},
        r"initial_state: got shape \(2, 4, 8, 16\), takes .*\(2, 4, 16, 8\)",
    ),
    "state's dtype": ({"initial_state": torch.ones(2, 4, 16, 8).long()}, "initial_state: got"),
    "normalize_qk": ({"normalize_qk": 1}, "normalize_qk: got 1, takes True or False"),
    "return_state": ({"return_state": None}, "return_state: got None, takes True or False"),
    "scale": ({"scale": "large"}, "scale: got 'large', takes"),
    "implementation": ({"implementation": "mps"}, "implementation: got 'mps', takes one of"),
    "hopper": ({"implementation": "hopper"}, "hopper: it takes bfloat16, not float32"),
    "config": (
        {"implementation": "reference", "config": saccade.KernelConfig(kv_tile=8)},
        "reference: it has no tiles",
    ),
    "dtypes": ({"value": torch.ones(2, 4, 9, 8).half()}, "value: got torch.float16, takes query's"),
    "dimensions": ({"query": torch.ones(2, 9)}, r"query: got shape \(2, 9\), takes \[batch"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_fit_is_refused_by_name(name: str) -> None:
    changes, message = REFUSED[name]
    with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
        rule(**given(**changes))


def test_a_packed_call_refuses_by_name() -> None:
    rows = [each[0].transpose(0, 1) for each in given().values()]
    ends = torch.tensor([0, 9], dtype=torch.int32)
    with pytest.raises(ValueError, match="cu_seqlens: got a last offset of 12 for 9 tokens"):
        varlen(*rows, torch.tensor([0, 12], dtype=torch.int32))
    with pytest.raises(TypeError, match="cu_seqlens: got None"):
        varlen(*rows, None)
    with pytest.raises(TypeError, match="causal: an unknown option; takes decay, normalize_qk"):
        varlen(*rows, ends, causal=True)
    with pytest.raises(ValueError, match=r"initial_state: got shape \(2, 4, 16, 8\), takes"):
        varlen(*rows, ends, initial_state=torch.ones(2, 4, 16, 8))


def one_token(**changes: Any) -> dict[str, Any]:
    return {name: each[:, :, :1] for name, each in given().items()} | changes


def test_a_step_refuses_by_name() -> None:
    pool = torch.zeros(5, 4, 16, 8)
    for state, changes, message in (
        (pool, {}, r"state: got shape \(5, 4, 16, 8\), takes .*\(2, 4, 16, 8\)"),
        (pool[:2], {"implementation": "reference"}, "reference: it changes nothing in place"),
        (pool[:1].expand(2, 4, 16, 8), {}, "state: got an expanded tensor"),
        (pool, {"state_index": torch.tensor([1, 1])}, "state_index: got an entry twice"),
        (pool, {"state_index": torch.tensor([1, 5])}, "state_index: got 1 to 5, takes 0 to 4"),
        (pool, {"state_index": torch.tensor([1.0, 2.0])}, "state_index: got torch.float32"),
        (pool[:2].requires_grad_(), {}, "got tensors that require gradients, takes none"),
        (None, {}, "state: got NoneType, takes a floating-point tensor"),
        (pool[:2].long(), {}, r"state: got torch.int64, takes a floating-point tensor \["),
        (
            torch.zeros(1000).as_strided((2, 4, 16, 8), (64, 128, 8, 1)),  # heads lie in entries
            {},
            r"state: got strides \(64, 128, 8, 1\) for .* takes one whose numbers all have memory",
        ),
    ):
        with pytest.raises((TypeError, ValueError, NotImplementedError), match=message):
            step(state, **one_token(**changes))


def test_defaults_are_those_of_the_formula() -> None:
    """No decay is a decay of 0, no state one of zeros, and the scale 1/sqrt(head_dim)."""
    plain = rule(**given())
    state, decay = torch.zeros(2, 4, 16, 8), torch.zeros(2, 4, 9)
    torch.testing.assert_close(rule(**given(initial_state=state, decay=decay, scale=0.25)), plain)
    by_channel = rule(**given(decay=decay.unsqueeze(-1).expand(2, 4, 9, 16)))
    torch.testing.assert_close(by_channel, plain, atol=1e-6, rtol=1e-5)


def test_a_value_head_reads_the_key_head_of_repeat_interleave() -> None:
    tensors = given()
    repeated = {name: tensors[name].repeat_interleave(2, 1) for name in ("query", "key")}
    torch.testing.assert_close(rule(**tensors), rule(**tensors | repeated))


def test_normalized_rows_are_those_of_transformers() -> None:
    """By x · rsqrt(Σ x² + 1e-6), which of short rows is far from length 1."""
    tensors = given()
    tensors["key"] = tensors["key"] * 1e-3
    divided = {
        name: tensors[name] * torch.rsqrt(tensors[name].square().sum(-1, keepdim=True) + 1e-6)
        for name in ("query", "key")
    }
    found = rule(**tensors, normalize_qk=True)
    torch.testing.assert_close(found, rule(**tensors | divided))


def test_beta_and_decay_come_in_any_dtype() -> None:
    decay = -torch.rand(2, 4, 9)
    wanted = rule(**given(decay=decay.bfloat16().float(), beta=given()["beta"].half().float()))
    leaves = given(decay=decay.bfloat16(), beta=given()["beta"].half())
    leaves = {name: each.requires_grad_() for name, each in leaves.items()}
    found = rule(**leaves)
    torch.testing.assert_close(found, wanted)
    grads = torch.autograd.grad(found.sum(), list(leaves.values()))
    assert [each.dtype for each in grads] == [each.dtype for each in leaves.values()]


def test_a_positive_decay_is_not_looked_at() -> None:
    tensors = given(decay=torch.rand(2, 4, 9) / 4)
    wanted = rule(**tensors, implementation="reference")
    torch.testing.assert_close(rule(**tensors), wanted, atol=1e-4, rtol=1e-4)


def test_infinite_decay_forgets_everything() -> None:
    for channels in ((), (16,)):
        decay = torch.zeros(2, 4, 9, *channels)
        decay[:, :, 5] = -torch.inf
        tensors = given(decay=decay)
        found = rule(**tensors)
        after = {name: each[:, :, 5:] for name, each in tensors.items()}
        torch.testing.assert_close(found[:, :, 5:], rule(**after), atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("decay", ["heads", "channels"])
def test_errors_do_not_grow_with_the_length(decay: str) -> None:
    """Of equal keys with beta 1, which undo each other, and of random ones."""
    for hard in (False, True):
        case = make_delta_case(
            lengths=(6000,), batch=1, heads=(1, 1), head_dim=16, hard=hard, normalize_qk=True,
            decay=decay, strength=1e-3,
        )  # fmt: skip
        wide = {name: each.double() for name, each in case.tensors.items()}
        exact = case.call(wide, implementation="cpu")["output"]
        found = case.call(case.tensors, implementation="cpu")["output"]
        error = (found.double() - exact).square().mean((0, 1, 3)).sqrt()
        size = exact.square().mean().sqrt()
        assert float(error.max()) < 1e-5 * float(size)
        assert float(error[-500:].mean()) < 2 * float(error[500:1000].mean()) + 1e-7 * float(size)


# ---- calls that are like one that was validated --------------------------------------------------


def test_a_call_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = validations.noted(monkeypatch, api)
    tensors = given(decay=-torch.rand(2, 4, 9), initial_state=torch.ones(2, 4, 16, 8))
    first = rule(**tensors, return_state=True)
    for again in (rule(**tensors, return_state=True) for _ in range(2)):
        torch.testing.assert_close(again, first, rtol=0, atol=0)
    leaves = {name: each.clone().requires_grad_() for name, each in tensors.items()}
    rule(**leaves, return_state=True)[0].sum().backward()
    assert len(seen) == 1 and all(leaf.grad is not None for leaf in leaves.values())
    rule(**tensors)  # another call
    with pytest.raises(ValueError, match="beta: got shape"):
        rule(**tensors | {"beta": torch.ones(2, 4, 8)}, return_state=True)
    assert len(seen) == 3


def test_a_step_is_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later ones give the same, and PyTorch knows of them too that they changed the states."""
    seen = validations.noted(monkeypatch, api)
    token, before = one_token(), torch.rand(2, 4, 16, 8)
    first, second = before.clone(), before.clone()
    outputs = [step(state, **token, normalize_qk=True) for state in (first, second)]
    assert len(seen) == 1 and first._version > 0 and second._version > 0
    torch.testing.assert_close(outputs[1], outputs[0], rtol=0, atol=0)
    torch.testing.assert_close(second, first, rtol=0, atol=0)
    step(second, **token)  # another call
    with pytest.raises(ValueError, match="state: got shape"):
        step(torch.zeros(2, 4, 16, 9), **token, normalize_qk=True)
    assert len(seen) == 3
    with torch.inference_mode():  # whose tensors count no versions
        step(before.clone(), **token, normalize_qk=True)


# ---- what explain and the counter of FLOPs say ---------------------------------------------------


def test_explain_tells_the_whole_call() -> None:
    decay = torch.zeros(2, 4, 9, 16)
    found = saccade.explain(rule, **given(decay=decay), normalize_qk=True)
    text = str(found)
    for words in (
        "gated delta rule: batch 2, 9 tokens, heads 2/4, dim 16/8, float32 on cpu",
        "decay of each channel, queries and keys normalized, initial state no",
        "cpu: yes, taken", "reference: yes, not asked for",
    ):  # fmt: skip
        assert words in text
    assert found.chosen == "cpu" and found.backward is not None and found.visible_pairs is None
    state = torch.zeros(2, 4, 16, 8)
    assert saccade.explain(step, state, **one_token()).backward is None
    rows = [each[0].transpose(0, 1) for each in given().values()]
    ends = torch.tensor([0, 4, 9], dtype=torch.int32)
    assert "2 sequences, 9 tokens" in str(saccade.explain(varlen, *rows, ends))


def test_flops_are_those_of_the_products() -> None:
    """Three products with the state for each token, and four with the rows of its chunk."""
    tensors: dict[str, Tensor] = {name: each.requires_grad_() for name, each in given().items()}
    product, rows = 2 * 16 * 8, 2 * 4 * 9
    forward = rows * (3 * product + 2 * 64 * (2 * 16 + 2 * 8))
    with FlopCounterMode(display=False) as counter:
        output = rule(**tensors)
        assert counter.get_total_flops() == forward
        output.sum().backward()
    backward = rows * (8 * product + 2 * 64 * (6 * 16 + 5 * 8))
    assert counter.get_total_flops() == forward + backward
    assert saccade.explain(rule, **given()).flops == forward
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        step(torch.zeros(2, 4, 16, 8), **one_token())
    assert counter.get_total_flops() == 2 * 4 * 3 * product
