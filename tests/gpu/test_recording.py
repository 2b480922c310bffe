"""A pass that is done again starts what it started step by step, on the same memory.

A GPU is pretended, whose kernels note their parameters.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import host_times
import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks
from saccade.gpu import driver, launcher, machine_code, recording
from saccade.gpu.launcher import Launch
from saccade.gpu.pass_recorder import MemoryLayout
from saccade.gpu.recording import Lengths, PassFamily, RecordedPass
from saccade.ops.attention.hopper import host as hopper_host
from saccade.ops.attention.triton import host as triton_host
from saccade.ops.delta_rule.triton import passes as delta_passes
from saccade.ops.linear_attention.hopper import host as linear_hopper
from saccade.ops.linear_attention.triton import host as linear_triton
from saccade.ops.paged_attention.triton import host as paged_host
from saccade.runtime import call_cache

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is pretended")

Started = list[tuple[Any, ...]]
STARTED: Started = []
BETWEEN_PASSES = ()


class Noting(machine_code.Variant):
    """Machine code that notes its parameters instead of running."""

    def __init__(self, arguments: Any, started: Started) -> None:
        self.by_triton, self.name, self.device, self.started = "", "noting", 0, started
        self.formats = machine_code.formats_of(arguments)
        self.maps = [host_times.MAP_KIND] * self.formats.count(machine_code.MAP)
        self._lay_out(self.formats)

    def launch(self, programs: int, stream: int) -> None:
        values = self.format.unpack(self.memory)
        found = [
            ("at", struct.unpack("Q", value[:8])[0]) if kind == machine_code.MAP
            else ("at", value) if kind == machine_code.ADDRESS and value
            else value
            for kind, value in zip(self.formats, values, strict=True)
        ]  # fmt: skip
        self.started.append((id(self), programs, *found))


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Iterator[Started]:
    """What kernels were started with."""
    found = STARTED
    found.clear()
    variants: dict[Any, Noting] = {}

    def variant(kernel: Any, arguments: Any, options: Any, device: int) -> Noting:
        return variants.setdefault((kernel, arguments.key), Noting(arguments, found))

    for module, memories in (
        (triton_host, ("_forwards", "_lengths", "_specs", "_launches")),
        (hopper_host, ("_forwards", "_lengths", "_kinds", "_backwards")),
        (paged_host, ("_forwards",)),
        (linear_triton, ("_call_specs", "_backwards")),
        (linear_hopper, ("_backwards",)),
        (delta_passes, ("_call_specs",)),
        (call_cache, ("_calls", "_layouts")),
    ):
        for memory in memories:
            monkeypatch.setattr(module, memory, {})
    monkeypatch.setattr(delta_passes, "current_device", lambda tensor: 0)
    monkeypatch.setattr(recording, "STEP_BY_STEP", 1)
    with host_times.pretended(), pytest.MonkeyPatch.context() as patched:  # undone in that order
        patched.setattr(machine_code, "variant", variant)
        patched.setattr(driver, "tensor_map", lambda kind, at, *_: struct.pack("Q120x", at))
        yield found


def told_apart(started: Started, tensors: list[Tensor], *passes: list[Tensor]) -> list[Any]:
    """What was started, with the number of a tensor for its address; what is none of these has
    the number that it is met in, in its pass.

    passes: the results of each pass, and what else came after the one before: it may lie where
        that one had memory of its own.
    """
    found: list[Any] = []
    names: dict[int, Any] = {}
    results = iter(passes)
    for one in (BETWEEN_PASSES, *started):
        if one == BETWEEN_PASSES:
            tensors = [*tensors, *next(results)]
            names = {tensor.data_ptr(): number for number, tensor in enumerate(tensors)}
        found.append(
            tuple(
                names.setdefault(value[1], f"own {len(names)}") if type(value) is tuple else value
                for value in one
            )
        )
    return found


def gradients(*given: Any) -> tuple[Tensor, ...]:
    STARTED.append(BETWEEN_PASSES)
    return torch.autograd.grad(*given)


Call = Callable[[], tuple[list[Tensor], ...]]


def rows(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16).requires_grad_()


def dense(dim: int, length: int = 517, **options: Any) -> tuple[list[Tensor], ...]:
    """A call's tensors, its results, and gradients of these and those."""
    given = [rows(1, heads, length, dim) for heads in (8, 2, 2)]
    output = saccade.attention(*given, **options)
    grad = torch.zeros_like(output)
    return given, [output], [grad, *gradients(output, given, grad)]


def varlen(tokens: int = 517) -> tuple[list[Tensor], ...]:
    given = [rows(tokens, heads, 64) for heads in (4, 2, 2)]
    offsets = torch.tensor([0, 200, tokens], dtype=torch.int32)
    query, key, value = given
    output = saccade.attention_varlen(query, key, value, offsets, causal=True)
    grad = torch.zeros_like(output)
    return [*given, offsets], [output], [grad, *gradients(output, given, grad)]


