"""Session: one use of the bench at the terminal, from what was asked to tables and files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from saccade.bench import (
    host,
    measure,
    plot,
    processes,
    results,
    selection,
    serving,
    terminal,
    training,
    verdicts,
)
from saccade.bench import report as reporting
from saccade.bench.case import BenchCase
from saccade.bench.cases import CASES, HOST_CASES
from saccade.bench.peers import Peer, all_peers, ours
from saccade.bench.terminal import console
from saccade.bench.timing import TimingPlan

QUICK = TimingPlan(rounds=3, sample_seconds=0.005, warm_seconds=0.0, limit_seconds=20.0)

# The load average of the last minute above which a CPU is not ours alone.
BUSY = 0.5

# Dense, over pages, and linear attention: who can take part in one of them can take part.
EASY = {
    "cpu": ("cpu-decode-fp32-d128-16k", "tiny-causal-fp32-d16-48", "tiny-linear-fp32-d16-48"),
    "cuda": (
        "gpu-causal-bf16-d64-512", "gpu-pages-h32x8-bf16-d128-1x8k", "gpu-linear-bf16-d64-8x8k",
    ),
}  # fmt: skip

Found = tuple[list[results.Result], list[results.Absence]]


class Asked(NamedTuple):
    """What the user named."""

    cases: list[str]
    who: list[str]
    passes: list[str]
    dtypes: list[str]
    lengths: list[str]
    modes: list[str]


class Outputs(NamedTuple):
    """Where results go, beside the terminal.

    Attributes:
        file: to which they are appended, one JSON object a line.
        image: on which they are drawn.
        page: which shows them, and before them what `read` holds.
        read: a file of results, or a folder of files.
    """

    file: Path | None = None
    image: Path | None = None
    page: Path | None = None
    read: Path | None = None


class Recorder:
    """What is measured in one use: kept in the file at once, shown and drawn at the end.

    Raises:
        ValueError: before anything is measured: for an image of an unknown format, or if there
            is nothing to read.
        ModuleNotFoundError: for an image without matplotlib.
    """

    def __init__(self, outputs: Outputs) -> None:
        self.outputs = outputs
        self.found: list[results.Result] = []
        self.absences: list[results.Absence] = []
        if outputs.image is not None:
            plot.require(outputs.image)
        reads = outputs.page is not None and outputs.read is not None
        self.known = reporting.gather(outputs.read) if reads and outputs.read else []

    def add(self, new: list[results.Result], missing: Iterable[results.Absence] = ()) -> None:
        """Take results; an interrupted run leaves what it has."""
        self.found += new
        self.absences += missing
        if self.outputs.file is not None:
            results.append(self.outputs.file, new)

    def finish(self, show: Callable[[list[results.Result]], None]) -> None:
        """Show what was found and why some of it was not; write the image and the page."""
        if self.found:
            show(self.found)
        for line in terminal.footnotes(self.absences):
            console().print(line)
        if self.outputs.image is not None and self.found:
            plot.plot(self.found, self.outputs.image)
        if self.outputs.page is not None and self.found:
            write_page([*self.known, reporting.Source("this run", self.found)], self.outputs.page)

    def require_results(self) -> None:
        """Refuse to end well without any result.

        Raises:
            ValueError: if nothing was measured.
        """
        if not self.found:
            raise ValueError("nothing was measured")


def write_page(sources: list[reporting.Source], page: Path) -> None:
    """Write results as a page, and say so."""
    size = reporting.write(sources, page)
    count = sum(len(source.results) for source in sources)
    console().print(f"{page}: {count} results, {size / 1e3:.0f} kB", soft_wrap=True)


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
    quick: bool,
    graph: bool,
    cold: bool,
) -> measure.Settings:
    """How to measure, from the options.

    Raises:
        ValueError: for what a GPU alone can do.
    """
    for name, given in (("--graph", graph), ("--cold", cold)):
        if given and where.type != "cuda":
            raise ValueError(f"{name}: got {where.type}, takes a GPU")
    # A card that was idle runs too fast at first: its clock falls once it is warm.
    warm_seconds = 1.0 if where.type == "cuda" else 0.2
    plan = QUICK if quick else TimingPlan(rounds, warm_seconds=warm_seconds, limit_seconds=limit)
    return measure.Settings(where, plan, memory, graph, cold)


def show_cases(where: torch.device) -> None:
    """Print the named cases for a device."""
    console().print(terminal.cases_table(selection.listed_cases(where.type)))


def show_peers(where: torch.device) -> None:
    """Print everybody, and why they cannot take part here, judged by an easy case of each kind.

    A peer that compiles is not asked: its answer would take as long as its first call.
    """
    with console().status("asking ..."):
        answers = {
            peer: None if peer.compiles else reason_against(peer, where) for peer in all_peers()
        }
    console().print(terminal.peers_table(answers))


def reason_against(peer: Peer, where: torch.device) -> str | None:
    """Why somebody cannot take part in any easy case, or None."""
    reasons = []
    for name in EASY[where.type]:
        try:
            call = peer.prepare(CASES[name], where)
        except Exception as error:  # whatever a package raises, the others are to be listed
            call = f"fails: {results.first_line(error)}"
        if not isinstance(call, str):
            return None
        reasons.append(call)
    return reasons[0]


def show_targets(path: Path) -> None:
    """Print how the targets stand in a file of results, or in all of a folder; what they lack."""
    found = [result for file in results.files_of(path) for result in results.read(file)]
    answers = verdicts.compare_with_targets(found)
    console().print(terminal.targets_table(answers))
    for line in verdicts.still_missing(answers):
        console().print(f"[bold]missing[/bold] {line}")


def show_results(path: Path, image: Path | None, page: Path | None) -> None:
    """Show what a file, or every file of a folder, holds: on a page, else in a table a file."""
    if image is not None:
        plot.require(image)
    sources = reporting.gather(path)
    if page is not None:
        write_page(sources, page)
    else:
        for source in sources:
            show_tables(source.results, source.label if len(sources) > 1 else "")
    if image is not None:
        plot.plot([result for source in sources for result in source.results], image)


def show_tables(found: Sequence[results.Result], title: str = "") -> None:
    """Print the tables of results: training steps have their own."""
    steps = [result for result in found if terminal.is_training(result)]
    others = [result for result in found if not terminal.is_training(result)]
    if others:
        console().print(terminal.results_table(others, title=title))
    if steps:
        console().print(terminal.speed_table(steps, "" if others else title))
        console().print(terminal.course_table(steps))


def run_host(asked: Asked, where: torch.device, outputs: Outputs) -> None:
    """Measure the host's time of a call, by default of saccade's choice and of SDPA."""
    default = HOST_CASES[selection.machine(where.type)]
    _run_calls(asked, where, outputs, default, ("sdpa",), host.measure_host, "µs")


def run_first_calls(asked: Asked, where: torch.device, outputs: Outputs) -> None:
    """Measure the first calls of fresh processes, by default of saccade's choice."""
    default = CASES[processes.DEFAULT_CASES[selection.machine(where.type)]]
    _run_calls(asked, where, outputs, default, (), processes.measure_first_calls, "ms")


