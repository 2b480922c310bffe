"""Command: `saccade generate`: its options, and one run of it: load, serve, show, write; and
`saccade serve`, which answers over HTTP until it is stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from time import perf_counter
from typing import Annotated, Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from saccade.serving import launch
from saccade.serving.engine import MAX_BATCH_TOKENS, Engine
from saccade.serving.request import Completion, EngineStatistics, Generated, RequestStatistics
from saccade.serving.scheduler import choose_threads

ROWS = 12  # requests shown at once: a live table must fit the screen
SHOWN = 48  # the last characters of a text that is being written
REFRESHES = 8  # a second

# transformers' own message names no part of saccade that brings it.
OVER_RANKS = "models over ranks need accelerate (pip install 'saccade[serve]')"

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

GraphsOption = typer.Option(
    "--cuda-graphs/--no-cuda-graphs", rich_help_panel=RUN, show_default=False,
    help="Capture steps as CUDA graphs first; on a GPU.",
)  # fmt: skip
CompileOption = typer.Option(
    "--compile/--no-compile", rich_help_panel=RUN, show_default=False,
    help="Compile the model's layers by torch.compile first (half a minute); by default with "
    "CUDA graphs.",
)  # fmt: skip


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
    cuda_graphs: Annotated[bool, GraphsOption] = False,
    compile: Annotated[bool | None, CompileOption] = None,
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

    On a GPU, --cuda-graphs takes half a minute first, and pays for itself with long texts.
    """
    texts = [*(prompts or []), *_lines(file)]
    if not texts:
        _give_up("give a PROMPT, or --file with one a line")
    if json is not None and not json.absolute().parent.is_dir():  # before texts come, to be lost
        _give_up(f"--json: got {json}, takes a file in a folder that there is")
    options: dict[str, Any] = {
        "max_new_tokens": max_new_tokens, "temperature": temperature, "top_k": top_k,
        "top_p": top_p, "seed": seed, "stop": stop or (),
    }  # fmt: skip
    sizes: dict[str, Any] = {
        "max_sequences": max_sequences, "num_pages": num_pages, "cuda_graphs": cuda_graphs,
        "compile": "auto" if compile is None else compile,
    }  # fmt: skip
    try:
        run(model, texts, samples, options, sizes, device=device, output=json, quiet=quiet)
    except (TypeError, ValueError, OSError, ImportError) as error:
        _give_up(str(error))


def _lines(file: Path | None) -> list[str]:
    if file is None:
        return []
    try:
        return [line for line in file.read_text(encoding="utf-8").splitlines() if line]
    except UnicodeDecodeError:
        _give_up(f"--file: {file} is no text in UTF-8")


def _give_up(message: str, command: str = "generate") -> NoReturn:
    typer.secho(f"saccade {command}: {message}", fg=typer.colors.RED, err=True)
    raise typer.Exit(2)


HostOption = typer.Option(help="The address to listen at.", rich_help_panel=RUN)
PortOption = typer.Option(min=0, max=65535, help="0 takes any that is free.", rich_help_panel=RUN)
KeyOption = typer.Option(
    "--api-key", envvar="SACCADE_API_KEY", show_envvar=True, rich_help_panel=READ,
    help="What clients must give; without it everybody is served.", show_default=False,
)  # fmt: skip
NameOption = typer.Option(
    "--name", help="The model's name for clients; the folder's by default.", rich_help_panel=READ,
    show_default=False,
)  # fmt: skip
TemplateOption = typer.Option(
    "--chat-template", exists=True, dir_okay=False, rich_help_panel=READ, show_default=False,
    help="A file with a chat template (Jinja), in the place of the tokenizer's.",
)  # fmt: skip
LengthOption = typer.Option(
    "--max-length", min=2, rich_help_panel=RUN, show_default=False,
    help="Tokens of a prompt and what follows it; the model's limit by default.",
)  # fmt: skip
BodyOption = typer.Option(
    "--max-body", min=1, help="Bytes of a request, at most.", rich_help_panel=READ
)
WaitingOption = typer.Option(
    "--max-waiting", min=0, rich_help_panel=READ,
    help="Choices that wait beside those that run; more are refused (429).",
)  # fmt: skip
TimeOption = typer.Option(
    "--max-seconds", min=0.001, help="Time that a request may take.", rich_help_panel=READ
)
RanksOption = typer.Option(
    "--nproc", min=1, rich_help_panel=RUN,
    help="Processes that share the model, each with a part of its heads: GPUs 0, 1 … of this host.",
)  # fmt: skip
RankTimeOption = typer.Option(
    "--rank-timeout", min=0.1, help="Seconds that these wait for one another.", rich_help_panel=RUN
)


