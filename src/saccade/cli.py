"""The command line: `saccade demo`, `bench`, `generate`, `kernels` and `tune`."""

from __future__ import annotations

import typer

from saccade.bench.command import bench
from saccade.demo.command import demo
from saccade.offline.kernels_command import kernels
from saccade.offline.tune_command import tune
from saccade.serving.command import generate

app = typer.Typer(
    name="saccade",
    help="Exact attention for PyTorch: see it train and write, and measure it on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
app.command()(demo)
app.command()(bench)
app.command()(generate)
app.command()(kernels)
app.command()(tune)


def main() -> None:
    """Run the command line."""
    app()
