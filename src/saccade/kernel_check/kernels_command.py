"""The command `saccade kernels`: options, checked and handed to what compiles.

Nothing heavy is imported until something is compiled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ARCH = typer.Option(
    "--arch", "-a", help="sm_90, gfx942, ...; several times or with commas; or all."
)
KERNEL = typer.Option("--kernel", "-k", help="Kernels by name or glob, such as 'backward_*'.")
HEAD_DIM = typer.Option("--head-dim", "-d", min=1, help="Only calls of this head_dim.")
CHECK = typer.Option(
    "--check",
    help="Show only defaults that spill or take too much memory; exit with 1 if any must not.",
)
MARKDOWN = typer.Option(
    "--markdown",
    exists=True,
    dir_okay=False,
    help="Write tables between the marks of this file; with --check, compare them.",
)
JSON = typer.Option("--json", dir_okay=False, help="Write all that was found to this file.")
KNOWN = typer.Option(
    "--known",
    dir_okay=False,
    help="Compile only what this file does not know, and a sample; add it to the file, or with "
    "--check compare.",
)
JOBS = typer.Option("--jobs", "-j", min=1, help="Compilers at a time; by default one a core.")


def kernels(
    arch: Annotated[list[str] | None, ARCH] = None,
    kernel: Annotated[str, KERNEL] = "*",
    head_dim: Annotated[int | None, HEAD_DIM] = None,
    check: Annotated[bool, CHECK] = False,
    markdown: Annotated[Path | None, MARKDOWN] = None,
    json: Annotated[Path | None, JSON] = None,
    known: Annotated[Path | None, KNOWN] = None,
    jobs: Annotated[int | None, JOBS] = None,
) -> None:
    """Compile the GPU kernels, with or without a GPU, and show what they take.

    Every kernel is compiled with its default config for each architecture: this
    machine's GPU, or all of them where there is none. Shown are registers, spills
    and shared memory.

    [bold]Examples[/bold]

      saccade kernels                       [dim]for this machine's GPU, or for all[/dim]
      saccade kernels --arch sm_75          [dim]as it will be on a T4[/dim]
      saccade kernels -a sm_80,sm_90 -k 'backward_*'
      saccade kernels --arch all --check    [dim]exit 1 if a default config spills[/dim]
      saccade kernels --arch all --markdown docs/kernels.md
    """
    from saccade.kernel_check import session

    which = session.Selection(arch, kernel, head_dim)
    session.or_exit("kernels", lambda: session.kernels(which, check, markdown, json, known, jobs))
