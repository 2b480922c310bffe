"""Exchange: rows that go from rank to rank, and their gradients back.

A message is sent as soon as it is asked for and awaited where its rows are used, so that what is
computed meanwhile hides it; in the backward pass the gradients of rows leave likewise, and are
awaited where they are added up. They are added in 32 bits, always in
the same order.

`torch.distributed` alone is used, with operations that gloo and NCCL both have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.modifiers.graph_constants import in_graph
from saccade.parallel.agreement import reporting
from saccade.runtime.spec import accumulate_dtype


class Routes(NamedTuple):
    """Which rows one rank sends to each rank, and which it receives from each.

    Attributes:
        send: for each rank the places of rows among those held here, ascending.
        receive: how many rows come from each rank.
        arrived: the numbers in the whole of all rows that come, ascending.
        order: by which what comes, that of rank 0 first, is brought into that order.
        inverse: by which that order is brought back into what came.
    """

    send: list[Tensor]
    receive: list[int]
    arrived: Tensor
    order: Tensor
    inverse: Tensor

    def to(self, device: torch.device) -> Routes:
        """Indices on a device; numbers stay."""
        send = [rows.to(device) for rows in self.send]
        order, inverse = self.order.to(device), self.inverse.to(device)
        return self._replace(send=send, order=order, inverse=inverse)


def spans_of(picks: Sequence[Tensor]) -> list[tuple[int, int] | None]:
    """The first place and how many, of places that follow one another; None of others."""
    found: list[tuple[int, int] | None] = []
    for pick in picks:
        first = int(pick[0]) if len(pick) else 0
        alone = not len(pick) or int(pick[-1]) - first == len(pick) - 1
        found.append((first, len(pick)) if alone else None)
    return found


class Counts(NamedTuple):
    """How many rows go to each rank, and come from each."""

    send: list[int]
    receive: list[int]

    @property
    def back(self) -> Counts:
        """Those of the way back."""
        return Counts(self.receive, self.send)


class Message:
    """Rows on their way: one all-to-all, and what must not go before it has arrived.

    In a graph it is PyTorch's functional all-to-all: what is computed meanwhile lies between that
    and its wait, as it does in eager calls.
    """

    def __init__(self, plan: Any, rows: Tensor, counts: Counts, what: str) -> None:
        self.plan, self.what, self.rows = plan, what, rows.detach().contiguous()
        self.work: Any = None
        self.traced = in_graph() and plan.ranks > 1
        if plan.ranks == 1:
            self.buffer = self.rows
            return
        if self.traced:
            self.buffer = torch.ops._c10d_functional.all_to_all_single.default(
                self.rows, counts.receive, counts.send, plan.group.group_name
            )
            return
        self.buffer = rows.new_empty(sum(counts.receive), *rows.shape[1:])
        with reporting(plan, what):
            self.work = dist.all_to_all_single(
                self.buffer, self.rows, counts.receive, counts.send, plan.group, async_op=True
            )

    def wait(self) -> Tensor:
        """The rows that came."""
        if self.traced:
            self.buffer = torch.ops._c10d_functional.wait_tensor.default(self.buffer)
            self.traced = False
        if self.work is not None:
            with reporting(self.plan, self.what):
                self.work.wait()
            self.work = None
        return self.buffer


def waiting_for(tensor: Tensor, *others: Tensor) -> Tensor:
    """A tensor that a graph computes after some others, of which it takes nothing.

    A message that nothing takes from would be left out of the graph of this rank alone, and one of
    the backward pass that needs no gradient would be moved into the forward pass.
    """
    return torch.ops.saccade.wait_for.default(tensor, others) if in_graph() else tensor


torch.library.define("saccade::wait_for", "(Tensor tensor, Tensor[] others) -> Tensor")
torch.library.impl(
    "saccade::wait_for", "CompositeExplicitAutograd", lambda tensor, others: tensor.clone()
)
torch.library.register_fake("saccade::wait_for", lambda tensor, others: tensor.clone())


class Back:
    """The way back of a message: its gradients, once they have left."""

    message: Message | None = None


class Taken(torch.autograd.Function):
    """Rows taken along the first dimension; gradients are awaited, and added up in 32 bits.

    A rank takes each row once at most, so that nothing is left to the order of atomics.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any, rows: Tensor, picks: Sequence[Tensor] | None,
        spans: Sequence[tuple[int, int] | None], back: Back,
    ) -> Tensor:  # fmt: skip
        ctx.picks, ctx.spans, ctx.shape, ctx.back = picks, spans, rows.shape, back
        if picks is None:  # all rows, as they lie
            return rows.view_as(rows)
        return torch.cat([
            rows.index_select(0, pick) if span is None else rows.narrow(0, *span)
            for pick, span in zip(picks, spans, strict=True)
        ])  # fmt: skip

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        (grad,) = grads
        if ctx.back.message is not None:
            grad, ctx.back.message = ctx.back.message.wait(), None
        if ctx.picks is None:
            return grad, None, None, None
        parts = list(
            zip(ctx.spans, ctx.picks, grad.split([len(p) for p in ctx.picks]), strict=True)
        )
        every = (0, ctx.shape[0])
        parts.sort(key=lambda part: part[0] != every)  # the first may have all rows
        wide, found = accumulate_dtype(grad.dtype), None
        if parts and parts[0][0] == every:
            found = parts.pop(0)[2].to(wide, copy=True)
        else:
            found = grad.new_zeros(ctx.shape, dtype=wide)
        for span, pick, part in parts:
            if span is None:
                found.index_add_(0, pick, part.to(wide))
            else:
                found.narrow(0, *span).add_(part)
        return found.to(grad.dtype), None, None, None


class Permuted(torch.autograd.Function):
    """Rows in another order; their gradients are brought back, not added."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, inverse: Tensor) -> Tensor:  # noqa: D102
        ctx.inverse = inverse
        return rows.index_select(0, order)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # noqa: D102
        return grads[0].index_select(0, ctx.inverse), None, None


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
        what: str, spans: Sequence[tuple[int, int] | None] = (), sizes: list[int] | None = None,
        compared: Callable[[Tensor], Tensor] | None = None,
    ) -> None:  # fmt: skip
        """rows: [rows, ...]. picks: for each rank the places of what it gets, on the rows' device,
        and spans, those that follow one another; None: rows lie in the order of ranks, `sizes` of
        them for each. compared: `LocalCall.compared`, for the first rows of a call."""
        self.back = Back()
        if picks is not None:
            sizes = [len(pick) for pick in picks]
        assert sizes is not None
        self.counts = Counts(sizes, receive)
        self.taken: Any = Taken.apply(rows, picks, spans, self.back)
        if compared is not None:
            self.taken = compared(self.taken)
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
        return None, summed_over_ranks(ctx.plan, total).to(grad.dtype)


def summed_over_ranks(plan: Any, total: Tensor) -> Tensor:
    """The sum of all ranks' gradients of what every rank has; the tensor's memory is used."""
    if in_graph():
        name = plan.group.group_name
        arriving = torch.ops._c10d_functional.all_reduce.default(total, "sum", name)
        return torch.ops._c10d_functional.wait_tensor.default(arriving)
    with reporting(plan, "gradients of what every rank has"):
        dist.all_reduce(total, group=plan.group)
    return total


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
