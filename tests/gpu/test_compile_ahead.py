"""A forward call begins to compile what its backward pass will start, and nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import saccade
from saccade import masks, scores
from saccade.gpu import language, launcher, machine_code, planning, recording
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.signature import Arguments
from saccade.integrations import flex_attention
from saccade.ops.attention.hopper import host as hopper_host
from saccade.ops.attention.triton import call_spec, host
from saccade.runtime import arguments, backends, call_cache

pytestmark = pytest.mark.skipif(
    not language.INTERPRETED, reason="the kernels of CPU tensors are pretended here"
)


class Compiled:
    """What was compiled of each pass, by all that a kernel is compiled for."""

    def __init__(self) -> None:
        self.ahead: dict[Any, str] = {}
        self.started: dict[Any, str] = {}

    def begin(
        self, wanted: Sequence[machine_code.Wanted], device: int, urgent: bool = True
    ) -> None:
        """In place of `machine_code.begin_to_find`."""
        assert not urgent
        for kernel, given, options in wanted:
            self.ahead[machine_code._key(kernel, given, options, device)] = kernel.__name__

    def variant(self, kernel: Any, given: Arguments, options: Any, device: int) -> Any:
        """In place of `machine_code.variant`: what Triton's own launcher starts."""
        self.started[machine_code._key(kernel, given, options, device)] = kernel.__name__
        return SimpleNamespace(by_triton="this test says so", compiled=Started())


class Started:
    """A kernel that does nothing."""

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *values, stream: None


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """One Hopper GPU is pretended, which starts nothing."""
    found = Compiled()
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda n: 0, raising=False)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "plain", lambda value: value)
    monkeypatch.setattr(recording, "RECORDS", False)
    for module in (launcher, call_spec, planning, host, hopper_host):
        monkeypatch.setattr(module, "current_device", lambda tensor: 0)
    counter = torch.zeros(tile_scheduler.NUMBERS, dtype=torch.int32)
    monkeypatch.setattr(tile_scheduler, "counter_of", lambda device: counter)
    for name in ("_hopper_device_unsupported", "_triton_device_unsupported"):
        monkeypatch.setattr(backends, name, lambda *device: None)
    others = tuple(entry for entry in backends.BACKENDS if entry.name != "cpu")
    monkeypatch.setattr(backends, "BACKENDS", others)
    monkeypatch.setattr(call_spec, "architecture", lambda tensor: "sm_90")
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 132)
    for module in (arguments, call_cache):
        monkeypatch.setattr(module, "values_readable", lambda tensor: False)
    monkeypatch.setattr(machine_code, "begin_to_find", found.begin)
    monkeypatch.setattr(machine_code, "find_side_by_side", lambda wanted, device: None)
    monkeypatch.setattr(machine_code, "variant", found.variant)
    for module, memories in (
        (host, ("_forwards", "_lengths", "_specs", "_launches", "_compiled", "_ahead")),
        (hopper_host, ("_forwards", "_lengths", "_kinds", "_backwards", "_ahead")),
        (call_cache, ("_calls", "_layouts")),
    ):
        for memory in memories:
            monkeypatch.setattr(module, memory, {})
    return found


class Way(NamedTuple):
    """How a call is made."""

    options: Mapping[str, Any]
    dim: int = 128
    length: int = 2048
    heads: tuple[int, int] = (4, 4)
    dtype: torch.dtype = torch.bfloat16
    heads_inside: bool = False


BIAS = torch.zeros(1, 4, 2048, 2048)
SLOPES = torch.zeros(4, requires_grad=True)


def by_distance(score: Any, batch: Any, head: Any, row: Any, kv_row: Any) -> Any:
    """A learned slope of each head."""
    return score + SLOPES[head] * (kv_row - row)


LEARNED = flex_attention._traced_score(by_distance)
DOCUMENTS = torch.arange(2048)[None] // 100
WAYS = {
    "causal": Way({"causal": True}),
    "plain": Way({}),
    "64 channels": Way({"causal": True}, 64),
    "256 channels": Way({"causal": True}, 256),
    "80 channels": Way({"mask": masks.window(100)}, 80),
    "few rows": Way({"causal": True}, 64, 100),
    "grouped": Way({"causal": True}, heads=(8, 2)),
    "heads inside": Way({"causal": True}, heads_inside=True),
    "float32": Way({"causal": True}, dtype=torch.float32),
    "equal bits": Way({"mask": masks.window(100), "deterministic": True}, 64),
    "softcap": Way({"causal": True, "score": scores.softcap(3.0)}),
    "documents": Way({"mask": masks.documents(DOCUMENTS), "causal": True}),
    "documents, by Triton": Way(
        {"mask": masks.documents(DOCUMENTS), "implementation": "triton"}, 64
    ),
    "blocks": Way({"mask": masks.blocks(torch.ones(1, 1, 16, 16, dtype=torch.bool), 128)}),
    "a bias": Way({"score": scores.bias(BIAS)}),
    "a bias with a gradient": Way({"score": scores.bias(BIAS.clone().requires_grad_())}),
    "a learned table": Way({"score": LEARNED, "mask": masks.window(100)}),
    "sinks": Way({"sinks": torch.zeros(4, requires_grad=True), "causal": True}),
    "dropout": Way({"dropout_p": 0.5}),
}


def called(way: Way) -> tuple[Tensor, list[Tensor]]:
    """The output of a call, and what has gradients."""
    leaves = []
    for heads in (way.heads[0], way.heads[1], way.heads[1]):
        rows = torch.zeros(1, heads, way.length, way.dim, dtype=way.dtype)
        if way.heads_inside:
            rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
        leaves.append(rows.requires_grad_())
    return saccade.attention(*leaves, **way.options), leaves


@pytest.mark.parametrize("name", WAYS)
def test_a_backward_pass_was_begun_by_the_forward_pass(compiled: Compiled, name: str) -> None:
    way = WAYS[name]
    output, leaves = called(way)
    forward = dict(compiled.started)
    assert set(forward.values()) <= {
        "attention_forward", "find_tile_ranges", "classify_pairs", "list_tiles", "list_blocks",
    }  # fmt: skip
    compiled.started.clear()
    torch.autograd.grad(output, leaves, torch.ones_like(output))
    backward = {key: kernel for key, kernel in compiled.started.items() if key not in forward}
    assert {**forward, **compiled.ahead} == {**forward, **backward} and len(backward) > 1