class Serving(NamedTuple):
    """What a server is asked to do; picklable, for its ranks."""

    folder: Path
    host: str
    port: int
    api_key: str | None
    name: str | None
    chat_template: Path | None
    limits: tuple[int, int, float]
    sizes: dict[str, Any]
    device: str | None


def serve(
    model: Annotated[Path, ModelArgument],
    host: Annotated[str, HostOption] = "127.0.0.1",
    port: Annotated[int, PortOption] = 8000,
    api_key: Annotated[str | None, KeyOption] = None,
    name: Annotated[str | None, NameOption] = None,
    chat_template: Annotated[Path | None, TemplateOption] = None,
    max_body: Annotated[int, BodyOption] = 2**20,
    max_waiting: Annotated[int, WaitingOption] = 256,
    max_seconds: Annotated[float, TimeOption] = 600.0,
    max_length: Annotated[int | None, LengthOption] = None,
    max_sequences: Annotated[int, SequencesOption] = 64,
    num_pages: Annotated[int | None, PagesOption] = None,
    device: Annotated[str | None, DeviceOption] = None,
    cuda_graphs: Annotated[bool | None, GraphsOption] = None,
    compile: Annotated[bool | None, CompileOption] = None,
    nproc: Annotated[int, RanksOption] = 1,
    rank_timeout: Annotated[float, RankTimeOption] = 300.0,
) -> None:
    """Answer OpenAI's HTTP interface with a Hugging Face model, many requests at once.

    Completions and chat completions, in one piece or as a stream; /v1/models,
    /health and /metrics beside them. Ctrl-C stops it once all requests under
    way are answered.

    [bold]Try:[/] saccade serve saccade-demo/huggingface --port 8000 (after saccade demo)

    [bold]Then:[/] curl localhost:8000/v1/completions -d '{"prompt": "def "}'

    [bold]Several GPUs:[/] saccade serve DIR --nproc 2
    """
    sizes: dict[str, Any] = {
        "max_sequences": max_sequences, "num_pages": num_pages, "max_length": max_length,
        "cuda_graphs": cuda_graphs, "compile": "auto" if compile is None else compile,
        "max_batch_tokens": max(MAX_BATCH_TOKENS, max_sequences), "rank_timeout": rank_timeout,
    }  # fmt: skip
    asked = Serving(
        model, host, port, api_key, name, chat_template, (max_body, max_waiting, max_seconds),
        sizes, device,
    )  # fmt: skip
    if nproc > 1:
        if not find_spec("accelerate"):  # before ranks are started, which takes seconds
            _give_up(f"--nproc: {OVER_RANKS}", "serve")
        gpus = torch.cuda.device_count()
        if gpus and nproc > gpus:
            _give_up(f"--nproc: got {nproc}, and PyTorch sees {gpus} GPUs here", "serve")
        if device is not None and (gpus or device != "cpu"):
            _give_up(f"--device: got {device} beside --nproc, which takes the first GPUs", "serve")
        status = launch.run_ranks(answer, [asked], nproc, rank_timeout)
    else:
        if int(os.environ.get("WORLD_SIZE", 1)) > 1:  # of torchrun
            launch.join(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), rank_timeout)
        status = answer(asked)
    if status:
        raise typer.Exit(status)


