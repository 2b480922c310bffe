"""Tiny models train with sequences sharded over processes, forked one world after another.

    python tests/sharded_models.py FOLDER WORLD [WORLD ...]
    python tests/sharded_models.py FOLDER --compiled  # on one process, and in graphs on two

A world of one process trains as transformers does; each rank writes losses and what its weights
became, by model, to a file.
"""

from __future__ import annotations

import copy
import json
import pickle
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import tiny_models
import torch
import torch.distributed as dist
from worlds import joined, run_worlds

from saccade.integrations.transformers import register, shard_sequences

STEPS = 3
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "dropped": {"attention_dropout": 0.3},
    "longrope": {"rope_parameters": LONGROPE},
    "dynamic": {"rope_parameters": DYNAMIC, "max_position_embeddings": 24},
}
MODELS = (
    "llama", "gpt_oss", "packed", "unsummed", "dropped", "thawed", "counted", "longrope", "dynamic",
    "jumping", "packed beside a mask", "packed by offsets",
)  # fmt: skip
GRAPHS = (
    "layers of gemma2", "inside of llama", "whole of llama", "whole of gemma2", "told of llama",
)  # fmt: skip


def batches(model: str) -> list[dict[str, Any]]:
    """A batch for each step, of lengths that ranks do not divide; some labels are ignored."""
    generator = torch.Generator().manual_seed(5)
    found: list[dict[str, Any]] = []
    for step in range(STEPS):
        shape = (1, 41) if model.startswith("packed") else (2, 37 + step % 2)
        tokens = torch.randint(3, tiny_models.VOCABULARY, shape, generator=generator)
        labels = tokens.masked_fill(torch.rand(shape, generator=generator) < 0.2, -100)
        batch: dict[str, Any] = {"input_ids": tokens, "labels": labels}
        if model.startswith("packed"):
            parts = [torch.arange(size) for size in (7, 20 + step, 14 - step)]
            batch["position_ids"] = torch.cat(parts)[None]
        if model == "packed beside a mask":  # transformers then keeps none apart
            batch["attention_mask"] = torch.ones_like(tokens)
        if model == "packed by offsets":  # by a collator for flash attention that counts nothing
            del batch["position_ids"]
            ends = torch.tensor([0, 7, 27 + step, 41], dtype=torch.int32)
            batch |= {"cu_seq_lens_q": ends, "cu_seq_lens_k": ends.clone()}
        if model == "jumping":
            batch["position_ids"] = torch.cat([torch.arange(4, 14), torch.arange(3, 30 + step % 2)])
            batch["position_ids"] = batch["position_ids"][None]
        if model == "counted":  # as transformers' Trainer counts several batches before a step
            batch["num_items_in_batch"] = (labels != -100).sum() + 17 if step else 60
        if model.startswith("told"):  # what makes no difference
            batch["attention_mask"] = torch.ones_like(tokens)
            if step:
                batch["position_ids"] = torch.arange(shape[1])[None]
        found.append(batch)
    return found


def compile_inside(model: Any, part: str) -> None:
    """Let graphs follow a model's layers, all that is inside of its loss, or all of it."""
    torch.compiler.reset()
    parts = {"layers": model.model.layers, "inside": [model.model]}
    for module in parts.get(part, [model]):
        module.compile(backend="aot_eager", fullgraph=True)


def trained(name: str, world: int) -> dict[str, Any]:
    """Losses and sums of weights of a model, "part of model" in graphs."""
    torch.manual_seed(0)
    part, _, of = name.rpartition(" of ")
    make = getattr(tiny_models, of, tiny_models.llama)
    model: Any = make(**OPTIONS.get(name, {})).float()
    if world > 1:
        group = dist.group.WORLD
        model.requires_grad_(name != "thawed")
        model = shard_sequences(model, group, reduce_gradients=name != "unsummed")
        model.requires_grad_(True)
        if part:
            compile_inside(model, part)
    else:
        register()
        model.set_attn_implementation("saccade")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)  # unlike Adam it knows the scale
    model.train()
    losses = []
    for batch in batches(name):
        loss = model(**batch, use_cache=False).loss
        loss.backward()
        if world > 1 and name == "unsummed":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    sums = [parameter.double().sum().item() for parameter in model.parameters()]
    return {"losses": losses, "weights": sums}


