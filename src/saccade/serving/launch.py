"""Launch: the ranks of a command, started and watched by one process.

A rank that fails ends all: the others may wait for its messages in the middle of a step. Ctrl-C and
SIGTERM reach rank 0, which ends the others when it has answered what is under way.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

GRACE_SECONDS = 5.0  # that ranks have to say what they saw, once one has ended


def join(rank: int, count: int, seconds: float, store: Path | None = None) -> None:
    """Be one rank of a process group; on GPUs by NCCL, one each, else by gloo.

    Args:
        seconds: that a message may take.
        store: a file by which the ranks find each other; None: as torchrun's variables say.
    """
    more: dict[str, Any] = {}
    if store is not None:
        more = {"init_method": store.as_uri(), "rank": rank, "world_size": count}
    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank)))
        torch.cuda.set_device(device)
        more["device_id"] = device
    else:
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // count))
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, timeout=timedelta(seconds=seconds), **more)


def run_ranks(
    work: Callable[..., int], arguments: Sequence[Any], count: int, seconds: float
) -> int:
    """Start ranks, each of which joins a group and does some work, and wait until all have ended.

    Args:
        work: called with the arguments; gives an exit status. Other processes must find it by name.
        seconds: that a message between ranks may take.

    Returns:
        The exit status: 0 where all ended well.
    """
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="saccade-ranks-") as folder:
        store = Path(folder) / "store"
        ranks = [
            context.Process(
                target=_be_rank, args=(rank, count, seconds, store, work, arguments),
                name=f"rank {rank}", daemon=True,
            )
            for rank in range(count)
        ]  # fmt: skip
        for each in ranks:
            each.start()
        before = {
            signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),  # it is rank 0's as well
            signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: ranks[0].terminate()),
        }
        try:
            return _watch(ranks)
        finally:
            _end(ranks)
            for number, handler in before.items():
                signal.signal(number, handler)


def _watch(ranks: Sequence[Any]) -> int:
    """Wait for all ranks, or for the first that fails."""
    running = {each.sentinel: each for each in ranks}
    while running:
        for sentinel in wait(list(running)):
            ended = running.pop(int(sentinel) if isinstance(sentinel, int) else sentinel)
            ended.join()
            if ended.exitcode:
                left = list(running.values())
                deadline = time.monotonic() + GRACE_SECONDS
                for each in left:
                    each.join(max(0.0, deadline - time.monotonic()))
                _say(ended, sum(each.is_alive() for each in left))
                return ended.exitcode if ended.exitcode > 0 else 1
    return 0


def _say(ended: Any, left: int) -> None:
    code = ended.exitcode
    ending = f"with status {code}" if code > 0 else f"by {signal.Signals(-code).name}"
    others = f"; the {left} that still ran are ended" if left else ""
    print(f"saccade serve: {ended.name} ended {ending}{others}", file=sys.stderr, flush=True)


def _end(ranks: Sequence[Any]) -> None:
    """End what still runs."""
    for stop in ("terminate", "kill"):
        for each in ranks:
            if each.is_alive():
                getattr(each, stop)()
        deadline = time.monotonic() + GRACE_SECONDS
        for each in ranks:
            each.join(max(0.0, deadline - time.monotonic()))


def _be_rank(
    rank: int, count: int, seconds: float, store: Path, work: Callable[..., int],
    arguments: Sequence[Any],
) -> None:  # fmt: skip
    """A process of its own: join the others, work, and end with the status of that."""
    if rank:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # rank 0 says when it is over
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count))
    join(rank, count, seconds, store)
    status = work(*arguments)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # threads of messages that never came would keep it


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
