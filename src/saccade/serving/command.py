"""Command: `saccade generate`, its options and its order of events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

READ, DRAWN, RUN = "What it reads", "How tokens are drawn", "How it runs"

ModelArgument = typer.Argument(
    metavar="MODEL_DIR", help="A folder with a causal model of transformers and its tokenizer.",
    exists=True, file_okay=False,
)  # fmt: skip
PromptArgument = typer.Argument(
    metavar="[PROMPT]...", help="Texts to continue, each a request of its own.", show_default=False
)
FileOption = typer.Option(
    "--file", help="A file with one prompt a line, after those given above.",
    exists=True, dir_okay=False, rich_help_panel=READ, show_default=False,
)  # fmt: skip
NewOption = typer.Option(
    "--max-new-tokens", min=1, help="New tokens of each request, at most.", rich_help_panel=DRAWN
)
TemperatureOption = typer.Option(
    min=0.0, help="0 takes the likeliest token; near 1 is lively.", rich_help_panel=DRAWN
)
TopKOption = typer.Option(
    min=1, help="Only so many of the likeliest tokens.", rich_help_panel=DRAWN, show_default=False
)
TopPOption = typer.Option(
    min=0.0, max=1.0, rich_help_panel=DRAWN,
    help="Only the likeliest tokens that together have this probability.",
)  # fmt: skip
SeedOption = typer.Option(
    help="Equal seeds draw equal numbers, whatever else is served.", rich_help_panel=DRAWN
)
SamplesOption = typer.Option(
    "--samples", min=1, rich_help_panel=DRAWN,
    help="Continuations of each prompt; they share its pages, and have the seeds seed, seed + 1 …",
)  # fmt: skip
StopOption = typer.Option(
    "--stop", help="End a text before this one; several times for several.",
    rich_help_panel=DRAWN, show_default=False,
)  # fmt: skip
SequencesOption = typer.Option(
    "--max-sequences", min=1, help="Requests that run at once.", rich_help_panel=RUN
)
PagesOption = typer.Option(
    "--num-pages", min=1, rich_help_panel=RUN, show_default=False,
    help="Pages of 16 tokens for each kind of layer. With too few, requests take turns.",
)  # fmt: skip
DeviceOption = typer.Option(
    help="cpu, cuda, cuda:1 … By default a GPU if there is one.", rich_help_panel=RUN,
    show_default=False,
)  # fmt: skip
JsonOption = typer.Option(
    "--json", help="Write one JSON object a line for each request.", dir_okay=False,
    rich_help_panel=RUN, show_default=False,
)  # fmt: skip
QuietOption = typer.Option(
    "--quiet", "-q", help="Print the new texts and nothing else.", rich_help_panel=RUN
)


def generate(
    model: Annotated[Path, ModelArgument],
    prompts: Annotated[list[str] | None, PromptArgument] = None,
    file: Annotated[Path | None, FileOption] = None,
    max_new_tokens: Annotated[int, NewOption] = 64,
    temperature: Annotated[float, TemperatureOption] = 0.0,
    top_k: Annotated[int | None, TopKOption] = None,
    top_p: Annotated[float, TopPOption] = 1.0,
    seed: Annotated[int, SeedOption] = 0,
    samples: Annotated[int, SamplesOption] = 1,
    stop: Annotated[list[str] | None, StopOption] = None,
    max_sequences: Annotated[int, SequencesOption] = 64,
    num_pages: Annotated[int | None, PagesOption] = None,
    device: Annotated[str | None, DeviceOption] = None,
    json: Annotated[Path | None, JsonOption] = None,
    quiet: Annotated[bool, QuietOption] = False,
) -> None:
    """Continue texts with a Hugging Face model, many at once.

    The model lies in a folder as [bold]save_pretrained[/] writes it. Nothing is downloaded.

    All prompts are served together: requests join and leave between steps, equal
    beginnings are computed once, and keys and values lie in pages.

    [bold]Try:[/] saccade generate saccade-demo/huggingface "def " (after saccade demo)

    [bold]Try:[/] saccade generate DIR "Dear " --temperature 0.8 --top-p 0.95 --samples 4

    [bold]Try:[/] saccade generate DIR --file prompts.txt --json texts.jsonl --quiet
    """
    texts = [*(prompts or []), *_lines(file)]
    if not texts:
        _give_up("give a PROMPT, or --file with one a line")
    # Imported here, since `saccade --help` needs none of it.
    from saccade.serving import session

    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "seed": seed, "stop": stop or (),
    }  # fmt: skip
    sizes = {"max_sequences": max_sequences, "num_pages": num_pages}
    try:
        session.run(model, texts, samples, options, sizes, device=device, output=json, quiet=quiet)
    except (TypeError, ValueError, OSError, ImportError) as error:
        _give_up(str(error))


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError:
        _give_up(f"--file: {file} is no text in UTF-8")


def _give_up(message: str) -> NoReturn:
    typer.secho(f"saccade generate: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2)
