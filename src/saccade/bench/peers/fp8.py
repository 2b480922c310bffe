"""Peers of fp8 attention: Saccade's implementations, rows that are quantised in the call, and
attention in bfloat16 over the same rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade import masks
from saccade.bench.case import BenchCase
from saccade.bench.peers import Call, Peer
from saccade.bench.peers.mask import mask_of


def of_ours(name: str, case: BenchCase, device: torch.device) -> Call | str:
    """An implementation's call over a case's e4m3 rows, or the reason why there is none."""
    rows, mask = case.empty(device), mask_of(case, device)
    reason = saccade.explain(saccade.attention_fp8, *rows, mask=mask).reasons.get(
        name, "it has no fp8 attention"
    )
    return reason or Call(_attend(saccade.attention_fp8, mask, implementation=name))


def peers() -> list[Peer]:
    """What e4m3 rows are compared with, over rows of the same numbers in bfloat16."""
    about = "saccade.attention_fp8 of 16-bit rows, quantised by blocks"
    return [
        _over_bfloat16("saccade/inside", about, saccade.attention_fp8),
        _over_bfloat16("saccade/bf16", "saccade.attention in bfloat16", saccade.attention),
    ]


def _over_bfloat16(who: str, about: str, function: Callable[..., Any]) -> Peer:
    """A peer whose rows are converted when it first sees them."""

    def prepare(case: BenchCase, device: torch.device) -> Call | str:
        attend = _attend(function, mask_of(case, device))
        converted: list[tuple[Tensor, list[Tensor]]] = []

        def run(*rows: Tensor) -> Tensor:
            if not converted or converted[0][0] is not rows[0]:
                converted[:] = [(rows[0], [each.bfloat16() for each in rows])]
            return attend(*converted[0][1])

        return Call(run)

    return Peer(who, about, prepare, by_default=False, attention=("fp8",))


def _attend(
    function: Callable[..., Any], mask: masks.Mask | None, **options: Any
) -> Callable[..., Tensor]:
    """The call of a function for some rows."""

    def attend(*rows: Tensor) -> Tensor:
        output = function(*rows, mask=mask, **options)
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    return attend
