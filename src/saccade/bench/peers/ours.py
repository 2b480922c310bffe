"""Ours: each implementation that saccade offers, by its public calls."""

from __future__ import annotations

import torch
from torch import Tensor

import saccade
from saccade import masks
from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer, to_layout

# The reference writes all scores out several times; beyond this it would only fill the memory.
LARGEST_REFERENCE_SCORES = 2**28


def peers() -> list[Peer]:
    """One peer for each implementation; the reference only when it is named."""
    row = torch.zeros(1, 1, 1, 8)
    names = saccade.explain(row, row, row).reasons
    return [_peer(name) for name in names]


def _peer(name: str) -> Peer:
    def prepare(case: Case, device: torch.device) -> Call | str:
        return _prepare(name, case, device)

    about = f'saccade.attention(..., implementation="{name}")'
    return Peer(f"saccade/{name}", about, prepare, by_default=name != "reference")


def _prepare(name: str, case: Case, device: torch.device) -> Call | str:
    if name == "reference" and case.score_bytes > LARGEST_REFERENCE_SCORES:
        return f"its scores alone would take {case.score_bytes / 1e9:.1f} GB"
    if case.visibility.kind == "documents":
        return _packed(name, case, device)
    mask = mask_of(case)
    query, key, value = _stand_ins(case, device)
    reason = saccade.explain(query, key, value, mask=mask).reasons[name]
    if reason is not None:
        return reason

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(query, key, value, mask=mask, implementation=name)
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    return Call(run)


def _packed(name: str, case: Case, device: torch.device) -> Call | str:
    length = case.visibility.size
    tokens = case.batch * case.query_len
    offsets = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=device)
    query, key, value = (to_layout(tensor, "packed") for tensor in _stand_ins(case, device))
    reason = saccade.explain(query, key, value, offsets, max_seqlen_q=length).reasons[name]
    if reason is not None:
        return reason

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention_packed(
            query, key, value, offsets,
            max_seqlen_q=length, max_seqlen_k=length, implementation=name,
        )  # fmt: skip
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    return Call(run, "packed")


def mask_of(case: Case) -> masks.Mask | None:
    """A case's mask in saccade's terms; documents are packed instead."""
    if case.visibility.kind == "causal":
        return masks.causal()
    return masks.window(case.visibility.size) if case.visibility.kind == "window" else None


def _stand_ins(case: Case, device: torch.device) -> list[Tensor]:
    """Tensors of a case's shapes that nobody reads, hence no memory is touched."""

    def empty(heads: int, length: int, dim: int) -> Tensor:
        return torch.empty(case.batch, heads, length, dim, dtype=case.torch_dtype, device=device)

    return [
        empty(case.query_heads, case.query_len, case.head_dim),
        empty(case.kv_heads, case.kv_len, case.head_dim),
        empty(case.kv_heads, case.kv_len, case.value_dim),
    ]
