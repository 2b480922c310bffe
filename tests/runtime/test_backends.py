"""The order of implementations, and that a named one never falls back."""

import itertools
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import saccade
from saccade import KernelConfig, masks
from saccade.gpu import machine_code, stored_code
from saccade.runtime import backends, call_cache
from saccade.runtime.spec import Problem
from saccade.runtime.validation import CAUSAL

PROBLEM = Problem(1, 2, 2, 8, 8, 16, 16, torch.float32, "cpu")


def test_the_order_of_preference():
    assert backends.NAMES == ("cpu", "hopper", "triton", "reference")
    for operation in ("attention", "paged_attention", "linear_attention"):
        names = [entry.name for entry in backends.candidates(operation)]
        assert names == list(backends.NAMES)


def test_the_first_that_can_is_taken():
    assert backends.choose(PROBLEM) == "cpu"
    assert backends.choose(PROBLEM._replace(device="cuda")) == "reference"


@pytest.mark.parametrize("name", sorted({*backends.NAMES} - {"hopper"}))  # which wants a GPU
def test_a_named_one_is_taken(name):
    assert backends.choose(PROBLEM, name) == name


def test_a_named_one_never_falls_back():
    with pytest.raises(NotImplementedError, match="cpu: tensors lie on cuda") as caught:
        backends.choose(PROBLEM._replace(device="cuda"), "cpu")
    assert "reference" not in str(caught.value)
    with pytest.raises(NotImplementedError, match="reference: it has no tiles") as caught:
        backends.choose(PROBLEM._replace(configured=True), "reference")
    assert "cpu" not in str(caught.value)


def test_without_a_name_every_reason_is_given():
    with pytest.raises(NotImplementedError, match="implementation: ") as caught:
        backends.choose(PROBLEM._replace(device="cuda", configured=True))
    nowhere = PROBLEM._replace(device="cuda", configured=True)
    for entry in backends.candidates("attention"):
        assert f"{entry.name}: {entry.unsupported(nowhere)}" in str(caught.value)


def test_lengths_of_one_kind_are_served_alike(monkeypatch: pytest.MonkeyPatch):
    """`lengths_kind` leaves out nothing that the choice looks at."""
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    lengths = (0, 1, 2, 3, 191, 192, 193, 383, 384, 511, 512, 513, 1024, 5000)
    half = torch.bfloat16
    compared = 0
    for packed, mask, dim in itertools.product(
        (False, True), ("", CAUSAL.key, masks.window(3).key), (32, 64, 128, 256)
    ):
        problem = Problem(1, 2, 2, 8, 8, dim, dim, half, "cuda", packed=packed, mask=mask, tma=True)
        chosen: dict[Any, backends.Chosen] = {}
        for batch, query_len, kv_len in itertools.product((1, 2, 3), lengths, lengths):
            of = problem._replace(batch=batch, query_len=query_len, kv_len=kv_len)
            kind = backends.lengths_kind(query_len, kv_len, batch if packed else None)
            found = backends.choose_all(of)
            assert chosen.setdefault(kind, found) == found, of
        compared += len(set(chosen.values())) > 1
    assert compared > 6  # else nothing depends on lengths here


@pytest.mark.parametrize("name", ["flash", "", "CPU", "cpu ", "hopper2"])
def test_an_unknown_name_is_refused_with_the_known_ones(name):
    with pytest.raises(ValueError, match="implementation: got") as caught:
        backends.choose(PROBLEM, name)
    assert repr(name) in str(caught.value)
    assert str(backends.NAMES) in str(caught.value)


def test_an_unknown_name_is_refused_even_where_nothing_fits():
    nowhere = PROBLEM._replace(device="cuda", configured=True)
    with pytest.raises(ValueError, match="got 'flash'"):
        backends.choose(nowhere, "flash")


def test_each_pass_has_its_own_choice(monkeypatch):
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    problem = PROBLEM._replace(device="cuda", dtype=torch.bfloat16, tma=True, head_dim=128)
    problem = problem._replace(value_dim=64, query_len=512, kv_len=512)
    assert backends.choose_all(problem)[:2] == ("hopper", "triton")
    assert backends.choose_all(problem._replace(value_dim=128))[:2] == ("hopper", "hopper")
    forward_by, backward_by, misses = backends.choose_all(problem, "hopper")
    assert (forward_by, backward_by) == ("hopper", "")
    assert (
        misses
        == "implementation: hopper: gradients of keys and values leave through the same memory"
    )


