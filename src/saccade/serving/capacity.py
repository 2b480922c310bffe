"""Capacity: how many pages an engine has on a machine, and how many threads.

PyTorch takes a thread for each core. Where other programs keep the cores busy, or two cores are
halves of one, its threads wait for one another at every operation and fewer of them are faster.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from saccade import PagedCache
from saccade.serving.decoding import check_number
from saccade.serving.model import LayerShape, PackedModel
from saccade.serving.scheduler import most_pages

MOST_MEMORY = 2**30  # unasked, on a CPU
SHARE_OF_FREE = 0.8  # of a GPU's memory, unasked
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)  # beside these lie scales, in float32


class Capacity(NamedTuple):
    """What the caller chose; None where the engine chooses."""

    num_pages: int | None
    memory: int | None
    page_size: int
    page_dtype: torch.dtype | None
    host_pages: int | None


def make_capacity(
    capacity: Capacity, model: PackedModel, *, sequences: int, longest: int, rows: int, swaps: bool
) -> PagedCache:
    """A cache with as many pages for each group of layers as it can use and the machine has.

    Args:
        sequences, longest: how many run at once, and the tokens of the longest.
        rows: of one step at most. swaps: whether sequences are swapped out.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_number("page_size", capacity.page_size, least=1)
    dtype = model.shape.dtype if capacity.page_dtype is None else capacity.page_dtype
    windows = model.windows
    useful = {
        window: sequences * most_pages(longest, window, capacity.page_size, rows)
        for window in dict.fromkeys(windows)
    }
    num_pages = _num_pages(capacity, model, dtype, useful)
    host_pages: int | dict[int | None, int] = num_pages if swaps else 0
    if capacity.host_pages is not None:
        host_pages = capacity.host_pages
    shape = model.shape
    return PagedCache(
        num_pages, capacity.page_size, windows=windows, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, value_dim=shape.value_dim, dtype=dtype, device=model.device,
        host_pages=host_pages,
    )  # fmt: skip


def _num_pages(
    capacity: Capacity, model: PackedModel, dtype: Any, useful: dict[int | None, int]
) -> dict[int | None, int]:
    """Pages for each group of layers, in proportion to what it can use."""
    if capacity.num_pages is not None:
        if capacity.memory is not None:
            raise ValueError("memory: got it beside num_pages, takes one of the two")
        pages = capacity.num_pages
        check_number("num_pages", pages, least=1)
        return {
            window: pages if window is None else min(pages, most) for window, most in useful.items()
        }
    of_page = {
        window: page_bytes(model.shape, dtype, capacity.page_size, model.windows.count(window))
        for window in useful
    }
    all_useful = sum(useful[window] * of_page[window] for window in useful)
    memory = capacity.memory
    if memory is None:
        memory = min(all_useful, _free_memory(model.device))
    else:
        check_number("memory", memory, least=0)
        least = sum(of_page.values())
        if memory < least:
            raise ValueError(f"memory: got {memory} bytes, takes at least a page's {least}")
    return {window: max(1, most * memory // all_useful) for window, most in useful.items()}


def page_bytes(shape: LayerShape, dtype: torch.dtype, page_size: int, layers: int) -> int:
    """What one page takes in all layers, with the scales of eight bits."""
    scales = 2 * 4 if dtype in EIGHT_BITS else 0
    of_head = (shape.head_dim + shape.value_dim) * dtype.itemsize + scales
    return layers * shape.kv_heads * page_size * of_head


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE)
    return MOST_MEMORY


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
