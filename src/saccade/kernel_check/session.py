"""Session: runs `saccade kernels` and talks to the user meanwhile."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from saccade.kernel_check import catalogue, markdown, pool, report
from saccade.kernel_check import compile_cache as known
from saccade.kernel_check.pool import Compiled, Job
from saccade.ops.attention.triton import configs, tuned_configs

Result = TypeVar("Result")


def or_exit(command: str, work: Callable[[], Result]) -> Result:
    """What the work gives; a mistake of the user's ends the program with one message."""
    try:
        return work()
    except typer.Exit:  # which counts as a RuntimeError
        raise
    except (ValueError, OSError, RuntimeError) as error:
        typer.secho(f"saccade {command}: {error}", fg=typer.colors.RED, err=True)
        raise typer.Exit(2) from None


def triton_version() -> str:
    """The version of Triton that compiles.

    Raises:
        RuntimeError: where there is no Triton.
    """
    if importlib.util.find_spec("triton") is None:
        raise RuntimeError("Triton is not installed; it comes with PyTorch for Linux")
    import triton

    return str(triton.__version__)


def own_architecture() -> str | None:
    """The architecture of this machine's GPU, or None where there is none."""
    if not torch.cuda.is_available():
        return None
    if torch.version.hip is not None:
        return "gfx942"
    return configs.architecture_of(torch.cuda.get_device_capability())


def architectures(names: Sequence[str] | None) -> tuple[str, ...]:
    """The architectures that a user named; this machine's, or all, where none was.

    Raises:
        ValueError: for a name that is not known, listing those that are.
    """
    asked = [part.strip() for name in names or () for part in name.split(",") if part.strip()]
    if not asked:
        own = own_architecture()
        return configs.ARCHITECTURES if own is None else (own,)
    if "all" in asked:
        return configs.ARCHITECTURES
    for name in asked:
        if name not in configs.ARCHITECTURES:
            known = ", ".join(configs.ARCHITECTURES)
            raise ValueError(f"--arch: got {name!r}, takes {known}, or all")
    return tuple(dict.fromkeys(asked))


def compile_with_progress(
    jobs: Sequence[Job],
    processes: int,
    console: Console,
    spared: known.Known | None = None,
) -> list[Compiled]:
    """Compile while a bar shows how far it has got."""
    total = sum(len(job.kernels) for job in jobs)
    columns = (
        *Progress.get_default_columns(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[at]}"),
    )
    with Progress(SpinnerColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=total, at="")

        def show(compiled: Compiled) -> None:
            at = f"{compiled.job.architecture} {compiled.kernel} {compiled.job.call.name}"
            bar.update(task, advance=1, at=at)

        return pool.compile_all(jobs, processes, show, spared)


class Selection(NamedTuple):
    """What a user asks to have compiled."""

    architectures: Sequence[str] | None  # None: this machine's, or all
    kernels: str = "*"  # a glob
    head_dim: int | None = None  # None: all


def kernels(
    selection: Selection,
    check: bool,
    markdown_file: Path | None,
    json_file: Path | None,
    known_file: Path | None,
    processes: int | None,
) -> None:
    """Compile, show, write, and classify."""
    console, version = Console(), triton_version()
    begin = time.perf_counter()
    jobs = catalogue.jobs(
        architectures(selection.architectures), selection.kernels, selection.head_dim
    )
    if check and known_file is not None and not known_file.exists():
        raise ValueError(
            f"--known: {known_file} does not exist, so nothing can be compared with it"
        )
    kept = {} if known_file is None else known.read(known_file, version)
    results = compile_with_progress(jobs, processes or cores(), console, known.trusted(kept))
    seconds = time.perf_counter() - begin
    if not check:
        console.print(*report.usage_tables(results), report.CAPTION, "", sep="\n")
    console.print(f"Triton {version}: {len(results)} kernels in {seconds:.0f} s.", highlight=False)
    console.print(own_table(), highlight=False, markup=False, soft_wrap=True)
    if json_file is not None:
        json_file.write_text(report.to_json(results, version), encoding="utf-8")
    fresh = known.unknown(kept, results)
    if known_file is not None and check and fresh:
        hint = f"{fresh} of them were not known; `make kernels-known` writes {known_file} anew."
        console.print(hint, style="yellow", highlight=False, markup=False, soft_wrap=True)
    if known_file is not None and not check:
        known.write(known_file, results, version)
    if check:
        classify(results, known.faults(known_file, kept, results) if known_file else [], console)
    if markdown_file is not None and check:
        markdown.compare(markdown_file, results, version)
    elif markdown_file is not None:
        markdown.write(markdown_file, results, version)


def classify(results: Sequence[Compiled], others: Sequence[str], console: Console) -> None:
    """Name kernels that must not be defaults, and other faults; exit with 1 if there are any."""
    excused, wrong = report.excused(results), [*report.offenders(results), *others]
    for line in excused:
        console.print(line, style="yellow", highlight=False, markup=False, soft_wrap=True)
    for line in wrong:
        console.print(line, style="red", highlight=False, markup=False, soft_wrap=True)
    if wrong:
        raise typer.Exit(1)
    other = "other " if excused else ""
    console.print(f"No {other}default config spills or takes too much memory.", style="green")


def own_table() -> str:
    """Where the user's own table of configs is, and whether there is one."""
    file = tuned_configs.path()
    if file is None:
        return "Your own configs: turned off, as SACCADE_CONFIGS is empty."
    if not file.exists():
        return f"Your own configs: none; `saccade tune --save` would write {file}"
    entries = ", ".join(
        f"{len(table.entries)} for {table.architecture}"
        for table in tuned_configs.read(file).values()
    )
    return f"Your own configs: {file} ({entries or 'empty'})"


def cores() -> int:
    """How many compilers run at a time unless the user says otherwise."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1
