"""Command: `saccade demo`, its options and its order of events."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from saccade.demo.settings import FULL, QUICK

INPUT, RUN = "What it reads", "How it runs"

TextOption = typer.Option(
    help="A file, or a folder of text files, to learn from. "
    "Without it: the sources of Python's standard library.",
    rich_help_panel=INPUT,
    show_default=False,
)
PromptOption = typer.Option(
    help="What the trained model writes on from. Without it: a piece of held-out text.",
    rich_help_panel=INPUT,
    show_default=False,
)
QuickOption = typer.Option(
    "--quick",
    help="Less of everything: at most 40 seconds instead of 4 minutes.",
    rich_help_panel=RUN,
)
SeedOption = typer.Option(
    help="Decides the first weights, the batches and the text that is written.",
    rich_help_panel=RUN,
)
StepsOption = typer.Option(
    help="Train for so many steps instead of so many seconds: the same machine and seed then "
    "give the same model.",
    min=1,
    rich_help_panel=RUN,
    show_default=False,
)
OutputOption = typer.Option(
    help="Where the model, the numbers and the plot go.",
    file_okay=False,
    rich_help_panel=RUN,
)


def demo(
    text: Annotated[Path | None, TextOption] = None,
    prompt: Annotated[str | None, PromptOption] = None,
    quick: Annotated[bool, QuickOption] = False,
    seed: Annotated[int, SeedOption] = 0,
    steps: Annotated[int | None, StepsOption] = None,
    output: Annotated[Path, OutputOption] = Path("saccade-demo"),
) -> None:
    """See attention at work: train a small model, check it, let it write, measure.

    On the CPU, with no GPU and no download, it

    1. trains a transformer of a million parameters to predict the next byte of a
    text, with [bold]saccade.attention[/]: one layer sees 64 bytes back, the others
    everything before;

    2. judges it on text that it never saw, beside counting bytes and pairs of bytes;

    3. compares output and gradients of the trained layers with a float64 reference;

    4. lets it write;

    5. measures time and memory beside plain PyTorch and PyTorch's own fused operator.

    The exit status is 1 if the model does not beat both kinds of counting, and 2
    if an option cannot be used.

    [bold]Try:[/] saccade demo --quick

    [bold]Try:[/] saccade demo --text ~/notes --prompt "Dear "
    """
    begin = time.perf_counter()
    # Imported here, since `saccade --help` needs none of it.
    from rich.console import Console

    from saccade.demo import parts

    console = Console(highlight=False)
    settings = QUICK if quick else FULL
    console.print(
        "[bold]Saccade[/]: a small transformer learns to write, on this machine's CPU. "
        f"This takes {'at most 40 seconds' if quick else 'up to four minutes'}."
    )
    corpus = parts.gather_text(console, text, settings)
    parts.make_folder(console, output)
    model, about = parts.train_model(console, corpus, settings, seed, steps)
    bits = parts.predict(console, corpus, model, settings)
    findings = parts.check(console, corpus, model, seed)
    parts.write(console, corpus, model, prompt, settings, seed)
    measured = parts.measure(console, settings, begin + settings.total_seconds)
    about = {"text": corpus.source, "seed": seed, "quick": quick, **about}
    parts.save(console, output, model, about, bits, findings, measured)
    parts.assess(console, bits)
