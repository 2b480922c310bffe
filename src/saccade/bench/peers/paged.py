"""Paged: attention over pages, and what is done without: gather them, then call SDPA.

All read the case's own keys and values, put into pages once, when they first come. Pages lie as
`saccade.PagedCache` lays them: heads outermost. Scattered pages come in a random order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import saccade
from saccade import masks
from saccade.bench.case import INT8_SCALE, BenchCase, PagedBenchCase
from saccade.bench.peers.peer import Call, Peer

PAGE_SIZES = (16, 64, 256)


class PagesOfCase(NamedTuple):
    """Sequences in pages, by the names of `saccade.attention_paged`'s arguments."""

    key_pages: Tensor
    value_pages: Tensor
    page_table: Tensor
    kv_lens: Tensor
    key_scales: Tensor | None = None
    value_scales: Tensor | None = None


Attend = Callable[[Tensor, PagesOfCase], Tensor]  # query [batch, query_heads, new tokens, head_dim]


def peers() -> list[Peer]:
    """For each page size: neighbouring pages, scattered ones, and gathering these."""
    found = []
    for size in PAGE_SIZES:
        pages = f"pages of {size}"
        call = "saccade.attention_paged"
        found += [
            _peer(f"saccade/paged-{size}", f"{call}, neighbouring {pages}", size, False, _ours),
            _peer(f"saccade/scattered-{size}", f"{call}, scattered {pages}", size, True, _ours),
            _peer(f"triton/scattered-{size}", "the same, Triton kernels", size, True, _triton),
            _peer(f"hopper/scattered-{size}", "the same, Hopper kernels", size, True, _hopper),
            _peer(f"sdpa/gathered-{size}", f"gathers {pages}, then SDPA", size, True, _gathered),
        ]
    return found


def _peer(who: str, about: str, size: int, scattered: bool, attend: Attend) -> Peer:
    def prepare(case: BenchCase, device: torch.device) -> Call | str:
        lens, new = _sequences(case)
        if not lens or any(length % size for length in lens):
            return f"it takes new tokens of sequences of whole pages of {size}"
        for by, implementation in ((_triton, "triton"), (_hopper, "hopper")):
            if attend is by and (reason := _not_by(implementation, case, device)):
                return reason
        if attend is _gathered and (len(lens) > 1 or not case.decodes):
            return "it decodes one sequence"
        kept: list[tuple[Tensor, PagesOfCase]] = []

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            if not kept or kept[0][0] is not key:
                kept[:] = [(key, _stored(case, key, value, size, scattered))]
            query = query.unflatten(0, (len(lens), new)).transpose(1, 2)
            return attend(query, kept[0][1]).transpose(1, 2).flatten(0, 1)

        return Call(run, "packed")

    return Peer(who, about, prepare, by_default=False, attention=("softmax", "paged"))


def _sequences(case: BenchCase) -> tuple[tuple[int, ...], int]:
    """The lengths of a case's sequences, none if it has no such; and how many tokens are new."""
    if isinstance(case, PagedBenchCase):
        return case.lens, case.new
    return ((case.kv_len,) if case.decodes and case.batch == 1 else ()), 1


def _stored(case: BenchCase, key: Tensor, value: Tensor, size: int, scattered: bool) -> PagesOfCase:
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
    dtype = getattr(torch, case.page_dtype) if isinstance(case, PagedBenchCase) else key.dtype
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
    heads_first_shape = (key_pages.shape[1], key_pages.shape[0], size)
    scales = torch.full(heads_first_shape, scale, device=key.device).transpose(0, 1)
    return stored._replace(key_scales=scales, value_scales=scales)


def _ours(query: Tensor, pages: PagesOfCase, implementation: str | None = None) -> Tensor:
    mask = masks.causal() if query.shape[2] > 1 else None
    options = {"mask": mask, "implementation": implementation}
    with torch.no_grad():
        output = saccade.attention_paged(query, **pages._asdict(), **options)
    assert isinstance(output, Tensor)  # a pair only with return_lse
    return output


def _triton(query: Tensor, pages: PagesOfCase) -> Tensor:
    return _ours(query, pages, "triton")


def _hopper(query: Tensor, pages: PagesOfCase) -> Tensor:
    return _ours(query, pages, "hopper")


def _not_by(implementation: str, case: BenchCase, device: torch.device) -> str | None:
    """Why an implementation cannot serve such queries and pages, or None."""
    stored = (
        getattr(torch, case.page_dtype) if isinstance(case, PagedBenchCase) else case.torch_dtype
    )
    scales = torch.ones(1, 1, 1, device=device) if stored.itemsize == 1 else None
    query = torch.zeros(1, 1, 1, case.head_dim, dtype=case.torch_dtype, device=device)
    page, one = query.to(stored), torch.ones(1, dtype=torch.int32, device=device)
    found = saccade.explain(
        saccade.attention_paged, query, page, page, one[None] - 1, one,
        key_scales=scales, value_scales=scales,
    )  # fmt: skip
    return found.reasons[implementation]


def _gathered(query: Tensor, pages: PagesOfCase) -> Tensor:
    key, value = (
        pool.index_select(0, pages.page_table[0]).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        for pool in (pages.key_pages, pages.value_pages)
    )
    return scaled_dot_product_attention(query, key, value, enable_gqa=True)
