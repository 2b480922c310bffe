"""Room: how many pages an engine gets, and the cache made of them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from saccade import PagedCache
from saccade.serving.model import PackedModel
from saccade.serving.sampling import check_number
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
    room: Room, model: PackedModel, *, sequences: int, longest: int, swaps: bool
) -> tuple[int, PagedCache]:
    """The number of pages, and a cache that has so many.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.
    """
    check_number("page_size", room.page_size, least=1)
    dtype = model.shape.dtype if room.page_dtype is None else room.page_dtype
    num_pages = _num_pages(room, model, dtype, sequences * -(-longest // room.page_size))
    host_pages = room.host_pages
    if host_pages is None:
        host_pages = num_pages if swaps else 0
    shape = model.shape
    cache = PagedCache(
        num_pages, room.page_size, num_layers=len(model.numbers), kv_heads=shape.kv_heads,
        head_dim=shape.head_dim, value_dim=shape.value_dim, dtype=dtype, device=model.device,
        host_pages=host_pages, window=shape.window,
    )  # fmt: skip
    return num_pages, cache


def _num_pages(room: Room, model: PackedModel, dtype: Any, useful: int) -> int:
    if room.num_pages is not None:
        if room.memory is not None:
            raise ValueError("memory: got it beside num_pages, takes one of the two")
        check_number("num_pages", room.num_pages, least=1)
        return room.num_pages
    of_page = page_bytes(model.shape, dtype, room.page_size, len(model.numbers))
    memory = room.memory
    if memory is None:
        return max(1, min(useful, _free_memory(model.device) // of_page))
    check_number("memory", memory, least=0)
    if memory < of_page:
        raise ValueError(f"memory: got {memory} bytes, takes at least a page's {of_page}")
    return memory // of_page


def page_bytes(shape: LayerShape, dtype: torch.dtype, page_size: int, layers: int) -> int:
    """What one page takes in all layers, with the scales of eight bits."""
    scales = 2 * 4 if dtype in EIGHT_BITS else 0
    of_head = (shape.head_dim + shape.value_dim) * dtype.itemsize + scales
    return layers * shape.kv_heads * page_size * of_head


def _free_memory(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * SHARE_OF_FREE)
    return MOST_MEMORY
