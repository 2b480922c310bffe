"""The command line: `saccade demo`, `bench`, `generate`, `serve`, `kernels` and `tune`.

It lies beside the package, whose import takes PyTorch's: `saccade --help` answers without either. A
command is imported when it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperCommand, TyperGroup


class Command(NamedTuple):
    """Where a command lies, and what it is for."""

    module: str
    help: str


COMMANDS = {
    "demo": Command(
        "saccade.demo.command",
        "See attention at work: train a small model, check it, let it write, measure.",
    ),
    "bench": Command(
        "saccade.bench.command",
        "Measure attention on this machine: saccade beside PyTorch and whatever else is installed.",
    ),
    "generate": Command(
        "saccade.serving.command",
        "Continue texts with a Hugging Face model, many at once.",
    ),
    "serve": Command(
        "saccade.serving.command",
        "Answer OpenAI's HTTP interface with a Hugging Face model, many requests at once.",
    ),
    "kernels": Command(
        "saccade.kernel_check.commands",
        "Compile the GPU kernels, with or without a GPU, and show what they take.",
    ),
    "tune": Command(
        "saccade.kernel_check.commands",
        "Find the fastest tile sizes for this machine's GPU.",
    ),
}


class Commands(TyperGroup):
    """The commands: named in the help without being imported."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Their names, in the order of a first visit."""
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """What the help shows of a command."""
        known = COMMANDS.get(cmd_name)
        return None if known is None else TyperCommand(cmd_name, help=known.help)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that is to run, imported."""
        name, command, rest = super().resolve_command(ctx, args)
        return name, command and imported(str(name)), rest


def imported(name: str) -> Any:
    """A command with all of its options."""
    one = typer.Typer(add_completion=False, rich_markup_mode="rich")
    one.command(name)(getattr(import_module(COMMANDS[name].module), name))
    return typer.main.get_command(one)


app = typer.Typer(
    name="saccade",
    cls=Commands,
    no_args_is_help=True,
    invoke_without_command=True,
    add_completion=False,
    rich_markup_mode="rich",
)

VERSION = typer.Option("--version", help="Show versions and end.")
ENVIRONMENT = typer.Option(
    "--environment",
    help="Show the machine, its GPUs and where kernels come from, too: for a report of a fault.",
)


@app.callback()
def saccade(
    version: Annotated[bool, VERSION] = False, environment: Annotated[bool, ENVIRONMENT] = False
) -> None:
    """Exact attention for PyTorch: see it train and write, and measure it on this machine.

    [bold]Examples[/bold]

      saccade demo --quick               [dim]train a small model, let it write[/dim]
      saccade bench                      [dim]measure this machine in a minute[/dim]
      saccade generate DIR "def "        [dim]by a model of transformers in DIR[/dim]
      saccade serve DIR --port 8000      [dim]the same over OpenAI's interface[/dim]
      saccade kernels --warm             [dim]compile now: no later call waits[/dim]
      saccade --version --environment    [dim]for a report of a fault[/dim]

    `saccade COMMAND --help` has the options of each, with examples. In Python,
    `saccade.explain(saccade.attention, query, key, value)` says which kernels serve a call.
    """
    if version or environment:
        _show(environment)
        raise typer.Exit


def _show(environment: bool) -> None:
    """Print versions, and the environment if asked."""
    results: Any = import_module("saccade.bench.results")
    lines = list(results.versions().items())
    if environment:
        of_machine: Any = import_module("saccade.gpu.environment")
        lines += of_machine.environment()
    for name, found in lines:
        typer.echo(f"{name} {found}" if not environment else f"{name}: {found}")


def main() -> None:
    """Run the command line."""
    app()


if __name__ == "__main__":
    main()
