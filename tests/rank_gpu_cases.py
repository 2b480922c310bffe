"""Cases of an engine whose model is shared out over two GPUs, by NCCL and by peer memory.

    python tests/rank_gpu_cases.py FOLDER

Each rank writes what went wrong, "" where nothing did, to a file. Worlds of two processes run side
by side, as most of their time is compilation; what ends a rank has one of its own.
"""

from __future__ import annotations

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import rank_cases
import tiny_models
import torch
import torch.distributed as dist
from rank_cases import FEW, GONE, refused, shared_out, with_ranks
from worlds import joined, run_worlds

import saccade
from saccade.serving import rank_sums

STARTED = float(os.environ.setdefault("RANK_CASES_STARTED", str(time.time())))  # of all worlds
BY_MEMORY = "go by memory that all of them read, in the order of ranks, others by nccl"
SIZES = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}


def engine_for(model: Any, **options: Any) -> saccade.Engine:
    # Steps of the same rows, whose products are rounded alike. One rank may compile longer.
    same = {"batch_sizes": [6], "run_ahead": True, "warm_up": False}
    few = {**FEW, **same, "rank_timeout": 60}
    return saccade.Engine(model, **{**few, **options})


def tokens_of(rank: int, engine: saccade.Engine) -> list[list[int]]:
    """What requests of all kinds get, on rank 0."""
    found: list[list[int]] = []

    def work() -> None:
        handles = [
            engine.submit(prompt, max_new_tokens=24, stop_tokens=[], **options)
            for prompt in ([5], [*range(3, 40)], [7, 8, 9])
            for options in ({}, *rank_cases.DRAWN)
        ]
        found.extend(handle.result().tokens for handle in handles)

    with_ranks(rank, engine, work)
    return found


def model_of(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    return shared_out(tiny_models.sharpened(tiny_models.llama(**SIZES)).to(dtype).cuda().eval())


def compared(rank: int, dtype: torch.dtype) -> None:
    """Tokens of graphs beside those of eager steps; in float32, where rounding decides about no
    token, beside those of layers that are not compiled, too."""
    model = model_of(dtype)
    ways = {
        "graphs": {"cuda_graphs": True},
        "eager": {"cuda_graphs": False, "compile": True, "merge_products": True},
    }
    if dtype == torch.float32:
        ways["plain"] = {"cuda_graphs": False, "compile": False}
    found = {}
    for name, options in ways.items():
        begin = time.monotonic()
        engine = engine_for(model, **options)
        said = engine.explain()
        by = "by nccl: nothing is compiled" if name == "plain" else BY_MEMORY
        assert by in said, said
        assert ("decode steps are CUDA graphs" in said) == (name == "graphs"), said
        made = time.monotonic() - begin
        found[name] = tokens_of(rank, engine)
        took = time.monotonic() - begin - made
        print(f"rank {rank}, {dtype}, {name}: made in {made:.1f} s, served in {took:.1f} s",
              flush=True)  # fmt: skip
    for name, tokens in found.items():
        assert tokens == found["graphs"], name


def graphs_give_the_tokens_of_eager_steps_in_float32(rank: int, folder: Path) -> None:
    compared(rank, torch.float32)


def graphs_give_the_tokens_of_eager_steps_in_bfloat16(rank: int, folder: Path) -> None:
    compared(rank, torch.bfloat16)


def sums_have_equal_bits(rank: int, folder: Path) -> None:
    """Of all sizes, one after the other in a graph that is replayed with other numbers."""
    [memory] = rank_sums._memory_of.values()
    for size in (8, 4096, 13 * 4096, memory.nbytes // 2):
        rows = torch.empty(size, dtype=torch.bfloat16, device="cuda")

        def added(rows: torch.Tensor = rows, size: int = size) -> list[torch.Tensor]:
            sums = []
            for number in range(3):
                part = memory.part((size,), torch.bfloat16)
                sums.append(memory.sum(part.copy_(rows * (number + 1))))
            return sums

        added()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            found = added()
        for turn in range(20):
            rows.normal_()
            graph.replay()
            for number, each in enumerate(found):
                parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
                dist.all_gather(parts, rows * (number + 1))
                assert torch.equal(each, parts[0] + parts[1]), (size, turn, number)


def a_rank_dies_in_a_step(rank: int, folder: Path) -> None:
    engine = engine_for(model_of(torch.bfloat16), cuda_graphs=True)
    engine._worker.device_seconds = 5  # as by rank_timeout
    if rank:
        heard, take = [0], engine._worker.step

        def step() -> bool:
            heard[0] += 1
            if heard[0] == 6:
                time.sleep(10)  # rank 0 waits for this part of a sum meanwhile, on its device
                os._exit(7)
            return take()

        engine._worker.step = step  # type: ignore[method-assign]
        engine.follow()
    begin = time.monotonic()
    refused(RuntimeError, ["ranks: rank 0 of 2 failed while", GONE], lambda: engine.generate(
        [[5, 6, 7]], max_new_tokens=40, stop_tokens=[]
    ))  # fmt: skip
    assert time.monotonic() - begin < 15, time.monotonic() - begin


WORLDS: dict[str, list[Callable[[int, Path], None]]] = {
    "float32": [graphs_give_the_tokens_of_eager_steps_in_float32, sums_have_equal_bits],
    "bfloat16": [graphs_give_the_tokens_of_eager_steps_in_bfloat16],
    "ending": [a_rank_dies_in_a_step],
}


def run_rank(name: str, rank: int, world: int, folder: Path) -> None:
    tiny_models.SIZES["vocab_size"] = rank_cases.VOCABULARY
    with joined(rank, world, folder, "nccl"):
        print(f"{name}: rank {rank} joined after {time.time() - STARTED:.1f} s", flush=True)
        rank_cases.run_cases(rank, folder, {each.__name__: each for each in WORLDS[name]})
        print(f"{name}: rank {rank} done after {time.time() - STARTED:.1f} s", flush=True)
        os._exit(0)  # graphs that hold messages may not outlive the group


def run_world(name: str, folder: Path) -> int:
    (folder / name).mkdir(parents=True, exist_ok=True)
    run = functools.partial(run_rank, name)
    failed = run_worlds(run, folder / name, [rank_cases.WORLD], "spawn")
    return 0 if name == "ending" else failed


def answers(folder: Path) -> list[str]:
    """What went wrong, by world and rank; the rank that ends says nothing."""
    wrong = []
    for name, cases in WORLDS.items():
        for rank in range(rank_cases.WORLD - (name == "ending")):
            path = folder / name / f"found.{rank}"
            found = json.loads(path.read_text("utf-8")) if path.exists() else {}
            for each in cases:
                said = found.get(each.__name__, "was not reached")
                if said:
                    wrong.append(f"{name}, rank {rank}, {each.__name__}: {said}")
    return wrong


if __name__ == "__main__":
    where = Path(sys.argv[1])
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")  # of each of six processes
    with ThreadPoolExecutor(len(WORLDS)) as pool:
        failed = sum(pool.map(run_world, WORLDS, [where] * len(WORLDS)))
    wrong = answers(where)
    print("\n".join(wrong) or "all cases are as they should be")
    sys.exit(bool(failed or wrong))
