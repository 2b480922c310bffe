"""Learn from text: bytes to train on and bytes held out, training, and what counting predicts."""

from __future__ import annotations

import hashlib
import math
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from saccade.demo.model import VOCABULARY, ByteModel
from saccade.serving import scheduler

# More than the full demo reads in its time; gathering it takes about a second.
MAX_BYTES = 6_000_000
# One huge file must not be most of the text.
MAX_FILE_BYTES = 200_000
MIN_BYTES = 8_192
HELD_OUT_FRACTION = 0.1
# From this many files on, whole files are held out; of fewer, the end of each.
MANY_FILES = 20

# Not the standard library, its tests, or tables of characters and help texts rather than code.
SKIPPED_FOLDERS = {
    "__pycache__", "dist-packages", "encodings", "idle_test", "lib2to3", "pydoc_data",
    "site-packages", "test", "tests",
}  # fmt: skip


class TextError(ValueError):
    """The text cannot be used; the message says why and what would do."""


@dataclass(frozen=True)
class Corpus:
    """A text, split into what is trained on and what is held out."""

    training: UInt8[Tensor, " bytes"]
    held_out: UInt8[Tensor, " held_out_bytes"]
    source: str  # where they come from, in words
    num_files: int
    split: str  # how the held-out bytes were chosen, in words


def gather(path: Path | None, context: int) -> Corpus:
    """Read the text and split it.

    Args:
        path: a file or a folder; None takes the sources of Python's standard library.
        context: bytes that the model reads at once; less held-out text than that is refused.
    """
    if path is None:
        root = Path(sysconfig.get_paths()["stdlib"])
        source, files = "Python's standard library", [*_standard_library(root)]
    else:
        source, (root, files) = str(path), _named(path)
    contents = _read(root, files)
    size = sum(map(len, contents))
    if not contents:
        advice = "give --text a file or folder" if path is None else "is it a folder of text files?"
        raise TextError(f"{source}: no text found there; {advice}")
    if size < MIN_BYTES or size * HELD_OUT_FRACTION <= context:
        least = max(MIN_BYTES, int(context / HELD_OUT_FRACTION) + 1)
        raise TextError(f"{source}: {size:,} bytes of text; the demo needs at least {least:,}")
    training, held_out, split = _split(contents)
    return Corpus(_tensor(training), _tensor(held_out), source, len(contents), split)


def _standard_library(root: Path) -> Iterator[Path]:
    for path in root.rglob("*.py"):
        folders = path.relative_to(root).parts[:-1]
        if not SKIPPED_FOLDERS.intersection(folders):
            yield path


def _named(path: Path) -> tuple[Path, list[Path]]:
    """The folder that names are relative to, and the files."""
    if not path.exists():
        raise TextError(f"{path}: no such file or folder")
    if path.is_file():
        return path.parent, [path]
    files = [file for file in path.rglob("*") if file.is_file()]
    return path, [
        file
        for file in files
        if not any(part.startswith(".") for part in file.relative_to(path).parts)
    ]


def _read(root: Path, files: list[Path]) -> list[bytes]:
    """The files' bytes up to the limits, in an order that is the same on every run."""
    # Ordered by a hash of their names, so that what the limit cuts off is no one part of the text.
    named = sorted((file.relative_to(root).as_posix(), file) for file in files)
    named.sort(key=lambda pair: hashlib.sha256(pair[0].encode()).digest())
    limit = MAX_BYTES if len(named) == 1 else MAX_FILE_BYTES
    contents, size = [], 0
    for _, file in named:
        if size >= MAX_BYTES:
            break
        try:
            with file.open("rb") as stream:
                content = stream.read(min(limit, MAX_BYTES - size))
        except OSError:
            continue  # a file that this user may not read is no reason to stop
        if content and b"\0" not in content:  # a NUL byte means that it is no text
            contents.append(content)
            size += len(content)
    return contents


def _split(contents: list[bytes]) -> tuple[bytes, bytes, str]:
    """Training bytes, held-out bytes, and how they were split."""
    every = round(1 / HELD_OUT_FRACTION)
    if len(contents) >= MANY_FILES:
        held_out = contents[::every]
        training = [content for index, content in enumerate(contents) if index % every]
        # Large files may fall to one side, so the fraction is only about right.
        return b"\n".join(training), b"\n".join(held_out), f"{len(held_out)} whole files"
    ends = [len(content) - int(len(content) * HELD_OUT_FRACTION) for content in contents]
    training = [content[:cut] for content, cut in zip(contents, ends, strict=True)]
    held_out = [content[cut:] for content, cut in zip(contents, ends, strict=True)]
    where = "the last tenth of it" if len(contents) == 1 else "the last tenth of each file"
    return b"\n".join(training), b"\n".join(held_out), where


def _tensor(content: bytes) -> UInt8[Tensor, " bytes"]:
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)


