"""The command `saccade demo`: its options, and its steps, each of which computes and prints."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from saccade.bench.results import device_name, versions
from saccade.demo import comparison
from saccade.demo.comparison import LayerErrors, Measured
from saccade.demo.model import (
    ByteModel,
    DemoModelShape,
    TextSampling,
    cache_error,
    export,
    generate,
    opening,
    save_model,
    write_json,
)
from saccade.demo.training import (
    Corpus,
    TextError,
    TrainingSchedule,
    TrainingStep,
    bigram_bits,
    choose_training_threads,
    gather,
    held_out_bits,
    spread_windows,
    train,
    unigram_bits,
)

MODEL = "this model"
CHECKED_BYTES = 256  # the cache is checked on so many bytes
PROMPT_BYTES = 64


@dataclass(frozen=True)
class DemoSettings:
    """What one run of the demo does, within its budget of wall-clock time."""

    total_seconds: float  # then the comparison ends; lengths that would take longer are left out
    training_seconds: float  # where no number of steps is asked for
    held_out_bytes: int  # how many unseen bytes are predicted
    lengths: tuple[int, ...]  # of sequences that are compared
    window_lengths: tuple[int, ...]  # those of them that are compared under a window as well
    rounds: int = 3  # measurements of each time
    batch: int = 2  # texts in one training step
    learning_rate: float = 3e-3  # the highest one, after the warm-up
    new_bytes: int = 200  # how long the generated text is
    shape: DemoModelShape = field(default_factory=DemoModelShape)


QUICK = DemoSettings(
    total_seconds=34,
    training_seconds=13,
    held_out_bytes=40_000,
    lengths=(1024, 2048),
    window_lengths=(1024, 2048),
)
FULL = DemoSettings(
    batch=4,
    total_seconds=228,
    training_seconds=90,
    held_out_bytes=200_000,
    lengths=(1024, 2048, 4096, 8192, 16384),
    window_lengths=(1024, 2048, 4096, 8192),
)

INPUT, RUN = "What it reads", "How it runs"

TextOption = typer.Option(
    help="A file, or a folder of text files, to learn from. "
    "Without it: the sources of Python's standard library.",
    rich_help_panel=INPUT,
)
PromptOption = typer.Option(
    help="What the trained model writes on from. Without it: a piece of held-out text.",
    rich_help_panel=INPUT,
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
    console = Console(highlight=False)
    settings = QUICK if quick else FULL
    console.print(
        "[bold]Saccade[/]: a small transformer learns to write, on this machine's CPU. "
        f"This takes {'at most 40 seconds' if quick else 'up to four minutes'}."
    )
    corpus = _gather_text(console, text, settings)
    _make_folder(console, output)
    torch.manual_seed(seed)
    run = DemoRun(console, settings, corpus, seed, ByteModel(settings.shape))
    trained = run.train(steps)
    bits = run.predict()
    errors = run.check()
    run.write(prompt)
    measured = run.measure(begin + settings.total_seconds)
    about = {"text": corpus.source, "seed": seed, "quick": quick, **trained}
    run.save(output, about, bits, errors, measured)
    if any(bits[MODEL] >= value for who, value in bits.items() if who != MODEL):
        _give_up(
            console,
            "The model predicts no better than counting: it has learned too little. "
            "Give it more time (leave out --quick, or raise --steps) or more text.",
            1,
        )


def _give_up(console: Console, message: str, status: int) -> NoReturn:
    """Say why the demo ends here, and end it."""
    console.print(f"[bold red]{escape(message)}[/]", soft_wrap=True)
    raise typer.Exit(status)


def _gather_text(console: Console, path: Path | None, settings: DemoSettings) -> Corpus:
    """Read the text and say what it is."""
    try:
        corpus = gather(path, settings.shape.context)
    except TextError as error:
        _give_up(console, str(error) if path is None else f"--text {error}", 2)
    files = "1 file" if corpus.num_files == 1 else f"{corpus.num_files:,} files"
    console.print(
        f"It reads {corpus.source}: {files}, {len(corpus.training):,} bytes to learn from; "
        f"held out are {len(corpus.held_out):,} bytes, {corpus.split}.",
        markup=False,
    )
    return corpus


def _make_folder(console: Console, output: Path) -> None:
    """Before the work, not after it: a folder that cannot be made should cost no time."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        _give_up(console, f"--output {output}: {error.strerror}", 2)