def decode() -> tuple[list[Tensor], ...]:
    query, *pages = (rows(*shape) for shape in ((2, 8, 1, 64), (9, 2, 16, 64), (9, 2, 16, 64)))
    table = torch.zeros(2, 8, dtype=torch.int32)
    lengths = torch.tensor([100, 20], dtype=torch.int32)
    with torch.no_grad():
        output, lse = saccade.attention_paged(
            query, pages[0], pages[1], table, lengths, return_lse=True
        )
    return [query, *pages, table, lengths], [output, lse]


def linear(heads: int, length: int, **options: Any) -> tuple[list[Tensor], ...]:
    given = [rows(1, heads, length, 64) for _ in range(3)]
    output, state = saccade.linear_attention(*given, return_state=True, **options)
    grads = tuple(map(torch.zeros_like, (output, state.kv, state.key_sum)))
    found = gradients((output, state.kv, state.key_sum), given, grads)
    return given, [output, state.kv, state.key_sum], [*grads, *found]


def delta() -> tuple[list[Tensor], ...]:
    query, key, value, beta = (rows(1, 2, 133, 64) for _ in range(4))
    given = [query, key, value, beta[..., 0].detach().contiguous()]
    with torch.no_grad():
        output, state = saccade.gated_delta_rule(*given, return_state=True)
    return given, [output, state]


CALLS: dict[str, Call] = {
    "causal": lambda: dense(128, causal=True),
    "by Triton": lambda: dense(64, mask=masks.window(9), implementation="triton"),
    "two passes": lambda: dense(256, causal=True, deterministic=True),
    "varlen": varlen,
    "decode": decode,
    "linear": lambda: linear(4, 129, causal=True),
    "linear in segments": lambda: linear(2, 2049, causal=True, normalize="none"),
    "linear by Triton": lambda: linear(2, 2049, implementation="triton"),
    "delta rule": delta,
}


