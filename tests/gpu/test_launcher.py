"""Prepared launches: later calls fill new addresses into the arguments of the first one."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from saccade.gpu import launcher, planning
from saccade.gpu.fast_launch import PROGRAMS, STREAM, Addresses
from saccade.gpu.launcher import Launch
from saccade.ops.attention.triton import call_spec, gradients
from saccade.ops.attention.triton import host as attention_host
from saccade.runtime import call_cache
from saccade.testing import make_case


class Row(NamedTuple):
    position: Any
    stride: int


def made(pointer: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    first, second, third = tensors
    return Row(pointer(first), 7), None, (("a", Row(pointer(second), 9)), 1.5), pointer(third)


def three() -> list[Tensor]:
    return [torch.zeros(16) for _ in range(3)]


def starter(tensors: list[Tensor], arguments: Any = made) -> tuple[Any, list[Any], bool]:
    """What starts such calls, what it started, and whether it may do so again."""
    positions, started = Addresses(tensors), []
    given = arguments(positions, tensors)
    start = positions.function(lambda *call: started.append(call), (PROGRAMS, STREAM, *given))
    return start, started, positions.complete


def test_new_addresses_take_the_places_of_old_ones():
    start, started, complete = starter(three())
    assert complete
    again = three()
    assert start(5, 77, *again)
    assert started == [(5, 77, *made(Tensor.data_ptr, again))]


def test_addresses_that_are_not_aligned_do_not_fit():
    start, started, _ = starter(three())
    first, _, third = three()
    assert not start(5, 77, first, torch.zeros(17)[1:], third)
    assert not started


def test_tensors_that_were_one_must_be_one_again():
    first, second, third = three()
    start, started, _ = starter([first, second, first])
    again = [second, third, second]
    assert start(5, 77, *again)
    assert started == [(5, 77, *made(Tensor.data_ptr, again))]
    assert not start(5, 77, first, second, third)
    assert len(started) == 1


def test_an_address_without_a_place_serves_one_call_only():
    tensors, other = three(), torch.zeros(16)
    *_, complete = starter(tensors, lambda pointer, given: (*made(pointer, given), pointer(other)))
    assert not complete


def test_numbers_come_back_as_they_were():
    numbers = (0, -1, 2**40, True, None, 0.1, float("inf"), "text", torch.float32, (1, (2.5,)))
    start, started, _ = starter(three(), lambda pointer, given: (pointer(given[0]), numbers))
    again = three()
    start(1, 0, *again)
    assert started == [(1, 0, again[0].data_ptr(), numbers)]
    assert [type(number) for number in started[0][3]] == [type(number) for number in numbers]


# ---- the library's own launches -----------------------------------------------------------------


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would have been started, each checked against arguments made anew."""
    started: list[str] = []
    handed: list[Any] = []

    def call(self: Launch, programs: int, device: Any, tensors: Any, arguments: Any) -> None:
        handed.clear()
        if not again(self, programs, device, tensors):
            real(self, programs, device, tensors, arguments)
        if programs:
            given = arguments(Tensor.data_ptr)
            names = self.kernel.arg_names[len(given) :]
            wanted = (*given, *(self.constants[name] for name in names))
            assert plain(handed) == plain([wanted]), self.kernel.__name__
            started.append(self.kernel.__name__)

    def call_of(compiled: Any, arguments: tuple[Any, ...]) -> Any:
        return (lambda *given: handed.append(given)), arguments

    real, again = Launch.__call__, Launch.relaunch
    for module in (launcher, call_spec, planning):
        monkeypatch.setattr(module, "current_device", lambda tensor: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    monkeypatch.setattr(launcher, "call_of", call_of)
    monkeypatch.setattr(Launch, "compile", lambda self, arguments: "compiled")
    monkeypatch.setattr(Launch, "__call__", call)
    monkeypatch.setattr(Launch, "relaunch", lambda *given: False)  # asked by `call`, which looks on
    for module, memory in (
        (attention_host, "_forwards"),
        (gradients, "_launches"),
        (call_cache, "_calls"),
    ):
        monkeypatch.setattr(module, memory, {})
    return started


@pytest.mark.skipif(
    not launcher.INTERPRETED, reason="the kernels of CPU tensors are pretended here"
)
@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("ordered", [False, True], ids=["shared", "ordered"])
@pytest.mark.parametrize(
    ("mask", "score"),
    [
        ("none", "none"),
        ("causal", "softcap"),
        ("documents", "bias"),
        ("blocks", "alibi"),
        ("tensor", "none"),
        ("window", "own"),
    ],
)
def test_every_launch_finds_its_addresses_again(
    monkeypatch: pytest.MonkeyPatch,
    recorded: list[str],
    mask: str,
    score: str,
    ordered: bool,
    packed: bool,
):
    monkeypatch.setattr(gradients, "ordered_is_faster", lambda call_spec: False)
    lengths = ((24, 30), (8, 16)) if packed else ((24, 32),)
    for _ in range(3):  # the second and third calls meet other addresses
        case = make_case(
            mask=mask, score=score, packed=packed, lengths=lengths, sinks=True, dropout_p=0.25
        )
        case.run("triton", deterministic=ordered)
    kernels = {"attention_forward", "attention_backward_keys"}
    kernels |= {"attention_backward_queries"} if ordered else set()
    kernels |= {"attention_row_statistics"} if not ordered or mask == "none" else set()
    kernels |= {"attention_backward_bias"} if score == "bias" else set()
    assert kernels <= set(recorded)
    assert recorded.count("attention_forward") == 3
