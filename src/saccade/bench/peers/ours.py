"""Saccade's implementations as peers, by its public calls: dense, packed, linear, over pages.

Peers over pages put the case's own keys and values into pages once, when they first see them, as
`saccade.PagedCache` lays them: heads outermost. Scattered pages lie in a random order. Beside them
is what is done without: gather the pages, then call SDPA.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import saccade
from saccade import LinearState, masks
from saccade.bench.case import INT8_SCALE, BenchCase, PagedBenchCase, StepCase
from saccade.bench.peers import Call, Peer, delta, fp8, to_layout
from saccade.bench.peers.mask import mask_of

# The reference writes all scores out several times; beyond this it would only fill the memory.
LARGEST_REFERENCE_SCORES = 2**28


def peers() -> list[Peer]:
    """One peer for each implementation, the reference only when it is named, and one more for
    gradients that are equal bit for bit each time."""
    row = torch.zeros(1, 1, 1, 8)
    found = [
        Peer(
            f"saccade/{name}",
            f'saccade.attention(..., implementation="{name}")',
            functools.partial(_prepare, name),
            by_default=name != "reference",
            attention=("softmax", "linear", "paged", "delta", "fp8"),
        )
        for name in saccade.explain(saccade.attention, row, row, row).reasons
    ]
    about = "saccade.attention(..., deterministic=True)"
    prepare = functools.partial(_prepare, None, deterministic=True)
    return [*found, Peer("saccade/deterministic", about, prepare, by_default=False)]


def _prepare(
    name: str | None, case: BenchCase, device: torch.device, deterministic: bool = False
) -> Call | str:
    """name: an implementation, or None for the one that is chosen."""
    if name is not None and case.attention == "linear":
        return _linear(name, case, device)
    if name is not None and case.attention == "delta":
        return delta.of_ours(name, case, device)
    if name is not None and case.attention == "fp8":
        return fp8.of_ours(name, case, device)
    if isinstance(case, PagedBenchCase) and len(case.lens) > 1:
        return "this call has no pages: it takes one sequence"
    if name == "reference" and (reason := case.scores_beyond(LARGEST_REFERENCE_SCORES)):
        return reason
    if name is not None and (reason := explained(case, device).reasons[name]):
        return reason
    mask = mask_of(case, device)
    options: dict[str, Any] = {"implementation": name, "deterministic": deterministic}

    def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention(query, key, value, mask=mask, **options)
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    if not case.packed:
        return Call(run)
    offsets, longest = case.visibility.offsets(device), max(case.visibility.documents)

    def packed(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output = saccade.attention_varlen(
            query, key, value, offsets,
            max_seqlen_q=longest, max_seqlen_k=longest, mask=mask, **options,
        )  # fmt: skip
        assert isinstance(output, Tensor)  # a pair only with return_lse
        return output

    return Call(packed, "packed")


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


def _linear(name: str, case: BenchCase, device: torch.device) -> Call | str:
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


PAGE_SIZES = (16, 64, 256)


class PagesOfCase(NamedTuple):
    """Sequences in pages, by the names of `saccade.attention_paged`'s arguments."""

    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    kv_lens: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


def paged_peers() -> list[Peer]:
    """For each page size: neighbouring pages, scattered ones, and gathering these."""
    call, found = "saccade.attention_paged", []
    for size in PAGE_SIZES:
        pages = f"pages of {size}"
        found += [
            _paged(f"saccade/paged-{size}", f"{call}, neighbouring {pages}", size, "", False),
            _paged(f"saccade/scattered-{size}", f"{call}, scattered {pages}", size, ""),
            _paged(f"triton/scattered-{size}", "the same, Triton kernels", size, "triton"),
            _paged(f"hopper/scattered-{size}", "the same, Hopper kernels", size, "hopper"),
            _paged(f"sdpa/gathered-{size}", f"gathers {pages}, then SDPA", size, "sdpa"),
        ]
    return found


