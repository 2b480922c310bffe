"""Prepared launches: later calls write other addresses among the parameters of the first one.

A variant that notes what it is started with stands in for machine code.
"""

from __future__ import annotations

import gc
import struct
import threading
import weakref
from collections.abc import Mapping, Sequence
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import saccade
from saccade import masks
from saccade.gpu import driver, language, launcher, machine_code, planning, recording
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.hopper.pipeline import Box, descriptor
from saccade.gpu.kernel_args import Extent, Geometry
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments, Described, Stride
from saccade.ops.attention.hopper import host as hopper_host
from saccade.ops.attention.triton import call_spec, host, recorded_forward
from saccade.ops.attention.triton.call_spec import CallSpec
from saccade.runtime import arguments, backends, call_cache
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
    kind = f"Q{len(shape)}q{len(strides)}q"
    return struct.pack(kind, address, *shape, *strides).ljust(128, b"\0")


class Kernel:
    """A kernel of arguments by these names."""

    __name__, is_gluon = "noted", False

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
    template = launcher.Template(variant, arguments, tensors)
    return launcher.Start(template, ()), variant.started


def parameters(tensors: list[Tensor]) -> tuple[Any, ...]:
    first, second, third = map(Tensor.data_ptr, tensors)
    return first, 7, second, 2**40, 1.5, -3, third, 0, 0


def test_other_addresses_take_the_places_of_those_before() -> None:
    start, started = start_of(three())
    for programs in (5, 6):
        tensors = three()
        assert start(programs, 77, tensors)
        assert started[-1] == (programs, 77, *parameters(tensors))
    assert start.template.complete


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
    assert not start.template.complete
    assert start(5, 77, three())
    assert started[0][-3] == other.data_ptr()


def test_tensors_are_not_kept_alive() -> None:
    tensors = three()
    start, _ = start_of(tensors)
    alive = list(map(weakref.ref, tensors))
    del tensors
    gc.collect()
    assert [one() for one in alive] == [None] * 3 and start.template.complete


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
    _, shape, strides, *_ = descriptor(tensor, Box.of(tensor, False, 64, 64))
    wanted = launcher.usable(shape, strides)
    return map_of(tensor.data_ptr(), shape, wanted), *shape, *strides


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


