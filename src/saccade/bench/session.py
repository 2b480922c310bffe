"""Session: one use of the bench at the terminal, from what was asked to tables and files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import Console

from saccade.bench import (
    bar,
    first_call,
    host,
    judgement,
    measure,
    results,
    selection,
    serving,
    table,
)
from saccade.bench import plot as plotting
from saccade.bench.cases import CASES, HOST_CASES, Case
from saccade.bench.peers import Peer, all_peers, ours
from saccade.bench.timing import Plan

QUICK = Plan(rounds=3, sample_seconds=0.005, warm_seconds=0.0, limit_seconds=20.0)

# The load average of the last minute above which a CPU is not ours alone.
BUSY = 0.5


class Asked(NamedTuple):
    """What the user named."""

    cases: list[str]
    who: list[str]
    passes: list[str]
    dtypes: list[str]


def console() -> Console:
    """Where tables go; wide enough for them even where the output is no terminal."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)


def device(name: str) -> torch.device:
    """The device that a user names, or the best there is.

    Raises:
        ValueError: for one that does not exist.
    """
    chosen = name or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(chosen)
    except RuntimeError:
        raise ValueError(f"no device is named {name!r}; there are cpu, cuda, cuda:0 ...") from None
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"the bench has no clock for {found.type!r}; it takes cpu and cuda")
    if found.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError("this PyTorch sees no GPU; --device cpu measures without one")
        if found.index is not None:
            torch.cuda.set_device(found)
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def settings(
    where: torch.device,
    rounds: int,
    limit: float,
    memory: bool | None,
    *,
    quick: bool,
    graph: bool,
    cold: bool,
) -> measure.Settings:
    """How to measure, from the options."""
    # A card that was idle runs too fast at first: its clock falls once it is warm.
    warm_seconds = 1.0 if where.type == "cuda" else 0.2
    plan = QUICK if quick else Plan(rounds, warm_seconds=warm_seconds, limit_seconds=limit)
    return measure.Settings(where, plan, memory, graph, cold)


def show_cases(where: torch.device) -> None:
    """Print the named cases for a device."""
    console().print(table.cases_table(selection.listed_cases(where.type)))


def show_peers(where: torch.device) -> None:
    """Print everybody, and why they cannot take part here, judged by one easy case."""
    case = CASES["tiny-causal-fp32-d16-48" if where.type == "cpu" else "gpu-causal-bf16-d64-512"]
    terminal = console()
    answers: list[tuple[Peer, str | None]] = []
    with terminal.status("asking ..."):
        for peer in all_peers():
            try:
                call = peer.prepare(case, where)
            except Exception as error:  # whatever a package raises, the others are to be listed
                call = f"fails: {measure.first_line(error)}"
            answers.append((peer, call if isinstance(call, str) else None))
    terminal.print(table.peers_table(answers))


def show_targets(path: Path) -> None:
    """Print how the targets stand in a file of results, or in all of a folder; what they lack."""
    terminal = console()
    files = sorted(path.glob("*.jsonl")) if path.is_dir() else [path]
    verdicts = judgement.judge([result for file in files for result in results.read(file)])
    terminal.print(judgement.targets_table(verdicts))
    for line in judgement.missing_lines(verdicts):
        terminal.print(line)


def show_results(path: Path, image: Path | None) -> None:
    """Print, and draw if asked, what a file holds."""
    found = results.read(path)
    console().print(table.results_table(found))
    if image is not None:
        plotting.plot(found, image)


def run_host(asked: Asked, where: torch.device, file: Path | None) -> None:
    """Measure the host's time of a call, by default of saccade's choice and of SDPA."""
    cases = _named_cases(asked, where) or [HOST_CASES[selection.machine(where.type)]]
    found = []
    for case in cases:
        peers = _named_peers(asked) or _peers_of(ours.chosen(case, where), "sdpa")
        found.append(host.measure_host(case, peers, where))
    _show_calls(found, file, "µs")


def run_first_calls(asked: Asked, where: torch.device, file: Path | None) -> None:
    """Measure the first calls of fresh processes, by default of saccade's choice."""
    default = CASES[first_call.DEFAULT_CASES[selection.machine(where.type)]]
    found = []
    for case in _named_cases(asked, where) or [default]:
        peers = _named_peers(asked) or _peers_of(ours.chosen(case, where))
        found.append(first_call.measure_first_calls(case, peers, where))
    _show_calls(found, file, "ms")


def run_serving(folder: Path, file: Path | None) -> None:
    """Measure an engine that serves many requests, beside transformers' generate."""
    terminal = console()
    found = serving.measure_serving(folder, say=terminal.print)
    if file is not None:
        results.append(file, found)


def _named_cases(asked: Asked, where: torch.device) -> list[Case]:
    patterns, dtypes = selection.split(asked.cases), selection.split(asked.dtypes)
    return selection.choose_cases(patterns, dtypes, where.type) if patterns else []


def _named_peers(asked: Asked) -> list[Peer]:
    patterns = selection.split(asked.who)
    return selection.choose_peers(patterns, all_peers()) if patterns else []


def _peers_of(*names: str) -> list[Peer]:
    return [peer for peer in all_peers() if peer.who in names]


def _show_calls(
    found: list[tuple[list[results.Result], list[measure.Absence]]], file: Path | None, unit: str
) -> None:
    new = [result for part, _ in found for result in part]
    if file is not None:
        results.append(file, new)
    terminal = console()
    if new:
        terminal.print(table.results_table(new, unit))
    for line in table.footnotes(absence for _, part in found for absence in part):
        terminal.print(line)
    if not new:
        raise ValueError("nothing was measured")


def run(asked: Asked, how: measure.Settings, file: Path | None, image: Path | None) -> None:
    """Measure what was asked, show it, and keep it where a file is named."""
    where = how.device
    cases = selection.choose_cases(
        selection.split(asked.cases), selection.split(asked.dtypes), where.type
    )
    peers = selection.choose_peers(selection.split(asked.who), all_peers())
    passes = selection.choose_passes(selection.split(asked.passes))
    if image is not None:
        plotting.require()
    terminal = console()
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if where.type == "cpu" and load > BUSY:
        terminal.print(
            f"[yellow]Other programs keep {load:.1f} processors busy: these times will be noisy, "
            "and many-threaded calls suffer most.[/yellow]"
        )
    found: list[results.Result] = []
    absences: list[measure.Absence] = []
    shares = [_share(case, passes, len(peers), how) for case in cases]
    with bar.Bar(terminal, [case.name for case in cases], shares) as progress:
        for new, missing in measure.measure(cases, peers, passes, how, progress):
            found += new
            absences += missing
            if file is not None:  # case by case, so that an interrupted run leaves what it has
                results.append(file, new)
            progress.case_done()
    if found:
        terminal.print(table.results_table(found))
    for line in table.footnotes(absences):
        terminal.print(line)
    if image is not None and found:
        plotting.plot(found, image)
    if not found:
        raise ValueError("nothing was measured")


def _share(case: Case, passes: tuple[str, ...], num_peers: int, how: measure.Settings) -> float:
    """The seconds that a case is expected to take."""
    names = selection.passes_of(case, passes)
    return num_peers * sum(measure.expected_seconds(case, name, how) for name in names)
