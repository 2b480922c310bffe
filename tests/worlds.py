"""Worlds of processes that talk by gloo, or by NCCL with a GPU each, one world after another."""

from __future__ import annotations

import importlib
import json
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import programs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore


@contextmanager
def joined(
    rank: int, world: int, folder: Path, backend: str = "gloo", seconds: float = 60
) -> Iterator[None]:
    """Be one rank of a world, whose processes meet in a file of the folder.

    seconds: that a message may take.
    """
    store = FileStore(str(folder / f"store.{world}"), world)
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        backend, store=store, rank=rank, world_size=world, timeout=timedelta(seconds=seconds)
    )
    yield
    dist.destroy_process_group()


def run_worlds(
    run_rank: Callable[[int, int, Path], None],
    folder: Path,
    worlds: Sequence[int],
    start_method: Literal["fork", "spawn"] = "fork",
    imports: Sequence[str] = (),
) -> int:
    """Run each world's ranks; the exit status says whether all processes ended well.

    imports: modules that each rank would import late, for seconds, were they not forked with them.
    start_method: "spawn" where ranks use GPUs, which a forked process may not.
    """
    torch.set_num_threads(1)
    for name in imports:
        importlib.import_module(name)
    context: Any = multiprocessing.get_context(start_method)
    failed = 0
    for world in worlds:
        ranks = [context.Process(target=run_rank, args=(r, world, folder)) for r in range(world)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
            failed += process.exitcode != 0
    return int(failed > 0)


def answers_of(
    program: Sequence[str], folder: Path, worlds: Sequence[int], seconds: float
) -> dict[tuple[int, int], dict[str, str]]:
    """What each rank of each world says of each case of a program: "" or what went wrong."""
    command = [sys.executable, "-W", "error::FutureWarning", program[0], str(folder), *program[1:]]
    programs.run(command, seconds, {**os.environ, "OMP_NUM_THREADS": "1"})
    return {
        (world, rank): json.loads((folder / f"found.{world}.{rank}").read_text("utf-8"))
        for world in worlds
        for rank in range(world)
    }
