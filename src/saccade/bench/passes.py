"""Passes: forward, backward, or both, of a peer's call, as functions without arguments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bench.cases import Tensors
from saccade.bench.peers import Call, to_layout


class Runnable(NamedTuple):
    """One pass of one peer: call `run` with `around` entered."""

    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


def in_layout(call: Call, tensors: Tensors, *, gradients: bool) -> tuple[list[Tensor], Tensor]:
    """Query, key and value as the peer wants them, and the gradient of its output."""
    query, key, value, grad_output = (to_layout(tensor, call.layout) for tensor in tensors)
    leaves = [tensor.detach().requires_grad_(gradients) for tensor in (query, key, value)]
    return leaves, grad_output


def runnable(call: Call, which_pass: str, tensors: Tensors) -> Runnable:
    """A pass of a peer's call, ready to be timed.

    "forward" and "decode" record nothing for a backward pass; "backward" runs the forward pass
    once, now, and keeps what it saved.
    """
    differentiates = which_pass in ("backward", "forward+backward")
    leaves, grad_output = in_layout(call, tensors, gradients=differentiates)

    def forward() -> Tensor:
        with torch.no_grad():
            return call.run(*leaves)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call.run(*leaves), leaves, grad_output)

    if which_pass == "backward":
        with call.around():
            output = call.run(*leaves)

        def backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(output, leaves, grad_output, retain_graph=True)

        return Runnable(backward, call.around)
    return Runnable(both if differentiates else forward, call.around)
