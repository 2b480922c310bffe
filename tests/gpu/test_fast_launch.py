"""Behind Triton's launcher: its function in C gets what Triton itself would hand to it.

Triton's own Python runs here, of whichever version is installed, around pretended C.
"""

from __future__ import annotations

import gc
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
import triton
from triton.backends.nvidia import driver as nvidia

from saccade.gpu import fast_launch, launcher
from saccade.gpu.fast_launch import Addresses
from saccade.gpu.hopper.descriptors import Box, descriptor
from saccade.gpu.launcher import Launch, opened

FUNCTION, PACKED = 123, (4, 1, 1000)
SHAPE = (1, 2, 64, 64)


class Pretended:
    """A launcher of Triton's over functions in C that only note what they are given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.started: list[Any] = []
        self.encoded: list[int] = []
        utils = SimpleNamespace(fill_tma_descriptor=self.encode)
        utils.fill_tma_descriptor_tiled = self.encode
        monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(utils=utils))

    def encode(self, address: int, *rest: Any) -> Any:
        self.encoded.append(address)
        return ("map", address, *(tuple(part) if isinstance(part, list) else part for part in rest))

    def start(self, *given: Any) -> None:
        self.started.append(given)

    def compiled(self, signature: dict[str, str], maps: int, **more: Any) -> Any:
        meta = {"swizzle": 3, "elem_size": 2, "elem_type": 10, "block_size": [1, 1, 64, 64]}
        metadata = [{**meta, "fp4_padded": False} for _ in range(maps)]
        run = object.__new__(nvidia.CudaLauncher)
        vars(run).update(
            launch=nvidia.wrap_handle_tensordesc(self.start, signature, metadata),
            num_ctas=1, global_scratch_size=0, global_scratch_align=1, profile_scratch_size=0,
            profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
            gsan_enabled=False, arg_annotations="annotations", kernel_signature=b"signature",
        )  # fmt: skip
        vars(run).update(more)
        return SimpleNamespace(
            run=run, function=FUNCTION, packed_metadata=PACKED,
            metadata=SimpleNamespace(tensordesc_meta=metadata),
        )  # fmt: skip


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    return Pretended(monkeypatch)


PLAIN_SIGNATURE = {"rows": ("*fp32", "i64"), "other": "*fp32", "SIZE": "constexpr"}
MOVED = "tensordesc<bf16[1,1,64,64]>"
MOVED_SIGNATURE = {"query": MOVED, "key": MOVED, "rows": ("*fp32", "i64"), "SIZE": "constexpr"}


def plain_arguments(pointer: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    return (pointer(tensors[0]), 7), pointer(tensors[1]), 64


def moved_arguments(pointer: Any, tensors: list[Tensor]) -> tuple[Any, ...]:
    query, key, rows = tensors
    boxes = [Box.of(tensor, False, 64, 64) for tensor in (query, key)]
    moved = (descriptor(pointer, t, box) for t, box in zip((query, key), boxes, strict=True))
    return *moved, (pointer(rows), 7), 64


def plain_tensors() -> list[Tensor]:
    return [torch.zeros(16), torch.zeros(16)]


def moved_tensors(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    return [torch.zeros(SHAPE, dtype=dtype), torch.zeros(SHAPE, dtype=dtype), torch.zeros(16)]


def starter(compiled: Any, arguments: Any, tensors: list[Tensor]) -> Any:
    positions = Addresses(tensors)
    return positions.function(*fast_launch.call_of(compiled, arguments(positions, tensors)))


def by_triton(compiled: Any, arguments: Any, tensors: list[Tensor]) -> None:
    given = opened(arguments(launcher.itself, tensors))
    addresses = tuple(
        (part[0].data_ptr(), *part[1:]) if isinstance(part, tuple) else
        part.data_ptr() if isinstance(part, Tensor) else part
        for part in given
    )  # fmt: skip
    compiled.run(
        5, 1, 1, 77, compiled.function, compiled.packed_metadata, None, None, None, *addresses
    )


def as_tuples(value: Any) -> Any:
    return tuple(map(as_tuples, value)) if isinstance(value, (list, tuple)) else value


@pytest.mark.parametrize("kind", ["plain", "moved"])
def test_the_function_in_c_gets_what_triton_hands_to_it(pretended: Pretended, kind: str) -> None:
    signature, maps, arguments, tensors = {
        "plain": (PLAIN_SIGNATURE, 0, plain_arguments, plain_tensors),
        "moved": (MOVED_SIGNATURE, 2, moved_arguments, moved_tensors),
    }[kind]
    compiled = pretended.compiled(signature, maps)
    start = starter(compiled, arguments, tensors())
    for _ in range(3):
        given = tensors()
        assert start(5, 77, *given)
        by_triton(compiled, arguments, given)
        mine, wanted = pretended.started[-2:]
        assert as_tuples(mine) == as_tuples(wanted)
    assert start.__globals__["called"] == pretended.start  # and no Python between


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_descriptor_is_checked_with_numbers_as_wide_as_its_own(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype
) -> None:
    """Triton asks for it from 3.7 on; gradients of queries are summed in 32 bits."""
    checked: list[Any] = []
    opened = fast_launch.Described.opened
    monkeypatch.setattr(
        fast_launch.Described, "opened", lambda self: checked.append(self) or opened(self)
    )
    rows = torch.zeros(SHAPE, dtype=dtype)
    boxes = [Box.of(rows, False, 64, 64)]
    if dtype == torch.float32:
        rows = rows.view(-1, 64)
        boxes.append(Box.plain(*rows.shape, 8))  # pyright: ignore[reportCallIssue]
    for box in boxes[-1:]:
        made = descriptor(launcher.itself, rows, box).maker()(rows.data_ptr())
        assert made.base.data_ptr() == rows.data_ptr()
        assert checked[-1].base.element_size() * 8 == box.layout.element_bitwidth


def test_a_map_is_encoded_once_for_an_address(pretended: Pretended) -> None:
    tensors = moved_tensors()
    start = starter(pretended.compiled(MOVED_SIGNATURE, 2), moved_arguments, tensors)
    for _ in range(3):
        start(5, 77, *tensors)
    assert pretended.encoded == [tensor.data_ptr() for tensor in tensors[:2]]


def test_another_tensor_at_the_address_of_a_freed_one_has_its_map(pretended: Pretended) -> None:
    query, key, rows = moved_tensors()
    memory = torch.zeros(2, *SHAPE, dtype=torch.bfloat16)
    start = starter(pretended.compiled(MOVED_SIGNATURE, 2), moved_arguments, [query, key, rows])
    first = memory[1]
    start(5, 77, first, key, rows)
    del first
    gc.collect()
    start(5, 77, memory[1], key, rows)
    assert as_tuples(pretended.started[0]) == as_tuples(pretended.started[1])
    assert pretended.encoded.count(memory[1].data_ptr()) == 1


def test_kinds_do_not_share_maps_of_an_address(pretended: Pretended) -> None:
    """What a map says beside the address belongs to the kind of call."""
    key, rows, memory = *moved_tensors()[1:], torch.zeros(SHAPE, dtype=torch.bfloat16)
    shapes = {}
    for shape in ((1, 2, 64, 64), (1, 1, 128, 64), (1, 4, 32, 64)):
        query = memory.view(shape)
        start = starter(pretended.compiled(MOVED_SIGNATURE, 2), moved_arguments, [query, key, rows])
        start(5, 77, query, key, rows)
        by_triton(pretended.compiled(MOVED_SIGNATURE, 2), moved_arguments, [query, key, rows])
        mine, wanted = pretended.started[-2:]
        assert as_tuples(mine) == as_tuples(wanted)
        shapes[shape] = mine
    assert len({str(started) for started in shapes.values()}) == 3


def test_maps_take_bounded_memory(pretended: Pretended, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_launch, "MOST_MAPS", 3)
    _, key, rows = moved_tensors()
    many = list(torch.zeros(8, *SHAPE, dtype=torch.bfloat16))
    compiled = pretended.compiled(MOVED_SIGNATURE, 2)
    start = starter(compiled, moved_arguments, [many[0], key, rows])
    maps = [value for value in vars_of(start) if isinstance(value, fast_launch.Maps)]
    for query in (*many, *many):
        start(5, 77, query, key, rows)
        assert pretended.started[-1] is not None and all(len(found) <= 3 for found in maps)
        by_triton(compiled, moved_arguments, [query, key, rows])
        assert as_tuples(pretended.started[-1]) == as_tuples(pretended.started[-2])
    assert len(maps) == 2


def vars_of(start: Any) -> list[Any]:
    return list(start.__globals__.values())


OTHER_FORMS: dict[str, dict[str, Any]] = {
    "scratch memory": {"global_scratch_size": 8},
    "a sanitiser": {"gsan_enabled": True},
    "a launcher of one piece": {"launch": lambda *given: None},
    "one that computes": {},
}


@pytest.mark.parametrize("form", list(OTHER_FORMS))
def test_a_launcher_of_another_form_is_called_itself(pretended: Pretended, form: str) -> None:
    compiled = pretended.compiled(MOVED_SIGNATURE, 2, **OTHER_FORMS[form])
    seen: list[Any] = []
    compiled.run = (Computing if form == "one that computes" else Noting)(compiled.run, seen)
    start = starter(compiled, moved_arguments, moved_tensors())
    given = moved_tensors()
    assert start(5, 77, *given)
    outer, (query, key, rows, size) = seen[0][:9], seen[0][9:]
    assert outer == (5, 1, 1, 77, FUNCTION, PACKED, None, None, None)
    assert [query.base.data_ptr(), key.base.data_ptr()] == [t.data_ptr() for t in given[:2]]
    assert tuple(query.shape) == SHAPE and (rows, size) == ((given[2].data_ptr(), 7), 64)


class Noting:
    """A launcher that notes its arguments."""

    def __init__(self, run: Any, seen: list[Any]):
        vars(self).update(vars(run))
        self.noted = seen

    def __call__(self, *given: Any) -> None:
        self.noted.append(given)


class Computing(Noting):
    """One that looks at how many programs there are."""

    def __call__(self, *given: Any) -> None:
        super().__call__(given[0] + 0, *given[1:])


def test_launches_of_two_devices_are_each_started_on_their_own(
    pretended: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prepared on one device, a Launch is not started while another one is current."""
    current, entered = [0], []

    class Entered:
        def __init__(self, device: int):
            self.device = device

        def __enter__(self) -> None:
            entered.append(self.device)
            self.before, current[0] = current[0], self.device

        def __exit__(self, *error: Any) -> None:
            current[0] = self.before

    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current[0], raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda n: 100 + n, raising=False)
    monkeypatch.setattr(torch.cuda, "device", Entered)
    monkeypatch.setattr(launcher, "INTERPRETED", False)
    compiled = pretended.compiled(PLAIN_SIGNATURE, 0)
    monkeypatch.setattr(Launch, "compile", lambda self, arguments: compiled)
    kernel = SimpleNamespace(arg_names=["rows", "other", "SIZE"])
    launches = [Launch(kernel, {"SIZE": 64}, {}) for _ in range(2)]
    for _ in range(2):
        for device in (0, 1):
            tensors = plain_tensors()
            launches[device](
                3, device, tensors, lambda pointer, t=tensors: plain_arguments(pointer, t)[:2]
            )
            assert pretended.started[-1][:4] == (3, 1, 1, 100 + device)
    assert entered == [1, 1]
