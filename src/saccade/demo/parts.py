"""Parts: what the demo does one after the other; each part computes and prints."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

import torch
import typer
from rich.console import Console
from rich.markup import escape

from saccade.demo import comparison, files, report
from saccade.demo.comparison import Measured
from saccade.demo.exactness import SOFTCAP, Finding, compare, ratios_to_plain
from saccade.demo.files import export
from saccade.demo.model import ByteModel, TextSampling, cache_error, generate, opening
from saccade.demo.settings import DemoSettings
from saccade.demo.text import Corpus, TextError, bigram_bits, gather, spread_windows, unigram_bits
from saccade.demo.training import (
    TrainingSchedule,
    TrainingStep,
    choose_training_threads,
    held_out_bits,
    train,
)

MODEL = "this model"
CHECKED_BYTES = 256  # the cache is checked on so many bytes
PROMPT_BYTES = 64


def give_up(console: Console, message: str, status: int) -> NoReturn:
    """Say why the demo ends here, and end it."""
    console.print(f"[bold red]{escape(message)}[/]", soft_wrap=True)
    raise typer.Exit(status)


def gather_text(console: Console, path: Path | None, settings: DemoSettings) -> Corpus:
    """Read the text and say what it is."""
    try:
        corpus = gather(path, settings.shape.context)
    except TextError as error:
        give_up(console, str(error) if path is None else f"--text {error}", 2)
    files = "1 file" if corpus.num_files == 1 else f"{corpus.num_files:,} files"
    console.print(
        f"It reads {corpus.source}: {files}, {len(corpus.training):,} bytes to learn from; "
        f"held out are {len(corpus.held_out):,} bytes, {corpus.split}.",
        markup=False,
    )
    return corpus


def make_folder(console: Console, output: Path) -> None:
    """Before the work, not after it: a folder that cannot be made should cost no time."""
    try:
        output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        give_up(console, f"--output {output}: {error.strerror}", 2)


def train_model(
    console: Console, corpus: Corpus, settings: DemoSettings, seed: int, steps: int | None
) -> tuple[ByteModel, dict[str, object]]:
    """Train a new model; also say how long that took."""
    torch.manual_seed(seed)
    model = ByteModel(settings.shape)
    report.heading(console, "1. Training")
    shape = settings.shape
    if steps is None:  # with a number of steps the result should not hang on the machine's mood
        choose_training_threads(model, settings.batch)
    layers = ", ".join("everything" if w is None else f"{w} bytes" for w in shape.windows)
    console.print(
        f"{model.num_parameters:,} parameters, {len(shape.windows)} layers that see back "
        f"{layers}; {shape.query_heads} query heads share {shape.kv_heads} key heads; "
        f"{torch.get_num_threads()} thread(s)."
    )
    schedule = TrainingSchedule(
        settings.training_seconds, steps, settings.batch, settings.learning_rate, seed
    )
    history: list[TrainingStep] = []
    with report.training_progress(console) as progress:
        bar = progress.add_task("", total=1.0, step=0, bits=8.0, speed=0.0, left=0.0)
        for step in train(model, corpus.training, schedule):
            progress.update(bar, completed=step.progress, **report.shown(step))
            history.append(step)
    about = {
        "parameters": model.num_parameters,
        "threads": torch.get_num_threads(),
        "steps": len(history),
        "training_seconds": round(history[-1].seconds, 2),
        "training_bits_per_byte": [round(step.bits_per_byte, 4) for step in history],
    }
    return model, about


def predict(
    console: Console, corpus: Corpus, model: ByteModel, settings: DemoSettings
) -> dict[str, float]:
    """Judge the model on held-out text, beside counting."""
    report.heading(console, "2. What it learned")
    windows = spread_windows(corpus.held_out, settings.shape.context, settings.held_out_bytes)
    bits = {
        "counting bytes (unigram)": unigram_bits(corpus.training, windows),
        "counting pairs (bigram)": bigram_bits(corpus.training, windows),
        MODEL: held_out_bits(model, windows),
    }
    console.print(report.prediction_table(bits, windows[:, 1:].numel()))
    return bits


def check(console: Console, corpus: Corpus, model: ByteModel, seed: int) -> list[Finding]:
    """Compare the trained layers with the reference, and the cache with a single pass."""
    report.heading(console, "3. Is the attention right?")
    tokens = corpus.held_out[None, : model.shape.context].long()
    findings = list(compare(model.attention_calls(tokens), seed))
    console.print(report.exactness_table(findings))
    for dtype in dict.fromkeys(finding.dtype for finding in findings):
        ratios = [f"{who} {ratio:.2f}" for who, ratio in ratios_to_plain(findings, dtype).items()]
        console.print(
            f"Largest RMS error as a multiple of plain PyTorch's, {dtype}: {', '.join(ratios)}."
        )
    console.print(
        f"Where scores are capped (at {SOFTCAP:g}), Saccade's own tiles compute: SDPA has no "
        "softcap. In the other rows Saccade and SDPA run the same kernel of PyTorch's, whose "
        "exponential may be an approximate one, which shows in float32."
    )
    off = cache_error(model, tokens[0, :CHECKED_BYTES])
    console.print(
        "Byte by byte with a key/value cache, the logits are those of one pass over the whole "
        f"text to within {off:.1e}."
    )
    return findings


def write(
    console: Console, corpus: Corpus, model: ByteModel, prompt: str | None,
    settings: DemoSettings, seed: int,
) -> None:  # fmt: skip
    """Let the model write on from a prompt."""
    report.heading(console, "4. What it writes")
    begin = prompt.encode() if prompt else opening(corpus.held_out, PROMPT_BYTES)
    sampling = TextSampling(seed=seed)
    written = generate(model, begin, settings.new_bytes, sampling)
    explanation = (
        f"dimmed: the prompt · temperature {sampling.temperature}, top {sampling.top_k} bytes"
    )
    console.print(report.generated_panel(begin, written, explanation))


def measure(console: Console, settings: DemoSettings, deadline: float) -> list[Measured]:
    """Measure time and memory of attention on this machine, until the deadline at most."""
    report.heading(console, "5. Time and memory on this machine")
    measured: list[Measured] = []
    with console.status("measuring ...") as status:
        for at_length in comparison.compare(settings, deadline):
            measured += at_length
            status.update(f"measured {at_length[0].pattern}, length {at_length[0].length:,} ...")
    for pattern in dict.fromkeys(one.pattern for one in measured):
        console.print(report.comparison_table(measured, pattern))
    console.print(
        f"float32, batch 1, {comparison.HEADS} heads of {comparison.HEAD_DIM}, "
        f"{torch.get_num_threads()} thread(s); medians of {settings.rounds} interleaved rounds. "
        "Peak extra: how far a fresh process grows beyond its inputs in a forward and a backward "
        "pass. A causal mask is built into SDPA; a window it takes only written out."
    )
    return measured


def save(
    console: Console, output: Path, model: ByteModel, about: dict[str, object],
    bits: dict[str, float], findings: list[Finding], measured: list[Measured],
) -> None:  # fmt: skip
    """Write the model in both forms, the numbers and the plot."""
    report.heading(console, "Saved")
    results = output / "results.json"
    files.save_results(results, about, bits, findings, measured)
    exported = export(model, output / "huggingface")
    saved = {
        "trained model": files.save_model(model, output),
        "as Hugging Face's": exported,
        "numbers": results,
    }
    if report.matplotlib_missing():
        console.print(
            "No plot: matplotlib is missing (pip install 'saccade[bench]').", markup=False
        )
    else:
        saved["plot"] = output / "comparison.png"
        report.save_plot(measured, saved["plot"], files.device_name())
    for what, path in saved.items():
        console.print(f"{what:>17}  {path}", markup=False, soft_wrap=True)
    console.print(
        "It is a Qwen2 of its size. With transformers (pip install 'saccade[transformers]') it "
        f'writes many texts at once: saccade generate {exported} "def " "class " '
        f"--temperature {TextSampling().temperature}",
        markup=False, soft_wrap=True,
    )  # fmt: skip


def assess(console: Console, bits: dict[str, float]) -> None:
    """End with status 1 if the model is not the best of all."""
    if any(bits[MODEL] >= value for who, value in bits.items() if who != MODEL):
        give_up(
            console,
            "The model predicts no better than counting: it has learned too little. "
            "Give it more time (leave out --quick, or raise --steps) or more text.",
            1,
        )