@pytest.mark.parametrize("name", list(CALLS))
def test_what_is_done_again_is_what_was_done(
    started: Started, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    found, kept = [], []
    for number in range(4):
        begin = len(started)
        if number == 2:
            monkeypatch.setattr(Launch, "__call__", None)  # who goes step by step fails
        of_call = CALLS[name]()
        kept.append(of_call)  # so that every call has addresses of its own
        found.append(told_apart(started[begin:], *of_call))
    # Nothing of the second call, which is recorded, lies where something else lay before.
    assert len(found[0]) > 1 and found[2:] == found[1:2] * 2
    assert len(found[0]) == len(found[1])


LENGTHS = (517, 523, 571, 633)
FAMILIES: dict[str, Callable[[int], tuple[list[Tensor], ...]]] = {
    "causal": lambda length: dense(128, length, causal=True),
    "without a mask": lambda length: dense(64, length),
    "two passes": lambda length: dense(256, length, causal=True, deterministic=True),
    "equal bits": lambda length: dense(64, length, causal=True, deterministic=True),
    "varlen": lambda length: varlen(length),
    "by Triton": lambda length: dense(64, length, causal=True, implementation="triton"),
    "by Triton, no mask": lambda length: dense(
        64, length, deterministic=True, implementation="triton"
    ),
}


@pytest.mark.parametrize("name", list(FAMILIES))
def test_what_was_recorded_of_a_length_serves_the_others(
    started: Started, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def all_lengths(lengths: Iterable[int]) -> list[Any]:
        found = []
        for length in lengths:
            begin, of_call = len(started), FAMILIES[name](length)
            found.append(told_apart(started[begin:], *of_call))
            kept.append(of_call)
        return found

    kept: list[Any] = []
    with monkeypatch.context() as patched:
        patched.setattr(recording, "RECORDS", False)
        step_by_step = all_lengths(LENGTHS)
    for memory in ("_lengths", "_backwards"):
        monkeypatch.setattr(hopper_host, memory, {})
    for memory in ("_lengths", "_launches"):
        monkeypatch.setattr(triton_host, memory, {})
    monkeypatch.setattr(call_cache, "_layouts", {})
    all_lengths([LENGTHS[0] + 2] * 2)  # the second one is recorded
    monkeypatch.setattr(Launch, "__call__", None)  # who goes step by step fails
    again = all_lengths(LENGTHS)
    assert list(map(without_own, again)) == list(map(without_own, step_by_step))


def without_own(started: list[Any]) -> list[Any]:
    """What was started; of the pass's own memory no more than that it is."""
    return [
        tuple("own" if isinstance(value, str) and value[:3] == "own" else value for value in one)
        for one in started
    ]


def test_a_length_of_another_class_goes_step_by_step_at_first(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it may be another kernel that takes multiples of 16; then it serves these as well."""
    for _ in range(2):
        varlen(517)
        varlen(528)  # multiples of 16 are another class, of no recording yet
    monkeypatch.setattr(Launch, "__call__", None)
    for length in (528, 560, 533, 1024):
        varlen(length)


def test_what_differs_from_what_a_pass_says_serves_no_other_length(started: Started) -> None:
    def run() -> tuple[Tensor, ...]:
        result = torch.empty(32)
        kernel([result])
        return (result,)

    kernel, layout = noted_kernel(), MemoryLayout((32,), (1,), torch.float32)
    for lengths in (
        Lengths((1,), (4,), [layout]),  # it starts three programs
        Lengths((1,), (3,), [layout._replace(shape=(33,))]),
        Lengths((1,), (3,), [layout]),  # its kernel takes no numbers
    ):
        family = PassFamily()
        done = RecordedPass(torch.zeros(1), family, lengths)
        for _ in range(3):
            done((), run)
        assert family.pattern is None and done.again(()) is not None


def test_pieces_of_a_block_do_not_overlap(started: Started) -> None:
    def run() -> tuple[Tensor, ...]:
        result, *own = (torch.empty(size, dtype=torch.uint8) for size in (64, 700, 16, 1))
        zeros = [torch.zeros(size, dtype=torch.uint8) for size in (600, 8)]
        kernel([result, *own, own[0][512:], *zeros])
        return (result,)

    done, kernel = RecordedPass(torch.zeros(1)), noted_kernel()
    kept = [done((), run) for _ in range(3)]
    first, *own, inner, zeros, more_zeros = (
        value[1] for value in started[-1][2:] if isinstance(value, tuple)
    )
    assert first == kept[-1][0].data_ptr()
    assert [own[1] - own[0], own[2] - own[0], inner - own[0]] == [1024, 1536, 512]
    assert more_zeros - zeros == 1024
    _, block_of_zeros = done.again.blocks  # type: ignore[attr-defined]
    assert not block_of_zeros().any()


def noted_kernel() -> Callable[[list[Tensor]], None]:
    """A kernel that is handed addresses."""

    class Kernel:
        __name__ = "noted"
        arg_names = ("addresses",)

    launch = Launch(Kernel(), {}, {})
    return lambda tensors: launch(3, 0, tensors, lambda: (tuple(tensors),))


SPOILERS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "memory that is written": lambda given, result: result.zero_(),
    "a result that is part of memory": lambda given, result: result[:16],
    "a result that was given": lambda given, result: given,
}


@pytest.mark.parametrize("spoiler", [None, *SPOILERS])
def test_a_pass_that_does_more_is_not_recorded(started: Started, spoiler: str | None) -> None:
    kernel, runs = noted_kernel(), []

    def run(given: Tensor) -> tuple[Tensor, ...]:
        result = torch.empty(32)
        kernel([given, result])
        runs.append(given)
        return (SPOILERS[spoiler](given, result) if spoiler else result,)

    done = RecordedPass(torch.zeros(1))
    for number in range(4):
        given = torch.zeros(32)
        done((given,), lambda given=given: run(given))
        assert len(started) == number + 1
        assert ("at", given.data_ptr()) in started[-1]
    assert len(runs) == (4 if spoiler else 2)


def test_tensors_that_do_not_fit_go_step_by_step(
    started: Started, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel, runs = noted_kernel(), []

    def call(*given: Tensor) -> bool:
        """Whether it was done again."""

        def run() -> tuple[Tensor, ...]:
            runs.append(given)
            result = torch.empty(32)
            kernel([*given, result])
            return (result,)

        before, (result,) = len(runs), done(given, run)
        assert [("at", one.data_ptr()) for one in (*given, result)] == [
            value for value in started[-1] if isinstance(value, tuple)
        ]
        return len(runs) == before

    done, both = RecordedPass(torch.zeros(1)), [torch.zeros(32) for _ in range(2)]
    assert [call(*both) for _ in range(3)] == [False, False, True]
    assert not call(both[0], both[0])
    assert not call(torch.zeros(33)[1:], both[0])
    with torch.profiler.profile():
        assert not call(*both)
    monkeypatch.setattr(recording, "RECORDS", False)
    assert not call(*both)
    monkeypatch.setattr(recording, "RECORDS", True)
    assert call(*reversed(both))


def test_nobody_is_told_of_starts_afterwards(started: Started) -> None:
    def run() -> tuple[Tensor, ...]:
        raise ValueError("in the middle")

    done = RecordedPass(torch.zeros(1))
    for _ in range(2):
        with pytest.raises(ValueError, match="in the middle"):
            done((torch.zeros(32),), run)
    assert launcher.watched.by is None
