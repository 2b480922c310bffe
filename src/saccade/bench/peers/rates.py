"""Rates: how fast products and the memory are, as yardsticks: none of them computes attention."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from saccade.bench.case import BenchCase, StepCase
from saccade.bench.peers.peer import Call, Peer

COPY_BYTES = 2**30
"""What "copy" moves, read and written together, whatever the case."""

COMPUTES = "memory does not bound it"


def peers() -> list[Peer]:
    """The rate that a product reaches, a pure read of a case's bytes, and a pure copy of many."""
    yardstick: dict[str, Any] = {
        "by_default": False,
        "attention": ("paged", "linear"),
        "computes_attention": False,
    }
    return [
        Peer(
            "bmm",
            "torch.bmm on as many operations: not attention, a yardstick",
            _bmm,
            attention=("linear",),
            computes_attention=False,
        ),
        Peer("read", "a sum over as many bytes as the case has", _read, **yardstick),
        Peer(
            "copy", "a copy of half a GiB, whatever the case", _copy, moves=COPY_BYTES, **yardstick
        ),
    ]


def _read(case: BenchCase, device: torch.device) -> Call | str:
    if _computes(case):
        return COMPUTES

    @functools.cache
    def memory() -> tuple[Tensor, Tensor]:
        return torch.ones(case.bytes // 4, device=device), torch.empty((), device=device)

    def run(*inputs: Tensor) -> Tensor:
        source, total = memory()
        return torch.sum(source, 0, out=total)

    return Call(run)


def _copy(case: BenchCase, device: torch.device) -> Call | str:
    if _computes(case):
        return COMPUTES

    @functools.cache
    def memory() -> tuple[Tensor, Tensor]:
        source = torch.ones(COPY_BYTES // 8, device=device)
        return source, torch.empty_like(source)

    def run(*inputs: Tensor) -> Tensor:
        source, target = memory()
        return torch.neg(source, out=target)  # an operation: copies have an engine of their own

    return Call(run)


def _computes(case: BenchCase) -> bool:
    """Whether a case is a whole call of linear attention, and no step."""
    return case.attention == "linear" and not case.decodes


class _Products(torch.autograd.Function):
    """A product of so many rows forward, and of so many backward."""

    @staticmethod
    def forward(ctx: Any, products: dict[str, Any], *inputs: Tensor) -> Tensor:
        ctx.products, ctx.shapes = products, [rows.shape for rows in inputs]
        torch.bmm(*products["forward"][:2], out=products["forward"][2])
        return inputs[2].new_zeros(()).expand(products["output"])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        torch.bmm(*ctx.products["backward"][:2], out=ctx.products["backward"][2])
        nothing = grads[0].new_zeros(())
        return (None, *(nothing.expand(shape) for shape in ctx.shapes))


def _bmm(case: BenchCase, device: torch.device) -> Call | str:
    """Rows of head_dim times a matrix for each head, into memory that is there."""
    if isinstance(case, StepCase):
        return "a step is bound by memory: see copy"
    count = case.batch * case.query_heads
    products: dict[str, Any] = {
        "output": (case.batch, case.query_heads, case.query_len, case.value_dim)
    }
    for which_pass in ("forward", "backward"):
        rows = case.flops(which_pass) // (2 * count * case.head_dim * case.value_dim)
        options: dict[str, Any] = {"dtype": case.torch_dtype, "device": device}
        products[which_pass] = (
            torch.randn(count, rows, case.head_dim, **options),
            torch.randn(count, case.head_dim, case.value_dim, **options),
            torch.empty(count, rows, case.value_dim, **options),
        )
    return Call(lambda *inputs: _Products.apply(products, *inputs))
