"""Peers: everything that computes attention and can be timed, or says why it cannot."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from saccade.bench.case import BenchCase, Tensors
from saccade.bench.cases import matching
from saccade.bench.timing import Runnable

Layout = Literal["heads first", "rows first", "packed"]


class Call(NamedTuple):
    """A peer's call for one case, ready to run.

    Attributes:
        run: the output from query, key and value.
        layout: how the peer lays out its tensors: "heads first" [batch, heads, length, dim],
            "rows first" [batch, length, heads, dim], or "packed" [tokens, heads, dim].
        around: what must be switched on around the call; entered outside of what is timed.
    """

    run: Callable[[Tensor, Tensor, Tensor], Tensor]
    layout: Layout = "heads first"
    around: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Peer:
    """An implementation of attention, or a yardstick, that takes its turn in a run.

    Attributes:
        who: the name in tables and result files.
        about: a description in one line.
        prepare: a `Call` for a case on a device, or the reason why there is none.
        by_default: whether it takes part when no peer is named.
        compiles: whether a first call compiles for its shapes.
        attention: the kinds of cases that it serves: "softmax", "linear", "paged".
        computes_attention: whether its results are checked; a mere yardstick has none.
        moves: bytes that a call reads and writes, where these are not the case's own.
    """

    who: str
    about: str
    prepare: Callable[[BenchCase, torch.device], Call | str]
    by_default: bool = True
    compiles: bool = False
    attention: tuple[str, ...] = ("softmax",)
    computes_attention: bool = True
    moves: int | None = None


def all_peers() -> list[Peer]:
    """Every peer, in the order of the tables' columns."""
    from saccade.bench.peers import ours, packages, pytorch

    return [
        *ours.peers(), *pytorch.peers(), *packages.peers(), *pytorch.yardsticks(),
        *ours.paged_peers(),
    ]  # fmt: skip


def choose_peers(patterns: Sequence[str], peers: Sequence[Peer]) -> list[Peer]:
    """The peers that names and globs name; without any, those of a normal run.

    Raises:
        ValueError: for a name or glob that no peer has, listing those that exist.
    """
    if not patterns:
        return [peer for peer in peers if peer.by_default]
    names = [peer.who for peer in peers]
    chosen = {name for pattern in patterns for name in matching("peer", pattern, names)}
    return [peer for peer in peers if peer.who in chosen]


def to_layout(tensor: Tensor, layout: Layout) -> Tensor:
    """A tensor [batch, heads, length, dim], contiguous in a peer's own layout."""
    if layout == "heads first":
        return tensor.contiguous()
    tensor = tensor.transpose(1, 2)
    return (tensor.flatten(0, 1) if layout == "packed" else tensor).contiguous()


def from_layout(tensor: Tensor, layout: Layout, batch: int) -> Tensor:
    """The tensor again as [batch, heads, length, dim]."""
    if layout == "heads first":
        return tensor
    if layout == "packed":
        tensor = tensor.unflatten(0, (batch, -1))
    return tensor.transpose(1, 2)


def in_layout(call: Call, tensors: Tensors, *, gradients: bool) -> tuple[list[Tensor], Tensor]:
    """Query, key and value as the peer wants them, and the gradient of its output."""
    query, key, value, grad_output = (to_layout(tensor, call.layout) for tensor in tensors)
    leaves = [tensor.detach().requires_grad_(gradients) for tensor in (query, key, value)]
    return leaves, grad_output


def runnable(call: Call, which_pass: str, tensors: Tensors) -> Runnable:
    """A pass of a peer's call, ready to be timed.

    "forward" and "decode" run without gradients; "backward" runs the forward pass once, now, and
    keeps what it saved. The passes of the host's time do without `torch.no_grad`, as users do.
    """
    records = which_pass not in ("forward", "decode", "host")
    leaves, grad_output = in_layout(call, tensors, gradients=records)

    def forward() -> Tensor:
        return call.run(*leaves)

    def forward_without_gradients() -> Tensor:
        with torch.no_grad():
            return call.run(*leaves)

    def both() -> tuple[Tensor, ...]:
        return torch.autograd.grad(call.run(*leaves), leaves, grad_output)

    if which_pass == "backward":
        with call.around():
            output = call.run(*leaves)
        return Runnable(
            lambda: torch.autograd.grad(output, leaves, grad_output, retain_graph=True), call.around
        )
    if which_pass.endswith("forward+backward"):
        return Runnable(both, call.around)
    measures_host = which_pass.startswith("host")
    return Runnable(forward if measures_host else forward_without_gradients, call.around)
