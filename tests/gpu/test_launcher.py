"""Prepared launches: later calls write other addresses among the parameters of the first one.

A variant that notes what it is started with stands in for machine code.
"""

from __future__ import annotations

import gc
import struct
import weakref
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import saccade
from saccade.gpu import driver, language, launcher, machine_code, planning
from saccade.gpu.hopper.pipeline import Box, descriptor
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments, Stride
from saccade.ops.attention.triton import call_spec, host
from saccade.ops.attention.triton import host as attention_host
from saccade.runtime import call_cache
from saccade.testing import make_case

MAP_KIND = driver.TensorMapKind(3, 2, 9, (1, 1, 64, 64))


class NotingVariant(machine_code.Variant):
    """Machine code that notes its parameters instead of running."""

    def __init__(self, arguments: Arguments) -> None:
        self.by_triton, self.name, self.device = "", "noting", 0
        self.started: list[tuple[Any, ...]] = []
        formats = machine_code.formats_of(arguments)
        self.maps = [MAP_KIND] * formats.count(machine_code.MAP)
        self._lay_out(formats)

    def launch(self, programs: int, stream: int) -> None:
        self.started.append((programs, stream, *self.format.unpack(self.memory)))


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses for which a TMA descriptor was made."""
    found: list[int] = []

    def encode(kind: Any, address: int, shape: Any, strides: Any) -> bytes:
        found.append(address)
        return map_of(address, shape, strides)

    monkeypatch.setattr(driver, "tensor_map", encode)
    return found


def map_of(address: int, shape: Any, strides: Any) -> bytes:
    return struct.pack("Q4q4q", address, *shape, *strides).ljust(128, b"\0")


class Kernel:
    """A kernel of arguments by these names."""

    __name__ = "noted"

    def __init__(self, *names: str) -> None:
        self.arg_names = names


class Row(NamedTuple):
    position: Any
    stride: int


def made(tensors: list[Tensor]) -> tuple[Any, ...]:
    first, second, third = tensors
    return Row(first, 7), None, (("a", Row(second, 2**40)), 1.5, Stride(-3)), third


def three() -> list[Tensor]:
    return [torch.zeros(16) for _ in range(3)]


def start_of(
    tensors: list[Tensor], make: Any = made
) -> tuple[launcher.Start, list[tuple[Any, ...]]]:
    """What starts such calls, and what it started."""
    arguments = Arguments(make(tensors), [64])
    variant = NotingVariant(arguments)
    return launcher.Start(variant, arguments, tensors), variant.started


def parameters(tensors: list[Tensor]) -> tuple[Any, ...]:
    first, second, third = map(Tensor.data_ptr, tensors)
    return first, 7, second, 2**40, 1.5, -3, third, 0, 0


def test_other_addresses_take_the_places_of_those_before() -> None:
    start, started = start_of(three())
    for programs in (5, 6):
        tensors = three()
        assert start(programs, 77, tensors)
        assert started[-1] == (programs, 77, *parameters(tensors))
    assert start.complete


def test_addresses_that_are_not_aligned_do_not_fit() -> None:
    start, started = start_of(three())
    first, _, third = three()
    assert not start(5, 77, [first, torch.zeros(17)[1:], third])
    assert not started


def test_a_tensor_that_was_not_aligned_may_be_again() -> None:
    first, _, third = three()
    start, started = start_of([first, torch.zeros(17)[1:], third])
    for second in (torch.zeros(17)[1:], torch.zeros(16)):
        assert start(5, 77, [first, second, third])
        assert started[-1][2:] == parameters([first, second, third])


def test_tensors_that_were_one_must_be_one_again() -> None:
    first, second, third = three()
    start, started = start_of([first, second, first])
    tensors = [second, third, second]
    assert start(5, 77, tensors)
    assert started == [(5, 77, *parameters(tensors))]
    assert not start(5, 77, [first, second, third])
    assert len(started) == 1


def test_an_address_of_no_tensor_of_the_call_serves_one_call_only() -> None:
    other = torch.zeros(16)
    start, started = start_of(three(), lambda tensors: (*made(tensors), other))
    assert not start.complete
    assert start(5, 77, three())
    assert started[0][-3] == other.data_ptr()


def test_tensors_are_not_kept_alive() -> None:
    tensors = three()
    start, _ = start_of(tensors)
    alive = list(map(weakref.ref, tensors))
    del tensors
    gc.collect()
    assert [one() for one in alive] == [None] * 3 and start.complete


# ---- descriptors for TMA ------------------------------------------------------------------------

SHAPE = (1, 2, 64, 64)


def moved(tensors: list[Tensor]) -> tuple[Any, ...]:
    query, key, rows = tensors
    boxes = [Box.of(tensor, False, 64, 64) for tensor in (query, key)]
    described = (descriptor(t, box) for t, box in zip((query, key), boxes, strict=True))
    return *described, Row(rows, 7)


def moved_tensors(shape: tuple[int, ...] = SHAPE) -> list[Tensor]:
    return [torch.zeros(shape, dtype=torch.bfloat16), torch.zeros(SHAPE).bfloat16(), *three()[:1]]


def described(tensor: Tensor) -> tuple[Any, ...]:
    _, _, strides, *_ = descriptor(tensor, Box.of(tensor, False, 64, 64))
    return map_of(tensor.data_ptr(), tensor.shape, strides), *tensor.shape, *strides


def test_a_descriptor_is_made_once_for_an_address(encoded: list[int]) -> None:
    tensors = moved_tensors()
    start, started = start_of(tensors, moved)
    for _ in range(3):
        assert start(5, 77, tensors)
    query, key, rows = tensors
    wanted = (*described(query), *described(key), rows.data_ptr(), 7, 0, 0)
    assert started == [(5, 77, *wanted)] * 3
    assert encoded == [query.data_ptr(), key.data_ptr()]


def test_another_tensor_at_the_address_of_a_freed_one_has_its_descriptor(
    encoded: list[int],
) -> None:
    query, key, rows = moved_tensors()
    memory = torch.zeros(2, *SHAPE, dtype=torch.bfloat16)
    start, started = start_of([query, key, rows], moved)
    first = memory[1]
    start(5, 77, [first, key, rows])
    del first
    gc.collect()
    start(5, 77, [memory[1], key, rows])
    assert started[0] == started[1]
    assert encoded.count(memory[1].data_ptr()) == 1


def test_calls_unlike_one_another_do_not_share_descriptors_of_an_address(
    encoded: list[int],
) -> None:
    key, rows, memory = *moved_tensors()[1:], torch.zeros(SHAPE, dtype=torch.bfloat16)
    for shape in ((1, 2, 64, 64), (1, 1, 128, 64), (1, 4, 32, 64)):
        query = memory.view(shape)
        start, started = start_of([query, key, rows], moved)
        start(5, 77, [query, key, rows])
        assert started[-1][2:11] == described(query)


def test_descriptors_take_bounded_memory(
    encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "MOST_MAPS", 3)
    _, key, rows = moved_tensors()
    many = list(torch.zeros(8, *SHAPE, dtype=torch.bfloat16))
    start, started = start_of([many[0], key, rows], moved)
    for query in (*many, *many):
        start(5, 77, [query, key, rows])
        assert started[-1][2:11] == described(query)
        assert all(len(maps) <= 3 for _, _, maps in start.maps)


# ---- starting -----------------------------------------------------------------------------------


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """One GPU is pretended, with the current device, which is 0, in a list."""
    current = [0]
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda n: 100 + n, raising=False)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    return current


def test_launches_of_two_devices_are_each_started_on_their_own(
    on_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared on one device, a Launch is not started while another one is current."""
    entered: list[int] = []

    class Entered:
        def __init__(self, device: int) -> None:
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)
            self.before, on_gpu[0] = on_gpu[0], self.device

        def __exit__(self, *error: Any) -> None:
            on_gpu[0] = self.before

    variants: dict[int, NotingVariant] = {}

    def variant(kernel: Any, arguments: Arguments, options: Any, device: int) -> NotingVariant:
        assert on_gpu[0] == device
        return variants.setdefault(device, NotingVariant(arguments))

    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(machine_code, "variant", variant)
    kernel = Kernel("a", "b", "c", "d", "SIZE")
    launches = [Launch(kernel, {"SIZE": 64}, {}) for _ in range(2)]
    for _ in range(2):
        for device in (0, 1):
            tensors = three()
            launches[device](3, device, tensors, lambda t=tensors: made(t))
            assert variants[device].started[-1] == (3, 100 + device, *parameters(tensors))
    assert entered == [1, 1]


