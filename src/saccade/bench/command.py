"""The command `saccade bench`: its options, and one use of it, from what was named to tables.

Named problems, peers that solve them, and times that can be compared.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import torch
import typer

from saccade.bench import display, measure, models, processes, results, serving_load, targets
from saccade.bench import report as reporting
from saccade.bench.cases import (
    CASES,
    HOST_CASES,
    choose_cases,
    choose_passes,
    listed_cases,
    machine,
    passes_of,
)
from saccade.bench.display import console
from saccade.bench.peers import Peer, all_peers, choose_peers, ours
from saccade.bench.timing import TimingPlan

Names = list[str] | None


def split(values: Sequence[str] | None) -> list[str]:
    """The names in an option that may be given several times and may hold commas."""
    return [name.strip() for value in values or () for name in value.split(",") if name.strip()]


def _names(*flags: str, text: str) -> Any:
    return typer.Option(*flags, help=text, callback=split)


WHICH = _names("--cases", "-c", text="Cases by name or glob; several times or with commas.")
WHO = _names("--who", "-w", text="Peers by name or glob, such as 'saccade/*,sdpa'.")
PASS = _names(
    "--pass", text="forward, backward, forward+backward; both: the first and the last of these."
)
DTYPE = _names("--dtype", text="Of the chosen cases only those: fp32, bf16, fp16, fp64.")
ROUNDS = typer.Option("--rounds", min=1, help="How often each peer has its turn.")
LIMIT = typer.Option(
    "--limit", min=0, help="Seconds after which a case ends, but not before 3 rounds."
)
QUICK = typer.Option("--quick", help="Three short rounds: a first look, not to be published.")
MEMORY = typer.Option(
    "--memory/--no-memory",
    help="Peak memory of every case / of none. By default: on a GPU, and of the memory cases.",
)
DEVICE = typer.Option("--device", help="cpu, cuda, cuda:1, ... By default a GPU if there is one.")
GRAPH = typer.Option("--graph", help="GPU: time replays of CUDA graphs, without the host's part.")
COLD = typer.Option("--cold", help="GPU: empty the L2 cache before every call.")
JSON = typer.Option("--json", dir_okay=False, help="Append one JSON object a line for each result.")
PLOT = typer.Option(
    "--plot", dir_okay=False, help="Draw the results to this image (PNG, SVG or PDF)."
)
REPORT = typer.Option(
    "--report", dir_okay=False, help="Write the results as a page for any browser (HTML)."
)
READ = typer.Option(
    "--read",
    exists=True,
    help="Measure nothing: show the results in this file, or folder; with --report on a page, "
    "where cases that are named (or --host ...) are measured and added.",
)
TARGETS = typer.Option(
    "--targets", exists=True, help="Measure nothing: judge this file, or folder, by the targets."
)
HOST = typer.Option("--host", help="Measure how long a small call keeps the host instead.")
FIRST_CALL = typer.Option("--first-call", help="Measure first calls in fresh processes instead.")
SERVING = typer.Option(
    "--serving",
    exists=True,
    file_okay=False,
    help="Serve 64 requests by a model's folder, beside transformers' generate; with --rates "
    "measure what requests wait.",
)
RATES = _names(
    "--rates",
    text="With --serving: requests arrive by a Poisson process, so many a second, one rate after "
    "the other, such as 1,2,4,8; auto: at 25, 50, 75 and 100 % of what the engine can do. They "
    "come whether or not it keeps up, and each one's clock starts when it arrives.",
)
SECONDS = typer.Option(
    "--seconds",
    help="With --rates: how long each rate counts. By default 30; a quarter of that goes before.",
)
TOKENS = _names(
    "--tokens",
    text="With --rates: of a prompt, and new ones, in the mean, by default 64,64. Lengths are "
    "log-normal, and each is at most half of the model's length.",
)
TRAINING = typer.Option(
    "--training",
    help="Measure training steps of a Llama-like model instead: sdpa and saccade, by --who.",
)
LENGTHS = _names("--lengths", text="With --training: of the sequences, such as 2k,8k,32k.")
MODES = _names("--modes", text="With --training: eager, compiled; both by default.")
LIST = typer.Option("--list", help="List the cases for this device and end.")
LIST_PEERS = typer.Option("--list-peers", help="List the peers, with reasons, and end.")


def bench(  # breaks function-length: each option takes a line of it
    ctx: typer.Context,
    cases: Annotated[Names, WHICH] = None,
    who: Annotated[Names, WHO] = None,
    passes: Annotated[Names, PASS] = None,
    dtype: Annotated[Names, DTYPE] = None,
    rounds: Annotated[int, ROUNDS] = 9,
    limit: Annotated[float, LIMIT] = 60.0,
    quick: Annotated[bool, QUICK] = False,
    memory: Annotated[bool | None, MEMORY] = None,
    device: Annotated[str, DEVICE] = "",
    graph: Annotated[bool, GRAPH] = False,
    cold: Annotated[bool, COLD] = False,
    json: Annotated[Path | None, JSON] = None,
    plot: Annotated[Path | None, PLOT] = None,
    report: Annotated[Path | None, REPORT] = None,
    read: Annotated[Path | None, READ] = None,
    targets: Annotated[Path | None, TARGETS] = None,
    host: Annotated[bool, HOST] = False,
    first_call: Annotated[bool, FIRST_CALL] = False,
    serving: Annotated[Path | None, SERVING] = None,
    rates: Annotated[Names, RATES] = None,
    seconds: Annotated[float | None, SECONDS] = None,
    tokens: Annotated[Names, TOKENS] = None,
    training: Annotated[bool, TRAINING] = False,
    lengths: Annotated[Names, LENGTHS] = None,
    modes: Annotated[Names, MODES] = None,
    list_cases: Annotated[bool, LIST] = False,
    list_peers: Annotated[bool, LIST_PEERS] = False,
) -> None:
    """Measure attention on this machine: saccade beside PyTorch and whatever else is installed.

    All peers take turns, in another order every round, so that ratios mean
    something. Before it is timed, each one's result is checked against float64.

    [bold]Examples[/bold]

      saccade bench                  [dim]a look at this machine, a minute or two[/dim]
      saccade bench --list           [dim]what can be measured[/dim]
      saccade bench --list-peers     [dim]who can take part, and why not[/dim]
      saccade bench -c 'cpu-causal-*-4k' -w 'saccade/*,sdpa' --json found.jsonl
      saccade bench --training --lengths 2k,8k --modes eager
      saccade bench --serving FOLDER [dim]an engine beside transformers' generate[/dim]
      saccade bench --serving FOLDER --rates auto --plot waits.png
      saccade bench --targets found.jsonl
      saccade bench --read benchmarks/results --report page.html
    """
    try:
        where = device_of(device)
        if list_cases or list_peers:
            return (show_cases if list_cases else show_peers)(where)
        _refuse_unused(ctx)
        if targets is not None:
            return show_targets(targets)
        measures = cases or host or first_call or serving or training
        if read is not None and not (report and measures):
            return show_results(read, plot, report)
        recorder = Recorder(json, plot, report, read)
        if serving is not None and rates:
            plan = serving_load.read_plan(rates, seconds, tokens or [])
            return run_load(serving, plan, where, recorder)
        if serving is not None:
            return run_serving(serving, recorder)
        choice = Choice(*(names or [] for names in (cases, who, passes, dtype)))
        if host or first_call:
            return run_calls(choice, where, recorder, host=host)
        options = settings(where, rounds, limit, memory, quick, graph, cold)
        if training:
            return run_training(choice.who, lengths or [], modes or [], options, recorder)
        run(choice, options, recorder)
    except (ValueError, OSError, ModuleNotFoundError) as error:  # a mistake of the user's
        typer.secho(f"saccade bench: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def _refuse_unused(ctx: typer.Context) -> None:
    """Raise a ValueError if options are given that another one would leave unused."""
    named = [option.opts[0] for option in ctx.command.params if ctx.params.get(str(option.name))]
    others, of_training = ("--host", "--first-call", "--serving"), ("--lengths", "--modes")
    of_load = ("--rates", "--seconds", "--tokens")
    calls = [name for name in (*others, "--training") if name in named]
    choice = ("--cases", "--who", "--pass", "--dtype")
    left_by_all = (*choice, *of_training, *of_load, *calls, "--json")
    if "--targets" in named:
        what, unused = "--targets", (*left_by_all, "--plot", "--report", "--read")
    elif "--read" in named and not ("--report" in named and ("--cases" in named or calls)):
        what, unused = "--read", left_by_all
    elif calls == ["--training"]:
        what, unused = "--training", ("--cases", "--pass", "--dtype", *of_load)
    elif calls == ["--serving"] and "--rates" in named:
        what, unused = "--serving", (*choice, *of_training)
    elif calls == ["--serving"]:
        what, unused = "--serving without --rates", (*choice, "--plot", *of_training, *of_load)
    elif calls:
        what, unused = calls[0], ("--plot", *of_training, *of_load)
    else:
        lacking = "--serving" if any(name in named for name in of_load) else "--training"
        what, unused = f"a run without {lacking}", (*of_training, *of_load)
    if left := [name for name in unused if name in named]:
        raise ValueError(f"{what} leaves {' and '.join(left)} unused; give one without the other")


QUICK_PLAN = TimingPlan(rounds=3, sample_seconds=0.005, warm_seconds=0.0, limit_seconds=20.0)

# The load average of the last minute above which other programs keep a CPU busy.
BUSY = 0.5

# Dense, over pages, and linear attention: a peer that can take part here serves one of them.
EASY = {
    "cpu": ("cpu-decode-fp32-d128-16k", "tiny-causal-fp32-d16-48", "tiny-linear-fp32-d16-48"),
    "cuda": (
        "gpu-causal-bf16-d64-512", "gpu-pages-h32x8-bf16-d128-1x8k", "gpu-linear-bf16-d64-8x8k",
    ),
}  # fmt: skip


class Choice(NamedTuple):
    """Names and globs of what is to be measured."""

    cases: list[str]
    who: list[str]
    passes: list[str]
    dtypes: list[str]


class Recorder:
    """What is measured in one use: kept in a file at once, shown and drawn at the end.

    Args:
        file: to which results are appended, one JSON object a line.
        image: on which they are drawn.
        page: which shows them, and before them what `read` holds.
        read: a file of results, or a folder of files.

    Raises:
        ValueError: before anything is measured: for an image of an unknown format, or if there
            is nothing to read.
        ModuleNotFoundError: for an image without matplotlib.
    """

    def __init__(
        self, file: Path | None, image: Path | None, page: Path | None, read: Path | None
    ) -> None:
        self.file, self.image, self.page = file, image, page
        self.found: list[results.Result] = []
        self.absences: list[results.Absence] = []
        if image is not None:
            display.require_plotting(image)
        self.known = reporting.gather(read) if page is not None and read is not None else []

    def add(self, new: list[results.Result], missing: Iterable[results.Absence] = ()) -> None:
        """Take results; an interrupted run leaves what it has."""
        self.found += new
        self.absences += missing
        if self.file is not None:
            results.append(self.file, new)

    def finish(self, show: Callable[[list[results.Result]], None]) -> None:
        """Show what was found and why some of it was not; write the image and the page."""
        if self.found:
            show(self.found)
        for line in display.footnotes(self.absences):
            console().print(line)
        if self.image is not None and self.found:
            display.plot(self.found, self.image)
        if self.page is not None and self.found:
            write_page([*self.known, reporting.Source("this run", self.found)], self.page)

    def require_results(self) -> None:
        """Refuse to end well without any result."""
        if not self.found:
            raise ValueError("nothing was measured")


def write_page(sources: list[reporting.Source], page: Path) -> None:
    """Write results as a page, and say so."""
    size = reporting.write(sources, page)
    count = sum(len(source.results) for source in sources)
    console().print(f"{page}: {count} results, {size / 1e3:.0f} kB", soft_wrap=True)


def device_of(name: str) -> torch.device:
    """The device that a user names, or the best there is."""
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
    """How to measure, from the options."""
    for name, given in (("--graph", graph), ("--cold", cold)):
        if given and where.type != "cuda":
            raise ValueError(f"{name}: got {where.type}, takes a GPU")
    # A card that was idle runs too fast at first: its clock falls once it is warm.
    warm_seconds = 1.0 if where.type == "cuda" else 0.2
    plan = (
        QUICK_PLAN if quick else TimingPlan(rounds, warm_seconds=warm_seconds, limit_seconds=limit)
    )
    return measure.Settings(where, plan, memory, graph, cold)


def show_cases(where: torch.device) -> None:
    """Print the named cases for a device."""
    console().print(display.cases_table(listed_cases(where.type)))


def show_peers(where: torch.device) -> None:
    """Print every peer, and why some cannot take part here: each is given an easy case of its kind.

    A peer that compiles is not tried: its answer would take as long as its first call.
    """
    with console().status("trying peers ..."):
        answers = {
            peer: None if peer.compiles else reason_against(peer, where) for peer in all_peers()
        }
    console().print(display.peers_table(answers))


def reason_against(peer: Peer, where: torch.device) -> str | None:
    """Why a peer cannot take part in any easy case, or None."""
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
    """Print how far a file of results, or all of a folder, shows targets reached; what it lacks."""
    found = [result for file in results.files_of(path) for result in results.read(file)]
    verdicts = targets.compare_with_targets(found)
    console().print(display.targets_table(verdicts))
    for line in targets.still_missing(verdicts):
        console().print(f"[bold]missing[/bold] {line}")


def show_results(path: Path, image: Path | None, page: Path | None) -> None:
    """Show what a file, or every file of a folder, holds: on a page, else in a table a file."""
    if image is not None:
        display.require_plotting(image)
    sources = reporting.gather(path)
    if page is not None:
        write_page(sources, page)
    else:
        for source in sources:
            show_tables(source.results, source.label if len(sources) > 1 else "")
    if image is not None:
        display.plot([result for source in sources for result in source.results], image)


def show_tables(found: Sequence[results.Result], title: str = "") -> None:
    """Print the tables of results: training steps and loads have their own."""
    steps = [result for result in found if display.is_training(result)]
    loads = [result for result in found if result.load is not None]
    others = [r for r in found if r.load is None and not display.is_training(r)]
    if others:
        console().print(display.results_table(others, title=title))
    if steps:
        console().print(display.speed_table(steps, "" if others else title))
        console().print(display.course_table(steps))
    for table in display.load_tables(loads, "" if others or steps else title):
        console().print(table)


def run_calls(choice: Choice, where: torch.device, recorder: Recorder, *, host: bool) -> None:
    """Measure single calls case by case: the host's time, or first calls in fresh processes.

    By default of small cases by saccade's choice; the host's time beside SDPA's.
    """
    kind = machine(where.type)
    cases = [*HOST_CASES[kind]] if host else [CASES[processes.DEFAULT_CASES[kind]]]
    if choice.cases:
        cases = choose_cases(choice.cases, choice.dtypes, where.type)
    measured = measure.measure_host if host else processes.measure_first_calls
    with console().status("") as status:
        for case in cases:
            status.update(f"measuring {case.name} ...")
            names = choice.who or [ours.chosen(case, where), *(["sdpa"] if host else [])]
            recorder.add(*measured(case, choose_peers(names, all_peers()), where))
    unit = "µs" if host else "ms"
    recorder.finish(lambda found: console().print(display.results_table(found, unit)))
    recorder.require_results()


def run_serving(folder: Path, recorder: Recorder) -> None:
    """Measure an engine that serves many requests, beside transformers' generate."""
    recorder.add(models.measure_serving(folder, say=console().print))
    recorder.finish(lambda found: None)  # it was said line by line


