"""Ours: each implementation that saccade offers, by its public calls."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import Tensor

import saccade
from saccade import LinearState, masks
from saccade.bench.case import BenchCase, PagedBenchCase, StepCase
from saccade.bench.peers.peer import Call, Peer, to_layout
from saccade.bench.visibility import block_layout

# The reference writes all scores out several times; beyond this it would only fill the memory.
LARGEST_REFERENCE_SCORES = 2**28
KINDS = ("softmax", "linear", "paged")


def peers() -> list[Peer]:
    """One peer for each implementation; the reference only when it is named."""
    row = torch.zeros(1, 1, 1, 8)
    names = saccade.explain(saccade.attention, row, row, row).reasons
    return [_peer(name) for name in names]


def _peer(name: str) -> Peer:
    def prepare(case: BenchCase, device: torch.device) -> Call | str:
        return _prepare(name, case, device)

    about = f'saccade.attention(..., implementation="{name}")'
    by_default = name != "reference"
    return Peer(f"saccade/{name}", about, prepare, by_default, attention=KINDS)


def _prepare(name: str, case: BenchCase, device: torch.device) -> Call | str:
    if case.attention == "linear":
        return _linear(name, case, device)
    if isinstance(case, PagedBenchCase) and len(case.lens) > 1:
        return "this call has no pages: it takes one sequence"
    if name == "reference" and (reason := case.scores_beyond(LARGEST_REFERENCE_SCORES)):
        return reason
    reason = explained(case, device).reasons[name]
    if reason is not None:
        return reason
    mask = mask_of(case, device)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(query, key, value, mask=mask, implementation=name)
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    if not case.packed:
        return Call(run)
    offsets, longest = case.visibility.offsets(device), max(case.visibility.documents)

    def run_packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention_varlen(
            query, key, value, offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, mask=mask, implementation=name,
        )  # fmt: skip
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    return Call(run_packed, "packed")


def chosen(case: BenchCase, device: torch.device) -> str:
    """The peer that serves a case when no implementation is named."""
    return f"saccade/{explained(case, device).chosen}"


def explained(case: BenchCase, device: torch.device) -> Any:
    """What `saccade.explain` says of a case."""
    (query, key, value), mask = case.empty(device), mask_of(case, device)
    if not case.packed:
        return saccade.explain(saccade.attention, query, key, value, mask=mask)
    query, key, value = (to_layout(tensor, "packed") for tensor in (query, key, value))
    offsets, longest = case.visibility.offsets(device), max(case.visibility.documents)
    packed = query, key, value, offsets
    return saccade.explain(saccade.attention_varlen, *packed, max_seqlen_q=longest, mask=mask)


def mask_of(case: BenchCase, device: torch.device) -> masks.Mask | None:
    """A case's mask in saccade's terms; packed documents need none."""
    visibility = case.visibility
    size = visibility.size
    parts: list[masks.Mask] = []
    if visibility.kind == "causal":
        parts.append(masks.causal())
    if visibility.kind == "window":
        parts.append(masks.window(size))
    if visibility.kind == "prefix":
        parts.append(masks.prefix(torch.tensor([size], dtype=torch.int32, device=device)))
    if visibility.kind == "blocks":
        layout = block_layout(-(-case.query_len // size)).to(device)
        parts.append(masks.blocks(layout[None, None], size))
    if visibility.documents and not case.packed:
        parts.append(masks.documents(visibility.document_ids(device)[None]))
    return functools.reduce(operator.and_, parts) if parts else None


def _linear(name: str, case: BenchCase, device: torch.device) -> Call | str:
    """One of saccade's implementations."""
    row = torch.empty(1, 1, 1, 8, dtype=case.torch_dtype, device=device)
    reasons = saccade.explain(saccade.linear_attention, row, row, row).reasons
    reason = reasons.get(name, "it has no linear attention")
    if name == "reference":
        reason = case.scores_beyond(LARGEST_REFERENCE_SCORES)
    if reason is not None:
        return reason

    if isinstance(case, StepCase):
        return _step(name)

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return saccade.linear_attention(query, key, value, implementation=name)

    return Call(run)


def _step(name: str) -> Call | str:
    """A step in place from the state of all keys but the last, which the first call makes."""
    if name == "reference":
        return "it changes no states in place"
    made: list[LinearState] = []

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        token = [rows[:, :, -1:] for rows in (query, key, value)]
        if not made:
            before = [rows[:, :, :-1] for rows in (key, key, value)]
            made.append(saccade.linear_attention(*before, return_state=True)[1])
        return saccade.linear_attention_step(made[0], *token, implementation=name)

    return Call(run)
