"""Configs: the schedule of a Hopper kernel, as a pure function of the problem.

Shared memory of a program holds the queries of its consumers, `stages` tiles of keys and as many of
values, and output on its way out.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 64  # query rows of a consumer, as in forward.py
SHARED_MEMORY = 227 << 10  # bytes of one program
L2_BYTES = 32 << 20  # keys and values of heads that take turns: most of the L2
ADDED_BYTES = 1 << 10  # for barriers and tickets


class KernelProblem(NamedTuple):
    """What a schedule depends on."""

    head_width: int  # as the kernel widens them
    value_width: int
    masked: bool  # then tiles of query rows are not equally dear


class Schedule(NamedTuple):
    """How a kernel runs."""

    consumers: int
    kv_tile: int
    stages: int  # a power of two
    query_stages: int  # a power of two: of tiles of queries
    output_parts: int  # 1, or 2: halves of its channels go out one after the other
    consumer_registers: int
    producer_registers: int
    grid: str  # "dynamic", "static" (both persistent) or "plain"

    @property
    def query_tile(self) -> int:
        """Query rows of a program."""
        return self.consumers * ROWS

    def shared_memory(self, head_width: int, value_width: int) -> int:
        """Bytes of shared memory, for elements of 2 bytes."""
        queries = self.query_tile * self.query_stages * head_width
        outputs = self.query_tile * value_width // self.output_parts
        keys_and_values = self.stages * self.kv_tile * (head_width + value_width)
        return 2 * (queries + keys_and_values + outputs) + ADDED_BYTES


OVERRIDE: Schedule | None = None
"""Taken instead of what `choose` would take, to measure what it should."""


def choose(problem: KernelProblem) -> Schedule:
    """The schedule of a problem."""
    if OVERRIDE is not None:
        return OVERRIDE
    width = max(problem.head_width, problem.value_width)
    if width <= 64 and not problem.masked:
        return Schedule(3, 128, 2, 2, 1, 160, 32, "dynamic")
    if width <= 128:
        return Schedule(2, 128, 2, 2, 1, 240, 24, "dynamic")
    return Schedule(2, 64, 2, 1, 2, 240, 24, "dynamic")


def forward_unsupported(problem: KernelProblem) -> str | None:
    """Why a forward pass goes to the portable kernel, or None."""
    width = max(problem.head_width, problem.value_width)
    if OVERRIDE is None and width <= 64 and not problem.masked:
        return "without a mask, at widths up to 64, the portable kernel is faster"
    return None


def heads_at_once(masked: bool, slots: int, multiprocessors: int, group: int, size: int) -> int:
    """How many query heads take turns, their longest rows first.

    Without a mask all rows are equally long: one head after the other meets its keys in the L2.
    Else there should be some tiles to choose from, but not so many that their keys leave the L2.

    slots: tiles of query rows of a head. group: query heads of a kv head. size: bytes of the keys
    and values of a kv head.
    """
    if not masked:
        return 1
    enough = -(-2 * multiprocessors // max(slots, 1))
    return max(1, min(enough, L2_BYTES // max(size, 1) * group))
