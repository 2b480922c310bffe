"""Storage: the tensors of a paged cache, for every layer, on the device and on the host; and how
they hold numbers in eight bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.kv_cache.move import move_pages, moves
from saccade.runtime.spec import QUANTISED

# ---- quantization --------------------------------------------------------------------------------
# Keys and values in eight bits, with one scale for each token and head.

LARGEST = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def quantised(rows: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Rows as numbers of eight bits, and the scale that each row is multiplied by when read.

    Args:
        rows: [..., dim], floating point.
        dtype: int8 or float8_e4m3fn.

    Returns:
        numbers of `rows`' shape, and float32 scales [...]. The largest number of a row takes the
        whole range. A row that holds NaN or inf is NaN when read.
    """
    wide = rows.float()
    largest = wide.abs().amax(-1) if rows.shape[-1] else wide.new_zeros(rows.shape[:-1])
    scales = (largest / LARGEST[dtype]).clamp_min(torch.finfo(torch.float32).tiny)  # divides
    scales = torch.where(scales.isfinite(), scales, torch.nan)
    numbers = (wide / scales.unsqueeze(-1)).nan_to_num(0, 0, 0)
    if dtype == torch.int8:
        numbers = numbers.round()
    return numbers.to(dtype), scales


class LayerPages(NamedTuple):
    """One layer's pages, by the names of `attention_paged`'s arguments."""

    key_pages: Tensor
    value_pages: Tensor
    key_scales: Tensor | None
    value_scales: Tensor | None


class PageSizes(NamedTuple):
    """The sizes of a cache's tensors."""

    page_size: int
    num_layers: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype


class PageMemory:
    """Pages on the device, and as many as asked for on the host (page-locked beside a GPU).

    Heads lie outermost, so that neighbouring pages of a head are one stretch of memory.
    """

    def __init__(self, sizes: PageSizes, num_pages: int, host_pages: int, device: torch.device):
        self.layers = [_layer(sizes, num_pages, device, False) for _ in range(sizes.num_layers)]
        on_host = torch.device("cpu")
        pinned = device.type == "cuda"
        host = [_layer(sizes, host_pages, on_host, pinned) for _ in range(sizes.num_layers)]
        self.pools, self.host_pools = _pools(self.layers), _pools(host)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages on the device, reading all before any is written."""
        if source:
            move_pages(self.pools, _numbers(source), _numbers(target))

    def moves(self, source: Sequence[int], target: Sequence[int]) -> list[Callable[[], object]]:
        """The steps of `copy`, for `at_once`."""
        return moves(self.pools, _numbers(source), _numbers(target)) if source else []

    def to_host(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages from the device to the host."""
        if source:
            move_pages(self.pools, _numbers(source), _numbers(target), into=self.host_pools)

    def to_device(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy pages from the host to the device."""
        if source:
            move_pages(self.host_pools, _numbers(source), _numbers(target), into=self.pools)


def _layer(sizes: PageSizes, num_pages: int, device: torch.device, pinned: bool) -> LayerPages:
    shape = (sizes.kv_heads, num_pages, sizes.page_size)

    def empty(*dims: int, dtype: torch.dtype) -> Tensor:
        tensor = torch.empty(*shape, *dims, dtype=dtype, device=device, pin_memory=pinned)
        return tensor.transpose(0, 1)

    scales = [None, None]
    if sizes.dtype in QUANTISED:
        scales = [empty(dtype=torch.float32), empty(dtype=torch.float32)]
    return LayerPages(
        empty(sizes.head_dim, dtype=sizes.dtype), empty(sizes.value_dim, dtype=sizes.dtype), *scales
    )


def _pools(layers: list[LayerPages]) -> list[Tensor]:
    return [tensor for layer in layers for tensor in layer if tensor is not None]


def _numbers(pages: Sequence[int]) -> Tensor:
    return torch.tensor(pages, dtype=torch.int64, device="cpu")
