"""Traffic: how fast the memory is, as a yardstick for what must read all of a cache or state."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer

COPY_BYTES = 2**30
"""What "copy" moves, read and written together, whatever the case."""

COMPUTES = "memory does not bound it"


def peers() -> list[Peer]:
    """A pure read of a case's bytes, and a pure copy of many."""
    yardstick: dict[str, Any] = {
        "by_default": False,
        "attention": ("paged", "linear"),
        "computes_attention": False,
    }
    return [
        Peer("read", "a sum over as many bytes as the case has", _read, **yardstick),
        Peer(
            "copy", "a copy of half a GiB, whatever the case", _copy, moves=COPY_BYTES, **yardstick
        ),
    ]


def _read(case: Case, device: torch.device) -> Call | str:
    if _computes(case):
        return COMPUTES

    @functools.cache
    def memory() -> tuple[Tensor, Tensor]:
        return torch.ones(case.bytes // 4, device=device), torch.empty((), device=device)

    def run(*inputs: Tensor) -> Tensor:
        source, total = memory()
        return torch.sum(source, 0, out=total)

    return Call(run)


def _copy(case: Case, device: torch.device) -> Call | str:
    if _computes(case):
        return COMPUTES

    @functools.cache
    def memory() -> tuple[Tensor, Tensor]:
        source = torch.ones(COPY_BYTES // 8, device=device)
        return source, torch.empty_like(source)

    def run(*inputs: Tensor) -> Tensor:
        source, target = memory()
        return torch.neg(source, out=target)  # an operation: copies have an engine of their own

    return Call(run)


def _computes(case: Case) -> bool:
    """Whether a case is a whole call of linear attention, and no step."""
    return case.attention == "linear" and not case.decodes