def answer(asked: Serving) -> int:
    """Answer over HTTP until stopped, or be another rank of a server that does.

    Returns:
        An exit status.
    """
    rank = dist.get_rank() if dist.is_initialized() else 0
    try:
        from saccade.serving import server as servers
    except ImportError as error:
        return _refused(f"{error}; pip install 'saccade[serve]'", rank)
    try:
        loaded, tokenizer = load(asked.folder, asked.device)
        if asked.chat_template is not None:
            tokenizer.chat_template = asked.chat_template.read_text(encoding="utf-8")
        engine = Engine(loaded, tokenizer, **asked.sizes)
    except (TypeError, ValueError, OSError, ImportError) as error:
        return _refused(str(error), rank)
    try:
        if rank:
            engine.follow()
            return 0
        name = asked.name or asked.folder.resolve().name
        served = servers.Server(
            engine, tokenizer, name=name, api_key=asked.api_key,
            limits=servers.ServerLimits(*asked.limits),
        )  # fmt: skip
        typer.echo(engine.explain(), err=True)
        servers.run(served, asked.host, asked.port)
        engine.close()
    except RuntimeError as error:
        if not engine.failure:
            raise
        return _refused(str(error), rank)
    return 0


def _refused(message: str, rank: int) -> int:
    of_rank = f"rank {rank}: " if rank else ""
    typer.secho(f"saccade serve: {of_rank}{message}", fg=typer.colors.RED, err=True)
    return 2


