"""Plain: softmax attention as one writes it by hand, all scores in memory."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer

# Forward and backward hold about four tensors as large as the scores.
LARGEST_SCORES = 2**30


def peers() -> list[Peer]:
    """The one peer of this file."""
    return [Peer("plain", "softmax(query @ key.T * scale) @ value, written by hand", _prepare)]


def _prepare(case: Case, device: torch.device) -> Call | str:
    if case.score_bytes > LARGEST_SCORES:
        return f"its scores alone would take {case.score_bytes / 1e9:.1f} GB"
    hidden = None
    if case.visibility.kind != "full" or case.visibility.needs_table:
        hidden = ~case.visibility.tensor(case.query_len, case.kv_len, device)
    group = case.query_heads // case.kv_heads
    scale = 1 / math.sqrt(case.head_dim)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if group > 1:
            key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
        scores = query @ key.transpose(-1, -2) * scale
        if hidden is not None:
            scores = scores.masked_fill(hidden, -torch.inf)
        return scores.softmax(-1) @ value

    return Call(run)
