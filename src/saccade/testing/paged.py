"""Random problems of attention over pages, in a pool whose unused slots hold NaN; and what writing
and moving pages must leave, written out token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from saccade.kv_cache.storage import quantised
from saccade.masks import Mask
from saccade.ops.paged_attention import reference
from saccade.ops.paged_attention.api import attention_paged
from saccade.rotary import rotated
from saccade.runtime.spec import PagedInputs, Variant
from saccade.runtime.validation import prepare_paged
from saccade.scores import Score
from saccade.testing.cases import MASKS, SCORES, Description, bias_shape

MEMORIES = ("pages_first", "slots_first", "heads_first", "interleaved")


@dataclass(frozen=True)
class PagedDescription:
    """What a random case over pages is made from.

    `lengths` are (query, key) lengths, one pair a sequence; `memory` says what lies outermost in
    the pool; `page_dtype` None is query's; `scattered`: pages lie in random order; `latent`: values
    are the first channels of keys, in the same memory.

    Examples:
        >>> description = saccade.testing.PagedDescription(lengths=((1, 9), (1, 4)))
        >>> saccade.testing.make_paged_case(description).table["kv_lens"].tolist()
        [9, 4]
    """

    lengths: tuple[tuple[int, int], ...] = ((1, 40), (1, 0), (1, 17))
    page_size: int = 8
    kv_heads: int = 2
    group: int = 2
    head_dim: int = 16
    value_dim: int = 16
    dtype: torch.dtype = torch.float32
    page_dtype: torch.dtype | None = None
    packed: bool = False
    scattered: bool = True
    memory: str = "pages_first"
    mask: str = "none"
    score: str = "none"
    sinks: bool = False
    poison_hidden: bool = False
    latent: bool = False
    scale: float | None = None
    seed: int = 0
    device: str = "cpu"

    @property
    def alike(self) -> Description:
        """The packed case whose mask and score this one has."""
        return Description(
            kv_heads=self.kv_heads, group=self.group, lengths=self.lengths, dtype=self.dtype,
            packed=True, mask=self.mask, score=self.score, seed=self.seed, device=self.device,
        )  # fmt: skip


@dataclass
class PagedCase:
    """A random problem over pages.

    Examples:
        >>> case = saccade.testing.make_paged_case(lengths=((1, 9), (1, 4)))
        >>> case.table["kv_lens"].tolist()
        [9, 4]
    """

    description: PagedDescription
    tensors: dict[str, Tensor]  # query, key_pages, value_pages; scales, sinks and bias if any
    table: dict[str, Tensor]  # page_table, kv_lens; cu_seqlens_q if packed
    mask: Mask | Tensor | None

    def arguments(self, dtype: torch.dtype | None = None) -> dict[str, Any]:
        """Every argument of the public call, with floating-point tensors of another dtype if given.

        Pages of eight bits stay what they are.
        """
        floating = {
            name: tensor.to(dtype) if dtype and tensor.dtype not in QUANTISED_PAGES else tensor
            for name, tensor in self.tensors.items()
        }
        if self.description.latent:
            floating["value_pages"] = floating["key_pages"][..., : self.description.value_dim]
            if "key_scales" in floating:
                floating["value_scales"] = floating["key_scales"]
        bias = floating.pop("bias", None)
        score: Score | None = SCORES[self.description.score](self.description.alike, bias)
        options = {"mask": self.mask, "score": score, "scale": self.description.scale}
        return {**floating, **self.table, **options}

    def run(
        self, implementation: str, dtype: torch.dtype | None = None, **more: Any
    ) -> dict[str, Tensor]:
        """Output and lse, by name."""
        with torch.no_grad():
            output, lse = attention_paged(
                **self.arguments(dtype), implementation=implementation, return_lse=True, **more
            )
        return {"output": output, "lse": lse}

    def prepared(self, dtype: torch.dtype | None = None) -> tuple[PagedInputs, Variant]:
        """The inputs and variant that implementations take."""
        arguments = self.arguments(dtype)
        options = {name: arguments.pop(name) for name in ("mask", "score", "scale")}
        inputs, variant, _, _ = prepare_paged(
            PagedInputs(**arguments), **options, batch_invariant=False, return_lse=True, config=None
        )
        return inputs, variant

    def run_plain(self) -> dict[str, Tensor]:
        """The results of plain PyTorch with every step in the case's own dtype, to compare with."""
        inputs, variant = self.prepared()
        output, lse = reference.attention_paged(inputs, variant, sums=self.description.dtype)
        return {"output": output, "lse": lse}


QUANTISED_PAGES = (torch.float8_e4m3fn, torch.int8)


