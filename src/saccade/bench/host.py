"""Host: how long a call keeps the processor, whatever a GPU makes of it later.

On a CPU a call is over when it returns, so there this is all of its time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch

from saccade.bench.case import BenchCase, Tensors
from saccade.bench.measure import fit
from saccade.bench.peers import Call, Peer
from saccade.bench.peers.peer import in_layout
from saccade.bench.results import Absence, Result, first_line, record
from saccade.bench.timing import Runnable, TimingPlan, rotate

PASSES = ("host", "host with gradients", "host forward+backward")
"""A call that records nothing, one that does, and one with its backward pass."""

# So few that a GPU's queue takes them all: a full queue makes the host wait.
CALLS = 200
PLAN = TimingPlan(rounds=20, sample_seconds=0.0, limit_seconds=120.0)


class HostClock:
    """The clock for the host: it waits for the device before the calls, and not between them."""

    def __init__(self, device: torch.device, calls: int = CALLS) -> None:
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
            self._wait()
            start = time.perf_counter()
            for _ in range(self.calls):
                run()
            taken += time.perf_counter() - start
        self._wait()
        return taken / repeats / self.calls

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def measure_host(
    case: BenchCase,
    peers: Sequence[Peer],
    device: torch.device,
    plan: TimingPlan = PLAN,
    calls: int = CALLS,
) -> tuple[list[Result], list[Absence]]:
    """The host's time of each kind of call, for all peers in turn, and who has none."""
    tensors = case.make(device)
    clock = HostClock(device, calls)
    passes = PASSES[:1] if case.decodes else PASSES
    calls_of, absences, _ = fit(case, peers, tensors, device, gradients=not case.decodes)
    results: list[Result] = []
    for which_pass in passes:
        ready = {}
        for who, call in calls_of.items():
            try:
                ready[who] = clock.ready(_runnable(call, which_pass, tensors))
            except Exception as error:  # whatever a peer raises, the others are to be measured
                reason = f"{which_pass} fails: {type(error).__name__}: {first_line(error)}"
                absences.append(Absence(case.name, who, reason))
        timings = rotate(ready, clock, plan) if ready else {}
        results += record(case, which_pass, timings, device)
    return results, absences


def _runnable(call: Call, which_pass: str, tensors: Tensors) -> Runnable:
    """One kind of call; unlike a timed forward pass it does without `torch.no_grad`."""
    leaves, grad_output = in_layout(call, tensors, gradients=which_pass != "host")

    def forward() -> object:
        return call.run(*leaves)

    def both() -> object:
        return torch.autograd.grad(call.run(*leaves), leaves, grad_output)

    return Runnable(both if "backward" in which_pass else forward, call.around)