def refusals() -> dict[str, str]:
    """What is said to batches that cannot be sharded."""
    model: Any = shard_sequences(tiny_models.llama(), dist.group.WORLD)
    tokens, found = torch.ones(2, 8, dtype=torch.long), {}
    for name, options in {
        "padding": {"attention_mask": tokens.clone().index_fill(1, torch.tensor([0]), 0)},
        "embeddings": {"inputs_embeds": torch.zeros(2, 8, 64)},
        "labels": {"labels": tokens[:, :4]},
        "positions": {"position_ids": tokens},
        "batch": {"input_ids": tokens * (1 + dist.get_rank())},
        "other labels": {"labels": tokens * (1 + dist.get_rank())},
        "few": {"input_ids": tokens[:, :1]},
        "items": {"labels": tokens, "num_items_in_batch": "all"},
        "other items": {"labels": tokens, "num_items_in_batch": 14 + dist.get_rank()},
        "kinds": {"token_type_ids": tokens},
        "offsets": {"cu_seq_lens_q": torch.tensor([0, 8]), "cu_seq_lens_k": torch.tensor([0, 4])},
        "routers": {"output_router_logits": True},
    }.items():
        try:
            model(**{"input_ids": tokens, **options})
        except (TypeError, ValueError) as error:
            found[name] = str(error)
    model = shard_sequences(tiny_models.gpt_oss(), dist.group.WORLD)
    model.config.output_router_logits = True
    try:
        model(input_ids=tokens)
    except ValueError as error:
        found["routers of a config"] = str(error)
    model(input_ids=tokens, output_router_logits=False)
    model = tiny_models.llama()
    model.register_module("mixer", torch.nn.Conv1d(4, 4, 3))
    for name, refused in {"convolution": model, "chunks": tiny_models.llama4()}.items():
        try:
            shard_sequences(refused, dist.group.WORLD)
        except ValueError as error:
            found[name] = str(error)
    sharded = shard_sequences(tiny_models.llama(), dist.group.WORLD)
    calls: dict[str, Any] = {
        "module": lambda: shard_sequences(torch.nn.Linear(2, 2), dist.group.WORLD),
        "class": lambda: shard_sequences(torch.nn.Linear, dist.group.WORLD),  # type: ignore[type-var]
        "copy": lambda: copy.deepcopy(sharded),
        "pickle": lambda: pickle.dumps(sharded),
    }
    for name, call in calls.items():
        try:
            call()
        except TypeError as error:
            found[name] = str(error)
    return found


def tuples_differ() -> bool:
    """Whether results are other ones where they are asked for as a tuple."""
    model: Any = shard_sequences(tiny_models.llama().eval(), dist.group.WORLD)
    tokens = torch.arange(24).view(2, 12)
    loss, logits = model(input_ids=tokens, labels=tokens, return_dict=False)
    named = model(input_ids=tokens, labels=tokens)
    return not (torch.equal(loss, named.loss) and torch.equal(logits, named.logits))


def refusals_in_graphs() -> dict[str, str]:
    """What is said to batches that a graph of a whole model cannot be of."""
    torch.compiler.reset()
    model: Any = shard_sequences(tiny_models.llama(), dist.group.WORLD)
    model.compile(backend="aot_eager", fullgraph=True)
    tokens, found = torch.ones(2, 8, dtype=torch.long), {}
    model(input_ids=tokens, attention_mask=tokens)
    for name, options in {
        "padding": {"attention_mask": tokens.clone().index_fill(1, torch.tensor([0]), 0)},
        "packed": {"position_ids": torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])},
    }.items():
        try:
            model(input_ids=tokens, **options)
        except ValueError as error:
            found[name] = str(error)
    return found


def run_rank(rank: int, world: int, folder: Path) -> None:
    models = MODELS if world < 4 else ("packed",)
    with joined(rank, world, folder) if world > 1 else nullcontext():
        said: dict[str, Any] = {name: trained(name, world) for name in models}
        if world > 1:
            said |= {"refusals": refusals(), "tuples differ": tuples_differ()}
    (folder / f"trained.{world}.{rank}").write_text(json.dumps(said), encoding="utf-8")


def run_graphs(rank: int, world: int, folder: Path) -> None:
    with joined(rank, world, folder) if world > 1 else nullcontext():
        said: dict[str, Any] = {name: trained(name, world) for name in GRAPHS}
        if world > 1:
            said["refusals"] = refusals_in_graphs()
    (folder / f"trained.{world}.{rank}").write_text(json.dumps(said), encoding="utf-8")


if __name__ == "__main__":
    where, imports = Path(sys.argv[1]), ("transformers.models.llama.modeling_llama",)
    if sys.argv[2] == "--compiled":
        sys.exit(run_worlds(run_graphs, where, [1, 2], imports=imports))
    sys.exit(run_worlds(run_rank, where, [int(world) for world in sys.argv[2:]], imports=imports))
