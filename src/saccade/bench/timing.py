"""Timing by turns: candidates alternate, in another order every round, and medians are compared.

What a machine does otherwise (its clock, its heat, other programs) changes slowly. Candidates that
take turns all meet the same of it, so ratios within one rotation mean something where times that
were taken one after the other do not.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor


class Runnable(NamedTuple):
    """One pass of one peer: call `run` with `around` entered."""

    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = nullcontext


FEWEST_ROUNDS = 3


@dataclass(frozen=True)
class TimingPlan:
    """How long to measure.

    Attributes:
        rounds: how often each candidate has its turn.
        sample_seconds: the least that one turn lasts; short calls are repeated. With 0
            a turn is one call, and there is no warm-up.
        warm_seconds: how long all candidates load the device before the first round.
        limit_seconds: a rotation that has lasted longer ends after its round, though not before
            the third.
    """

    rounds: int = 9
    sample_seconds: float = 0.025
    warm_seconds: float = 0.2
    limit_seconds: float = 60.0


@dataclass(frozen=True)
class Timing:
    """What one candidate took, over all rounds."""

    median_ms: float
    min_ms: float
    max_ms: float
    rounds: int

    @staticmethod
    def of(samples: list[float]) -> Timing:
        """Sum up samples in seconds."""
        times = [sample * 1e3 for sample in samples]
        return Timing(statistics.median(times), min(times), max(times), len(times))


class Clock(Protocol):
    """How to time calls on a device."""

    def ready(self, candidate: Runnable) -> Runnable:
        """The candidate as it will be timed; everything that happens once happens here."""
        ...

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The time of one call, from so many of them."""
        ...


class WallClock:
    """The clock for a CPU, where a call is over when it returns."""

    def ready(self, candidate: Runnable) -> Runnable:
        """The candidate itself: its check and the warm-up have loaded all code."""
        return candidate

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The time of one call by the system's finest clock."""
        start = time.perf_counter()
        for _ in range(repeats):
            run()
        return (time.perf_counter() - start) / repeats


class HostClock:
    """The clock for the host: it waits for the device before the calls, and not between them."""

    def __init__(self, device: torch.device, calls: int) -> None:
        self.device, self.calls = device, calls

    def ready(self, candidate: Runnable) -> Runnable:
        """Compile, and warm up, by calling."""
        with candidate.around():
            self.seconds(candidate.run, 1)
        return candidate

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The time of one call, from `calls` in a row, `repeats` times over."""
        taken = 0.0
        for _ in range(repeats):
            wait(self.device)
            start = time.perf_counter()
            for _ in range(self.calls):
                run()
            taken += time.perf_counter() - start
        wait(self.device)
        return taken / repeats / self.calls


def clock_of(device: torch.device, *, graph: bool = False, cold: bool = False) -> Clock:
    """The clock for a device; `graph` and `cold` are those of `GpuClock`."""
    return GpuClock(device, graph=graph, cold=cold) if device.type == "cuda" else WallClock()


def wait(device: torch.device) -> None:
    """Wait until a GPU has done what it was given; a CPU has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def orders(names: list[str], seed: int = 0) -> Iterator[list[str]]:
    """Orders of the same names without end; no two in a row are equal (of more than one name)."""
    shuffle = random.Random(seed).shuffle
    order: list[str] = []
    while True:
        before, order = order, list(names)
        while True:
            shuffle(order)
            if order != before or len(names) < 2:
                break
        yield list(order)


def rotate(
    candidates: Mapping[str, Runnable],
    clock: Clock,
    plan: TimingPlan,
    on_turn: Callable[[str], None] = lambda name: None,
) -> dict[str, Timing]:
    """Time candidates against each other; `on_turn` is called with the name after each turn."""
    start = time.perf_counter()
    repeats = _warm_up(candidates, clock, plan)
    samples: dict[str, list[float]] = {name: [] for name in candidates}
    rounds = orders(list(candidates))
    for number in range(1, plan.rounds + 1):
        for name in next(rounds):
            with candidates[name].around():
                samples[name].append(clock.seconds(candidates[name].run, repeats[name]))
            on_turn(name)
        if number >= FEWEST_ROUNDS and time.perf_counter() - start > plan.limit_seconds:
            break
    return {name: Timing.of(taken) for name, taken in samples.items()}


def _warm_up(candidates: Mapping[str, Runnable], clock: Clock, plan: TimingPlan) -> dict[str, int]:
    """Load the device with all candidates in turn; find how many calls make up a sample."""
    if plan.sample_seconds == 0:
        return dict.fromkeys(candidates, 1)
    fastest = dict.fromkeys(candidates, math.inf)
    start = time.perf_counter()
    while True:
        for name, candidate in candidates.items():
            with candidate.around():
                fastest[name] = min(fastest[name], clock.seconds(candidate.run, 1))
        if time.perf_counter() - start >= plan.warm_seconds:
            break
    return {
        name: max(1, math.ceil(plan.sample_seconds / max(seconds, 1e-6)))
        for name, seconds in fastest.items()
    }


FLUSH_BYTES = 2**28  # several times the largest L2 cache
HEAD_START = 20_000  # cycles: in that time the host puts a graph's launch behind the event


class GpuClock:
    """The clock for a GPU, where a call returns long before it is over.

    Args:
        graph: capture each candidate once and time its replays, without the host's part.
        cold: fill the L2 cache with other things before every call, which is then timed by itself.
    """

    def __init__(self, device: torch.device, *, graph: bool = False, cold: bool = False) -> None:
        self.graph = graph
        self.flush = torch.zeros(FLUSH_BYTES // 4, device=device) if cold else None

    def ready(self, candidate: Runnable) -> Runnable:
        """Compile by calling; capture a graph where replays are timed."""
        with candidate.around():
            for _ in range(3):
                candidate.run()
            torch.cuda.synchronize()
            return self._captured(candidate) if self.graph else candidate

    def _captured(self, candidate: Runnable) -> Runnable:
        # Capture wants a warm-up on the stream that it uses; torch.cuda.graph takes care of order.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            candidate.run()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = candidate.run()
        # A graph holds addresses: what it reads and writes must live as long as it is replayed.
        kept = candidate, output

        def replay() -> object:
            graph.replay()
            return kept

        return Runnable(replay)

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The time of one call between events on the device."""
        turns = [(run, repeats)] if self.flush is None else [(run, 1)] * repeats
        events = [_timed(turn, count, self.flush) for turn, count in turns]
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in events) / repeats / 1e3


def _timed(
    run: Callable[[], object], repeats: int, flush: Tensor | None
) -> tuple[torch.cuda.Event, torch.cuda.Event]:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    if flush is not None:
        flush.sum()  # reads: what is written would be written back while the call is timed
        torch.cuda._sleep(HEAD_START)
    start.record()
    for _ in range(repeats):
        run()
    end.record()
    return start, end