@dataclass
class DemoRun:
    """The model of one run of the demo, and what is done with it."""

    console: Console
    settings: DemoSettings
    corpus: Corpus
    seed: int
    model: ByteModel

    def train(self, steps: int | None) -> dict[str, Any]:
        """Train the model, for so many steps or the seconds of the settings; say how that went."""
        console, settings, model = self.console, self.settings, self.model
        heading(console, "1. Training")
        shape = settings.shape
        if steps is None:  # with a number of steps the result should not depend on the machine
            choose_training_threads(model, settings.batch)
        layers = ", ".join("everything" if w is None else f"{w} bytes" for w in shape.windows)
        console.print(
            f"{model.num_parameters:,} parameters, {len(shape.windows)} layers that see back "
            f"{layers}; {shape.query_heads} query heads share {shape.kv_heads} key heads; "
            f"{torch.get_num_threads()} thread(s)."
        )
        schedule = TrainingSchedule(
            settings.training_seconds, steps, settings.batch, settings.learning_rate, self.seed
        )
        history: list[TrainingStep] = []
        with training_progress(console) as progress:
            bar = progress.add_task("", total=1.0, step=0, bits=8.0, speed=0.0, left=0.0)
            for step in train(model, self.corpus.training, schedule):
                progress.update(bar, completed=step.progress, **shown(step))
                history.append(step)
        return {
            "parameters": model.num_parameters,
            "threads": torch.get_num_threads(),
            "steps": len(history),
            "training_seconds": round(history[-1].seconds, 2),
            "training_bits_per_byte": [round(step.bits_per_byte, 4) for step in history],
        }

    def predict(self) -> dict[str, float]:
        """Bits per byte of held-out text: of the model and of counting."""
        heading(self.console, "2. What it learned")
        corpus, settings = self.corpus, self.settings
        windows = spread_windows(corpus.held_out, settings.shape.context, settings.held_out_bytes)
        bits = {
            "counting bytes (unigram)": unigram_bits(corpus.training, windows),
            "counting pairs (bigram)": bigram_bits(corpus.training, windows),
            MODEL: held_out_bits(self.model, windows),
        }
        self.console.print(prediction_table(bits, windows[:, 1:].numel()))
        return bits

    def check(self) -> list[LayerErrors]:
        """Compare the trained layers with the reference, and the cache with a single pass."""
        console, model = self.console, self.model
        heading(console, "3. Is the attention right?")
        tokens = self.corpus.held_out[None, : model.shape.context].long()
        errors = list(comparison.measure_errors(model.attention_calls(tokens), self.seed))
        console.print(comparison.exactness_table(errors))
        for dtype in dict.fromkeys(one.dtype for one in errors):
            ratios = comparison.ratios_to_plain(errors, dtype)
            listed = ", ".join(f"{who} {ratio:.2f}" for who, ratio in ratios.items())
            console.print(f"Largest RMS error as a multiple of plain PyTorch's, {dtype}: {listed}.")
        console.print(
            f"Where scores are capped (at {comparison.SOFTCAP:g}), Saccade's own tiles compute: "
            "SDPA has no softcap. In the other rows Saccade and SDPA run the same kernel of "
            "PyTorch's, whose exponential may be an approximate one, which shows in float32."
        )
        off = cache_error(model, tokens[0, :CHECKED_BYTES])
        console.print(
            "Byte by byte with a key/value cache, the logits are those of one pass over the whole "
            f"text to within {off:.1e}."
        )
        return errors

    def write(self, prompt: str | None) -> None:
        """Let the model write on from a prompt."""
        heading(self.console, "4. What it writes")
        begin = prompt.encode() if prompt else opening(self.corpus.held_out, PROMPT_BYTES)
        sampling = TextSampling(seed=self.seed)
        written = generate(self.model, begin, self.settings.new_bytes, sampling)
        explanation = (
            f"dimmed: the prompt · temperature {sampling.temperature}, top {sampling.top_k} bytes"
        )
        self.console.print(generated_panel(begin, written, explanation))

    def measure(self, deadline: float) -> list[Measured]:
        """Measure time and memory of attention on this machine, until the deadline at most."""
        console, settings = self.console, self.settings
        sizes = settings.lengths, settings.window_lengths, settings.rounds
        heading(console, "5. Time and memory on this machine")
        measured: list[Measured] = []
        with console.status("measuring ...") as status:
            for at_length in comparison.measure_lengths(*sizes, deadline):
                measured += at_length
                last = at_length[-1]
                status.update(f"measured {last.pattern}, length {last.length:,} ...")
        for pattern in dict.fromkeys(one.pattern for one in measured):
            console.print(comparison.comparison_table(measured, pattern))
        console.print(
            f"float32, batch 1, {comparison.HEADS} heads of {comparison.HEAD_DIM}, "
            f"{torch.get_num_threads()} thread(s); medians of {settings.rounds} interleaved "
            "rounds. Peak extra: how far a fresh process grows beyond its inputs in a forward and "
            "a backward pass. A causal mask is built into SDPA; a window it takes only written out."
        )
        return measured

    def save(
        self, output: Path, about: dict[str, Any], bits: dict[str, float],
        errors: list[LayerErrors], measured: list[Measured],
    ) -> None:  # fmt: skip
        """Write the model in both forms, the numbers and the plot."""
        console = self.console
        heading(console, "Saved")
        write_json(
            results := output / "results.json",
            {
                "device": this_machine(),
                "versions": versions(),
                **about,
                "bits_per_byte": bits,
                "exactness": [one.plain() for one in errors],
                "comparison": {
                    "batch": 1,
                    "heads": comparison.HEADS,
                    "head_dim": comparison.HEAD_DIM,
                    "dtype": "float32",
                    "measured": [one._asdict() for one in measured],
                },
            },
        )
        saved = {
            "trained model": save_model(self.model, output),
            "as Hugging Face's": (exported := export(self.model, output / "huggingface")),
            "numbers": results,
        }
        if comparison.matplotlib_missing():
            console.print(
                "No plot: matplotlib is missing (pip install 'saccade[bench]').", markup=False
            )
        else:
            saved["plot"] = output / "comparison.png"
            comparison.save_plot(measured, saved["plot"], this_machine())
        for what, path in saved.items():
            console.print(f"{what:>17}  {path}", markup=False, soft_wrap=True)
        console.print(
            "It is a Qwen2 of its size. With transformers (pip install 'saccade[transformers]') it "
            f'writes many texts at once: saccade generate {exported} "def " "class " '
            f"--temperature {TextSampling().temperature}",
            markup=False, soft_wrap=True,
        )  # fmt: skip