def _paged(who: str, about: str, size: int, by: str, scattered: bool = True) -> Peer:
    """by: "sdpa", one of saccade's implementations, or "" for its own choice."""

    def prepare(case: BenchCase, device: torch.device) -> Call | str:
        lens, new = _sequences(case)
        if not lens or any(length % size for length in lens):
            return f"it takes new tokens of sequences of whole pages of {size}"
        if by == "sdpa" and (len(lens) > 1 or not case.decodes):
            return "it decodes one sequence"
        if by in ("triton", "hopper") and (reason := _reason_against(by, case, device)):
            return reason
        stored: list[tuple[Tensor, PagesOfCase]] = []

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if not stored or stored[0][0] is not key:
                stored[:] = [(key, _in_pages(case, key, value, size, scattered))]
            query = query.unflatten(0, (len(lens), new)).transpose(1, 2)
            return _attend(query, stored[0][1], by).transpose(1, 2).flatten(0, 1)

        return Call(run, "packed")

    return Peer(who, about, prepare, by_default=False, attention=("softmax", "paged"))


def _sequences(case: BenchCase) -> tuple[tuple[int, ...], int]:
    """The lengths of a case's sequences (none where pages cannot serve it), and new tokens each."""
    if isinstance(case, PagedBenchCase):
        return case.lens, case.new
    return ((case.kv_len,) if case.decodes and case.batch == 1 else ()), 1


def _page_dtype(case: BenchCase) -> torch.dtype:
    return getattr(torch, case.page_dtype if isinstance(case, PagedBenchCase) else case.dtype)


def _in_pages(
    case: BenchCase, key: Tensor, value: Tensor, size: int, scattered: bool
) -> PagesOfCase:
    """Keys and values, packed [tokens, kv_heads, dim], in pages."""
    lens, _ = _sequences(case)
    counts = [length // size for length in lens]
    order = torch.arange(sum(counts))
    if scattered:
        order = torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0))
    table = torch.zeros(len(lens), max(counts), dtype=torch.int32)
    for row, pages in zip(table, order.split(counts), strict=True):
        row[: len(pages)] = pages
    table, order = table.to(key.device), order.to(key.device)
    dtype = _page_dtype(case)
    scale = INT8_SCALE if dtype == torch.int8 else 1.0
    pools = []
    for rows in (key, value):
        heads_first = (rows.transpose(0, 1) / scale).to(dtype).contiguous().unflatten(1, (-1, size))
        pool = torch.empty_like(heads_first)
        pool.view(torch.uint8)[:, order] = heads_first.view(torch.uint8)
        pools.append(pool.transpose(0, 1))
    key_pages, value_pages = pools
    kv_lens = torch.tensor(lens, dtype=torch.int32, device=key.device)
    stored = PagesOfCase(key_pages, value_pages, table, kv_lens)
    if dtype.itemsize > 1:
        return stored
    num_pages, heads = key_pages.shape[:2]
    scales = torch.full((heads, num_pages, size), scale, device=key.device).transpose(0, 1)
    return stored._replace(key_scales=scales, value_scales=scales)


def _attend(query: Tensor, pages: PagesOfCase, by: str) -> Tensor:
    """The output for a query [batch, query_heads, new tokens, head_dim]."""
    if by == "sdpa":
        key, value = (
            pool.index_select(0, pages.page_table[0]).transpose(0, 1).flatten(1, 2).unsqueeze(0)
            for pool in (pages.key_pages, pages.value_pages)
        )
        return scaled_dot_product_attention(query, key, value, enable_gqa=True)
    options = {"mask": masks.causal() if query.shape[2] > 1 else None, "implementation": by or None}
    with torch.no_grad():
        output = saccade.attention_paged(query, **pages._asdict(), **options)
    assert isinstance(output, Tensor)  # a pair only with return_lse
    return output


def _reason_against(implementation: str, case: BenchCase, device: torch.device) -> str | None:
    """Why an implementation cannot serve such queries and pages, or None."""
    dtype = _page_dtype(case)
    scales = torch.ones(1, 1, 1, device=device) if dtype.itemsize == 1 else None
    query = torch.zeros(1, 1, 1, case.head_dim, dtype=case.torch_dtype, device=device)
    page, one = query.to(dtype), torch.ones(1, dtype=torch.int32, device=device)
    found = saccade.explain(
        saccade.attention_paged, query, page, page, one[None] - 1, one,
        key_scales=scales, value_scales=scales,
    )  # fmt: skip
    return found.reasons[implementation]
