"""A case's mask, as Saccade's calls take it."""

from __future__ import annotations

import functools
import operator

import torch

from saccade import masks
from saccade.bench.case import BenchCase, block_layout


def mask_of(case: BenchCase, device: torch.device) -> masks.Mask | None:
    """A case's mask in saccade's terms; packed documents need none."""
    visibility, size = case.visibility, case.visibility.size
    parts: list[masks.Mask] = []
    if visibility.kind == "causal":
        parts.append(masks.causal())
    elif visibility.kind == "window":
        parts.append(masks.window(size))
    elif visibility.kind == "prefix":
        parts.append(masks.prefix(torch.tensor([size], dtype=torch.int32, device=device)))
    elif visibility.kind == "blocks":
        layout = block_layout(-(-case.query_len // size)).to(device)
        parts.append(masks.blocks(layout[None, None], size))
    if visibility.documents and not case.packed:
        parts.append(masks.documents(visibility.document_ids(device)[None]))
    return functools.reduce(operator.and_, parts) if parts else None
