"""Writing and moving pages, written out: token by token, page by page."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from saccade.kv_cache.storage import quantised
from saccade.rotary import rotated


def write(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """See `saccade.write_kv_cache`."""
    if cos is not None and sin is not None:
        key = rotated(key, cos, sin, interleaved)
    page_size = key_pages.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        at = (slot // page_size, slice(None), slot % page_size)
        for row, pages, scales in (
            (key[token], key_pages, key_scales),
            (value[token], value_pages, value_scales),
        ):
            if scales is not None:
                row, scales[at] = quantised(row, pages.dtype)
            pages[at] = row.to(pages.dtype)


def move(pools: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """See `saccade.move_pages`: every page is read before any is written."""
    for pool in pools:
        read = torch.clone(pool)
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            pool[new] = read[old]