def test_one_call_that_is_not_aligned_slows_no_other_one(
    on_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    variants: dict[Any, NotingVariant] = {}

    def variant(kernel: Any, arguments: Arguments, options: Any, device: int) -> NotingVariant:
        return variants.setdefault(arguments.key, NotingVariant(arguments))

    monkeypatch.setattr(machine_code, "variant", variant)
    launch = Launch(Kernel("a", "b", "c", "d", "SIZE"), {"SIZE": 64}, {})
    aligned, unaligned = three(), [torch.zeros(17)[1:], *three()[1:]]
    for tensors in (unaligned, aligned, unaligned, aligned):
        launch(3, 0, tensors, lambda t=tensors: made(t))
        found = Arguments(made(tensors), [64]).key
        assert variants[found].started[-1] == (3, 100, *parameters(tensors))
    assert [len(each.started) for each in variants.values()] == [2, 2]


def test_a_kernel_that_wants_more_is_started_by_triton(
    on_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Any] = []

    class Compiled:
        def __getitem__(self, grid: Any) -> Any:
            return lambda *values, stream: started.append((grid, stream, values))

    variant = SimpleNamespace(by_triton="it wants scratch memory", compiled=Compiled())
    monkeypatch.setattr(machine_code, "variant", lambda *given: variant)
    launch = Launch(Kernel("a", "b", "c", "d", "SIZE"), {"SIZE": 64}, {})
    for _ in range(2):
        tensors = three()
        launch(3, 0, tensors, lambda t=tensors: made(t))
        grid, stream, values = started[-1]
        assert (grid, stream) == ((3, 1, 1), 100)
        assert values == (*made(tensors), 64)
        assert type(values[2][2]) is int
    assert launch.start is None


# ---- the library's own launches -----------------------------------------------------------------


@pytest.fixture
def recorded(on_gpu: list[int], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Kernels that would have been started, each checked against arguments made anew."""
    started: list[str] = []
    variants: dict[Any, NotingVariant] = {}

    def variant(kernel: Any, arguments: Arguments, options: Any, device: int) -> NotingVariant:
        key = (id(kernel), arguments.key)
        return variants.setdefault(key, NotingVariant(arguments))

    def call(self: Launch, programs: int, device: Any, tensors: Any, arguments: Any) -> None:
        if not again(self, programs, device, tensors):
            real(self, programs, device, tensors, arguments)
        if programs:
            wanted = self.arguments(arguments())
            noting = variants[id(self.kernel), wanted.key]
            values = [
                value.data_ptr() if isinstance(value, Tensor) else value
                for _, value in wanted.parameters
            ]
            bits = noting.format.pack(*values, 0, 0)
            assert noting.started[-1] == (programs, 100, *noting.format.unpack(bits))
            started.append(self.kernel.__name__)

    real, again = Launch.__call__, Launch.relaunch
    for module in (launcher, call_spec, planning):
        monkeypatch.setattr(module, "current_device", lambda tensor: 0)
    monkeypatch.setattr(machine_code, "variant", variant)
    monkeypatch.setattr(Launch, "__call__", call)
    monkeypatch.setattr(Launch, "relaunch", lambda *given: False)  # asked by `call`, which looks on
    for module, memory in (
        (attention_host, "_forwards"),
        (host, "_launches"),
        (call_cache, "_calls"),
    ):
        monkeypatch.setattr(module, memory, {})
    return started


@pytest.mark.skipif(
    not language.INTERPRETED, reason="the kernels of CPU tensors are pretended here"
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
    monkeypatch.setattr(host, "ordered_is_faster", lambda call_spec: False)
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


@pytest.mark.skipif(
    not language.INTERPRETED, reason="the kernels of CPU tensors are pretended here"
)
def test_nothing_is_kept_for_each_length(
    monkeypatch: pytest.MonkeyPatch, recorded: list[str]
) -> None:
    """Of calls whose lengths differ, forms and machine code are one; the rest is bounded."""
    monkeypatch.setattr(launcher, "_forms", {})
    monkeypatch.setattr(call_spec, "MOST_PREPARED", 8)
    monkeypatch.setattr(call_cache, "MOST_CALLS", 8)
    kept = []
    for length in range(17, 47, 2):
        leaves = [torch.zeros(1, 2, length, 16, requires_grad=True) for _ in range(3)]
        output = saccade.attention(*leaves, causal=True, implementation="triton")
        torch.autograd.grad(output.sum(), leaves)
        memories = attention_host._forwards, attention_host._launches, call_cache._calls
        kept.append((len(launcher._forms), *map(len, memories)))
    forms = {forms for forms, *_ in kept}
    assert len(forms) == 1 and kept[-1] == kept[-2] == (*forms, 8, 8, 8)
