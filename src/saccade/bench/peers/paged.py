"""Paged: decoding from pages, and what is done without: gather them, then call SDPA.

All read the case's own keys and values as pages, laid out as `saccade.PagedCache` does: heads
outermost. Scattered pages come in a random order; without a mask the order of keys changes
nothing but roundings.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import saccade
from saccade.bench.cases import Case
from saccade.bench.peers.peer import Call, Peer

PAGE_SIZES = (16, 64, 256)
Attend = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def peers() -> list[Peer]:
    """For each page size: neighbouring pages, scattered ones, and gathering these."""
    found = []
    for size in PAGE_SIZES:
        pages = f"pages of {size}"
        call = "saccade.attention_paged"
        found += [
            _peer(f"saccade/paged-{size}", f"{call}, neighbouring {pages}", size, False, _ours),
            _peer(f"saccade/scattered-{size}", f"{call}, scattered {pages}", size, True, _ours),
            _peer(f"sdpa/gathered-{size}", f"gathers {pages}, then SDPA", size, True, _gathered),
        ]
    return found


def _peer(who: str, about: str, size: int, scattered: bool, attend: Attend) -> Peer:
    def prepare(case: Case, device: torch.device) -> Call | str:
        if not case.decodes or case.batch != 1 or case.kv_len % size:
            return f"it decodes one sequence of whole pages of {size}"
        if attend is _ours and device.type != "cpu":
            return "no implementation for a GPU reads pages yet"
        count = case.kv_len // size
        order = torch.arange(count)
        if scattered:
            order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        table = order.int().unsqueeze(0).to(device)
        lens = torch.tensor([case.kv_len], dtype=torch.int32, device=device)

        def run(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            key, value = (
                rows[0].unflatten(1, (count, size)).transpose(0, 1) for rows in (key, value)
            )
            return attend(query, key, value, table, lens)

        return Call(run)

    return Peer(who, about, prepare, by_default=False)


def _ours(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    with torch.no_grad():
        output = saccade.attention_paged(query, key, value, table, lens)
    assert isinstance(output, Tensor)  # a pair only with return_lse
    return output


def _gathered(query: Tensor, key: Tensor, value: Tensor, table: Tensor, lens: Tensor) -> Tensor:
    key, value = (
        pages.index_select(0, table[0]).transpose(0, 1).flatten(1, 2).unsqueeze(0)
        for pages in (key, value)
    )
    return scaled_dot_product_attention(query, key, value, enable_gqa=True)
