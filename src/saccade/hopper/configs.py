"""Configs: the schedule of a Hopper kernel, as a pure function of the problem.

Shared memory of a program holds the queries of its consumers, `stages` tiles of keys and as many of
values, and the output on its way out, unless that lies where the queries lay.
"""

from __future__ import annotations

from typing import NamedTuple

ROWS = 64  # query rows of a consumer, as in forward.py
SHARED_MEMORY = 227 << 10  # bytes of one program
L2_MEGABYTES = 16  # keys and values that are kept in the L2: a third of it
ADDED_BYTES = 1 << 10  # for barriers and tickets


class KernelProblem(NamedTuple):
    """What a schedule depends on."""

    head_width: int  # as the kernel widens them
    value_width: int
    masked: bool  # then tiles of query rows are not equally dear
    planned: bool  # whether other kernels judge tiles, whose sides must be powers of two


class Schedule(NamedTuple):
    """How a kernel runs."""

    consumers: int
    kv_tile: int
    stages: int  # a power of two
    own_output: bool
    consumer_registers: int
    producer_registers: int
    grid: str  # "dynamic", "static" (both persistent) or "plain"
    at_once_mb: int  # MB of keys and values whose heads take turns; 0: one head after the other

    @property
    def query_tile(self) -> int:
        """Query rows of a program."""
        return self.consumers * ROWS

    def shared_memory(self, head_width: int, value_width: int) -> int:
        """Bytes of shared memory, for elements of 2 bytes."""
        rows = self.query_tile * (head_width + (value_width if self.own_output else 0))
        return 2 * (rows + self.stages * self.kv_tile * (head_width + value_width)) + ADDED_BYTES


OVERRIDE: Schedule | None = None
"""Taken instead of what `choose` would take, to measure what it should."""


def choose(problem: KernelProblem) -> Schedule:
    """The schedule of a problem."""
    if OVERRIDE is not None:
        return OVERRIDE
    width = max(problem.head_width, problem.value_width)
    grid, at_once = "dynamic", L2_MEGABYTES if problem.masked else 0
    if width <= 64 and not problem.planned:
        return Schedule(3, 128, 2, True, 160, 32, grid, at_once)
    if width <= 128:
        return Schedule(2, 128, 2, True, 240, 24, grid, at_once)
    own = problem.head_width + problem.value_width <= 384
    return Schedule(2, 64, 2, own, 240, 24, grid, at_once)