def _run_calls(
    asked: Asked,
    where: torch.device,
    outputs: Outputs,
    default: BenchCase,
    beside: tuple[str, ...],
    measured: Callable[[BenchCase, Sequence[Peer], torch.device], Found],
    unit: str,
) -> None:
    """Measure single calls case by case: of the peers that are named, or of ours and `beside`."""
    patterns, who = selection.split(asked.cases), selection.split(asked.who)
    dtypes = selection.split(asked.dtypes)
    cases = selection.choose_cases(patterns, dtypes, where.type) if patterns else [default]
    recorder = Recorder(outputs._replace(image=None))
    with console().status("") as status:
        for case in cases:
            status.update(f"measuring {case.name} ...")
            names = who or [ours.chosen(case, where), *beside]
            recorder.add(*measured(case, selection.choose_peers(names, all_peers()), where))
    recorder.finish(lambda found: console().print(terminal.results_table(found, unit)))
    recorder.require_results()


def run_serving(folder: Path, outputs: Outputs) -> None:
    """Measure an engine that serves many requests, beside transformers' generate."""
    recorder = Recorder(outputs._replace(image=None))
    recorder.add(serving.measure_serving(folder, say=console().print))
    recorder.finish(lambda found: None)  # it was said line by line


def run_training(asked: Asked, options: measure.Settings, outputs: Outputs) -> None:
    """Measure training steps; what was found by then is kept and shown if it is interrupted."""
    where = options.device
    works = training.workloads(selection.machine(where.type), selection.split(asked.lengths))
    who = training.chosen("--who", selection.split(asked.who), training.ATTENTIONS)
    modes = training.chosen("--modes", selection.split(asked.modes), list(training.MODES))
    training.require()
    recorder = Recorder(outputs)
    plan = dataclasses.replace(options.plan, sample_seconds=0.0)  # a turn is one step
    try:
        with console().status("") as status:
            for found in training.measure_training(works, who, modes, where, plan, status.update):
                recorder.add(*found)
    finally:
        recorder.finish(show_tables)
    recorder.require_results()


def run(asked: Asked, options: measure.Settings, outputs: Outputs) -> None:
    """Measure what was asked, show it, and keep it where a file is named."""
    where = options.device
    patterns, dtypes = selection.split(asked.cases), selection.split(asked.dtypes)
    cases = selection.choose_cases(patterns, dtypes, where.type)
    peers = selection.choose_peers(selection.split(asked.who), all_peers())
    passes = selection.choose_passes(selection.split(asked.passes))
    recorder = Recorder(outputs)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if where.type == "cpu" and load > BUSY:
        console().print(
            f"[yellow]Other programs keep {load:.1f} processors busy: these times will be noisy, "
            "and many-threaded calls suffer most.[/yellow]"
        )
    seconds = [_expected_seconds(case, passes, len(peers), options) for case in cases]
    with terminal.Bar(console(), [case.name for case in cases], seconds) as progress:
        for found in measure.measure(cases, peers, passes, options, progress):
            recorder.add(*found)
            progress.case_done()
    recorder.finish(lambda found: console().print(terminal.results_table(found)))
    recorder.require_results()


def _expected_seconds(
    case: BenchCase, passes: tuple[str, ...], num_peers: int, options: measure.Settings
) -> float:
    names = selection.passes_of(case, passes)
    return num_peers * sum(measure.expected_seconds(case, name, options) for name in names)