# ---- what the steps show -------------------------------------------------------------------------


def heading(console: Console, text: str) -> None:
    """The title of a part of the demo."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def training_progress(console: Console) -> Progress:
    """A bar that shows how training goes."""
    return Progress(
        TextColumn("step {task.fields[step]:>4}"),
        BarColumn(bar_width=None),
        TextColumn("[bold]{task.fields[bits]:.3f}[/] bits/byte"),
        TextColumn("{task.fields[speed]:,.0f} bytes/s"),
        TextColumn("{task.fields[left]:>4.0f} s left"),
        console=console,
    )


def shown(step: TrainingStep) -> dict:
    """The fields of the bar after a step."""
    left = step.seconds * (1 / step.progress - 1)
    speed = step.bytes_per_second
    return {"step": step.number, "bits": step.bits_per_byte, "speed": speed, "left": left}


def prediction_table(bits: dict[str, float], unseen: int) -> Table:
    """Bits per byte of each model on text that none of them has seen."""
    table = comparison.table_of(
        f"Predicting {unseen:,} held-out bytes", ["model"], ["bits per byte", "size next to 8 bits"]
    )
    best = min(bits.values())
    for who, value in bits.items():
        style = "bold green" if value == best else ""
        table.add_row(who, f"{value:.3f}", f"{value / 8:.0%}", style=style)
    return table


def generated_panel(prompt: bytes, written: bytes, explanation: str) -> Panel:
    """The prompt, dimmed, and what the model wrote after it."""
    text = Text(readable(prompt), style="dim")
    text.append(readable(written), style="bold cyan")
    return Panel(text, title="what it writes", subtitle=explanation, border_style="cyan")


def readable(content: bytes) -> str:
    """Bytes as text; what is no UTF-8, or would move the cursor, is shown as �."""
    text = content.decode("utf-8", errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def this_machine() -> str:
    """The processor, and the threads that PyTorch uses."""
    threads = torch.get_num_threads()
    return f"{device_name(torch.device('cpu'))}, {threads} thread{'s' if threads > 1 else ''}"
