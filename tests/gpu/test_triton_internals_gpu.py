"""On a GPU: both of Triton's doors give the same bits, and first calls train under checkpoints."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

pytest.importorskip("triton")
import saccade
from saccade import masks
from saccade.gpu import triton_internals
from saccade.runtime import call_cache

pytestmark = pytest.mark.gpu


def leaves(*shapes: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    options: dict[str, Any] = {"device": "cuda", "dtype": torch.float16, "generator": generator}
    return [torch.randn(shape, **options).requires_grad_() for shape in shapes]


def results(call: Any, given: list[Tensor]) -> list[Tensor]:
    output = call(*given)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), given)]


CALLS = {
    "dense": (saccade.attention, ((1, 4, 353, 64), (1, 2, 353, 64), (1, 2, 353, 64))),
    "linear": (saccade.linear_attention, ((1, 4, 353, 64), (1, 4, 353, 64), (1, 4, 353, 64))),
}


@pytest.mark.parametrize("name", list(CALLS))
@pytest.mark.parametrize("implementation", [None, "triton"])
def test_the_front_door_gives_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, name: str, implementation: str | None
) -> None:
    function, shapes = CALLS[name]
    options: dict[str, Any] = {"implementation": implementation}
    if name == "dense":
        options |= {"mask": masks.causal(), "deterministic": True}
    given = leaves(*shapes)
    call_cache.forget()
    with monkeypatch.context() as patched:
        patched.setattr(triton_internals, "unknown", lambda: "everything, which this test brings")
        slow = results(lambda *rows: function(*rows, **options), given)
    for _ in range(2):  # prepared, then started again
        fast = results(lambda *rows: function(*rows, **options), given)
        assert all(map(torch.equal, slow, fast))


@pytest.mark.parametrize("packed", [False, True])
def test_a_first_call_under_checkpointing_trains(packed: bool) -> None:
    offsets = torch.tensor([0, 100, 371], dtype=torch.int32, device="cuda")

    def call(*rows: Tensor) -> Tensor:
        if packed:
            return saccade.attention_varlen(*rows, offsets, mask=masks.causal())  # pyright: ignore[reportCallIssue]
        return saccade.attention(*rows, mask=masks.causal())

    shapes = [(371, h, 64) if packed else (2, h, 371, 64) for h in (4, 2, 2)]
    given = leaves(*shapes)
    call_cache.forget()
    found = results(lambda *rows: checkpoint(call, *rows, use_reentrant=False), given)
    again = results(lambda *rows: checkpoint(call, *rows, use_reentrant=False), given)
    plain = results(call, given)
    for one, other in zip((*found, *again), (*plain, *plain), strict=True):
        torch.testing.assert_close(one, other, atol=2e-2, rtol=2e-2)