def warn_if_busy(where: torch.device) -> None:
    """Say so if other programs keep the processor busy on which is measured."""
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if where.type == "cpu" and load > BUSY:
        console().print(
            f"[yellow]Other programs keep {load:.1f} processors busy: these times will be noisy, "
            "and many-threaded calls suffer most.[/yellow]"
        )


def run_load(
    folder: Path, plan: serving_load.LoadPlan, where: torch.device, recorder: Recorder
) -> None:
    """Measure an engine under load; rates that were measured are kept if it is interrupted."""
    warn_if_busy(where)
    loaded = serving_load.LoadedModel.of(folder, plan, where)  # it may show a bar of its own
    # A bar is drawn beside the engine, and takes its time: once a second is enough.
    bar = display.Bar(console(), plan.names, plan.expected_seconds, refreshes=1)
    try:
        with bar:
            for found in serving_load.measure_load(loaded, plan, where, bar, console().print):
                recorder.add([found])
    finally:
        recorder.finish(show_tables)


def run_training(
    who: list[str],
    lengths: list[str],
    modes: list[str],
    options: measure.Settings,
    recorder: Recorder,
) -> None:
    """Measure training steps; what was found by then is kept and shown if it is interrupted."""
    where = options.device
    works = models.workloads(machine(where.type), lengths)
    who = models.chosen("--who", who, models.ATTENTIONS)
    modes = models.chosen("--modes", modes, list(models.MODES))
    models.require_transformers()
    plan = dataclasses.replace(options.plan, sample_seconds=0.0)  # a turn is one step
    try:
        with console().status("") as status:
            for found in models.measure_training(works, who, modes, where, plan, status.update):
                recorder.add(*found)
    finally:
        recorder.finish(show_tables)
    recorder.require_results()


def run(choice: Choice, options: measure.Settings, recorder: Recorder) -> None:
    """Measure cases, show what was found, and keep it where a file is named."""
    where = options.device
    cases = choose_cases(choice.cases, choice.dtypes, where.type)
    peers = choose_peers(choice.who, all_peers())
    passes = choose_passes(choice.passes)
    warn_if_busy(where)
    seconds = [
        len(peers) * options.plan_for(case).rounds
        * sum(options.expected_seconds(case, name) for name in passes_of(case, passes))
        for case in cases
    ]  # fmt: skip
    with display.Bar(console(), [case.name for case in cases], seconds) as bar:
        for found in measure.measure(cases, peers, passes, options, bar):
            recorder.add(*found)
            bar.case_done()
    recorder.finish(lambda found: console().print(display.results_table(found)))
    recorder.require_results()