def test_new_kernels_of_a_pass_are_compiled_side_by_side(
    on_gpu: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each is found once, by a thread of its own, before any is started; a known one is not."""
    met, found, loaded = threading.Barrier(2, timeout=20), [], []

    def find(kernel: Any, arguments: Arguments, options: Any, architecture: str) -> Any:
        if kernel is not kernels[0]:
            met.wait()
        found.append(kernel.__name__)
        return kernel.__name__, "the compiler"

    class Loaded(NotingVariant):
        def __init__(self, kernel: Any, given: Any, options: Any, device: int, known: Any) -> None:
            super().__init__(given)
            loaded.append((kernel.__name__, known and known[0]))

    monkeypatch.setattr(machine_code, "find", find)
    monkeypatch.setattr(machine_code, "Variant", Loaded)
    monkeypatch.setattr(machine_code, "architecture_of", lambda device: "sm_90")
    for memory in ("_variants", "_found"):
        monkeypatch.setattr(machine_code, memory, {})
    kernels = [Kernel("a", "b", "c", "d", "SIZE") for _ in range(3)]
    for number, kernel in enumerate(kernels):
        kernel.__name__ = str(number)
    known, *new = (Launch(kernel, {"SIZE": 64}, {}) for kernel in kernels)
    tensors = three()

    def run() -> None:
        for launch in (known, *new, new[0]):
            launch(3, 0, tensors, lambda: made(tensors))

    known(3, 0, tensors, lambda: made(tensors))
    launcher.compile_side_by_side(run, 0)
    assert sorted(found) == ["0", "1", "2"] and loaded == [("0", "0")]
    run()
    assert loaded == [("0", "0"), ("1", "1"), ("2", "2")] and not machine_code._found


# ---- the library's own launches -----------------------------------------------------------------


class Recorded(list[str]):
    """Kernels that would have been started."""

    made = 0  # how often arguments had to be put together


@pytest.fixture
def recorded(on_gpu: list[int], encoded: list[int], monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """Kernels that would have been started, each checked against arguments made anew, of what
    tensors themselves say of their shapes and strides."""
    started = Recorded()
    variants: dict[Any, NotingVariant] = {}

    def variant(kernel: Any, arguments: Arguments, options: Any, device: int) -> NotingVariant:
        key = (id(kernel), arguments.key)
        return variants.setdefault(key, NotingVariant(arguments))

    def call(self: Launch, programs: int, device: Any, tensors: Any, arguments: Any) -> None:
        def counted() -> Any:
            started.made += 1
            return arguments()

        if not again(self, programs, device, tensors):
            real(self, programs, device, tensors, counted)
        if programs:
            with monkeypatch.context() as patched:
                patched.setattr(CallSpec, "sourced", as_tensors_say)
                wanted = self.arguments(arguments())
            noting = variants[id(self.kernel), wanted.key]
            values = [
                value.data_ptr() if isinstance(value, Tensor) else mapped(value)
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
    monkeypatch.setattr(recording, "RECORDS", False)
    for module in (host, hopper_host, recorded_forward):
        monkeypatch.setattr(module, "compile_side_by_side", lambda run, device: True)
    for module, memories in (
        (host, ("_forwards", "_lengths", "_specs", "_launches")),
        (hopper_host, ("_forwards", "_lengths", "_kinds", "_backwards")),
        (call_cache, ("_calls", "_layouts")),
    ):
        for memory in memories:
            monkeypatch.setattr(module, memory, {})
    return started


def as_tensors_say(spec: CallSpec, numbers: Sequence[int], tensors: Sequence[Tensor]) -> CallSpec:
    """In place of `CallSpec.sourced`: nothing is taken from the numbers but how many sequences."""
    rows = 0 if spec.packed else 2
    extents = [Extent(numbers[0], t.shape[rows], t.shape[1], spec.packed) for t in tensors[:2]]
    return spec._replace(geometry=Geometry(*extents))


def mapped(value: Any) -> Any:
    """A parameter as it lies in memory."""
    if not isinstance(value, Described):
        return value
    strides = launcher.usable(value.shape, value.strides)
    return map_of(value.tensor.data_ptr(), value.shape, strides)


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
    recorded: Recorded,
    mask: str,
    score: str,
    ordered: bool,
    packed: bool,
):
    monkeypatch.setattr(host, "ordered_is_faster", lambda call_spec: False)
    first = ((24, 30), (8, 16)) if packed else ((24, 32),)
    other = ((7, 9), (1, 32), (40, 40)) if packed else ((17, 41),)
    for lengths in (first, other, first, other, other):  # later calls meet other addresses
        case = make_case(
            mask=mask, score=score, packed=packed, lengths=lengths, sinks=True, dropout_p=0.25
        )
        case.run("triton", deterministic=ordered)
    kernels = {"attention_forward", "attention_backward_keys"}
    kernels |= {"attention_backward_queries"} if ordered else set()
    kernels |= {"attention_row_statistics"} if not ordered or mask == "none" else set()
    kernels |= {"attention_backward_bias"} if score == "bias" else set()
    assert kernels <= set(recorded)
    assert recorded.count("attention_forward") == 5


@pytest.mark.skipif(
    not language.INTERPRETED, reason="the kernels of CPU tensors are pretended here"
)
def test_nothing_is_kept_for_each_length(
    monkeypatch: pytest.MonkeyPatch, recorded: Recorded
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
        memories = host._forwards, call_cache._calls, host._lengths, host._launches
        kept.append((len(launcher._forms), recorded.made, *map(len, memories)))
    (forms, made, *_), *_ = kept
    # Arguments were put together for the first length, and never again.
    assert kept[-1] == kept[-2] == (forms, made, 1, 1, 8, 8)


# ---- Hopper's launches --------------------------------------------------------------------------


@pytest.fixture
def hopper(recorded: Recorded, monkeypatch: pytest.MonkeyPatch) -> Recorded:
    """What a Hopper would be given to start."""
    counter = torch.zeros(tile_scheduler.NUMBERS, dtype=torch.int32)
    monkeypatch.setattr(backends, "_hopper_device_unsupported", lambda device, index: None)
    monkeypatch.setattr(backends, "_triton_device_unsupported", lambda *device: None)
    monkeypatch.setattr(call_spec, "architecture", lambda tensor: "sm_90")
    monkeypatch.setattr(call_spec, "multiprocessors", lambda tensor: 132)
    monkeypatch.setattr(tile_scheduler, "counter_of", lambda device: counter)
    for module in (arguments, call_cache):
        monkeypatch.setattr(module, "values_readable", lambda tensor: False)
    return recorded


LENGTHS = ((1, 2, 700, 700), (2, 1, 257, 1041), (1, 2, 64, 2048), (1, 1, 2049, 1), (3, 2, 1, 31))


class Way(NamedTuple):
    """How calls are made."""

    dim: int = 128
    heads: int = 4
    options: Mapping[str, Any] = MappingProxyType({})
    heads_inside: bool = False
    deterministic: bool = False


WAYS = {
    "causal": Way(options={"causal": True}),
    "plain": Way(),
    "64 channels": Way(64, options={"causal": True}),
    "256 channels": Way(256, options={"causal": True}),
    "80 channels": Way(80, 2),
    "heads inside": Way(options={"causal": True}, heads_inside=True),
    "equal bits": Way(64, options={"mask": masks.window(100)}, deterministic=True),
    "softcap": Way(64, options={"score": saccade.scores.softcap(3.0)}),
    "planned": Way(options={"mask": masks.key_lengths(torch.tensor([9]))}),
}


def given_of(way: Way, batch: int, kv_heads: int, *lengths: int) -> list[Tensor]:
    """Query, key and value with their gradients wanted."""
    found = []
    heads = (way.heads * kv_heads, kv_heads, kv_heads)
    for length, count in zip((lengths[0], lengths[1], lengths[1]), heads, strict=True):
        rows = torch.zeros(batch, count, length, way.dim, dtype=torch.bfloat16)
        if way.heads_inside:
            rows = rows.transpose(1, 2).contiguous().transpose(1, 2)
        found.append(rows.requires_grad_())
    return found


@pytest.mark.parametrize("name", list(WAYS))
def test_hoppers_launches_of_lengths_in_turns(hopper: Recorded, name: str) -> None:
    way = WAYS[name]
    for batch, kv_heads, *lengths in LENGTHS * 2:
        given = given_of(way, 1 if name == "planned" else batch, kv_heads, *lengths)
        options = {"implementation": "hopper", "deterministic": way.deterministic, **way.options}
        output, lse = saccade.attention(*given, return_lse=True, **options)
        torch.autograd.grad((output, lse), given, (output, lse))
        torch.autograd.grad(saccade.attention(*given, **options), given, output)
    assert len(hopper) > 6 * len(LENGTHS)


@pytest.mark.parametrize("dim", [64, 128])
def test_hoppers_launches_of_packed_lengths_in_turns(hopper: Recorded, dim: int) -> None:
    for tokens, kv_tokens, sequences in ((600, 700, 2), (257, 257, 1), (1040, 1024, 7)) * 2:
        given = [
            torch.zeros(rows, heads, dim, dtype=torch.bfloat16, requires_grad=True)
            for rows, heads in ((tokens, 4), (kv_tokens, 2), (kv_tokens, 2))
        ]
        ends = [
            torch.arange(sequences + 1, dtype=torch.int32) * rows // sequences
            for rows in (tokens, kv_tokens)
        ]
        offsets = [end.to(torch.int32) for end in ends]
        output = saccade.attention_varlen(*given, *offsets, causal=True, implementation="hopper")
        torch.autograd.grad(output, given, output)


def test_new_lengths_of_a_kind_make_no_arguments(hopper: Recorded) -> None:
    """Not even where lengths and strides are other multiples, once there was one of each sort."""
    made = []
    for length in (528, 521, 1040, 1041, 3008, 3001, 523, 2000, 4001, 777, 640, 5008):
        given = given_of(WAYS["causal"], 1, 2, length, length)
        output = saccade.attention(*given, causal=True, implementation="hopper")
        torch.autograd.grad(output, given, output)
        made.append(hopper.made)
    assert made[5] == made[-1]
