"""Measure: each case in turn: ask the peers, check them, let them take turns, look at memory."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch

from saccade.bench import processes
from saccade.bench.case import BenchCase, Tensors
from saccade.bench.check import check, exact
from saccade.bench.peers import Call, Peer
from saccade.bench.peers.peer import runnable
from saccade.bench.results import Absence, Result, first_line, record
from saccade.bench.selection import passes_of
from saccade.bench.timing import Clock, GpuClock, Timing, TimingPlan, WallClock, rotate

ONE_TURN = TimingPlan(rounds=1, sample_seconds=0.0, warm_seconds=0.0)


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

    def clock(self) -> Clock:
        """The clock for the device."""
        if self.device.type == "cuda":
            return GpuClock(self.device, graph=self.graph, cold=self.cold)
        return WallClock()

    def plan_for(self, case: BenchCase) -> TimingPlan:
        """How long to time a case: where memory is the point, one turn each says enough."""
        return ONE_TURN if case.memory_matters else self.plan

    def wants_memory(self, case: BenchCase) -> bool:
        """Whether memory is measured for a case."""
        cheap = self.device.type == "cuda"
        return (cheap or case.memory_matters) if self.memory is None else self.memory


class Fitted(NamedTuple):
    """The peers that serve a case and serve it right, and why the others do not.

    Attributes:
        errors: how far each one's results are from float64; a mere yardstick has none.
    """

    calls: dict[str, Call]
    absences: list[Absence]
    errors: dict[str, dict[str, float]]


class Progress:
    """Who hears how far the work is; this one keeps it to itself."""

    def now(self, text: str) -> None:
        """What is being done now."""

    def done(self, seconds: float) -> None:
        """So many expected seconds of work are over."""


def measure(
    cases: Sequence[BenchCase],
    peers: Sequence[Peer],
    passes: Sequence[str],
    settings: Settings,
    progress: Progress,
) -> Iterator[tuple[list[Result], list[Absence]]]:
    """Measure case by case; each one's results come as soon as they are there."""
    clock = settings.clock()
    moves = {peer.who: peer.moves for peer in peers if peer.moves is not None}
    for case in cases:
        chosen = passes_of(case, passes)
        if not chosen:
            yield [], [Absence(case.name, "all", f"it has no pass among {', '.join(passes)}")]
            continue
        progress.now(f"{case.name}: check")
        tensors = case.make(settings.device)
        gradients = any("backward" in name for name in chosen)
        calls, absences, errors = fit(case, peers, tensors, settings.device, gradients=gradients)
        results: list[Result] = []
        for which_pass in chosen if calls else ():
            progress.now(f"{case.name}: {which_pass}")
            rounds = settings.plan_for(case).rounds
            share = expected_seconds(case, which_pass, settings) / rounds
            timings, failed = _time(
                calls,
                which_pass,
                tensors,
                clock,
                settings.plan_for(case),
                lambda share=share: progress.done(share),
            )
            absences += [Absence(case.name, who, reason) for who, reason in failed.items()]
            peaks: dict[str, float] = {}
            if settings.wants_memory(case):
                progress.now(f"{case.name}: memory of {which_pass}")
                measured = _peaks(case, list(timings), calls, which_pass, tensors, settings)
                peaks = {who: peak for who, peak in measured.items() if isinstance(peak, float)}
                absences += [
                    Absence(case.name, who, reason)
                    for who, reason in measured.items()
                    if isinstance(reason, str)
                ]
            results += record(case, which_pass, timings, settings.device, peaks, errors, moves)
        yield results, absences


def expected_seconds(case: BenchCase, which_pass: str, settings: Settings) -> float:
    """A guess of how long one peer will be timed in one pass; it only shapes the progress bar."""
    rate = 3e14 if settings.device.type == "cuda" else 6e10
    plan = settings.plan_for(case)
    return plan.rounds * max(case.flops(which_pass) / rate, plan.sample_seconds)


def fit(
    case: BenchCase,
    peers: Sequence[Peer],
    tensors: Tensors,
    device: torch.device,
    *,
    gradients: bool,
) -> Fitted:
    """Ask every peer for a call, and check what it gives."""
    calls: dict[str, Call] = {}
    absences = []
    errors: dict[str, dict[str, float]] = {}
    truth = exact(case, tensors)
    for peer in peers:
        if case.attention not in peer.attention:
            absences.append(Absence(case.name, peer.who, f"it has no {case.attention} attention"))
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a peer's own affair; what matters fails the check
            try:
                call = peer.prepare(case, device)
                reason = call if isinstance(call, str) else None
                if isinstance(call, Call):
                    if peer.computes_attention:
                        checked = check(call, truth, tensors, gradients=gradients)
                        reason, errors[peer.who] = checked
                    calls[peer.who] = call
            except Exception as error:  # whatever a peer raises, the others are to be measured
                reason = f"fails: {type(error).__name__}: {first_line(error)}"
        if reason is not None:
            calls.pop(peer.who, None)
            absences.append(Absence(case.name, peer.who, reason))
    return Fitted(calls, absences, errors)


def _time(
    calls: dict[str, Call],
    which_pass: str,
    tensors: Tensors,
    clock: Clock,
    plan: TimingPlan,
    on_turn: Callable[[], None],
) -> tuple[dict[str, Timing], dict[str, str]]:
    """Let all peers take turns in one pass; those that fail in it, with reasons."""
    ready, failed = {}, {}
    for who, call in calls.items():
        try:
            ready[who] = clock.ready(runnable(call, which_pass, tensors))
        except Exception as error:  # say, out of memory, or no capture in a graph
            failed[who] = f"{which_pass} fails: {type(error).__name__}: {first_line(error)}"
    timings = rotate(ready, clock, plan, lambda who: on_turn()) if ready else {}
    return timings, failed


def _peaks(
    case: BenchCase,
    names: Sequence[str],
    calls: dict[str, Call],
    which_pass: str,
    tensors: Tensors,
    settings: Settings,
) -> dict[str, float | str]:
    """Each peer's peak memory, or why it is unknown."""
    if settings.device.type == "cuda":
        return {
            who: processes.peak_on_gpu(runnable(calls[who], which_pass, tensors)) for who in names
        }
    return {who: processes.peak_on_cpu(case, who, which_pass) for who in names}
