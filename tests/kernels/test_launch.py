"""Prepared launches: later calls fill new addresses into the arguments of the first one."""

from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from saccade import recall
from saccade.kernels import launch
from saccade.kernels.launch import Launch, Places
from saccade.portable import attention, gradients, kind, planning
from saccade.testing import make_case


class Row(NamedTuple):
    place: Any
    stride: int


def made(pointer: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    first, second, third = tensors
    return Row(pointer(first), 7), None, (("a", Row(pointer(second), 9)), 1.5), pointer(third)


def three() -> list[Tensor]:
    return [torch.zeros(16) for _ in range(3)]


def filler(tensors: list[Tensor], arguments: Any = made) -> Any:
    places = Places(tensors)
    return places.fill(arguments(places, tensors)), places.complete


def test_new_addresses_take_the_places_of_old_ones():
    fill, complete = filler(three())
    assert complete
    again = three()
    assert fill(*again) == made(Tensor.data_ptr, again)


def test_addresses_that_are_not_aligned_do_not_fit():
    fill, _ = filler(three())
    first, _, third = three()
    assert fill(first, torch.zeros(16)[1:], third) is None


def test_tensors_that_were_one_must_be_one_again():
    first, second, third = three()
    fill, _ = filler([first, second, first])
    again = [second, third, second]
    assert fill(*again) == made(Tensor.data_ptr, again)
    assert fill(first, second, third) is None


def test_an_address_without_a_place_serves_one_call_only():
    tensors, other = three(), torch.zeros(16)
    _, complete = filler(tensors, lambda pointer, given: (*made(pointer, given), pointer(other)))
    assert not complete


# ---- the library's own launches -----------------------------------------------------------------


def plain(value: Any) -> Any:
    return tuple(map(plain, value)) if isinstance(value, tuple) else value


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would have been started, each checked against arguments made anew."""
    started: list[str] = []

    def call(self: Launch, programs: int, device: Any, tensors: Any, arguments: Any) -> None:
        real(self, programs, device, tensors, arguments)
        if programs:
            given = arguments(Tensor.data_ptr)
            names = self.kernel.arg_names[len(given) :]
            wanted = (*given, *(self.constants[name] for name in names))
            assert plain(self.fill(*tensors)) == plain(wanted), self.kernel.__name__
            started.append(self.kernel.__name__)

    def load(self: Launch, compiled: Any) -> None:
        self.run = lambda *arguments: None

    real = Launch.__call__
    for module in (launch, kind, planning):
        monkeypatch.setattr(module, "current_device", lambda tensor: 0)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: 0, raising=False)
    monkeypatch.setattr(launch, "INTERPRETED", False)
    monkeypatch.setattr(Launch, "_load", load)
    monkeypatch.setattr(Launch, "compile", lambda self, arguments: None)
    monkeypatch.setattr(Launch, "__call__", call)
    for module, memory in ((attention, "_forwards"), (gradients, "_launches"), (recall, "_calls")):
        monkeypatch.setattr(module, memory, {})
    return started


@pytest.mark.skipif(not launch.INTERPRETED, reason="the kernels of CPU tensors are pretended here")
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
    monkeypatch.setattr(gradients, "ordered_is_faster", lambda kind: False)
    lengths = ((24, 30), (8, 16)) if packed else ((24, 32),)
    for _ in range(3):  # the second and third calls meet other addresses
        case = make_case(
            mask=mask, score=score, packed=packed, lengths=lengths, sinks=True, dropout_p=0.25
        )
        case.run("portable", deterministic=ordered)
    kernels = {"attention_forward", "attention_row_statistics", "attention_backward_keys"}
    kernels |= {"attention_backward_queries"} if ordered else set()
    kernels |= {"attention_backward_bias"} if score == "bias" else set()
    assert kernels <= set(recorded)
    assert recorded.count("attention_forward") == 3
