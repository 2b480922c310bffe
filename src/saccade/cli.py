"""The command line: `saccade demo`, `saccade bench`."""

from __future__ import annotations

import typer

from saccade.bench.command import bench
from saccade.demo.command import demo

app = typer.Typer(
    name="saccade",
    help="Exact attention for PyTorch: see it train and write, and measure it on this machine.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
)
app.command()(demo)
app.command()(bench)


def main() -> None:
    """Run the command line."""
    app()
