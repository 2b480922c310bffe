"""A cache whose tokens are dealt to ranks one by one, so that decoding reads a share of it on each.

All ranks keep the same books: a page stands for `ranks` times as many tokens as a rank's page has
slots, and each rank's page of that number holds its own tokens among them. So ranks agree on pages,
shared beginnings and copies without a message, and have as many tokens as one another. A call
attends to a rank's tokens on each and merges all partial results by their lse, in one message.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from saccade.kv_cache.paged_cache import PagedCache, check_released
from saccade.kv_cache.storage import on_device
from saccade.masks import NOTHING_HIDDEN, Mask, as_mask
from saccade.masks import window as window_mask
from saccade.modifiers.normal_form import is_causal
from saccade.modifiers.renumber import interleaved
from saccade.ops.attention.merge import merged
from saccade.ops.paged_attention.api import attention_paged
from saccade.parallel import large_scores
from saccade.parallel.agreement import agree, begin, described, reporting, whole_tensors
from saccade.parallel.planner import members
from saccade.runtime.arguments import check_flag
from saccade.runtime.spec import accumulate_dtype
from saccade.runtime.validation import with_causal
from saccade.scores import Score, as_score

# What torch 2.13 calls it, which warns of its older name.
ALL_GATHER: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(eq=False)
class _Members:
    """The ranks of a cache, as comparisons and reports take them."""

    ranks: int
    rank: int
    group: Any
    verify: str
    memory: dict[Any, Any] = field(default_factory=dict)

    @property
    def compares_always(self) -> bool:
        """Whether every call is compared, and not only the first of each kind."""
        on_gpus = self.group is not None and dist.get_backend(self.group) == "nccl"
        return self.verify == "always" or (self.verify == "auto" and not on_gpus)


class ShardedCache(PagedCache):
    """A `PagedCache` whose tokens are dealt to ranks one by one: token t lies on rank t % ranks.

    Every rank makes the same calls with the same arguments. Keys and values of new tokens are
    whole on every rank, and each writes its own; queries are whole as well, and so is the output
    of `attend`, a collective: one message brings all ranks' partial outputs and their lse, which
    each merges in float32, in the order of ranks.

    Args:
        num_pages: pages on each rank.
        page_size: tokens that a page holds on each rank: a page of the books stands for `ranks`
            times as many.
        mesh: a `ProcessGroup` or a `DeviceMesh` of one dimension; 1: this process alone.
        verify: "always" compares what ranks are about to attend to before every call, "first"
            before the first of each kind, and "auto" is "always" on CPUs and "first" on GPUs.
        options: those of `PagedCache`, but for states.

    Raises:
        TypeError, ValueError: as `PagedCache`; of `attend`, on every rank where ranks differ,
            naming the difference.
        RuntimeError: of `attend`, where messages fail or time out.

    Source: the merge, FlashAttention-2 (Dao 2023), section 3.1.

    Examples:
        >>> cache = saccade.parallel.ShardedCache(
        ...     64, page_size=4, mesh=1, num_layers=1, kv_heads=2, head_dim=16
        ... )  # under torchrun: a process group in place of 1
        >>> sequence = cache.allocate()
        >>> slots = cache.append({sequence: 5})  # -1 for tokens of other ranks
        >>> cache.write(0, torch.randn(5, 2, 16), torch.randn(5, 2, 16), slots)
        >>> cache.attend(0, torch.randn(1, 8, 1, 16), [sequence]).shape
        torch.Size([1, 8, 1, 16])
    """

    def __init__(
        self, num_pages: int | Mapping[int | None, int], page_size: int = 16, *, mesh: Any,
        verify: str = "auto", **options: Any,
    ) -> None:  # fmt: skip
        if options.get("states"):
            raise NotImplementedError("states: got some, takes none: states are not dealt to ranks")
        if verify not in ("auto", "always", "first"):
            raise ValueError(f'verify: got {verify!r}, takes "auto", "always" or "first"')
        ranks, rank, group = members(mesh)
        if ranks > 1 and group is None:
            raise ValueError(f"mesh: got {ranks} simulated ranks, takes a process group, or 1")
        self._members = _Members(ranks, rank, group, verify)
        super().__init__(num_pages, page_size, **options)

    @property
    def _tokens_of_page(self) -> int:
        return self.page_size * self._members.ranks

    def grow(
        self,
        tokens: Mapping[int, int | Sequence[int]],
        *,
        spare: Sequence[int | None] | None = None,
        keep: Collection[int] = (),
    ) -> Any:
        """`append` whose slots are plain numbers: -1 for tokens of other ranks."""
        slots = super().grow(tokens, spare=spare, keep=keep)
        if self._grouped:
            return [[self._own_slot(slot) for slot in of_group] for of_group in slots]
        return [self._own_slot(slot) for slot in slots]

    def _own_slot(self, slot: int) -> int:
        """The slot of this rank's page of a slot of the books."""
        page, place = divmod(slot, self._tokens_of_page)
        if slot < 0 or place % self._members.ranks != self._members.rank:
            return -1
        return page * self.page_size + place // self._members.ranks

    def own_lengths(self, lengths: Sequence[int]) -> list[int]:
        """How many of so many first tokens lie on this rank.

        Examples:
            >>> cache = saccade.parallel.ShardedCache(
            ...     8, mesh=1, num_layers=1, kv_heads=1, head_dim=8)
            >>> cache.own_lengths([5, 0])
            [5, 0]
        """
        ranks, rank = self._members.ranks, self._members.rank
        return [max(length - rank + ranks - 1, 0) // ranks for length in lengths]

    def _kv_lens(self, lengths: Sequence[int]) -> Tensor:
        """kv_lens of this rank's tokens, of sequences of so many."""
        return super()._kv_lens(self.own_lengths(lengths))

    def attend(self, layer: int, query: Tensor, sequences: Sequence[int], **options: Any) -> Any:
        """`saccade.attention_paged` over the pages of all ranks: a collective.

        Masks and scores number the keys of all ranks, and sinks count once. The options are those
        of `PagedCache.attend`.
        """
        if self._members.ranks == 1:
            return super().attend(layer, query, sequences, **options)
        fault, found, facts, whole = None, None, {}, {}
        return_lse = options.pop("return_lse", False)
        try:
            check_flag("return_lse", return_lse)
            with self._lock:
                found, facts, whole = self._attend_own(layer, query, list(sequences), options)
        except (TypeError, ValueError, NotImplementedError, LookupError) as error:
            fault = error  # others learn of it before they wait for this rank
        begin(self._members, "attend")
        device = query.device if isinstance(query, Tensor) else self.device
        facts = {"call": "attend", "layer": str(layer), **facts}
        agree(self._members, facts, fault, device, whole=whole)
        assert found is not None
        output, lse = self._merged(*found)
        return (output, lse) if return_lse else output

    def _attend_own(
        self, layer: int, query: Tensor, sequences: list[int], options: dict[str, Any]
    ) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, str], dict[str, Tensor]]:
        """Output, lse and what rounding took from it, of this rank's tokens; what must be equal on
        all ranks, in words, and in all numbers."""
        pages, group = self.pages(layer), self.groups[self._address(layer).group]
        lengths = [group.find(sequence).length for sequence in sequences]
        mask = as_mask(with_causal(options.pop("mask", None), options.pop("causal", False)))
        score, sinks = as_score(options.pop("score", None)), options.pop("sinks", None)
        if group.window is not None:
            check_released(group, sequences, query, options.get("cu_seqlens_q"))
            mask = mask & window_mask(group.window) if mask.key else window_mask(group.window)
        facts = {
            "query": f"{tuple(query.shape)} {query.dtype}",
            "mask": described(mask.key, mask.captured, contents=False),
            "score": described(score.key, score.captured, contents=False),
            "sinks": "none" if sinks is None else str(sinks.dtype),
            "options": str({name: each for name, each in options.items()
                            if not isinstance(each, Tensor)}),
        }  # fmt: skip
        if self._members.compares_always:
            facts["lengths"] = str(lengths)
        whole = {"query": query, **whole_tensors(sinks, mask.captured, score.captured)}
        whole |= {name: each for name, each in options.items() if isinstance(each, Tensor)}
        mask, score = self._as_seen_here(mask, score, query, lengths, options.get("cu_seqlens_q"))
        sinks = sinks if self._members.rank == 0 else None
        table, kv_lens = self._known_tables(layer, sequences)
        options |= {"key_scales": pages.key_scales, "value_scales": pages.value_scales}

        def attend(kv_lens: Tensor, score: Score, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
            return attention_paged(
                query, pages.key_pages, pages.value_pages, table, kv_lens, mask=mask, score=score,
                sinks=sinks, return_lse=True, **options,
            )  # fmt: skip

        output, lse = attend(kv_lens, score, sinks)

        def again(base: Tensor, rows: Tensor | None) -> Tensor:
            offsets = options.get("cu_seqlens_q")
            seen = kv_lens if rows is None else kv_lens * large_scores.entries_of(rows, offsets)
            found = attend(seen, large_scores.less(score, base, offsets), None)[1]
            return found if sinks is None else large_scores.with_sinks(found, sinks, base)

        lost = large_scores.lost_of(lse, None, bool(score.key), again)
        number = torch.zeros_like(lse) if lost is None else lost.number
        return (output, lse, number), facts, whole

    def _as_seen_here(
        self, mask: Mask, score: Score, query: Tensor, lengths: list[int], offsets: Tensor | None
    ) -> tuple[Mask, Score]:
        """A mask and a score of all tokens, where keys are those of this rank."""
        if offsets is None and query.dim() == 4 and query.shape[2] == 1 and is_causal(mask.key):
            mask = NOTHING_HIDDEN  # the last token sees all
        if not mask.key and not score.key:
            return mask, score
        shift = on_device(lengths, torch.int32, self.device)
        if offsets is not None:
            shift = shift - offsets.diff()
        elif query.dim() == 4:
            shift = shift - query.shape[2]
        ranks = self._members.ranks, self._members.rank
        mask, score = mask.to(self.device), score.to(self.device)
        return (
            Mask(*interleaved(mask.key, mask.captured, shift, *ranks)),
            Score(*interleaved(score.key, score.captured, shift, *ranks)),
        )

    def _merged(self, output: Tensor, lse: Tensor, lost: Tensor) -> tuple[Tensor, Tensor]:
        """Output and lse of all ranks' tokens, from every rank's own."""
        packed = output.dim() == 3
        wide = accumulate_dtype(output.dtype)
        beside = [(each.transpose(0, 1) if packed else each).unsqueeze(-1) for each in (lse, lost)]
        own = torch.cat([output.to(wide), *beside], -1)
        parts = own.new_empty(self._members.ranks, *own.shape)
        with reporting(self._members, "outputs of all ranks"):
            ALL_GATHER(parts.flatten(0, 1), own, group=self._members.group)
        whole, lse, _ = merged(parts[..., :-2], parts[..., -2], parts[..., -1])
        return whole.to(output.dtype), lse.transpose(0, 1) if packed else lse


__all__ = ["ShardedCache"]