class Watch:
    """A live table of the requests that run, over a bar of all new tokens."""

    def __init__(self, console: Console, completions: Sequence[Completion], most_tokens: int):
        self._completions = completions
        self._bar = Progress(
            TextColumn("{task.fields[done]} of {task.fields[all]} done"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("tokens  {task.fields[speed]:,.0f}/s"),
            TimeElapsedColumn(),
            console=console,
        )
        self._task = self._bar.add_task(
            "", total=most_tokens, done=0, all=len(completions), speed=0
        )
        self.live = Live(console=console, transient=True, auto_refresh=False)

    def update(self, engine: EngineStatistics) -> None:
        """Show where all requests stand now."""
        states = [completion.statistics for completion in self._completions]
        new_tokens = sum(state.new_tokens for state in states)
        done = sum(state.state == "done" for state in states)
        self._bar.update(
            self._task, completed=new_tokens, done=done, speed=engine.tokens_per_second
        )
        table = _table("", "state", "prompt", "cached", "new", "pages", "/s")
        table.add_column("text", no_wrap=True)
        shown = [n for n, state in enumerate(states) if state.state != "done"][:ROWS]
        for number in shown:
            state = states[number]
            text = Text(_last(self._completions[number].text_so_far()))
            table.add_row(*_numbers(number, state), text)
        left = len(states) - done - len(shown)
        more = [Text(f"and {left} more", style="dim")] if left > 0 else []
        self.live.update(Group(table, *more, self._bar), refresh=True)


def _last(text: str) -> str:
    return " ".join(readable(text).split())[-SHOWN:]


def _numbers(number: int, state: RequestStatistics) -> list[str]:
    speed = state.tokens_per_second
    fields = ("state", "prompt_tokens", "cached_tokens", "new_tokens", "pages")
    return [
        str(number + 1), *(str(getattr(state, field)) for field in fields),
        "–" if speed is None else f"{speed:,.0f}",
    ]  # fmt: skip


def text_panel(number: int, prompt: str, generated: Generated) -> Panel:
    """One prompt, dimmed, and what came after it."""
    text = Text(readable(prompt), style="dim")
    text.append(readable(generated.text or ""), style="bold cyan")
    what = generated.statistics
    speed = f", {what.tokens_per_second:,.0f} tokens/s" if what.tokens_per_second else ""
    explanation = f"{what.new_tokens} tokens{speed} · {generated.reason.replace('_', ' ')}"
    return Panel(text, title=str(number), subtitle=explanation, border_style="cyan")


def requests_table(results: Sequence[Generated]) -> Table:
    """What became of each request."""
    table = _table(
        "", "ended by", "prompt", "cached", "new", "pages", "new\n/s", "queued\nms", "first\nms",
        "gave\nway",
    )  # fmt: skip
    for number, result in enumerate(results):
        what = result.statistics
        numbers = _numbers(number, what)
        numbers[1] = result.reason.replace("_", " ")
        first = "–" if what.to_first_token is None else f"{1e3 * what.to_first_token:,.0f}"
        table.add_row(*numbers, f"{1e3 * what.queued:,.0f}", first, str(what.preemptions))
    return table


def summary(statistics: EngineStatistics) -> str:
    """What the engine did, in a line."""
    read = statistics.prompt_tokens
    cached = f" ({statistics.cached_tokens / read:.0%} found in the cache)" if read else ""
    plural = "" if statistics.done == 1 else "s"
    return (
        f"{statistics.done} request{plural}: {read:,} prompt tokens{cached}, "
        f"{statistics.new_tokens:,} new ones in {statistics.busy:.2f} s "
        f"({statistics.tokens_per_second:,.0f} a second), {statistics.steps:,} steps, "
        f"{statistics.preemptions} preemptions, {statistics.pages:,} pages."
    )


def readable(text: str) -> str:
    """Text whose control characters cannot move the cursor."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text.expandtabs(4))


def _table(*columns: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in columns:
        left = name in ("state", "ended by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    return table


def run(
    folder: Path, texts: Sequence[str], samples: int, options: dict[str, Any],
    sizes: dict[str, Any], *, device: str | None, output: Path | None, quiet: bool,
) -> None:  # fmt: skip
    """Continue all texts, and show or write what came."""
    console = Console(highlight=False)
    with nullcontext() if quiet else console.status(f"loading {folder} …"):
        model, tokenizer = load(folder, device)
        if model.device.type == "cpu":
            with torch.inference_mode():
                choose_threads(lambda: model(torch.zeros(1, 8, dtype=torch.long)))
    rows = max(MAX_BATCH_TOKENS, sizes["max_sequences"])
    engine = Engine(model, tokenizer, max_batch_tokens=rows, **sizes)
    completions = [
        completion
        for text in texts
        for completion in engine.submit_samples(text, samples, **options)
    ]
    if quiet:
        engine.run()
    else:
        watch(console, engine, completions, options["max_new_tokens"])
    results = [completion.result() for completion in completions]
    prompts = [text for text in texts for _ in range(samples)]
    if output is not None:
        write(output, prompts, results)
    if quiet:
        for result in results:
            print(result.text)
        return
    for number, (prompt, result) in enumerate(zip(prompts, results, strict=True), 1):
        console.print(text_panel(number, prompt, result))
    console.print(requests_table(results))
    console.print(summary(engine.statistics()))


def load(folder: Path, device: str | None) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder; nothing is downloaded, and no code of it runs.

    Where a process group is there, the ranks share the model out.

    Raises:
        ImportError: without transformers.
        ValueError: for a folder without a model, and a device that is not there.
    """
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ImportError(
            "models need transformers (pip install 'saccade[transformers]')"
        ) from error
    disable_progress_bar()  # a folder on disk is read in no time, and --quiet is quiet
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; a model's folder has one")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    options: dict[str, Any] = {"local_files_only": True, "dtype": "auto"}
    if dist.is_initialized():
        from transformers.distributed.configuration_utils import DistributedConfig

        if not find_spec("accelerate"):
            raise ImportError(OVER_RANKS)
        config = DistributedConfig(tp_size=dist.get_world_size())
        options["distributed_config"] = config
        return AutoModelForCausalLM.from_pretrained(folder, **options), tokenizer
    model: Any = AutoModelForCausalLM.from_pretrained(folder, **options)
    return model.to(_device(device)), tokenizer


def _device(name: str | None) -> torch.device:
    """The device that a user names, or the best there is."""
    has_gpu = torch.cuda.is_available()
    try:
        found = torch.device(name or ("cuda" if has_gpu else "cpu"))
    except RuntimeError:
        raise ValueError(f"--device: got {name!r}, takes cpu, cuda, cuda:0 …") from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        number = torch.cuda.device_count()
        raise ValueError(f"--device: got {name!r}, and PyTorch sees {number} GPUs here")
    return found


def watch(
    console: Console, engine: Engine, completions: Sequence[Completion], most_tokens: int
) -> None:
    """Take steps, and show how far all requests are."""
    shown = Watch(console, completions, most_tokens * len(completions))
    with shown.live:
        next_look = 0.0
        while engine.step():
            if perf_counter() >= next_look:
                shown.update(engine.statistics())
                next_look = perf_counter() + 1 / REFRESHES


def write(path: Path, prompts: Sequence[str], results: Sequence[Generated]) -> None:
    """One JSON object a line for each request."""
    lines = [
        json.dumps({"prompt": prompt, **asdict(result)}, ensure_ascii=False)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
