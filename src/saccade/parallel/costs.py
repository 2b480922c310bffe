"""Costs: what a deal takes by each method, predicted from work, bytes and the speed of links.

The model is coarse and printed with every plan: a rank computes its pairs at one speed, receives
bytes from ranks of its host at the speed of a link and from others at that of the network, copies
them in its own memory, and waits a moment for each message. What overlaps counts once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

METHODS = ("gather", "ulysses", "ring")
# How often what messages bring is read or written in a GPU's own memory, forward and backward, as
# two H200s took for it: rows are packed and put in order, and gradients added up in 32 bits.
GATHER_PASSES, ULYSSES_PASSES = (9, 27), (19, 31)
MERGE_PASSES = 10  # over numbers of 32 bits, that a partial output is merged by in a ring
BACKWARD_FLOPS = 2.5  # times the forward pass's: five products of a tile for two


class Machine(NamedTuple):
    """What the cost model assumes of GPUs and their links.

    Attributes:
        flops: operations a second that attention reaches on one GPU.
        link_bytes: bytes a second that a GPU receives from others of its host.
        network_bytes: bytes a second that a GPU receives from other hosts.
        memory_bytes: bytes a second that a GPU reads or writes in its own memory.
        latency: seconds until a message begins to arrive.
        ranks_per_host: GPUs of one host, whose ranks follow one another.

    Examples:
        >>> from saccade.parallel import Machine
        >>> slow = Machine(network_bytes=10e9)  # 100 Gb/s for each GPU
        >>> plan = saccade.parallel.plan(masks.causal(), 65536, 16, machine=slow)
        >>> plan.machine.ranks_per_host
        8
    """

    flops: float = 500e12
    link_bytes: float = 360e9  # four fifths of NVLink 4's 450 GB/s each way
    network_bytes: float = 40e9  # four fifths of InfiniBand NDR's 400 Gb/s, one adapter a GPU
    memory_bytes: float = 3e12
    latency: float = 20e-6
    ranks_per_host: int = 8


class Sizes(NamedTuple):
    """Heads, channels and bytes of a call's rows."""

    batch: int
    query_heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    itemsize: int

    @property
    def kv_bytes(self) -> int:
        """Bytes of one row's keys and values."""
        return self.batch * self.kv_heads * (self.head_dim + self.value_dim) * self.itemsize

    @property
    def query_bytes(self) -> int:
        """Bytes of one row's queries and outputs."""
        return self.batch * self.query_heads * (self.head_dim + self.value_dim) * self.itemsize

    def seconds(self, pairs: float, machine: Machine) -> float:
        """Seconds for the forward pass over so many pairs."""
        return 2 * pairs * (self.head_dim + self.value_dim) / machine.flops


class Cost(NamedTuple):
    """What one method takes, by the slowest rank.

    Attributes:
        method: its name.
        received: bytes that the rank that receives most receives in the forward pass.
        held: rows of keys that a rank holds at once, at most.
        compute: seconds of the forward pass's work.
        communication: seconds of its messages.
        forward, backward: seconds of both, what overlaps counted once.
        refused: why the method cannot serve; "" where it can.

    Examples:
        >>> cost = saccade.parallel.plan(masks.causal(), 65536, 8).costs["gather"]
        >>> cost.compute <= cost.forward < cost.backward
        True
    """

    method: str
    received: float
    held: int
    compute: float
    communication: float
    forward: float
    backward: float
    refused: str = ""

    @property
    def total(self) -> float:
        """Seconds of both passes."""
        return self.forward + self.backward


def costs(
    length: int, work: Tensor, sent: Tensor, sizes: Sizes, machine: Machine
) -> dict[str, Cost]:
    """The cost of each method.

    Args:
        length: rows of all ranks.
        work: [ranks], pairs of each rank.
        sent: [ranks, ranks], how many rows of keys each rank (first) needs of each other; its own
            stand on the diagonal.
        sizes: heads and channels.
        machine: speeds.
    """
    found = (
        _gather(work, sent, sizes, machine),
        _ulysses(work, length, sizes, machine),
        _ring(work, length, sent, sizes, machine),
    )
    return {cost.method: cost for cost in found}


def cheapest(known: dict[str, Cost]) -> str:
    """The method that takes least time of those that can serve."""
    return min((cost for cost in known.values() if not cost.refused), key=lambda c: c.total).method


def ulysses_unsupported(ranks: int, query_heads: int, kv_heads: int) -> str:
    """Why heads cannot be dealt to ranks; "" where they can."""
    if query_heads % ranks:
        return f"{query_heads} query heads on {ranks} ranks, takes a number that {ranks} divides"
    if kv_heads % ranks and ranks % kv_heads:
        return (
            f"{kv_heads} kv heads on {ranks} ranks, takes a number that {ranks} divides, or that "
            f"divides {ranks}"
        )
    return ""


