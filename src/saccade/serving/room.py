"""Room: how many pages an engine gets, and the cache made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from saccade import LayeredCache
from saccade.serving.model import PackedModel
from saccade.serving.sampling import check_number
from saccade.serving.scheduler import most_pages
from saccade.serving.step import LayerShape

MOST_MEMORY = 2**30  # unasked, on a CPU
SHARE_OF_FREE = 0.8  # of a GPU's memory, unasked
EIGHT_BITS = (torch.int8, torch.float8_e4m3fn)  # beside these lie scales, in float32


class Room(NamedTuple):
    """What the caller said of pages; None where the engine chooses."""

    num_pages: int | None
    memory: int | None
    page_size: int
    page_dtype: torch.dtype | None
    host_pages: int | None


def make_room(
    room: Room, model: PackedModel, *, sequences: int, longest: int, rows: int, swaps: bool
) -> LayeredCache:
    """A cache with as many pages for each kind of layer as it should have.

    Args:
        sequences, longest: how many run at once, and the tokens of the longest.
        rows: of one step at most. swaps: whether sequences are swapped out.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_number("page_size", room.page_size, least=1)
    dtype = model.shape.dtype if room.page_dtype is None else room.page_dtype
    windows = model.windows
    useful = {
        window: sequences * most_pages(longest, window, room.page_size, rows)
        for window in dict.fromkeys(windows)
    }
    num_pages = _num_pages(room, model, dtype, useful)
    host_pages: int | dict[int | None, int] = num_pages if swaps else 0
    if room.host_pages is not None:
        host_pages = room.host_pages
    shape = model.shape
    return LayeredCache(
        num_pages, room.page_size, windows=windows, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, value_dim=shape.value_dim, dtype=dtype, device=model.device,
        host_pages=host_pages,
    )  # fmt: skip


def _num_pages(
    room: Room, model: PackedModel, dtype: Any, useful: dict[int | None, int]
) -> dict[int | None, int]:
    """Pages for each kind of layer: in the same proportion as they are useful."""
    if room.num_pages is not None:
        if room.memory is not None:
            raise ValueError("memory: got it beside num_pages, takes one of the two")
        given = room.num_pages
        check_number("num_pages", given, least=1)
        return {
            window: given if window is None else min(given, most) for window, most in useful.items()
        }
    of_page = {
        window: page_bytes(model.shape, dtype, room.page_size, model.windows.count(window))
        for window in useful
    }
    all_useful = sum(useful[window] * of_page[window] for window in useful)
    memory = room.memory
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
