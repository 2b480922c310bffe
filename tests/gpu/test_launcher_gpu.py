"""On a GPU: launches of ours and of Triton's give the same bits, from every thread, at any length;
and first calls train under checkpoints."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
import saccade
from saccade import masks
from saccade.gpu import machine_code, stored_code, triton_compiler
from saccade.ops.attention.hopper import host as hopper_host
from saccade.ops.attention.triton import host
from saccade.runtime import call_cache

pytestmark = pytest.mark.gpu


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "generator": generator}
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def results(call: Any, given: list[Tensor]) -> list[Tensor]:
    output = call(*given)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), given)]


def forget() -> None:
    """Forget all calls, and what was prepared for those of attention."""
    call_cache.forget()
    for memory in (
        host._forwards, host._specs, host._launches,
        hopper_host._forwards, hopper_host._kinds, hopper_host._backwards,
    ):  # fmt: skip
        memory.clear()


@pytest.mark.parametrize("implementation", [None, "triton"])
def test_triton_starts_the_same_kernels(
    monkeypatch: pytest.MonkeyPatch, implementation: str | None
) -> None:
    given = leaves((1, 4, 353, 64), (1, 2, 353, 64), (1, 2, 353, 64))

    def call(*rows: Tensor) -> Tensor:
        return saccade.attention(
            *rows, causal=True, deterministic=True, implementation=implementation
        )

    forget()
    ours = results(call, given)
    with monkeypatch.context() as patched:
        patched.setattr(triton_compiler, "needs_triton", lambda metadata: "this test says so")
        patched.setattr(stored_code, "told_triton", lambda: "this test")
        patched.setattr(machine_code, "_variants", {})
        forget()
        assert all(map(torch.equal, ours, results(call, given)))
        assert all(found.by_triton for found in machine_code._variants.values())
        assert machine_code._variants
    forget()
    for _ in range(2):
        assert all(map(torch.equal, ours, results(call, given)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_a_new_length_is_no_new_machine_code(implementation: str | None, packed: bool) -> None:
    """Of lengths that choose the same tiles, and are no multiples of 16, or all are."""
    found: list[int] = []
    for length in (2049, 2050, 2100, 2111, 2064, 2080, 2112):
        offsets = torch.tensor([0, 100, length], dtype=torch.int32, device="cuda")
        given = leaves(*[(length, 2, 64) if packed else (1, 2, length, 64)] * 3)

        def call(*rows: Tensor, offsets: Tensor = offsets) -> Tensor:
            options: dict[str, Any] = {"causal": True, "implementation": implementation}
            if packed:
                return saccade.attention_varlen(*rows, offsets, **options)  # pyright: ignore[reportCallIssue]
            return saccade.attention(*rows, **options)

        results(call, given)
        found.append(len(machine_code._variants))
    assert len(set(found[:4])) == len(set(found[4:])) == 1


def test_threads_start_the_same_kernel_for_tensors_of_their_own() -> None:
    """Each on a stream of its own, in a thread that nothing has made a context current in."""
    wrong: list[Any] = []

    def rows(length: int) -> list[Tensor]:
        shape, dtype = (1, 4, length, 64), torch.float16
        return [torch.full(shape, 0.1 * n, device="cuda", dtype=dtype) for n in (1, 2, 3)]

    def attend(length: int) -> Tensor:
        return saccade.attention(*rows(length), causal=True)

    wanted = {length: attend(length) for length in range(100, 132)}
    torch.cuda.synchronize()

    def work(own: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):  # pyright: ignore[reportArgumentType]
                for _ in range(30):
                    for length in (own, 100):
                        found = attend(length)
                        torch.cuda.current_stream().synchronize()
                        if not torch.equal(found, wanted[length]):
                            wrong.append((own, length))
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(length,)) for length in wanted]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("packed", [False, True])
def test_a_first_call_under_checkpointing_trains(packed: bool) -> None:
    offsets = torch.tensor([0, 100, 371], dtype=torch.int32, device="cuda")

    def call(*rows: Tensor) -> Tensor:
        if packed:
            return saccade.attention_varlen(*rows, offsets, mask=masks.causal())  # pyright: ignore[reportCallIssue]
        return saccade.attention(*rows, mask=masks.causal())

    shapes = [(371, h, 64) if packed else (2, h, 371, 64) for h in (4, 2, 2)]
    given = leaves(*shapes)
    forget()
    found = results(lambda *rows: checkpoint(call, *rows, use_reentrant=False), given)
    again = results(lambda *rows: checkpoint(call, *rows, use_reentrant=False), given)
    plain = results(call, given)
    for one, other in zip((*found, *again), (*plain, *plain), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
