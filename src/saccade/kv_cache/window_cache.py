"""WindowCache: the pages of layers of one window; shares, copies, and never loses one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.kv_cache import sequences, statistics
from saccade.kv_cache.pool import PagePool
from saccade.kv_cache.sequences import CacheState, PrefixIndex
from saccade.kv_cache.statistics import CacheStatistics, SequenceStatistics
from saccade.kv_cache.storage import LayerPages, PageMemory, PageSizes
from saccade.kv_cache.write import write_kv_cache
from saccade.masks import as_mask
from saccade.masks import window as window_mask
from saccade.ops.paged_attention.api import attention_paged


class WindowCache:
    """The pages of all layers that look back equally far: a group of a `PagedCache`.

    That says what the methods of the same names do; it has checked all arguments, and lets one
    thread in at a time. What must change in all groups or none (`append`, `trim`, a swap) it enters
    in the states itself. Sequences have numbers of the group's own.
    """

    def __init__(
        self,
        sizes: PageSizes,
        num_pages: int,
        host_pages: int,
        device: torch.device,
        window: int | None,
        prefix_caching: bool,
    ):
        index = PrefixIndex(sizes.page_size)
        self._state = CacheState(
            PageMemory(sizes, num_pages, host_pages, device),
            PagePool(num_pages, "device", index.forget),
            PagePool(host_pages, "host", lambda page: None),
            index,
            sizes.page_size,
            window,
            prefix_caching,
        )
        self._device, self._numbers = device, itertools.count()

    def allocate(self, tokens: list[int], salt: bytes) -> int:
        """Begin a sequence; its number."""
        number = next(self._numbers)
        sequences.enter(sequences.begun(self._state, number, tokens, salt))
        return number

    def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens; its number."""
        number = next(self._numbers)
        sequences.enter(sequences.forked(self._state, number, sequence))
        return number

    def trim(self, sequence: int, length: int) -> None:
        """Forget all but the first tokens."""
        sequences.enter(sequences.trimmed(self._state, sequence, length))

    def commit(self, sequence: int) -> None:
        """Say that all tokens so far are written."""
        self._state.commit(self._state.find(sequence))

    def forget(self, sequence: int) -> None:
        """Let nobody find a sequence's pages any more."""
        self._state.forget(self._state.find(sequence))

    def free(self, sequence: int) -> None:
        """End a sequence."""
        self._state.end(sequence)

    def compact(self) -> int:
        """Move all pages to the lowest numbers; how many moved."""
        return sequences.compact(self._state)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._state.find(sequence, on_device=False).length

    def tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """page_table int32 [batch, max_pages] and kv_lens int32 [batch] for `attention_paged`."""
        held = [self._state.find(sequence) for sequence in sequences]
        width = max((len(each.pages) for each in held), default=0)
        rows = []
        for each in held:
            stand_in = next(iter(each.kept), 0)
            pages = [stand_in if page is None else page for page in each.pages]
            rows.append(pages + [0] * (width - len(pages)))
        table = torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(held), width)
        lens = torch.tensor([each.length for each in held], dtype=torch.int32, device="cpu")
        return table.to(self._device), lens.to(self._device)

    def pages(self, layer: int) -> LayerPages:
        """A layer's tensors, by the names of `attention_paged`'s arguments."""
        return self._state.memory.layers[layer]

    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor, **options: Any) -> None:
        """`saccade.write_kv_cache` into a layer's pages."""
        pages = self.pages(layer)
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        write_kv_cache(key, value, pages.key_pages, pages.value_pages, slots, **scales, **options)

    def attend(self, layer: int, query: Tensor, table: Tensor, lens: Tensor, **options: Any) -> Any:
        """`saccade.attention_paged` over a layer's pages, under the window's mask, if any."""
        if self._state.window is not None:
            seen, mask = window_mask(self._state.window), options.get("mask")
            options["mask"] = seen if mask is None else as_mask(mask) & seen
        pages = self.pages(layer)
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        return attention_paged(
            query, pages.key_pages, pages.value_pages, table, lens, **scales, **options
        )

    def statistics(self) -> CacheStatistics:
        """What the group holds now, and what it has done so far."""
        return statistics.of_cache(self._state)

    def sequence_statistics(self, sequence: int) -> SequenceStatistics:
        """What one sequence holds."""
        return statistics.of_sequence(self._state.find(sequence, on_device=False))

    def check(self) -> None:
        """Raise AssertionError, saying what is broken, if a page is not where the state says."""
        found = statistics.broken(self._state)
        if found:
            raise AssertionError("WindowCache: " + "; ".join(found))
