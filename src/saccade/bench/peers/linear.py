"""Linear: who takes part in cases of linear attention."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade import LinearState
from saccade.bench.cases import Case
from saccade.bench.linear_cases import StepCase
from saccade.bench.peers import fla
from saccade.bench.peers.peer import Call, Peer


def peers() -> list[Peer]:
    """Those who compute nothing but linear attention, and the rate that a product reaches."""
    return [
        Peer(
            "bmm",
            "torch.bmm on as many operations: not attention, a yardstick",
            _bmm,
            attention=("linear",),
            computes_attention=False,
        ),
        Peer(
            "fla",
            "chunk_linear_attn with normalize, by the package fla, tuned quickly; elu + 1 outside",
            fla.prepare,
            by_default=importlib.util.find_spec("fla") is not None,
            attention=("linear",),
        ),
    ]


def ours(name: str, case: Case, device: torch.device) -> Call | str:
    """One of saccade's implementations."""
    row = torch.empty(1, 1, 1, 8, dtype=case.torch_dtype, device=device)
    reason = saccade.explain_linear(row, row, row).reasons.get(name, "it has no linear attention")
    if name == "reference" and case.score_bytes > 2**28:
        reason = f"its scores alone would take {case.score_bytes / 1e9:.1f} GB"
    if reason is not None:
        return reason

    if isinstance(case, StepCase):
        return _step(name)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return saccade.linear_attention(query, key, value, implementation=name)

    return Call(run)


def _step(name: str) -> Call | str:
    """A step in place from the state of all keys but the last, which the first call makes."""
    if name == "reference":
        return "it changes no states in place"
    made: list[LinearState] = []

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        token = [rows[:, :, -1:] for rows in (query, key, value)]
        if not made:
            before = [rows[:, :, :-1] for rows in (key, key, value)]
            made.append(saccade.linear_attention(*before, return_state=True)[1])
        return saccade.linear_attention_step(made[0], *token, implementation=name)

    return Call(run)


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


def _bmm(case: Case, device: torch.device) -> Call | str:
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