def make_paged_case(description: PagedDescription | None = None, **changes: Any) -> PagedCase:
    """A paged case from its description (or from keyword arguments that make one).

    Examples:
        >>> case = saccade.testing.make_paged_case(lengths=((1, 9), (1, 4)))
        >>> saccade.testing.assert_exact(case, "cpu")
    """
    d = description or PagedDescription(**changes)
    generator = torch.Generator().manual_seed(d.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    query_lens, kv_lens = (torch.tensor(lengths) for lengths in zip(*d.lengths, strict=True))
    table, num_pages = _page_table(d, kv_lens, generator)
    tensors = {}
    pools = (("key", d.head_dim), ("value", d.value_dim))
    for name, dim in pools[:1] if d.latent else pools:
        rows = normal(num_pages, d.kv_heads, d.page_size, dim)
        tensors |= _pool(d, name, rows, table, kv_lens)
    heads = d.kv_heads * d.group
    if d.packed:
        tensors["query"] = normal(int(query_lens.sum()), heads, d.head_dim)
    else:
        tensors["query"] = normal(len(d.lengths), heads, int(query_lens[0]), d.head_dim)
    tensors["query"] = tensors["query"].to(d.dtype)
    if d.sinks:
        tensors["sinks"] = normal(heads)
    if "bias" in d.score:
        tensors["bias"] = normal(*bias_shape(d.alike)).to(d.dtype)
    integers = {"page_table": table, "kv_lens": kv_lens.int()}
    if d.packed:
        integers["cu_seqlens_q"] = torch.cat([torch.zeros(1), query_lens.cumsum(0)]).int()
    case = PagedCase(
        d,
        {name: tensor.to(d.device) for name, tensor in tensors.items()},
        {name: tensor.to(d.device) for name, tensor in integers.items()},
        MASKS[d.mask](d.alike, generator),
    )
    if d.poison_hidden:
        _poison_hidden(case)
    return case


def _page_table(
    d: PagedDescription, kv_lens: Tensor, generator: torch.Generator
) -> tuple[Tensor, int]:
    """A table whose entries behind each sequence's end are no pages, and the size of its pool."""
    counts = -(-kv_lens // d.page_size)
    num_pages = int(counts.sum()) + 3  # some belong to no sequence
    order = torch.arange(num_pages)
    if d.scattered:
        order = torch.randperm(num_pages, generator=generator)
    table = torch.full((len(d.lengths), int(counts.max()) + 1), -7, dtype=torch.int32)
    ends = counts.cumsum(0)
    for sequence, (count, end) in enumerate(zip(counts.tolist(), ends.tolist(), strict=True)):
        table[sequence, :count] = order[end - count : end].int()
    return table, num_pages


def _pool(
    d: PagedDescription, name: str, rows: Tensor, table: Tensor, kv_lens: Tensor
) -> dict[str, Tensor]:
    """Pages, and scales where they hold eight bits; unused slots hold NaN."""
    used = torch.zeros(rows.shape[0], rows.shape[2], dtype=torch.bool)
    for sequence, kv_len in enumerate(kv_lens.tolist()):
        row = torch.arange(kv_len)
        used[table[sequence].long()[row // d.page_size], row % d.page_size] = True
    unused = ~used.unsqueeze(1)
    dtype = d.page_dtype or d.dtype
    if dtype not in QUANTISED_PAGES:
        rows = rows.to(dtype).masked_fill(unused.unsqueeze(-1), torch.nan)
        return {f"{name}_pages": _remembered_as(rows, d.memory)}
    numbers, scales = quantised(rows, dtype)
    pages = {f"{name}_pages": _remembered_as(numbers, d.memory)}
    return pages | {f"{name}_scales": scales.masked_fill(unused, torch.nan)}


def _remembered_as(pages: Tensor, memory: str) -> Tensor:
    """Pages [num_pages, heads, slots, dim] with another order in memory."""
    if memory == "slots_first":
        return pages.transpose(1, 2).contiguous().transpose(1, 2)
    if memory == "heads_first":
        return pages.transpose(0, 1).contiguous().transpose(0, 1)
    if memory == "interleaved":  # keys beside values: every other row of something larger
        doubled = pages.repeat_interleave(2, dim=2)
        return doubled[:, :, ::2]
    return pages


def _poison_hidden(case: PagedCase) -> None:
    """Put NaN where no query row sees it: no result may show it."""
    d = case.description
    inputs, variant = case.prepared(torch.float64)
    scores, visible = reference.pairs(inputs, variant, torch.float64)
    seen = visible.expand(scores.shape).unflatten(1, (d.kv_heads, d.group)).any(3).any(2)
    batch, heads, row = (~seen).nonzero(as_tuple=True)
    inside = row < inputs.kv_lens.long()[batch]
    batch, heads, row = batch[inside], heads[inside], row[inside]
    page = inputs.page_table.long()[batch, row // d.page_size]
    for name in ("key",) if d.latent else ("key", "value"):
        kind = "scales" if f"{name}_scales" in case.tensors else "pages"
        case.tensors[f"{name}_{kind}"][page, heads, row % d.page_size] = torch.nan


# ---- what writes pages ---------------------------------------------------------------------------


def write(
    key: Tensor,
    value: Tensor,
    key_pages: Tensor,
    value_pages: Tensor,
    slot_mapping: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    interleaved: bool = False,
) -> None:
    """See `saccade.write_kv_cache`."""
    if cos is not None and sin is not None:
        key = rotated(key, cos, sin, interleaved)
    page_size = key_pages.shape[2]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot < 0:
            continue
        at = (slot // page_size, slice(None), slot % page_size)
        for row, pages, scales in (
            (key[token], key_pages, key_scales),
            (value[token], value_pages, value_scales),
        ):
            if scales is not None:
                row, scales[at] = quantised(row, pages.dtype)
            pages[at] = row.to(pages.dtype)


def move(pools: Sequence[Tensor], source: Tensor, target: Tensor) -> None:
    """See `saccade.move_pages`: every page is read before any is written."""
    for pool in pools:
        read = torch.clone(pool)
        for old, new in zip(source.tolist(), target.tolist(), strict=True):
            pool[new] = read[old]
