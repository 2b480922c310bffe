"""Trained: what training leaves, and how far apart two trainings end."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

Weights = dict[str, Tensor]


class Trained(NamedTuple):
    """The losses of all steps, and the weights that were trained before and after them."""

    losses: list[float]
    before: Weights
    after: Weights


def weights(model: Any) -> Weights:
    """A copy of what is trained in a model, whole where processes share it."""
    found = {}
    for name, weight in model.named_parameters():
        if weight.requires_grad:
            whole = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
            found[name] = whole.detach().clone()
    return found


class Watch(transformers.TrainerCallback):
    """Keeps the weights as they are when a Trainer begins."""

    before: Weights

    def on_train_begin(self, *_: Any, model: Any, **__: Any) -> None:
        """Called by the Trainer."""
        self.before = weights(model)


def by_trainer(trainer: Any) -> Trained:
    """Train to the end by a Trainer or what derives from it."""
    watch = Watch()
    trainer.add_callback(watch)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return Trained(losses, watch.before, weights(trainer.model))


def distance(one: Weights, other: Weights) -> float:
    """The length of the difference of all weights together."""
    assert one.keys() == other.keys()
    parts = [(one[name].double() - other[name].double()).flatten() for name in one]
    return torch.linalg.vector_norm(torch.cat(parts)).item()
