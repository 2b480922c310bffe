"""Kinds: padding as a mask of saccade, and masks joined."""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable

import torch
from torch import Tensor

from saccade import masks

Visible = masks.Mask | None  # None: everything is


def padding(real: Tensor, kv_len: int, kv_offset: int, device: torch.device) -> Visible:
    """Only keys that are no padding are visible.

    Args:
        real: bool [batch, positions]; positions behind its end are padding.
        kv_len, kv_offset: rows of keys, and the position of the first one.
        device: where the mask is used.
    """
    missing = kv_offset + kv_len - real.shape[1]
    if missing > 0:
        real = torch.nn.functional.pad(real, (0, missing))
    real = real.to(device=device, dtype=torch.bool)[:, kv_offset : kv_offset + kv_len]
    numbers = real.int()
    # one transfer from the device for all three
    counts, firsts, lasts = torch.stack(
        [numbers.sum(1), numbers.argmax(1), kv_len - 1 - numbers.flip(1).argmax(1)]
    ).tolist()
    if all(count == kv_len for count in counts):
        return None
    spans = [
        (0, 0) if c == 0 else (f, e + 1) for c, f, e in zip(counts, firsts, lasts, strict=True)
    ]
    if any(stop - start != count for (start, stop), count in zip(spans, counts, strict=True)):
        return masks.dense(real[:, None, None])
    starts, stops = torch.tensor(spans, dtype=torch.int32, device=device).unbind(1)
    before = None if not any(start for start, _ in spans) else ~masks.key_lengths(starts)
    behind = None if all(stop == kv_len for _, stop in spans) else masks.key_lengths(stops)
    return conjunction([before, behind])


def conjunction(parts: Iterable[Visible]) -> Visible:
    """What all parts show; None stands for everything."""
    hiding = [part for part in parts if part is not None]
    return functools.reduce(operator.and_, hiding) if hiding else None
