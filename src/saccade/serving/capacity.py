"""Capacity: how many pages and states an engine's cache has, on the device and on the host.

It follows from what the model keeps of a token, from what requests can use, and from the memory
that is free, unless the caller says.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from saccade import PagedCache
from saccade.serving.decoding import check_number

if TYPE_CHECKING:
    from saccade.serving.model import LayerShape, PackedModel
    from saccade.serving.ranks import Ranks

MOST_MEMORY = 2**30  # unasked, on a CPU
PART_OF_FREE = 0.8  # of a GPU's memory, unasked
MOST_ON_HOST, PART_OF_HOST = 4 * 2**30, 0.25  # of the host's free memory, unasked
STATES_OF_EACH = 2  # sequence that runs: its own, and one that is kept for others
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)  # beside these lie scales, in float32


class Capacity(NamedTuple):
    """What the caller chose; None where the engine chooses."""

    num_pages: int | None
    memory: int | None
    page_size: int
    page_dtype: torch.dtype | None
    host_pages: int | None


def make_capacity(
    capacity: Capacity, model: PackedModel, *, sequences: int, longest: int, rows: int, swaps: bool,
    ranks: Ranks | None = None,
) -> PagedCache:  # fmt: skip
    """A cache with as many pages for each group of layers as it can use and the machine has.

    Args:
        sequences, longest: how many run at once, and the tokens of the longest.
        rows: of one step at most. swaps: whether sequences are swapped out.
        ranks: that part the model; all have as many pages as the one with least memory.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_number("page_size", capacity.page_size, least=1)
    dtype = read_page_dtype(capacity.page_dtype, model.dtype)
    windows = model.windows
    useful = {
        window: sequences * most_pages(longest, window, capacity.page_size, rows)
        for window in dict.fromkeys(windows)
    }
    free, host = _free_memory(model.device), _host_memory(1 if ranks is None else ranks.count)
    if ranks is not None:
        free, host = map(min, zip(*ranks.gather((free, host)), strict=True))
    of_page, of_states = _bytes_of(model, dtype, capacity.page_size, useful)
    num_pages, num_states = _num_pages(capacity, of_page, of_states, useful, sequences, free)
    host_states = -(-num_states // STATES_OF_EACH)
    host_pages: int | dict[int | None, int] = 0
    if capacity.host_pages is not None:
        check_number("host_pages", capacity.host_pages, least=0)
        host_pages = capacity.host_pages
    elif swaps:
        wanted = host_states * of_states + sum(
            pages * of_page[window] for window, pages in num_pages.items()
        )
        part = min(1.0, host / max(1, wanted))
        host_pages = {window: max(1, int(pages * part)) for window, pages in num_pages.items()}
        host_states = max(1, int(host_states * part)) if host_states else 0
    taken = Taken(
        num_states * of_states + sum(num_pages[window] * of_page[window] for window in num_pages),
        0 if capacity.host_pages is None
        else host_states * of_states + capacity.host_pages * sum(of_page.values()),
    )  # fmt: skip
    try:
        if max(taken) >= 2**63:
            raise MemoryError
        return PagedCache(
            num_pages, capacity.page_size, dtype=dtype, device=model.device, host_pages=host_pages,
            num_states=num_states, host_states=host_states if host_pages else 0,
            **model.page_sizes(),
        )  # fmt: skip
    except (RuntimeError, MemoryError, OverflowError) as error:  # of the allocator
        raise refused_memory(capacity, taken, model.device) from error


class Taken(NamedTuple):
    """Bytes of pages and states on the device, and on the host if they were asked for."""

    device: int
    host: int


def refused_memory(capacity: Capacity, taken: Taken, device: torch.device) -> ValueError:
    """The error for pages that memory has no room for: by the argument that asks for the most."""
    on_host = available_memory()
    left = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else on_host
    name, got, bytes_asked = "memory", capacity.memory, taken.device
    if capacity.num_pages is not None:
        name, got = "num_pages", capacity.num_pages
    if capacity.host_pages is not None and (left is None or taken.device <= left):
        name, got, bytes_asked, left = "host_pages", capacity.host_pages, taken.host, on_host
    has = "what memory has room for" if left is None else f"what fits into the {left} that are left"
    return ValueError(f"{name}: got {got}, which asks for {bytes_asked} bytes, takes {has}")


def read_page_dtype(asked: object, of_model: torch.dtype) -> torch.dtype:
    """The dtype of pages: the model's own, or eight bits.

    Raises:
        TypeError, ValueError: naming page_dtype, what it got and what it takes.
    """
    if asked is None:
        return of_model
    takes = ", ".join(map(str, dict.fromkeys((of_model, *EIGHT_BITS))))
    if not isinstance(asked, torch.dtype):
        raise TypeError(f"page_dtype: got {asked!r}, takes a torch.dtype: {takes}")
    if asked not in (of_model, *EIGHT_BITS):
        raise ValueError(f"page_dtype: got {asked} for a model of {of_model}, takes {takes}")
    return asked


def _bytes_of(
    model: PackedModel, dtype: Any, page_size: int, windows: Iterable[int | None]
) -> tuple[dict[int | None, int], int]:
    """What a page takes in all layers of each window, and the states of a sequence."""
    of_page = {
        window: sum(
            page_bytes(layer, dtype, page_size) for layer in model.layers if layer.window == window
        )
        for window in windows
    }
    return of_page, sum(state.bytes for state in model.states)


def _num_pages(
    capacity: Capacity, of_page: dict[int | None, int], of_states: int,
    useful: dict[int | None, int], sequences: int, free: int,
) -> tuple[dict[int | None, int], int]:  # fmt: skip
    """Pages for each group of layers, and states, in proportion to what they can use.

    of_page, of_states: bytes, see `_bytes_of`. free: bytes that may be taken unasked.
    """
    num_states = STATES_OF_EACH * sequences
    if capacity.num_pages is not None:
        if capacity.memory is not None:
            raise ValueError("memory: got it beside num_pages, takes one of the two")
        asked = capacity.num_pages
        check_number("num_pages", asked, least=1)
        pages = {
            window: asked if window is None else min(asked, most) for window, most in useful.items()
        }
        return pages, num_states
    all_useful = sum(useful[window] * of_page[window] for window in useful) + num_states * of_states
    memory = capacity.memory
    if memory is None:
        memory = min(all_useful, free)
    else:
        check_number("memory", memory, least=0)
        least = sum(of_page.values()) + of_states
        if memory < least:
            beside = " and of one sequence's states" if of_states else ""
            raise ValueError(f"memory: got {memory} bytes, takes at least a page's{beside} {least}")
    pages = {window: max(1, most * memory // all_useful) for window, most in useful.items()}
    return pages, max(1, num_states * memory // all_useful)


def most_pages(tokens: int, window: int | None, page_size: int, max_batch_tokens: int) -> int:
    """The most pages that a sequence holds in layers of a window while it grows to so many tokens.

    New pages are taken before old ones are let go, and these by the chunk before.
    """
    if window is not None:
        tokens = min(tokens, window + 2 * max_batch_tokens + page_size)
    return -(-tokens // page_size)


def page_bytes(layer: LayerShape, dtype: torch.dtype, page_size: int) -> int:
    """What one page takes in a layer, with the scales of eight bits."""
    scales = 2 * 4 if dtype in EIGHT_BITS else 0
    numbers = layer.head_dim + (0 if layer.latent else layer.value_dim)
    return layer.kv_heads * page_size * (numbers * dtype.itemsize + scales)


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * PART_OF_FREE)
    return MOST_MEMORY


def _host_memory(processes: int) -> int:
    """Bytes of host memory that swapped sequences may take unasked, in each of some processes.

    Beside a GPU it is page-locked, which the system can take from nobody again: as much as a GPU's
    pages take may be all there is, and the system then ends the process without a word.
    """
    available = available_memory()
    if available is None:
        return MOST_ON_HOST
    return min(MOST_ON_HOST, int(available * PART_OF_HOST) // processes)


def available_memory(root: Path = Path("/")) -> int | None:
    """Bytes of host memory that this process could still take; None where nothing says.

    root: where /proc and /sys are.
    """
    found: list[int] = []
    with contextlib.suppress(OSError, ValueError, StopIteration):
        lines = (root / "proc/meminfo").read_text(encoding="ascii").splitlines()
        line = next(line for line in lines if line.startswith("MemAvailable:"))
        found.append(int(line.split()[1]) << 10)
    group = root / "sys/fs/cgroup"  # of a container, by cgroup v2; "max" is no limit
    with contextlib.suppress(OSError, ValueError):
        limit, taken = (
            int((group / name).read_text(encoding="ascii"))
            for name in ("memory.max", "memory.current")
        )
        found.append(max(0, limit - taken))
    return min(found, default=None)
