"""The command line: `saccade demo`, `bench`, `generate`, `kernels` and `tune`."""

from __future__ import annotations

from typing import Annotated

import typer

from saccade.bench.command import bench
from saccade.demo.command import demo
from saccade.kernel_check.kernels_command import kernels
from saccade.kernel_check.tune_command import tune
from saccade.serving.command import generate

app = typer.Typer(
    name="saccade",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)


def _show_versions(wanted: bool) -> None:
    """Print what a report of a fault should name, and end."""
    if not wanted:
        return
    from saccade.bench.results import versions

    for name, version in versions().items():
        typer.echo(f"{name} {version}")
    raise typer.Exit


VERSION = typer.Option(
    "--version", callback=_show_versions, is_eager=True, help="Show versions and end."
)


@app.callback()
def saccade(version: Annotated[bool, VERSION] = False) -> None:
    """Exact attention for PyTorch: see it train and write, and measure it on this machine."""


app.command()(demo)
app.command()(bench)
app.command()(generate)
app.command()(kernels)
app.command()(tune)


def main() -> None:
    """Run the command line."""
    app()
