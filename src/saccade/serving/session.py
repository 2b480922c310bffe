"""Session: one run of `saccade generate`: load, serve, show, write."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from rich.console import Console

from saccade.serving import display
from saccade.serving.completion import Completion, Generated
from saccade.serving.engine import Engine
from saccade.serving.threads import choose_threads


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
    rows = max(512, sizes["max_sequences"])
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
        console.print(display.text_panel(number, prompt, result))
    console.print(display.requests_table(results))
    console.print(display.summary(engine.statistics()))


def load(folder: Path, device: str | None) -> tuple[Any, Any]:
    """The model and the tokenizer of a folder; nothing is downloaded, and no code of it runs.

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
    where = _device(device)
    if not (folder / "config.json").is_file():
        raise ValueError(f"{folder} holds no config.json; a model's folder has one")
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model: Any = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True, dtype="auto")
    return model.to(where), tokenizer


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
    shown = display.Watch(console, completions, most_tokens * len(completions))
    with shown.live:
        next_look = 0.0
        while engine.step():
            if perf_counter() >= next_look:
                shown.update(engine.statistics())
                next_look = perf_counter() + 1 / display.REFRESHES


def write(path: Path, prompts: Sequence[str], results: Sequence[Generated]) -> None:
    """One JSON object a line for each request."""
    lines = [
        json.dumps({"prompt": prompt, **asdict(result)}, ensure_ascii=False)
        for prompt, result in zip(prompts, results, strict=True)
    ]
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