def spread_windows(
    content: UInt8[Tensor, " bytes"], context: int, wanted_bytes: int
) -> UInt8[Tensor, "windows window_bytes"]:
    """Windows of context + 1 bytes, evenly spread over the text and not overlapping.

    In each of them the last `context` bytes are to be predicted; all models are compared on these.
    """
    available = (len(content) - 1) // context
    count = max(1, min(available, wanted_bytes // context))
    starts = [index * available // count * context for index in range(count)]
    return torch.stack([content[start : start + context + 1] for start in starts])


# ---- training ------------------------------------------------------------------------------------

WARM_UP = 0.05  # the fraction of training in which the learning rate rises
FINAL_RATE = 0.05  # of the highest learning rate
MAX_GRADIENT = 1.0
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
# The loss shown is an average over about this many steps: single batches jump about.
SMOOTHING = 20


class TrainingSchedule(NamedTuple):
    """How long and how fast to learn; `steps` overrides `seconds`."""

    seconds: float
    steps: int | None
    batch: int
    learning_rate: float
    seed: int


class TrainingStep(NamedTuple):
    """The state of the training after a step."""

    number: int  # counted from 1
    progress: float  # how much of the training is done, from 0 to 1
    bits_per_byte: float  # the recent training loss
    bytes_per_second: float  # the recent speed
    seconds: float  # since training began


def train(
    model: ByteModel, content: UInt8[Tensor, " bytes"], schedule: TrainingSchedule
) -> Iterator[TrainingStep]:
    """Train the model in place, giving a report after each step."""
    optimizer = torch.optim.AdamW(
        parameter_groups(model), lr=schedule.learning_rate, betas=BETAS, fused=True
    )
    generator = torch.Generator().manual_seed(schedule.seed)
    model.train()
    begin, recent, progress, number = time.perf_counter(), math.nan, 0.0, 0
    while progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate * rate(progress)
        tokens = random_windows(content, model.shape.context, schedule.batch, generator)
        bits = learn(model, optimizer, tokens)
        number += 1
        recent = bits if number == 1 else recent + (bits - recent) / min(number, SMOOTHING)
        seconds = time.perf_counter() - begin
        progress = number / schedule.steps if schedule.steps else seconds / schedule.seconds
        speed = number * schedule.batch * model.shape.context / seconds
        yield TrainingStep(number, min(progress, 1.0), recent, speed, seconds)
    model.eval()


def learn(
    model: ByteModel, optimizer: torch.optim.Optimizer, tokens: Int[Tensor, "batch window_bytes"]
) -> float:
    """One step on one batch; the loss before it, in bits per byte."""
    loss = next_byte_loss(model(tokens[:, :-1]), tokens[:, 1:])
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_GRADIENT)
    optimizer.step()
    return loss.item() / math.log(2)


def next_byte_loss(
    logits: Float[Tensor, "batch rows byte"], targets: Int[Tensor, "batch rows"]
) -> Float[Tensor, ""]:
    """The mean negative log-likelihood, in nats."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def rate(progress: float) -> float:
    """The learning rate as a fraction of the highest: up in a line, down in a half cosine."""
    if progress < WARM_UP:
        return (progress + 0.01) / (WARM_UP + 0.01)
    fallen = (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP))) / 2
    return FINAL_RATE + (1 - FINAL_RATE) * fallen


def parameter_groups(model: ByteModel) -> list[dict]:
    """Matrices decay towards zero; the scales of the norms do not."""
    weights = list(model.parameters())
    return [
        {"params": [w for w in weights if w.dim() > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [w for w in weights if w.dim() <= 1], "weight_decay": 0.0},
    ]


def random_windows(
    content: UInt8[Tensor, " bytes"], context: int, batch: int, generator: torch.Generator
) -> Int[Tensor, "batch window_bytes"]:
    """Windows of context + 1 bytes from random places of the text."""
    starts = torch.randint(len(content) - context, (batch, 1), generator=generator)
    return content[starts + torch.arange(context + 1)].long()


@torch.no_grad()
def held_out_bits(
    model: ByteModel, windows: UInt8[Tensor, "windows window_bytes"], batch: int = 8
) -> float:
    """Bits per byte of the model on all but the first byte of each window."""
    total = 0.0
    for part in windows.long().split(batch):
        total += float(next_byte_loss(model(part[:, :-1]), part[:, 1:])) * len(part)
    return total / len(windows) / math.log(2)


def choose_training_threads(model: ByteModel, batch: int) -> int:
    """Let PyTorch use as many threads as are fastest for a step; the model stays as it is."""
    tokens = torch.zeros(batch, model.shape.context, dtype=torch.long)

    def step() -> object:
        loss = next_byte_loss(model(tokens), tokens)
        return torch.autograd.grad(loss, list(model.parameters()))

    return scheduler.choose_threads(step)


# ---- counting, which a model must beat -----------------------------------------------------------

# A pair's probability leans on the single byte's as if that had been seen this often.
PRIOR_COUNT = 4.0


def unigram(training: UInt8[Tensor, " bytes"]) -> Float[Tensor, " byte"]:
    """The probability of each byte: its count plus one, of all counts plus 256."""
    counts = torch.bincount(training.long(), minlength=VOCABULARY).double() + 1
    return counts / counts.sum()


def bigram(training: UInt8[Tensor, " bytes"]) -> Float[Tensor, "previous byte"]:
    """The probability of each byte after each other byte.

    A pair's count is smoothed towards the unigram probability:
    (count(a, b) + PRIOR_COUNT · p(b)) / (count(a) + PRIOR_COUNT).
    """
    pairs = training[:-1].long() * VOCABULARY + training[1:].long()
    counts = torch.bincount(pairs, minlength=VOCABULARY**2).double()
    counts = counts.view(VOCABULARY, VOCABULARY) + PRIOR_COUNT * unigram(training)
    return counts / counts.sum(1, keepdim=True)


def unigram_bits(
    training: UInt8[Tensor, " bytes"], windows: UInt8[Tensor, "windows window_bytes"]
) -> float:
    """Bits per byte of the unigram model on all but the first byte of each window."""
    return float(-unigram(training).log2()[windows[:, 1:].long()].mean())


def bigram_bits(
    training: UInt8[Tensor, " bytes"], windows: UInt8[Tensor, "windows window_bytes"]
) -> float:
    """Bits per byte of the bigram model on all but the first byte of each window."""
    previous, following = windows[:, :-1].long(), windows[:, 1:].long()
    return float(-bigram(training).log2()[previous, following].mean())
