"""Threads: how many of them make training steps fastest here and now."""

from __future__ import annotations

import torch

from saccade.demo.model import ByteModel
from saccade.demo.training import next_byte_loss
from saccade.serving import threads


def choose_threads(model: ByteModel, batch: int) -> int:
    """Let PyTorch use as many threads as are fastest for a step; the model stays as it is."""
    tokens = torch.zeros(batch, model.shape.context, dtype=torch.long)

    def step() -> object:
        loss = next_byte_loss(model(tokens), tokens)
        return torch.autograd.grad(loss, list(model.parameters()))

    return threads.choose_threads(step)
