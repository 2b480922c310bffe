"""Threads: how many of them make some work fastest here and now.

PyTorch takes a thread for each core. Where other programs keep the cores busy, or two cores are
halves of one, its threads wait for one another at every operation and fewer of them are faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

TRIALS = 2


def choose_threads(work: Callable[[], object]) -> int:
    """Let PyTorch use all its threads, half of them or one, as is faster for some work."""
    every = torch.get_num_threads()
    counts = sorted({1, max(1, every // 2), every})
    seconds = {count: _seconds(work, count) for count in counts}
    best = min(counts, key=lambda count: seconds[count])
    torch.set_num_threads(best)
    return best


def _seconds(work: Callable[[], object], count: int) -> float:
    torch.set_num_threads(count)
    taken = []
    for _ in range(1 + TRIALS):  # the first one starts the threads
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
