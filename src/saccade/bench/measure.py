"""Measuring a case: every peer is checked, then all take turns in each pass; memory at last.

The host's time is measured alike: how long a call keeps the processor, whatever a GPU makes of it
later. On a CPU a call is over when it returns, so there this is all of its time.

A peer's results are compared with float64 (`exact.py`) for some rows of some heads.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bench import processes
from saccade.bench.case import BenchCase, Tensors
from saccade.bench.cases import passes_of
from saccade.bench.display import Bar
from saccade.bench.exact import GroundTruth, HeadGradient, exact
from saccade.bench.peers import Call, Peer, from_layout, in_layout, runnable
from saccade.bench.results import Absence, Result, first_line, record
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


KINDS = {"delta": "gated delta rule"}  # of cases that are not called attention


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
                call = f"it has no {KINDS.get(case.attention, f'{case.attention} attention')}"
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


# Largest ‖result − exact‖ / ‖exact‖, of a row of the output and of a head's gradients, for normal
# inputs. Plain PyTorch stays about five times below; tf32 products of float32 inputs, or one wrong
# tile, go beyond.
OUTPUT_LIMITS = {
    "float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2, "float8_e4m3fn": 2e-1
}  # fmt: skip
GRADIENT_LIMITS = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
# Gradients of linear attention's queries and keys are differences; one side of them is
# δ = grad_output · output. Numbers of the output that are rounded, each by its share ε, move δ by
# ε · ‖grad_output ∘ output‖, and gradients by that times ∂gradient / ∂δ. ‖exact‖ does not tell how
# much that is: of the first row's difference, which sees one key, nothing is left. So each row may
# be off by the limit times ‖grad_output ∘ output‖ · ‖∂gradient / ∂δ‖; what is beyond is judged.


class Checked(NamedTuple):
    """How far a peer's result is from float64.

    Attributes:
        fault: what is wrong with it, in one line, or None.
        errors: the largest ‖result − exact‖ / ‖exact‖ of a row of the output, or of a head's by the
            delta rule ("forward"), and of a head's gradients ("backward"), if there are any.
    """

    fault: str | None
    errors: dict[str, float]


class Error(NamedTuple):
    """The distance of one result from the exact one, and the part of it that limits count."""

    name: str
    relative: float
    limited: float


def check(call: Call, truth: GroundTruth, tensors: Tensors, *, gradients: bool) -> Checked:
    """Compare a peer's result with what is exact."""
    inputs = tensors._replace(grad_output=truth.grad_output)
    leaves, grad_output = in_layout(call, inputs, gradients=gradients)
    with call.around(), torch.set_grad_enabled(gradients):
        output = call.run(*leaves)
        results = [output.detach()]
        if gradients:
            results += torch.autograd.grad(output, leaves, grad_output)
    results = [from_layout(tensor, call.layout, truth.case.batch) for tensor in results]
    if results[0].shape != truth.grad_output.shape:
        return Checked(f"wrong: its output is {list(results[0].shape)}", {})
    limit = GRADIENT_LIMITS.get(truth.case.dtype, 0.0)
    errors = list(_errors(truth, results, limit))
    largest = {"forward": max(error.relative for error in errors if error.name == "output")}
    if gradients:
        largest["backward"] = max(error.relative for error in errors if error.name != "output")
    return Checked(_fault(errors, truth.case.dtype), largest)


def _fault(errors: list[Error], dtype: str) -> str | None:
    """The first error beyond its limit, in words."""
    for name, _, limited in errors:
        limit = (OUTPUT_LIMITS if name == "output" else GRADIENT_LIMITS)[dtype]
        if not limited <= limit:  # NaN is no result either
            return f"wrong: {name} is {limited:.1e} away from float64, more than {limit:.0e}"
    return None


def _errors(truth: GroundTruth, results: list[Tensor], limit: float) -> Iterator[Error]:
    """Every error that is limited: of the output, and of gradients by head."""
    gradients: dict[tuple[int, int, int], list[HeadGradient]] = defaultdict(list)
    for one in truth.heads:
        output = results[0][one.batch, one.head, truth.rows]
        if truth.case.attention == "delta":
            # Sums of both signs, of which little may be left in a row: rows are judged together.
            of_output = float((output.double() - one.output).norm() / one.output.norm())
        else:
            of_output = float(_distance(output, one.output).max())
        yield Error("output", of_output, of_output)
        for each in one.gradients if len(results) > 1 else ():
            gradients[each.of_input, one.batch, each.head].append(each)
    for (index, batch, head), parts in gradients.items():
        total = torch.stack([each.part for each in parts]).sum(0)
        slope = torch.stack([each.delta_slope for each in parts]).norm(dim=0)
        result = results[1 + index][batch, head, parts[0].rows]
        if total.dim() == 1:  # one number a row
            result, total = result.unsqueeze(-1), total.unsqueeze(-1)
        yield _error(parts[0].name, result, total, limit * slope)


def _error(name: str, result: Tensor, true: Tensor, allowed: Tensor) -> Error:
    """The error of a gradient; allowed: what each row may be off by."""
    off, size = (result.double() - true).norm(dim=-1), true.norm()
    beyond = (off - allowed).clamp(min=0)
    return Error(name, float(off.norm() / size), float(beyond.norm() / size))


def _distance(result: Tensor, true: Tensor) -> Tensor:
    """‖result − true‖ / ‖true‖ along the last axis."""
    return (result.double() - true).norm(dim=-1) / true.norm(dim=-1)
