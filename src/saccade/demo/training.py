"""Training: AdamW on random windows of the text, for so many steps or so many seconds."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from saccade.demo.model import ByteModel
from saccade.serving import capacity

WARM_UP = 0.05  # the share of the training in which the learning rate rises
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
    """One training step, seen from outside.

    Attributes:
        number: counted from 1.
        progress: how much of the training is done, from 0 to 1.
        bits_per_byte: the recent training loss.
        bytes_per_second: the recent speed.
        seconds: since training began.
    """

    number: int
    progress: float
    bits_per_byte: float
    bytes_per_second: float
    seconds: float


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
        share = 1 / min(number, SMOOTHING)
        recent = bits if number == 1 else recent + share * (bits - recent)
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
    """The learning rate as a share of the highest: up in a line, down in a half cosine."""
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

    return capacity.choose_threads(step)
