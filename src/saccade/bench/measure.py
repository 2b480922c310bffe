"""Measuring a case: every peer is checked, then all take turns in each pass; memory at last.

The host's time is measured alike: how long a call keeps the processor, whatever a GPU makes of it
later. On a CPU a call is over when it returns, so there this is all of its time.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from saccade.bench import processes
from saccade.bench.case import BenchCase, Tensors
from saccade.bench.cases import passes_of
from saccade.bench.check import check, exact
from saccade.bench.peers import Call, Peer, runnable
from saccade.bench.results import Absence, Result, first_line, record
from saccade.bench.terminal import Bar
from saccade.bench.timing import Clock, HostClock, Timing, TimingPlan, clock_of, rotate

ONE_TURN = TimingPlan(rounds=1, sample_seconds=0.0, warm_seconds=0.0)

HOST_PASSES = ("host", "host with gradients", "host forward+backward")
"""A call that records nothing, one that does, and one with its backward pass."""

# So few that a GPU's queue takes them all: a full queue makes the host wait.
HOST_CALLS = 200
HOST_PLAN = TimingPlan(rounds=20, sample_seconds=0.0, limit_seconds=120.0)


@dataclass(frozen=True)
class Settings:
    """How to measure.

    Attributes:
        device: where.
        plan: how long.
        memory: measure memory of every case (True), of none (False), or where it is cheap or
            the point of the case (None).
        graph, cold: see `GpuClock`; a CPU has neither.
    """

    device: torch.device
    plan: TimingPlan = field(default_factory=TimingPlan)
    memory: bool | None = None
    graph: bool = False
    cold: bool = False

    def plan_for(self, case: BenchCase) -> TimingPlan:
        """How long to time a case: where memory is the point, one turn each says enough."""
        return ONE_TURN if case.memory_matters else self.plan

    def wants_memory(self, case: BenchCase) -> bool:
        """Whether memory is measured for a case."""
        cheap = self.device.type == "cuda"
        return (cheap or case.memory_matters) if self.memory is None else self.memory

    def expected_seconds(self, case: BenchCase, which_pass: str) -> float:
        """A guess of how long one turn of a peer takes; it only shapes the progress bar."""
        rate = 3e14 if self.device.type == "cuda" else 6e10
        return max(case.flops(which_pass) / rate, self.plan_for(case).sample_seconds)


class CaseRun:
    """The peers that serve a case and serve it right, ready to take turns.

    Attributes:
        calls: of these peers, by name.
        absences: why the others take no part.
        errors: how far each one's results are from float64; a mere yardstick has none.
    """

    def __init__(
        self, case: BenchCase, peers: Sequence[Peer], device: torch.device, *, gradients: bool
    ) -> None:
        self.case, self.device, self.tensors = case, device, case.make(device)
        self.moves = {peer.who: peer.moves for peer in peers if peer.moves is not None}
        self.calls, self.absences, self.errors = fit(
            case, peers, self.tensors, device, gradients=gradients
        )

    def time(
        self,
        which_pass: str,
        clock: Clock,
        plan: TimingPlan,
        on_turn: Callable[[str], None] = lambda who: None,
    ) -> dict[str, Timing]:
        """Let all peers take turns in one pass; absences tell of those that fail in it."""
        ready = {}
        for who, call in self.calls.items():
            try:
                ready[who] = clock.ready(runnable(call, which_pass, self.tensors))
            except Exception as error:  # say, out of memory, or no capture in a graph
                reason = f"{which_pass} fails: {type(error).__name__}: {first_line(error)}"
                self.absences.append(Absence(self.case.name, who, reason))
        return rotate(ready, clock, plan, on_turn) if ready else {}

    def peaks(self, which_pass: str, names: Sequence[str]) -> dict[str, float]:
        """Peak memory of each peer in megabytes; absences tell why one is unknown."""
        found: dict[str, float] = {}
        for who in names:
            if self.device.type == "cuda":
                peak = processes.peak_on_gpu(runnable(self.calls[who], which_pass, self.tensors))
            else:
                peak = processes.peak_on_cpu(self.case, who, which_pass)
            if isinstance(peak, str):
                self.absences.append(Absence(self.case.name, who, peak))
            else:
                found[who] = peak
        return found


def measure(
    cases: Sequence[BenchCase],
    peers: Sequence[Peer],
    passes: Sequence[str],
    settings: Settings,
    bar: Bar,
) -> Iterator[tuple[list[Result], list[Absence]]]:
    """Measure case by case; each one's results come as soon as they are there."""
    clock = clock_of(settings.device, graph=settings.graph, cold=settings.cold)
    for case in cases:
        chosen = passes_of(case, passes)
        if not chosen:
            yield [], [Absence(case.name, "all", f"it has no pass among {', '.join(passes)}")]
            continue
        bar.now(f"{case.name}: check")
        gradients = any("backward" in name for name in chosen)
        run = CaseRun(case, peers, settings.device, gradients=gradients)
        results: list[Result] = []
        for which_pass in chosen if run.calls else ():
            bar.now(f"{case.name}: {which_pass}")
            seconds = settings.expected_seconds(case, which_pass)
            plan = settings.plan_for(case)
            timings = run.time(which_pass, clock, plan, lambda who, turn=seconds: bar.done(turn))
            peaks: dict[str, float] = {}
            if settings.wants_memory(case):
                bar.now(f"{case.name}: memory of {which_pass}")
                peaks = run.peaks(which_pass, list(timings))
            results += record(
                case, which_pass, timings, settings.device, peaks, run.errors, run.moves
            )
        yield results, run.absences


def measure_host(
    case: BenchCase,
    peers: Sequence[Peer],
    device: torch.device,
    plan: TimingPlan = HOST_PLAN,
    calls: int = HOST_CALLS,
) -> tuple[list[Result], list[Absence]]:
    """The host's time of each kind of call, for all peers in turn, and why some have none."""
    run = CaseRun(case, peers, device, gradients=not case.decodes)
    clock = HostClock(device, calls)
    results = [
        result
        for which_pass in HOST_PASSES[: 1 if case.decodes else 3]
        for result in record(case, which_pass, run.time(which_pass, clock, plan), device)
    ]
    return results, run.absences


def fit(
    case: BenchCase,
    peers: Sequence[Peer],
    tensors: Tensors,
    device: torch.device,
    *,
    gradients: bool,
) -> tuple[dict[str, Call], list[Absence], dict[str, dict[str, float]]]:
    """The calls of peers that serve a case, why others do not, and the errors of their results."""
    calls: dict[str, Call] = {}
    absences = []
    errors: dict[str, dict[str, float]] = {}
    truth = exact(case, tensors)
    for peer in peers:
        reason = None
        try:
            if case.attention not in peer.attention:
                call = f"it has no {case.attention} attention"
            else:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # what matters fails the check
                    call = peer.prepare(case, device)
                    if isinstance(call, Call) and peer.computes_attention:
                        checked = check(call, truth, tensors, gradients=gradients)
                        reason, errors[peer.who] = checked
        except Exception as error:  # whatever a peer raises, the others are to be measured
            call = f"fails: {type(error).__name__}: {first_line(error)}"
        if isinstance(call, Call) and reason is None:
            calls[peer.who] = call
        else:
            absences.append(Absence(case.name, peer.who, reason or str(call)))
    return calls, absences, errors
