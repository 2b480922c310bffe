"""Masks and scores as users write them, on a GPU, by each implementation there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade import masks

pytestmark = pytest.mark.gpu
B, H, L, D = 2, 4, 200, 64
IMPLEMENTATIONS = ["triton", "hopper"]


def drawn(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).cuda()


def functions() -> dict[str, Callable[..., Any]]:
    ids = (torch.arange(L) // 37).cuda()
    order = torch.randperm(L, generator=torch.Generator().manual_seed(2)).cuda()
    lengths, table = torch.tensor([L, 41]).cuda(), drawn(B, L, L) > 0.4
    small = torch.randint(0, 200, (L,), dtype=torch.uint8).cuda()
    width = 12
    return {
        "causal": lambda b, h, q, k: q >= k,
        "window": lambda b, h, q, k: (q - k).abs() <= 31,
        "documents": lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k),
        "padding": lambda b, h, q, k: (k < lengths[b]) & (q < lengths[b]),
        "neighbours": lambda b, h, q, k: (
            (torch.abs(q // width - k // width) <= 2) & (torch.abs(q % width - k % width) <= 3)
        ),
        "per head": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, k - q < 4),
        "table": lambda b, h, q, k: table[b, q, k],
        "nested": lambda b, h, q, k: ids[order[q]] >= ids[order[k]],
        "negated": lambda b, h, q, k: ~((q < k) | (ids[k] == 2)),
        "small numbers": lambda b, h, q, k: small[q] + 100 >= small[k] + small[q],
        "products": lambda b, h, q, k: (q * 65537 * 32769 + k) % 7 < 5,
        "from the end": lambda b, h, q, k: ids[q - L] == ids[k],
        "real": lambda b, h, q, k: torch.exp(-(q - k).abs() * 0.05) > 0.3,
    }


@pytest.mark.parametrize("name", list(functions()) if torch.cuda.is_available() else ["none"])
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_masks(implementation: str, name: str) -> None:
    mask = masks.function(functions()[name])()
    query, key, value = (drawn(B, H, L, D, seed=seed).bfloat16() for seed in range(3))
    rows = [tensor.requires_grad_() for tensor in (query, key, value)]
    found = saccade.attention(*rows, mask=mask, implementation=implementation)
    exact = [tensor.detach().double().requires_grad_() for tensor in rows]
    wanted = saccade.attention(*exact, mask=mask, implementation="reference")
    grad = drawn(B, H, L, D, seed=9)
    gradients = torch.autograd.grad(found, rows, grad.bfloat16())
    others = torch.autograd.grad(wanted, exact, grad.bfloat16().double())
    torch.testing.assert_close(found.double(), wanted, rtol=2e-2, atol=2e-2)
    for one, other in zip(gradients, others, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=4e-2, atol=4e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_numbers_of_about_32_bits_in_a_graph(implementation: str) -> None:
    """A captured number that may change is held in as many bits as it needs."""
    below = masks.function(lambda b, h, q, k, number: (number - q < k - 2**31 - 70) | (q >= k))
    rows = drawn(B, H, L, D).bfloat16()

    def call(rows: Tensor, number: int, implementation: str = implementation) -> Tensor:
        return saccade.attention(
            rows, rows, rows, mask=below(number), implementation=implementation
        )

    graph = torch.compile(call, dynamic=True, fullgraph=True)
    for number in (-5, 3 - 2**31, -(2**31), 20 - 2**31, -(2**31) - 30):
        wanted = call(rows.double(), number, "reference").bfloat16()
        torch.testing.assert_close(call(rows, number), wanted, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(graph(rows, number), wanted, rtol=2e-2, atol=2e-2)


def scores_of(captured: dict[str, Tensor]) -> dict[str, Callable[..., Any]]:
    slopes, gates, line, square, one = (captured[name] for name in CAPTURED)
    return {
        "slopes": lambda s, b, h, q, k: s - slopes[h] * (q - k).abs(),
        "gates": lambda s, b, h, q, k: s * torch.sigmoid(gates[b, h]) + gates[b, h],
        "relative": lambda s, b, h, q, k: s + line[h, q - k + L - 1],
        "of keys": lambda s, b, h, q, k: s + line[h, k],
        "of queries": lambda s, b, h, q, k: s + line[h, q] * 0.5,
        "turned": lambda s, b, h, q, k: s + square[k, q],
        "as a bias": lambda s, b, h, q, k: s + square[q, k],
        "learned number": lambda s, b, h, q, k: torch.tanh(s * one) / (one.abs() + 1.0),
        "buckets": lambda s, b, h, q, k: s + line[h, torch.clamp((q - k).abs(), max=31)],
    }


CAPTURED = {"slopes": (H,), "gates": (B, H), "line": (H, 2 * L - 1), "square": (L, L), "one": ()}
NAMES = [
    "slopes", "gates", "relative", "of keys", "of queries", "turned", "as a bias",
    "learned number", "buckets",
]  # fmt: skip


@pytest.mark.parametrize("packed", [False, True], ids=["dense", "packed"])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_gradients_of_captured_tensors(implementation: str, name: str, packed: bool) -> None:
    dtype = torch.float32 if implementation == "triton" else torch.bfloat16
    results = []
    for kind, by in ((dtype, implementation), (torch.float64, "reference")):
        captured = {
            n: (drawn(*shape, seed=5) * 0.3).to(torch.float64 if by == "reference" else dtype)
            for n, shape in CAPTURED.items()
        }
        if by == "reference":  # the same numbers, rounded as the other had them
            captured = {n: t.to(dtype).double() for n, t in captured.items()}
        leaves = [tensor.requires_grad_() for tensor in captured.values()]
        score = scores_of(captured)[name]
        rows = [drawn(B, H, L, D, seed=seed).to(dtype).to(kind) for seed in range(3)]
        if packed:
            rows = [r.transpose(1, 2).reshape(B * L, H, D) for r in rows]
            offsets = torch.tensor([0, L, 2 * L - 70], dtype=torch.int32, device="cuda")
            output = saccade.attention_varlen(  # pyright: ignore[reportCallIssue]
                *rows, offsets, score=score, mask=masks.causal(), implementation=by
            )
        else:
            output = saccade.attention(*rows, score=score, mask=masks.causal(), implementation=by)
        grad = drawn(*output.shape, seed=9).to(dtype).to(kind)
        found = torch.autograd.grad(output, leaves, grad, allow_unused=True)
        results.append([None if g is None else g.double() for g in found])
    noise = [0.0] * len(CAPTURED)
    if dtype == torch.bfloat16:  # what plain PyTorch errs in the same dtype is allowed twice
        noise = plain_errors(name, dtype)
    for one, other, plain in zip(*results, noise, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            relative = 1e-3 if dtype == torch.float32 else 2e-2
            size = other.norm().clamp_min(0.1)  # that of a row's own bias is 0
            assert float((one - other).norm()) < relative * float(size) + 2 * plain


def plain_errors(name: str, dtype: torch.dtype) -> list[float]:
    """How far gradients of captured tensors by plain PyTorch in a dtype are from float64."""
    found = []
    for kind in (dtype, torch.float64):
        captured = {
            n: (drawn(*shape, seed=5) * 0.3).to(dtype).to(kind) for n, shape in CAPTURED.items()
        }
        leaves = [tensor.requires_grad_() for tensor in captured.values()]
        query, key, value = (drawn(B, H, L, D, seed=seed).to(dtype).to(kind) for seed in range(3))
        at = [
            torch.arange(size, device="cuda").view([-1 if d == dim else 1 for d in range(4)])
            for dim, size in enumerate((B, H, L, L))
        ]
        scores = scores_of(captured)[name](query @ key.mT * D**-0.5, *at)
        scores = scores.masked_fill(at[3] > at[2], -torch.inf)
        output = scores.softmax(-1).to(kind) @ value
        grad = drawn(B, H, L, D, seed=9).to(dtype).to(kind)
        found.append(torch.autograd.grad(output, leaves, grad, allow_unused=True))
    return [
        0.0 if a is None else float((a.double() - b).norm()) for a, b in zip(*found, strict=True)
    ]
