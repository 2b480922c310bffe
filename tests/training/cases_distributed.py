"""Cases of a loop of one's own on two processes, by DDP and by FSDP2."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from tiny import Run, padded
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from trained import Trained, Weights, weights

Batch = dict[str, Tensor]
STEPS = 4


def batches(rank: int = 0, processes: int = 1) -> Iterator[Batch]:
    """What one of the processes is given, each step longer than the one before it."""
    for step in range(STEPS):
        whole = padded(8, 12 + 3 * step)
        yield {name: rows[rank::processes] for name, rows in whole.items()}


def looped(model: Any, before: Weights) -> Trained:
    """A loop on every process, which then leaves the others; losses are means over all."""
    try:
        return steps_of(model, before)
    finally:
        dist.destroy_process_group()


def steps_of(model: Any, before: Weights) -> Trained:
    """The steps themselves."""
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-3), []
    model.train()
    for batch in batches(dist.get_rank(), dist.get_world_size()):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen = loss.detach().clone()
        dist.all_reduce(seen)
        losses.append(seen.item() / dist.get_world_size())
    trained = Trained(losses, before, weights(getattr(model, "module", model)))
    dist.barrier()
    return trained


def started(run: Run) -> Any:
    """The model, on a process that knows the others."""
    dist.init_process_group("gloo")
    assert dist.get_world_size() == int(os.environ["WORLD_SIZE"]) == 2
    model = run.model()
    model.gradient_checkpointing_enable()
    return model


def ddp(run: Run) -> Trained:
    """The whole model on each process, gradients averaged."""
    model = started(run)
    return looped(DistributedDataParallel(model), weights(model))


def fsdp2(run: Run, **options: Any) -> Trained:
    """Weights, gradients and the optimiser's state shared out, a layer gathered when it works."""
    model = started(run)
    before = weights(model)
    for layer in model.model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return looped(model, before)


def fsdp2_mixed(run: Run) -> Trained:
    """The same, where layers work in bfloat16."""
    if run.exact:
        return fsdp2(run)
    return fsdp2(run, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
