"""The command `saccade bench`: its options, and which run or view they ask for.

Named problems, peers that solve them, and times that can be compared. Nothing heavy is imported
until something is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

Names = list[str] | None


def split(values: Sequence[str] | None) -> list[str]:
    """The names in an option that may be given several times and may hold commas."""
    return [name.strip() for value in values or () for name in value.split(",") if name.strip()]


def _names(*flags: str, text: str) -> Any:
    return typer.Option(*flags, help=text, callback=split)


CASES = _names("--cases", "-c", text="Cases by name or glob; several times or with commas.")
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
    help="Serve 64 requests by a model's folder, beside transformers' generate.",
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
    cases: Annotated[Names, CASES] = None,
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
      saccade bench --targets found.jsonl
      saccade bench --read benchmarks/results --report page.html
    """
    from saccade.bench import session

    try:
        where = session.device(device)
        if list_cases or list_peers:
            return (session.show_cases if list_cases else session.show_peers)(where)
        _refuse_unused(ctx)
        if targets is not None:
            return session.show_targets(targets)
        measures = cases or host or first_call or serving or training
        if read is not None and not (report and measures):
            return session.show_results(read, plot, report)
        recorder = session.Recorder(json, plot, report, read)
        if serving is not None:
            return session.run_serving(serving, recorder)
        choice = session.Choice(*(names or [] for names in (cases, who, passes, dtype)))
        if host or first_call:
            return session.run_calls(choice, where, recorder, host=host)
        settings = session.settings(where, rounds, limit, memory, quick, graph, cold)
        if training:
            return session.run_training(choice.who, lengths or [], modes or [], settings, recorder)
        session.run(choice, settings, recorder)
    except (ValueError, OSError, ModuleNotFoundError) as error:  # a mistake of the user's
        typer.secho(f"saccade bench: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def _refuse_unused(ctx: typer.Context) -> None:
    """Raise a ValueError if options are given that another one would leave unused."""
    given = [option.opts[0] for option in ctx.command.params if ctx.params.get(str(option.name))]
    others, of_training = ("--host", "--first-call", "--serving"), ("--lengths", "--modes")
    calls = [name for name in (*others, "--training") if name in given]
    choice, what, unused = ("--cases", "--who", "--pass", "--dtype"), "", ()
    left_by_all = (*choice, *of_training, *calls, "--json")
    if "--targets" in given:
        what, unused = "--targets", (*left_by_all, "--plot", "--report", "--read")
    elif "--read" in given and not ("--report" in given and ("--cases" in given or calls)):
        what, unused = "--read", left_by_all
    elif calls == ["--training"]:
        what, unused = "--training", ("--cases", "--pass", "--dtype")
    elif calls:
        what, unused = calls[0], ("--plot", *of_training)
    else:
        what, unused = "a run without --training", of_training
    if left := [name for name in unused if name in given]:
        raise ValueError(f"{what} leaves {' and '.join(left)} unused; give one without the other")
