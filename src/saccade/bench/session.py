"""Session: one use of the bench at the terminal, from what was asked to tables and files."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
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
    training,
    training_model,
    training_table,
)
from saccade.bench import plot as plotting
from saccade.bench import report as reporting
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

    def require(self) -> list[reporting.Source]:
        """Refuse before anything is measured what cannot be written; what `read` holds.

        Raises:
            ValueError: for an image of an unknown format, or if `read` holds nothing.
            ModuleNotFoundError: for an image without matplotlib.
        """
        if self.image is not None:
            plotting.require(self.image)
        return reporting.gather(self.read) if self.page is not None and self.read else []

    def finish(self, known: list[reporting.Source], found: list[results.Result]) -> None:
        """Write the image and the page, once everything was measured."""
        if self.image is not None and found:
            plotting.plot(found, self.image)
        if self.page is not None and found:
            write_page([*known, reporting.Source("this run", found)], self.page)


def write_page(sources: list[reporting.Source], page: Path) -> None:
    """Write results as a page, and say so."""
    size = reporting.write(sources, page)
    count = sum(len(source.results) for source in sources)
    console().print(f"{page}: {count} results, {size / 1e3:.0f} kB", soft_wrap=True)


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
    plan = QUICK if quick else Plan(rounds, warm_seconds=warm_seconds, limit_seconds=limit)
    return measure.Settings(where, plan, memory, graph, cold)


def show_targets(path: Path) -> None:
    """Print how the targets stand in a file of results, or in all of a folder; what they lack."""
    terminal = console()
    found = [result for file in results.files_of(path) for result in results.read(file)]
    verdicts = judgement.judge(found)
    terminal.print(judgement.targets_table(verdicts))
    for line in judgement.missing_lines(verdicts):
        terminal.print(line)


def show_results(path: Path, image: Path | None, page: Path | None) -> None:
    """Show what a file, or every file of a folder, holds: on a page, else in a table a file."""
    sources = Outputs(None, image, page, path).require() or reporting.gather(path)
    found = [result for source in sources for result in source.results]
    if page is not None:
        write_page(sources, page)
    else:
        for source in sources:
            title = source.label if len(sources) > 1 else ""
            show_tables(source.results, title)
    if image is not None:
        plotting.plot(found, image)


def show_tables(found: Sequence[results.Result], title: str = "") -> None:
    """Print the tables of results: training steps have their own."""
    terminal = console()
    steps = [result for result in found if training_table.is_training(result)]
    others = [result for result in found if not training_table.is_training(result)]
    if others:
        terminal.print(table.results_table(others, title=title))
    if steps:
        terminal.print(training_table.speed_table(steps, "" if others else title))
        terminal.print(training_table.course_table(steps))


def run_host(asked: Asked, where: torch.device, outputs: Outputs) -> None:
    """Measure the host's time of a call, by default of saccade's choice and of SDPA."""
    cases = _named_cases(asked, where) or [HOST_CASES[selection.machine(where.type)]]
    known = outputs.require()
    found = []
    for case in _shown(cases):
        peers = _named_peers(asked) or _peers_of(ours.chosen(case, where), "sdpa")
        found.append(host.measure_host(case, peers, where))
    _show_calls(found, outputs, known, "µs")


def run_first_calls(asked: Asked, where: torch.device, outputs: Outputs) -> None:
    """Measure the first calls of fresh processes, by default of saccade's choice."""
    default = CASES[first_call.DEFAULT_CASES[selection.machine(where.type)]]
    known = outputs.require()
    found = []
    for case in _shown(_named_cases(asked, where) or [default]):
        peers = _named_peers(asked) or _peers_of(ours.chosen(case, where))
        found.append(first_call.measure_first_calls(case, peers, where))
    _show_calls(found, outputs, known, "ms")


def run_serving(folder: Path, outputs: Outputs) -> None:
    """Measure an engine that serves many requests, beside transformers' generate."""
    terminal = console()
    known = outputs.require()
    found = serving.measure_serving(folder, say=terminal.print)
    if outputs.file is not None:
        results.append(outputs.file, found)
    outputs._replace(image=None).finish(known, found)


def run_training(asked: Asked, how: measure.Settings, outputs: Outputs) -> None:
    """Measure training steps; what was found by then is kept and shown if it is interrupted."""
    works = training.workloads(selection.machine(how.device.type), selection.split(asked.lengths))
    who = training.chosen("--who", selection.split(asked.who), training.ATTENTIONS)
    modes = training.chosen("--modes", selection.split(asked.modes), list(training.MODES))
    training_model.require()
    known = outputs.require()
    found: list[results.Result] = []
    absences: list[measure.Absence] = []
    plan = dataclasses.replace(how.plan, sample_seconds=0.0)  # a turn is one step
    try:
        with console().status("") as status:
            steps = training.measure_training(works, who, modes, how.device, plan, status.update)
            for new, missing in steps:
                found += new
                absences += missing
                if outputs.file is not None:
                    results.append(outputs.file, new)
    finally:
        show_tables(found)
        for line in table.footnotes(absences):
            console().print(line)
        outputs.finish(known, found)
    if not found:
        raise ValueError("nothing was measured")


def _shown(cases: Sequence[Case]) -> Iterator[Case]:
    """Each case, its name on the terminal while it is measured."""
    with console().status("") as status:
        for case in cases:
            status.update(f"measuring {case.name} ...")
            yield case


def _named_cases(asked: Asked, where: torch.device) -> list[Case]:
    patterns, dtypes = selection.split(asked.cases), selection.split(asked.dtypes)
    return selection.choose_cases(patterns, dtypes, where.type) if patterns else []


def _named_peers(asked: Asked) -> list[Peer]:
    patterns = selection.split(asked.who)
    return selection.choose_peers(patterns, all_peers()) if patterns else []


def _peers_of(*names: str) -> list[Peer]:
    return [peer for peer in all_peers() if peer.who in names]


def _show_calls(
    found: list[tuple[list[results.Result], list[measure.Absence]]],
    outputs: Outputs,
    known: list[reporting.Source],
    unit: str,
) -> None:
    new = [result for part, _ in found for result in part]
    if outputs.file is not None:
        results.append(outputs.file, new)
    terminal = console()
    if new:
        terminal.print(table.results_table(new, unit))
    for line in table.footnotes(absence for _, part in found for absence in part):
        terminal.print(line)
    outputs._replace(image=None).finish(known, new)
    if not new:
        raise ValueError("nothing was measured")


def run(asked: Asked, how: measure.Settings, outputs: Outputs) -> None:
    """Measure what was asked, show it, and keep it where a file is named."""
    where = how.device
    cases = selection.choose_cases(
        selection.split(asked.cases), selection.split(asked.dtypes), where.type
    )
    peers = selection.choose_peers(selection.split(asked.who), all_peers())
    passes = selection.choose_passes(selection.split(asked.passes))
    known = outputs.require()
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
            if outputs.file is not None:  # at once: an interrupted run leaves what it has
                results.append(outputs.file, new)
            progress.case_done()
    if found:
        terminal.print(table.results_table(found))
    for line in table.footnotes(absences):
        terminal.print(line)
    outputs.finish(known, found)
    if not found:
        raise ValueError("nothing was measured")


def _share(case: Case, passes: tuple[str, ...], num_peers: int, how: measure.Settings) -> float:
    """The seconds that a case is expected to take."""
    names = selection.passes_of(case, passes)
    return num_peers * sum(measure.expected_seconds(case, name, how) for name in names)