def _arrival(rows: Tensor, row_bytes: float, machine: Machine) -> Tensor:
    """Seconds until each rank has its rows of others."""
    numbers = torch.arange(len(rows))
    host = numbers // machine.ranks_per_host
    near = torch.zeros(len(rows), int(host[-1]) + 1, dtype=torch.float64)
    near = near.index_add_(1, host, rows)[numbers, host] - rows.diagonal()
    far = _others(rows) - near
    seconds = near / machine.link_bytes + far / machine.network_bytes
    return seconds * row_bytes + (near + far > 0) * machine.latency


def _others(rows: Tensor) -> Tensor:
    return rows.sum(1) - rows.diagonal()


def _gather(work: Tensor, sent: Tensor, sizes: Sizes, machine: Machine) -> Cost:
    compute = sizes.seconds(float(work.max()), machine)
    arrival = float(_arrival(sent, sizes.kv_bytes, machine).max())
    groups = 2 if sizes.kv_heads % 2 == 0 else 1  # of heads: one computes while the next arrives
    sends = float(_others(sent).sum()) > 0
    once = float(sent.sum(1).max()) * sizes.kv_bytes / machine.memory_bytes * sends
    forward = max(compute, arrival) + min(compute, arrival) / groups + GATHER_PASSES[0] * once
    # Gradients come back from every rank that needed a row: where all need the same rows, their
    # owner waits for more than it sent.
    back = float(_arrival(sent.T, sizes.kv_bytes, machine).max())
    slow = BACKWARD_FLOPS * compute
    backward = max(slow, back) + min(slow, back) / groups + GATHER_PASSES[1] * once
    return Cost(
        "gather", float(_others(sent).max()) * sizes.kv_bytes, int(sent.sum(1).max()), compute,
        arrival, forward, backward,
    )  # fmt: skip


def _ulysses(work: Tensor, length: int, sizes: Sizes, machine: Machine) -> Cost:
    ranks = len(work)
    compute = sizes.seconds(float(work.sum()) / ranks, machine)
    kv = sizes.kv_bytes * max(1.0, ranks / max(sizes.kv_heads, 1))  # some heads go to several ranks
    near = min(ranks, machine.ranks_per_host) - 1
    seconds = near / machine.link_bytes + (ranks - 1 - near) / machine.network_bytes
    arrival = length / ranks / ranks * (sizes.query_bytes + kv) * seconds
    arrival += 3 * machine.latency * (ranks > 1)
    received = length / ranks * (ranks - 1) / ranks * (sizes.query_bytes + kv)
    held = length // max(min(ranks, sizes.kv_heads), 1)  # all rows, of some heads
    once = length / ranks * (sizes.query_bytes + kv) / machine.memory_bytes * (ranks > 1)
    return Cost(
        "ulysses", received, held, compute, arrival, compute + arrival + ULYSSES_PASSES[0] * once,
        BACKWARD_FLOPS * compute + arrival + ULYSSES_PASSES[1] * once,
        ulysses_unsupported(ranks, sizes.query_heads, sizes.kv_heads),
    )  # fmt: skip


def _ring(work: Tensor, length: int, sent: Tensor, sizes: Sizes, machine: Machine) -> Cost:
    ranks = len(work)
    numbers = torch.arange(ranks)
    host = numbers // machine.ranks_per_host
    each = sizes.seconds(1.0, machine) * work / sent.sum(1).clamp_min(1)
    merged = length / ranks * sizes.batch * sizes.query_heads * sizes.value_dim
    merge = 4 * MERGE_PASSES * merged / machine.memory_bytes if ranks > 1 else 0.0
    forward = backward = arrival = 0.0
    steps = sent[numbers, (numbers - numbers[:, None]) % ranks]  # rows that each step computes
    for step in range(ranks):  # what a rank computes arrived while it computed the step before
        compute = float((steps[step] * each).max()) + merge
        after = steps[step + 1] if step + 1 < ranks else torch.zeros(ranks)
        near = host == host[(numbers - step - 1) % ranks]
        speed = torch.where(near, machine.link_bytes, machine.network_bytes)
        message = float((after * sizes.kv_bytes / speed).max())
        message += machine.latency * bool((after > 0).any())
        arrival += message
        forward += max(compute, message)
        # Keys come once more, and their gradients go back in 32 bits.
        again = message * (1 + 4 / sizes.itemsize)
        backward += max(BACKWARD_FLOPS * (compute - merge) + merge, again)
    compute = sizes.seconds(float(work.max()), machine)
    held = int(sent.diagonal().max() + 2 * (sent - sent.diagonal().diag()).max())
    received = float(_others(sent).max()) * sizes.kv_bytes
    return Cost("ring", received, held, compute, arrival, forward, backward)