@pytest.mark.parametrize("has_code", [True, False])
def test_without_triton_machine_code_serves(monkeypatch, has_code):
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index=None: (9, 0))
    monkeypatch.setattr(machine_code, "architecture_of", lambda index: "sm_90")
    given = ("sm_90",) if has_code else ("sm_80",)
    index = {"made_by": "a test", "blocks": [], "places": {}}
    shipped = stored_code.Shipped(Path("sm_90.code"), index)
    monkeypatch.setattr(stored_code, "shipped", lambda name: shipped if name in given else None)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    backends._triton_device_unsupported.cache_clear()  # type: ignore[attr-defined]
    problem = PROBLEM._replace(device="cuda", device_index=0)
    if has_code:
        assert backends.choose(problem, "triton") == "triton"
    else:
        reason = str(backends.explained(problem).reasons["triton"])
        assert "no machine code for this GPU" in reason
    backends._triton_device_unsupported.cache_clear()  # type: ignore[attr-defined]


def test_a_named_one_without_a_backward_pass_refuses_gradients(monkeypatch):
    monkeypatch.setattr(
        backends, "choose_all", lambda *call: backends.Chosen("cpu", "", "implementation: cpu: no")
    )
    monkeypatch.setattr(call_cache, "_calls", {})
    monkeypatch.setattr(call_cache, "_layouts", {})
    rows = torch.ones(1, 2, 4, 8)
    saccade.attention(rows, rows, rows)
    for offsets in ((), (torch.tensor([0, 1], dtype=torch.int32),)):
        function = saccade.attention_varlen if offsets else saccade.attention
        leaf = (rows[0] if offsets else rows).clone().requires_grad_()
        for _ in range(2):
            with pytest.raises(NotImplementedError, match=r"cpu: no \(its backward pass\)"):
                function(leaf, leaf, leaf, *offsets)
            with torch.no_grad():
                function(leaf, leaf, leaf, *offsets)


# ---- through the calls ------------------------------------------------------------------------


@pytest.fixture
def ran(monkeypatch) -> list[str]:
    """The names of the implementations that ran."""
    names: list[str] = []

    def watch(target: str, name: str) -> None:
        module, attribute = target.rsplit(".", 1)
        run = getattr(__import__(module, fromlist=[attribute]), attribute)

        def remember(*arguments: Any) -> Any:
            names.append(name)
            return run(*arguments)

        monkeypatch.setattr(target, remember)

    watch("saccade.ops.attention.cpu.host.forward", "cpu")
    watch("saccade.ops.attention.reference.attention", "reference")
    return names


@pytest.mark.parametrize(
    ("more", "taken"),
    [
        ({}, "cpu"),
        ({"implementation": "cpu"}, "cpu"),
        ({"implementation": "reference"}, "reference"),
        ({"config": KernelConfig(16, 16)}, "cpu"),
        ({"config": {(9, 0): KernelConfig(16, 16)}, "implementation": "reference"}, "reference"),
    ],
    ids=str,
)
def test_the_chosen_one_runs_and_no_other(ran, more, taken):
    rows = torch.ones(1, 2, 4, 8)
    saccade.attention(rows, rows, rows, **more)
    offsets = torch.tensor([0, 4], dtype=torch.int32)
    tokens = torch.ones(4, 2, 8)
    saccade.attention_varlen(tokens, tokens, tokens, offsets, **more)
    assert ran == [taken, taken]


@pytest.mark.parametrize(
    ("device", "more", "reason"),
    [
        (
            "cpu",
            {"implementation": "reference", "config": KernelConfig(16)},
            "reference: it has no tiles",
        ),
        ("meta", {"implementation": "cpu"}, "cpu: tensors lie on meta"),
        (
            "meta",
            {"config": KernelConfig(16)},
            "cpu: tensors lie on meta.*; reference: it has no tiles",
        ),
    ],
    ids=["config", "device", "nothing-fits"],
)
def test_a_call_that_cannot_be_served_runs_nothing(ran, device, more, reason):
    rows = torch.ones(1, 2, 4, 8, device=device)
    with pytest.raises(NotImplementedError, match=reason):
        saccade.attention(rows, rows, rows, **more)
    assert ran == []
