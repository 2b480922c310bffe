"""Time training steps of small models on a CPU under Saccade's attention and under PyTorch's.

Usage: python tools/cpu_steps.py [--case GLOB] [--rounds N] [--json FILE]

--help says more. Needs what `saccade bench` needs, and transformers.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import saccade.integrations.transformers as integration
from saccade.bench.case import CAUSAL, BenchCase
from saccade.bench.results import Result, append, record
from saccade.bench.timing import Timing, orders

HELP = """\
Time training steps (forward, backward, optimizer) of small models with random weights, under
Saccade's attention and under sdpa, or transformers' eager attention where sdpa cannot serve.
"""
EPILOG = """\
example: OMP_NUM_THREADS=1 python tools/cpu_steps.py --json out/steps.jsonl

Both take turns in one process, the order changing. A ratio is the median, over rounds, of
Saccade's time over the other's in the same round. From the same weights on the
same tokens, the gradients of the first layer's weights of queries must agree (the loss of a new
model hardly knows of attention), except under dropout, where the two draw other numbers.

exit status: 0 if gradients agree and no ratio is above --limit, else 1.
"""
VOCABULARY, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 1024, 4, 2, 64, 2
COMPARED_STEPS, CLOSE = 3, 1e-4  # CLOSE: the relative distance of gradients in float32


class Work(NamedTuple):
    """What a step trains on."""

    name: str
    batch: int
    length: int
    padded: bool = False
    dropout: float = 0.0
    softcap: float | None = None

    @property
    def peer(self) -> str:
        """The attention to compare with: sdpa knows no softcap."""
        return "sdpa" if self.softcap is None else "eager"


WORKS = (
    Work("padded-16x32", 16, 32, padded=True),
    Work("padded-64x32", 64, 32, padded=True),
    Work("padded-8x128", 8, 128, padded=True),
    Work("dropout-4x256", 4, 256, dropout=0.1),
    Work("softcap-4x256", 4, 256, softcap=50.0),
)


class Compared(NamedTuple):
    """The outcome of one case in one mode."""

    name: str
    mode: str
    peer: str
    ratios: list[float]
    distance: float | None  # of gradients; None under dropout
    results: list[Result]


def model_of(work: Work, attention: str) -> Any:
    """A model with the same random weights for every attention."""
    shared = {
        "vocab_size": VOCABULARY, "hidden_size": HEADS * HEAD_DIM, "intermediate_size": 704,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "head_dim": HEAD_DIM,
        "num_key_value_heads": KV_HEADS, "max_position_embeddings": work.length,
        "attention_dropout": work.dropout,
    }  # fmt: skip
    if work.softcap is None:
        config: Any = transformers.LlamaConfig(**shared)
    else:
        config = transformers.Gemma2Config(
            **shared, attn_logit_softcapping=work.softcap, query_pre_attn_scalar=HEAD_DIM
        )
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    return made.train()


def batch_of(work: Work) -> dict[str, torch.Tensor]:
    """Random tokens; padded on the right from half of the length on."""
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(3, VOCABULARY, (work.batch, work.length), generator=generator)
    batch = {"input_ids": tokens, "labels": tokens}
    if work.padded:
        shortest = (work.batch,)
        lengths = torch.randint(work.length // 2, work.length + 1, shortest, generator=generator)
        real = torch.arange(work.length) < lengths.unsqueeze(1)
        batch["attention_mask"] = real.long()
        batch["labels"] = tokens.masked_fill(~real, -100)
    return batch


def step_of(
    work: Work, attention: str, compiled: bool, seen: list[torch.Tensor]
) -> Callable[[], float]:
    """One step, which gives its loss; the first one adds the gradient of a weight to `seen`."""
    model, batch = model_of(work, attention), batch_of(work)
    forward = torch.compile(model, dynamic=False) if compiled else model
    queries = model.model.layers[0].self_attn.q_proj.weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)

    def step() -> float:
        loss = forward(**batch, use_cache=False).loss
        loss.backward()
        if not seen:
            seen.append(queries.grad.clone())
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return float(loss.detach())

    return step


def compare(work: Work, mode: str, rounds: int, on_round: Callable[[], None]) -> Compared:
    """Train by both in turns."""
    torch.compiler.reset()
    seen: dict[str, list[torch.Tensor]] = {work.peer: [], "saccade": []}
    steps = {who: step_of(work, who, mode == "compiled", kept) for who, kept in seen.items()}
    losses = {who: [step() for _ in range(COMPARED_STEPS)] for who, step in steps.items()}
    taken: dict[str, list[float]] = {who: [] for who in steps}
    turns = orders(list(steps))
    for _ in range(rounds):
        for who in next(turns):
            start = time.perf_counter()
            steps[who]()
            taken[who].append(time.perf_counter() - start)
        on_round()
    ratios = [a / b for a, b in zip(taken["saccade"], taken[work.peer], strict=True)]
    own, beside = seen["saccade"][0], seen[work.peer][0]
    distance = None if work.dropout else float((own - beside).norm() / beside.norm())
    name, rows = f"cpu-step-{work.name}", work.length
    case = BenchCase(
        name, work.batch, HEADS, KV_HEADS, rows, rows, HEAD_DIM, HEAD_DIM, "float32", CAUSAL
    )
    names = {"saccade": "saccade/cpu"}
    timings = {names.get(who, who): Timing.of(samples) for who, samples in taken.items()}
    about = {"layers": LAYERS, "padded": work.padded, "dropout": work.dropout,
             "softcap": work.softcap}  # fmt: skip
    of_pass = "training step" + (", compiled" if mode == "compiled" else "")
    by_who = {names.get(who, who): numbers for who, numbers in losses.items()}
    results = [
        dataclasses.replace(result, case=result.case | about, losses=by_who[result.who])
        for result in record(case, of_pass, timings, torch.device("cpu"))
    ]
    return Compared(work.name, mode, work.peer, ratios, distance, results)


def table_of(found: list[Compared]) -> Table:
    """A row for each case and mode."""
    table = Table(caption="ms of a step; ratio: the median over rounds; Δ: relative, of gradients")
    for name in ("case", "mode", "beside", "ms", "its", "ratio", "min–max", "Δ"):
        table.add_column(name, no_wrap=True)
    for one in found:
        times = {result.who: f"{result.median_ms:.1f}" for result in one.results}
        distance = "–" if one.distance is None else f"{one.distance:.0e}"
        ratios = statistics.median(one.ratios), min(one.ratios), max(one.ratios)
        table.add_row(
            one.name, one.mode, one.peer, times["saccade/cpu"], times[one.peer],
            f"{ratios[0]:.2f}", f"{ratios[1]:.2f}–{ratios[2]:.2f}", distance,
        )  # fmt: skip
    return table


def parser() -> argparse.ArgumentParser:
    """The command line."""
    raw = argparse.RawDescriptionHelpFormatter
    made = argparse.ArgumentParser(description=HELP, epilog=EPILOG, formatter_class=raw)
    made.add_argument("--case", default="*", metavar="GLOB", help="cases by name (all)")
    made.add_argument("--mode", choices=("eager", "compiled"), help="one of both (both)")
    made.add_argument("--rounds", type=int, default=25, help="turns of each (25)")
    made.add_argument("--limit", type=float, default=1.10, help="the largest ratio (1.10)")
    made.add_argument("--json", type=Path, metavar="FILE", help="append results to a file")
    return made


def main() -> int:
    """Measure what is asked for and print it."""
    asked = parser().parse_args()
    if asked.rounds < 1:
        parser().error(f"--rounds: got {asked.rounds}, takes 1 or more")
    works = [work for work in WORKS if fnmatchcase(work.name, asked.case)]
    if not works:
        names = ", ".join(work.name for work in WORKS)
        parser().error(f"--case: got {asked.case!r}, takes a pattern for {names}")
    modes = [asked.mode] if asked.mode else ["eager", "compiled"]
    integration.register()
    console, found = Console(), []
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, TimeElapsedColumn(), console=console) as bar:
        total = bar.add_task("", total=len(works) * len(modes) * asked.rounds)
        for work in works:
            for mode in modes:
                bar.update(total, description=f"{work.name}, {mode}")
                found.append(compare(work, mode, asked.rounds, lambda: bar.advance(total)))
                if asked.json:
                    append(asked.json, found[-1].results)
    console.print(table_of(found))
    agree = all(one.distance is None or one.distance <= CLOSE for one in found)
    if not agree:
        console.print("gradients differ")
    fast = all(statistics.median(one.ratios) <= asked.limit for one in found)
    return 0 if agree and fast else 1


if __name__ == "__main__":
    sys.exit(main())
