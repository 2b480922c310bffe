"""Addresses that come again: with other shapes, dtypes and contents, unaligned, and in graphs."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks

pytestmark = pytest.mark.gpu

BF16, F16 = torch.bfloat16, torch.float16


@pytest.fixture(params=["hopper", "triton"])
def implementation(request: pytest.FixtureRequest) -> str:
    if request.param == "hopper" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU is no Hopper")
    return request.param


def check(implementation: str, *tensors: Tensor, **options: Any) -> Tensor:
    """The output, which must be that of the reference in float64."""
    found = saccade.attention(*tensors, implementation=implementation, **options)
    exact = saccade.attention(
        *(tensor.double() for tensor in tensors), implementation="reference", **options
    )
    torch.testing.assert_close(found.double(), exact, atol=2e-2, rtol=2e-2)
    return found


def filled(tensor: Tensor, seed: int) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return tensor.copy_(torch.randn(tensor.shape, generator=generator, device="cuda"))


def memories(count: int = 3, numbers: int = 1 << 17) -> list[Tensor]:
    """BackwardMemory to be looked at in many ways."""
    return [torch.zeros(numbers, dtype=BF16, device="cuda") for _ in range(count)]


# Shape, dtype, and whether heads lie beside channels: each is another kernel to compile.
KINDS = [
    ((1, 4, 256, 64), BF16, False),
    ((1, 4, 256, 64), F16, False),
    ((1, 4, 256, 64), BF16, True),
    ((1, 4, 128, 128), BF16, False),
    ((2, 4, 128, 64), BF16, False),
    ((1, 8, 128, 64), BF16, False),
    ((1, 4, 250, 64), BF16, True),
]


@pytest.mark.parametrize("mask", [None, masks.causal()], ids=["full", "causal"])
def test_one_address_with_other_shapes_strides_and_dtypes(implementation: str, mask: Any) -> None:
    lent = memories()
    for iteration in range(3):
        for shape, dtype, heads_inside in KINDS:
            rows = [memory[: torch.Size(shape).numel()].view(dtype) for memory in lent]
            if heads_inside:
                batch, heads, length, dim = shape
                rows = [row.view(batch, length, heads, dim).transpose(1, 2) for row in rows]
            else:
                rows = [row.view(shape) for row in rows]
            given = [filled(row, 10 * iteration + n) for n, row in enumerate(rows)]
            check(implementation, *given, mask=mask)


def test_another_tensor_takes_the_address_of_a_freed_one(implementation: str) -> None:
    key, value = (filled(torch.empty(1, 4, 200, 64, dtype=BF16, device="cuda"), n) for n in (1, 2))
    addresses, outputs = set(), []
    for seed in range(6):
        query = filled(torch.empty(1, 4, 200, 64, dtype=BF16, device="cuda"), seed)
        addresses.add(query.data_ptr())
        outputs.append(check(implementation, query, key, value).float().sum().item())
        del query
        gc.collect()
    assert len(addresses) < 6, "the allocator gave no address twice"
    assert len(set(outputs)) == 6


def test_unaligned_addresses_between_aligned_ones(implementation: str) -> None:
    lent, shape = memories(), (1, 4, 130, 64)
    numbers = torch.Size(shape).numel()
    for iteration in range(3):
        for start in (0, 1, 8, 0, 3):
            rows = [memory[start : start + numbers].view(shape) for memory in lent]
            given = [filled(row, 10 * iteration + n) for n, row in enumerate(rows)]
            check(implementation, *given, mask=masks.causal())
        moved = [filled(memory[:numbers].view(shape), n) for n, memory in enumerate(lent)]
        moved[iteration] = lent[iteration][5 : 5 + numbers].view(shape)
        check(implementation, *moved)


@pytest.mark.parametrize("start", [1, 8])
def test_slices_of_wider_rows_lie_as_they_say(implementation: str, start: int) -> None:
    """A copy of one that is not aligned lies otherwise than what it is a copy of."""
    for seed in range(2):
        lent = [torch.empty(1, 4, 130, 144, dtype=BF16, device="cuda") for _ in range(3)]
        rows = [filled(each, seed + n)[..., start : start + 128] for n, each in enumerate(lent)]
        leaves = [each.detach().requires_grad_() for each in rows]
        output = check(implementation, *leaves, mask=masks.causal())
        found = torch.autograd.grad(output.float().square().sum(), leaves)
        repeat = [each.detach().double().requires_grad_() for each in rows]
        exact: Any = saccade.attention(*repeat, causal=True, implementation="reference")
        for mine, theirs in zip(
            found, torch.autograd.grad(exact.square().sum(), repeat), strict=True
        ):
            torch.testing.assert_close(mine.double(), theirs, atol=6e-2, rtol=6e-2)


def test_a_graph_keeps_its_maps_when_they_are_forgotten(
    implementation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from saccade.gpu import launcher

    monkeypatch.setattr(launcher, "MOST_MAPS", 2)
    shape = (2, 4, 300, 128)
    static = [filled(torch.empty(shape, dtype=BF16, device="cuda"), n) for n in range(3)]

    def attend(*tensors: Tensor) -> Tensor:
        return saccade.attention(*tensors, mask=masks.causal(), implementation=implementation)

    attend(*static)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = attend(*static)
    kept = []
    for seed in range(4):
        others = [filled(torch.empty(shape, dtype=BF16, device="cuda"), seed) for _ in range(3)]
        kept.append((others, attend(*others)))
        gc.collect()
        for n, tensor in enumerate(static):
            filled(tensor, 20 + 3 * seed + n)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(captured, attend(*static))
    check(implementation, *static, mask=masks.causal())


def test_gradients_at_addresses_that_come_again(implementation: str) -> None:
    shape, grads = (1, 4, 200, 64), {}
    for iteration in range(3):
        for seed in range(3):
            leaves = [
                filled(torch.empty(shape, dtype=BF16, device="cuda"), 3 * seed + n).requires_grad_()
                for n in range(3)
            ]
            output, lse = saccade.attention(
                *leaves, mask=masks.causal(), implementation=implementation, return_lse=True,
                deterministic=True,
            )  # fmt: skip
            total = output.float().square().sum() + (lse.sum() if iteration != 1 else 0)
            found = torch.autograd.grad(total, leaves)
            repeat = [leaf.detach().double().requires_grad_() for leaf in leaves]
            output, lse = saccade.attention(
                *repeat, mask=masks.causal(), implementation="reference", return_lse=True
            )
            total = output.square().sum() + (lse.sum() if iteration != 1 else 0)
            for mine, exact in zip(found, torch.autograd.grad(total, repeat), strict=True):
                torch.testing.assert_close(mine.double(), exact, atol=6e-2, rtol=6e-2)
            known = grads.setdefault((seed, iteration != 1), found)
            assert all(map(torch.equal, known, found))


def test_two_gpus_take_turns(implementation: str) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU")
    shape = (1, 4, 200, 64)
    cases = [
        [filled(torch.empty(shape, dtype=BF16, device="cuda"), n).to(device) for n in range(3)]
        for device in ("cuda:0", "cuda:1")
    ]
    wanted = check(implementation, *cases[0])
    for current in (0, 1, 0):
        with torch.cuda.device(current):
            for tensors in cases:
                found = saccade.attention(*tensors, implementation=implementation)
                assert found.device == tensors[0].device
                assert torch.equal(found.to("cuda:0"), wanted)
