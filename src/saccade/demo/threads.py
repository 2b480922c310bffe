"""Threads: how many of them make the demo fastest here and now.

PyTorch takes a thread for each core. Where other programs keep the cores busy, or two cores are
halves of one, its threads wait for one another at every operation and fewer of them are faster.
"""

from __future__ import annotations

import time

import torch

from saccade.demo.model import ByteModel
from saccade.demo.training import next_byte_loss

TRIALS = 2


def choose_threads(model: ByteModel, batch: int) -> int:
    """Let PyTorch use all its threads or half of them, as is faster for training steps."""
    every = torch.get_num_threads()
    counts = sorted({max(1, every // 2), every})
    seconds = {count: _seconds(model, batch, count) for count in counts}
    best = min(counts, key=lambda count: seconds[count])
    torch.set_num_threads(best)
    return best


def _seconds(model: ByteModel, batch: int, count: int) -> float:
    """The time of a forward and a backward pass, which leave the model as it is."""
    torch.set_num_threads(count)
    tokens = torch.zeros(batch, model.shape.context, dtype=torch.long)
    taken = []
    for _ in range(1 + TRIALS):  # the first one starts the threads
        begin = time.perf_counter()
        loss = next_byte_loss(model(tokens), tokens)
        torch.autograd.grad(loss, list(model.parameters()))
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
