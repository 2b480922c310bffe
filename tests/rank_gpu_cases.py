"""Cases of an engine whose model is shared out over two GPUs, by NCCL and by peer memory.

    python tests/rank_gpu_cases.py FOLDER

Each rank writes what went wrong, "" where nothing did, to a file. What ends a rank has a world of
its own.
"""

from __future__ import annotations

import os
import sys
import time
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


def graphs_give_the_tokens_of_eager_steps(rank: int, folder: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        torch.manual_seed(0)
        model = shared_out(
            tiny_models.sharpened(tiny_models.llama(**SIZES)).to(dtype).cuda().eval()
        )
        eager = engine_for(model, cuda_graphs=False, compile=True, merge_products=True)
        graphs = engine_for(model, cuda_graphs=True)
        for engine in (eager, graphs):
            assert BY_MEMORY in engine.explain(), engine.explain()
        assert "decode steps are CUDA graphs" in graphs.explain(), graphs.explain()
        assert tokens_of(rank, graphs) == tokens_of(rank, eager)
        if dtype == torch.float32:  # where rounding decides about no token
            plain = engine_for(model, cuda_graphs=False, compile=False)
            graphs = engine_for(model, cuda_graphs=True)
            assert "by nccl: nothing is compiled" in plain.explain(), plain.explain()
            assert tokens_of(rank, graphs) == tokens_of(rank, plain)


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
    torch.manual_seed(0)
    model = shared_out(
        tiny_models.sharpened(tiny_models.llama(**SIZES)).to(torch.bfloat16).cuda().eval()
    )
    engine = engine_for(model, cuda_graphs=True)
    engine._worker.device_seconds = 5  # as by rank_timeout
    if rank:
        heard, take = [0], engine._worker.step

        def step() -> bool:
            heard[0] += 1
            if heard[0] == 6:
                time.sleep(20)  # rank 0 waits for this part of a sum meanwhile, on its device
                os._exit(7)
            return take()

        engine._worker.step = step  # type: ignore[method-assign]
        engine.follow()
    begin = time.monotonic()
    refused(RuntimeError, ["ranks: rank 0 of 2 failed while", GONE], lambda: engine.generate(
        [[5, 6, 7]], max_new_tokens=40, stop_tokens=[]
    ))  # fmt: skip
    assert time.monotonic() - begin < 15, time.monotonic() - begin


CASES = {
    each.__name__: each for each in (graphs_give_the_tokens_of_eager_steps, sums_have_equal_bits)
}
ENDING = a_rank_dies_in_a_step


def run_rank(rank: int, world: int, folder: Path) -> None:
    tiny_models.SIZES["vocab_size"] = rank_cases.VOCABULARY
    with joined(rank, world, folder, "nccl"):
        rank_cases.run_cases(rank, folder, CASES)
        sys.stdout.flush()
        os._exit(0)  # graphs that hold messages may not outlive the group


def run_ending(rank: int, world: int, folder: Path) -> None:
    tiny_models.SIZES["vocab_size"] = rank_cases.VOCABULARY
    (folder / "ending").mkdir(exist_ok=True)
    with joined(rank, world, folder / "ending", "nccl"):
        rank_cases.run_cases(rank, folder, {ENDING.__name__: ENDING})
        sys.stdout.flush()
        os._exit(0)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    failed = run_worlds(run_rank, where, [rank_cases.WORLD], "spawn")
    run_worlds(run_ending, where, [rank_cases.WORLD], "spawn")  # a rank of it ends badly
    sys.exit(failed)
