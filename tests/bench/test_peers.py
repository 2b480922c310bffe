"""Peers answer every case with a call or a reason, and a wrong one is caught before it is timed."""

import subprocess

import pytest
import torch

from saccade.bench.cases import CASES
from saccade.bench.check import exact, fault
from saccade.bench.peers import Call, Peer, all_peers, flex, from_layout, to_layout

CPU = torch.device("cpu")
TINY = [case for name, case in CASES.items() if name.startswith("tiny-")]
PEERS = {peer.who: peer for peer in all_peers()}
CHECKED = ("saccade/cpu", "saccade/reference", "plain", "sdpa", "sdpa/math")


def found_fault(case, call, gradients=True):
    tensors = case.make(CPU)
    return fault(call, exact(case, tensors), tensors, gradients=gradients)


@pytest.mark.parametrize("case", TINY, ids=lambda case: case.name)
@pytest.mark.parametrize("who", CHECKED)
def test_peers_agree_with_float64(who, case):
    call = PEERS[who].prepare(case, CPU)
    assert isinstance(call, Call)
    assert found_fault(case, call, gradients=not case.decodes) is None


@pytest.mark.parametrize("who", ["sdpa/cudnn", "sdpa/efficient"])
def test_backends_that_a_cpu_lacks_say_so(who):
    assert "No viable backend" in str(PEERS[who].prepare(TINY[0], CPU))


def test_packages_that_are_absent_say_so():
    reasons = {who: PEERS[who].prepare(TINY[0], CPU) for who in ("flash_attn", "xformers")}
    assert all(isinstance(reason, str) for reason in reasons.values())


@pytest.mark.parametrize("who", ["plain", "sdpa/math", "saccade/reference"])
def test_peers_that_write_scores_out_refuse_large_cases(who):
    assert "GB" in str(PEERS[who].prepare(CASES["cpu-memory-fp32-d64-32k"], CPU))


def test_flex_gives_the_reason_when_nothing_can_be_compiled(monkeypatch):
    def fails(command, **options):
        return subprocess.CompletedProcess(command, 1, "", "Traceback\nError: no compiler\n")

    def hangs(command, **options):
        raise subprocess.TimeoutExpired(command, 1)

    for run, reason in ((fails, "no compiler"), (hangs, "did not finish")):
        flex.why_not.cache_clear()
        monkeypatch.setattr(subprocess, "run", run)
        assert reason in str(PEERS["flex"].prepare(TINY[0], CPU))
    flex.why_not.cache_clear()


def one_key_too_many(query, key, value):
    length = query.shape[2]
    mask = torch.ones(length, length, dtype=torch.bool).tril(1)
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)


class WrongBackward(torch.autograd.Function):
    """The right number with the wrong gradient."""

    @staticmethod
    def forward(ctx, tensor):
        return tensor.clone()

    @staticmethod
    def backward(ctx, *grad_outputs):
        return grad_outputs[0] * 1.5


def wrong_gradient(query, key, value):
    return torch.nn.functional.scaled_dot_product_attention(
        query, WrongBackward.apply(key), value, is_causal=True
    )


def nothing(query, key, value):
    return torch.full_like(query, torch.nan).requires_grad_()


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (one_key_too_many, "wrong: output"),
        (wrong_gradient, "wrong: grad_key"),
        (lambda query, key, value: query[:, :, 1:], "wrong: its output is"),
    ],
)
def test_a_wrong_peer_is_caught(run, message):
    case = CASES["tiny-causal-fp32-d16-48"]
    gradients = run is wrong_gradient
    assert str(found_fault(case, Call(run), gradients)).startswith(message)


def test_nan_is_no_result():
    case = CASES["tiny-causal-fp32-d16-48"]
    assert "nan" in str(found_fault(case, Call(nothing), gradients=False))


@pytest.mark.parametrize("layout", ["heads first", "rows first", "packed"])
def test_layouts_there_and_back(layout):
    tensor = torch.randn(2, 3, 4, 5)
    there = to_layout(tensor, layout)
    assert there.is_contiguous()
    assert torch.equal(from_layout(there, layout, 2), tensor)


def test_only_the_reference_and_the_narrow_peers_wait_to_be_named():
    by_default = {peer.who for peer in PEERS.values() if peer.by_default}
    assert {"saccade/cpu", "plain", "sdpa"} <= by_default
    assert "saccade/reference" not in by_default
    assert all(isinstance(peer, Peer) and peer.about for peer in PEERS.values())
