"""Measuring a case: every peer is checked, then all take turns in each pass; memory at last.

The host's time is measured alike: how long a call keeps the processor, whatever a GPU makes of it
later. On a CPU a call is over when it returns, so there this is all of its time.

A peer's results are compared with float64 for some rows of some heads. Gradients are those of an
output whose gradient is zero in all other rows, so that they need no other rows either.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.bench import processes
from saccade.bench.case import BenchCase, Tensors
from saccade.bench.cases import passes_of
from saccade.bench.display import Bar
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


MOST_ROWS, MOST_HEADS, MOST_BATCHES = 48, 4, 2

# Largest ‖result − exact‖ / ‖exact‖, of a row of the output and of a head's gradients, for normal
# inputs. Plain PyTorch stays about five times below; tf32 products of float32 inputs, or one wrong
# tile, go beyond.
OUTPUT_LIMITS = {"float64": 1e-12, "float32": 2e-5, "float16": 4e-3, "bfloat16": 2e-2}
GRADIENT_LIMITS = {"float64": 1e-11, "float32": 1e-4, "float16": 2e-2, "bfloat16": 6e-2}
# Gradients of linear attention's queries and keys are differences; one side of them is
# δ = grad_output · output. Numbers of the output that are rounded, each by its share ε, move δ by
# ε · ‖grad_output ∘ output‖, and gradients by that times ∂gradient / ∂δ. ‖exact‖ does not tell how
# much that is: of the first row's difference, which sees one key, nothing is left. So each row may
# be off by the limit times ‖grad_output ∘ output‖ · ‖∂gradient / ∂δ‖; what is beyond is judged.


@dataclass(frozen=True)
class Exact:
    """The result in float64 for some rows of one head.

    Attributes:
        batch, head: which query head.
        output: [rows, value_dim].
        grad_query: [rows, head_dim].
        grad_key, grad_value: [kv_len, dim], this query head's part of its kv head's gradients.
        delta_slope: ‖grad_output ∘ output‖ · ‖∂gradient / ∂δ‖ of each row of queries and of keys.
    """

    batch: int
    head: int
    output: Tensor
    grad_query: Tensor
    grad_key: Tensor
    grad_value: Tensor
    delta_slope: tuple[Tensor, Tensor]


@dataclass(frozen=True)
class GroundTruth:
    """The exact result of a case, as far as it is checked."""

    case: BenchCase
    rows: Tensor
    heads: list[Exact]
    grad_output: Tensor  # the case's, zero outside of what is checked


class Checked(NamedTuple):
    """How far a peer's result is from float64.

    Attributes:
        fault: what is wrong with it, in one line, or None.
        errors: the largest ‖result − exact‖ / ‖exact‖ of a row of the output ("forward"), and of a
            head's gradients ("backward"), if there are any.
    """

    fault: str | None
    errors: dict[str, float]


class Error(NamedTuple):
    """The distance of one result from the exact one, and the part of it that limits count."""

    name: str
    relative: float
    limited: float


def exact(case: BenchCase, tensors: Tensors) -> GroundTruth:
    """Compute the rows that are checked in float64."""
    device = tensors.query.device
    rows = torch.tensor(_spread(case.query_len, MOST_ROWS), device=device)
    batches, picked = _spread(case.batch, MOST_BATCHES), _spread(case.query_heads, MOST_HEADS)
    heads = [_exact_head(case, tensors, batch, head, rows) for batch in batches for head in picked]
    grad_output = torch.zeros_like(tensors.grad_output)
    for one in heads:
        picked_rows = (one.batch, one.head, rows)
        grad_output[picked_rows] = tensors.grad_output[picked_rows]
    return GroundTruth(case, rows, heads, grad_output)


def _exact_head(case: BenchCase, tensors: Tensors, batch: int, head: int, rows: Tensor) -> Exact:
    kv_head = head // (case.query_heads // case.kv_heads)
    query = tensors.query[batch, head, rows].double()
    key, value = (tensor[batch, kv_head].double() for tensor in (tensors.key, tensors.value))
    grad_output = tensors.grad_output[batch, head, rows].double()
    if case.attention == "linear":
        ends = rows + case.kv_len - case.query_len  # the last row sees the last key
        return Exact(batch, head, *_linear_head(query, key, value, grad_output, ends))
    hidden = ~case.sees(rows, torch.arange(case.kv_len, device=rows.device))
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        scores = leaves[0] @ leaves[1].T / math.sqrt(case.head_dim)
        output = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2]
        of_q, of_k, of_v = torch.autograd.grad(output, leaves, grad_output)
    nothing = grad_output.new_zeros(1)  # what is left of these differences tells enough
    return Exact(batch, head, output.detach(), of_q, of_k, of_v, (nothing, nothing))


def _linear_head(
    query: Tensor, key: Tensor, value: Tensor, grad_output: Tensor, ends: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, Tensor]]:
    """The fields of `Exact` for causal linear attention with elu + 1, by all pairs of some rows.

    ends: the last key that each of them sees.
    """
    leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        of_query, of_key = (torch.nn.functional.elu(leaf) + 1 for leaf in leaves[:2])
        seen = torch.arange(key.shape[0], device=ends.device) <= ends.unsqueeze(-1)
        scores = (of_query @ of_key.T).masked_fill(~seen, 0)
        divisor = scores.sum(-1, keepdim=True) + 1e-6
        output = scores @ leaves[2] / divisor
        of_q, of_k, of_v = torch.autograd.grad(output, leaves, grad_output)
    output, divisor, of_query, of_key = (t.detach() for t in (output, divisor, of_query, of_key))
    size, seen = (grad_output * output).norm(dim=-1, keepdim=True) / divisor, seen.to(key.dtype)
    delta_slope = (
        (size * of_query.clamp(max=1) * (seen @ of_key)).norm(dim=-1),
        (of_key.clamp(max=1) * (seen.T @ (size * of_query).square()).sqrt()).norm(dim=-1),
    )
    return output, of_q, of_k, of_v, delta_slope


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
    limit = GRADIENT_LIMITS[truth.case.dtype]
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
    """Every error that is limited: of the output's rows, and of gradients by head."""
    group = truth.case.query_heads // truth.case.kv_heads
    for one in truth.heads:
        output = results[0][one.batch, one.head, truth.rows]
        of_output = float(_distance(output, one.output).max())
        yield Error("output", of_output, of_output)
        if len(results) > 1:
            grad_query = results[1][one.batch, one.head, truth.rows]
            yield _error("grad_query", grad_query, one.grad_query, limit * one.delta_slope[0])
    kv_heads = {(one.batch, one.head // group) for one in truth.heads if len(results) > 1}
    for kv_head in kv_heads:
        parts = [one for one in truth.heads if (one.batch, one.head // group) == kv_head]
        for name, result in (("grad_key", results[2]), ("grad_value", results[3])):
            total = torch.stack([getattr(one, name) for one in parts]).sum(0)
            through = torch.stack([one.delta_slope[1] for one in parts]).norm(dim=0)
            allowed = limit * through if name == "grad_key" else torch.zeros_like(through)
            yield _error(name, result[kv_head], total, allowed)


def _error(name: str, result: Tensor, true: Tensor, allowed: Tensor) -> Error:
    """The error of a gradient; allowed: what each row may be off by."""
    off, size = (result.double() - true).norm(dim=-1), true.norm()
    beyond = (off - allowed).clamp(min=0)
    return Error(name, float(off.norm() / size), float(beyond.norm() / size))


def _distance(result: Tensor, true: Tensor) -> Tensor:
    """‖result − true‖ / ‖true‖ along the last axis."""
    return (result.double() - true).norm(dim=-1) / true.norm(dim=-1)


def _spread(size: int, most: int) -> list[int]:
    """At most `most` indices, evenly spaced, the first and the last among them."""
    if size <= most:
        return list(range(size))
    return [round(index * (size - 1) / (most - 1)) for index in range(most)]
