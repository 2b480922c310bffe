"""Exchange: rows that go from rank to rank, and their gradients back.

A message is sent as soon as it is asked for and awaited where its rows are used, so that what is
computed meanwhile hides it; in the backward pass the gradients of rows leave likewise, and are
awaited where they are added up. They are added in 32 bits, in the order of ranks.

`torch.distributed` alone is used, with operations that gloo and NCCL both have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.parallel.agreement import reporting
from saccade.runtime.spec import accumulate_dtype


class Routes(NamedTuple):
    """Which rows one rank sends to each rank, and which it receives from each.

    Attributes:
        send: for each rank the places of rows among those held here.
        receive: how many rows come from each rank.
        arrived: the numbers in the whole of all rows that come, ascending.
        order: by which what comes, that of rank 0 first, is brought into that order.
    """

    send: list[Tensor]
    receive: list[int]
    arrived: Tensor
    order: Tensor

    def to(self, device: torch.device) -> Routes:
        """Indices on a device; numbers stay."""
        send = [rows.to(device) for rows in self.send]
        return self._replace(send=send, order=self.order.to(device))


class Counts(NamedTuple):
    """How many rows go to each rank, and come from each."""

    send: list[int]
    receive: list[int]

    @property
    def back(self) -> Counts:
        """Those of the way back."""
        return Counts(self.receive, self.send)


class Message:
    """Rows on their way: one all-to-all, and what must not go before it has arrived."""

    def __init__(self, plan: Any, rows: Tensor, counts: Counts, what: str) -> None:
        self.plan, self.what, self.rows = plan, what, rows.detach().contiguous()
        self.work: Any = None
        if plan.ranks == 1:
            self.buffer = self.rows
            return
        self.buffer = rows.new_empty(sum(counts.receive), *rows.shape[1:])
        with reporting(plan, what):
            self.work = dist.all_to_all_single(
                self.buffer, self.rows, counts.receive, counts.send, plan.group, async_op=True
            )

    def wait(self) -> Tensor:
        """The rows that came."""
        if self.work is not None:
            with reporting(self.plan, self.what):
                self.work.wait()
            self.work = None
        return self.buffer


class Back:
    """The way back of a message: its gradients, once they have left."""

    message: Message | None = None


class Taken(torch.autograd.Function):
    """Rows taken along the first dimension; gradients are awaited, and added up in 32 bits."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, rows: Tensor, picks: Sequence[Tensor] | None, deterministic: bool, back: Back
    ) -> Tensor:
        ctx.picks, ctx.shape, ctx.back = picks, rows.shape, back
        ctx.at_once = not deterministic or rows.device.type == "cpu"
        if picks is None:  # all rows, as they lie
            return rows.view_as(rows)
        return rows.index_select(0, torch.cat(list(picks)))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        (grad,) = grads
        if ctx.back.message is not None:
            grad, ctx.back.message = ctx.back.message.wait(), None
        if ctx.picks is None:
            return grad, None, None, None
        found = grad.new_zeros(ctx.shape, dtype=accumulate_dtype(grad.dtype))
        if ctx.at_once:
            found.index_add_(0, torch.cat(list(ctx.picks)), grad.to(found.dtype))
        else:  # a rank gets each row once, so that nothing is left to the order of atomics
            parts = grad.split([len(pick) for pick in ctx.picks])
            for pick, part in zip(ctx.picks, parts, strict=True):
                found[pick] += part.to(found.dtype)
        return found.to(grad.dtype), None, None, None


class Arrived(torch.autograd.Function):
    """Rows that a message brought; their gradients go back by another."""

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, rows: Tensor, message: Message, counts: Counts, back: Back
    ) -> Tensor:
        ctx.plan, ctx.counts, ctx.back, ctx.what = message.plan, counts, back, message.what
        return message.wait().view_as(message.buffer)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        (grad,) = grads
        what = f"gradients of {ctx.what}"
        ctx.back.message = message = Message(ctx.plan, grad, ctx.counts.back, what)
        return message.buffer, None, None, None


class Sending:
    """Rows of this rank on their way to others, and theirs to this one."""

    def __init__(
        self, plan: Any, rows: Tensor, picks: Sequence[Tensor] | None, receive: list[int],
        what: str, deterministic: bool = False, sizes: list[int] | None = None,
    ) -> None:  # fmt: skip
        """rows: [rows, ...]. picks: for each rank the places of what it gets, on the rows' device;
        None: rows lie in the order of ranks, `sizes` of them for each."""
        self.back = Back()
        if picks is not None:
            sizes = [len(pick) for pick in picks]
        assert sizes is not None
        self.counts = Counts(sizes, receive)
        self.taken: Any = Taken.apply(rows, picks, deterministic, self.back)
        self.message = Message(plan, self.taken, self.counts, what)

    def wait(self) -> Tensor:
        """The rows that came, those of rank 0 first."""
        found: Any = Arrived.apply(self.taken, self.message, self.counts, self.back)
        return found


class _Summed(torch.autograd.Function):
    """A tensor that every rank has; its gradient is the sum of all ranks' parts, in 32 bits."""

    @staticmethod
    def forward(ctx: Any, plan: Any, tensor: Tensor) -> Tensor:
        ctx.plan = plan
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        total = grad.to(accumulate_dtype(grad.dtype), copy=True).contiguous()
        with reporting(ctx.plan, "gradients of what every rank has"):
            dist.all_reduce(total, group=ctx.plan.group)
        return None, total.to(grad.dtype)


def summed(plan: Any, tensor: Tensor) -> Tensor:
    """A tensor that every rank has, whose gradient is summed over ranks."""
    if plan.ranks == 1 or not (tensor.requires_grad and torch.is_grad_enabled()):
        return tensor
    found: Any = _Summed.apply(plan, tensor)
    return found


class _Gathered(torch.autograd.Function):
    """All ranks' rows, laid end to end; the gradient is that of this rank's."""

    @staticmethod
    def forward(ctx: Any, plan: Any, rows: Tensor, counts: list[int]) -> Tensor:
        ctx.first, ctx.size = sum(counts[: plan.rank]), counts[plan.rank]
        picks = torch.arange(len(rows), device=rows.device).repeat(plan.ranks)
        sent = Counts([len(rows)] * plan.ranks, counts)
        return Message(plan, rows.index_select(0, picks), sent, "rows of all ranks").wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (grad,) = grads
        return None, grad.narrow(0, ctx.first, ctx.size), None


def gathered(plan: Any, rows: Tensor, dim: int, counts: list[int]) -> Tensor:
    """All ranks' rows along a dimension, laid end to end: a collective."""
    if plan.ranks == 1:
        return rows
    if plan.group is None:
        raise ValueError(
            "shards: got a tensor with simulated ranks, takes a sequence of each rank's, or a plan "
            "of a process group"
        )
    found: Any = _Gathered.apply(plan, rows.movedim(dim, 0), counts)
    return found.movedim(0, dim)
