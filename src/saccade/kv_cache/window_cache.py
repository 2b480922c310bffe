"""WindowCache: the pages of layers of one window; shares, copies, swaps and never loses one."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.kv_cache import growth, sequences, statistics
from saccade.kv_cache.growth import token_list
from saccade.kv_cache.pool import PagePool, locked
from saccade.kv_cache.prefix import PrefixIndex
from saccade.kv_cache.sequences import CacheState
from saccade.kv_cache.statistics import CacheStatistics, SequenceStatistics
from saccade.kv_cache.storage import LayerPages, PageMemory, PageSizes
from saccade.kv_cache.write import write_kv_cache
from saccade.masks import as_mask
from saccade.masks import window as window_mask
from saccade.ops.paged_attention.api import attention_paged
from saccade.runtime.arguments import LARGEST_PAGE, check_whole_number
from saccade.runtime.spec import DTYPES, QUANTISED


class WindowCache:
    """The pages of all layers that look back equally far: a group of a `PagedCache`.

    Arguments and methods are those of `PagedCache`, which says what they do; sequences have numbers
    of this group's own.
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int = 16,
        *,
        num_layers: int,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        host_pages: int = 0,
        window: int | None = None,
        prefix_caching: bool = True,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        for name, value, least in (
            ("num_pages", num_pages, 1), ("page_size", page_size, 1), ("num_layers", num_layers, 1),
            ("kv_heads", kv_heads, 1), ("head_dim", head_dim, 1), ("value_dim", value_dim, 1),
            ("host_pages", host_pages, 0), ("window", 0 if window is None else window, 0),
        ):  # fmt: skip
            check_whole_number(name, value, least=least)
        if page_size > LARGEST_PAGE:
            raise ValueError(f"page_size: got {page_size}, takes 1 to {LARGEST_PAGE}")
        if dtype not in DTYPES + QUANTISED:
            raise TypeError(f"dtype: got {dtype}, takes a floating-point dtype or int8")
        sizes = PageSizes(page_size, num_layers, kv_heads, head_dim, value_dim, dtype)
        index = PrefixIndex(page_size)
        self.page_size, self.device = page_size, torch.device(device)
        self._state = CacheState(
            PageMemory(sizes, num_pages, host_pages, self.device),
            PagePool(num_pages, "device", index.forget),
            PagePool(host_pages, "host", lambda page: None),
            index,
            page_size,
            window,
            prefix_caching,
        )
        self._numbers = itertools.count()
        self._lock = threading.RLock()

    @locked
    def allocate(self, tokens: Sequence[int] = (), *, salt: bytes = b"") -> int:
        """Begin a sequence; it starts with the pages that hold the beginning of `tokens`, if any.

        Append what is left, tokens[length(sequence):]; that is one token at least.

        Args:
            tokens: the whole prompt; where it is left out nothing is shared.
            salt: sequences of unlike salt (an adapter's name, a tenant's) share no pages.

        Returns:
            The sequence's number.
        """
        number = next(self._numbers)
        sequences.enter(sequences.begun(self._state, number, token_list(tokens), salt))
        return number

    @locked
    def append(self, tokens: Mapping[int, int | Sequence[int]]) -> Tensor:
        """Make room for new tokens of any number of sequences, in one step.

        A last page that others hold too is copied first. What was appended before counts as
        written from now on, and its full pages can be found by others (see `commit`).

        Args:
            tokens: for each sequence its new tokens, or only how many (then its pages are not
                found by others from there on).

        Returns:
            int64 [tokens]: the slot of each new token, sequence after sequence, as `write_kv_cache`
            takes them.

        Raises:
            OutOfPagesError: if there are too few pages for all of it; then nothing has changed.
            KeyError, ValueError: for a sequence that is not there, or is swapped out.
        """
        growing = growth.wanted(self._state, growth.checked(tokens))
        change, slots = growth.grown(self._state, growing)
        sequences.enter(change)
        return torch.tensor(slots, dtype=torch.int64, device=self.device)

    @locked
    def commit(self, sequence: int) -> None:
        """Say that all tokens so far are written: their full pages may be found by others."""
        self._state.commit(self._state.find(sequence))

    @locked
    def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens; pages are shared until one of the two writes."""
        number = next(self._numbers)
        sequences.enter(sequences.forked(self._state, number, sequence))
        return number

    @locked
    def forget(self, sequence: int) -> None:
        """Let nobody find a sequence's pages any more, nor others that begin with the same tokens.

        For what turns out to be wrong: another that begins so is computed again.
        """
        self._state.forget(self._state.find(sequence))

    @locked
    def trim(self, sequence: int, length: int) -> None:
        """Forget all but the first tokens (drafts that were not accepted, say).

        Raises:
            ValueError: if there are fewer, or if the window would reach back to released pages.
        """
        sequences.enter(sequences.trimmed(self._state, sequence, length))

    @locked
    def free(self, sequence: int) -> None:
        """End a sequence; its pages that hold a known beginning stay until room is needed."""
        self._state.end(sequence)

    @locked
    def swap_out(self, sequence: int) -> None:
        """Move a sequence's pages to the host; shared pages are copied there.

        Raises:
            OutOfPagesError: if the host has too few pages; then nothing has changed.
        """
        sequences.enter(sequences.swapped_out(self._state, sequence))

    @locked
    def swap_in(self, sequence: int) -> None:
        """Move a sequence's pages back from the host.

        Raises:
            OutOfPagesError: if there are too few pages; then nothing has changed.
            ValueError: if it is not swapped out.
        """
        sequences.enter(sequences.swapped_in(self._state, sequence))

    @locked
    def compact(self) -> int:
        """Move all pages to the lowest numbers, each sequence's side by side; how many moved.

        Slots and tables that were handed out before no longer hold.
        """
        return sequences.compact(self._state)

    @locked
    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self._state.find(sequence, on_device=False).length

    @locked
    def tables(self, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        """page_table int32 [batch, max_pages] and kv_lens int32 [batch] for `attention_paged`.

        In place of a released page stands one that the sequence holds: its mask must be the
        window's.
        """
        held = [self._state.find(sequence) for sequence in sequences]
        width = max((len(each.pages) for each in held), default=0)
        rows = []
        for each in held:
            stand_in = next(iter(each.kept), 0)
            pages = [stand_in if page is None else page for page in each.pages]
            rows.append(pages + [0] * (width - len(pages)))
        table = torch.tensor(rows, dtype=torch.int32, device="cpu").view(len(held), width)
        lens = torch.tensor([each.length for each in held], dtype=torch.int32, device="cpu")
        return table.to(self.device), lens.to(self.device)

    def pages(self, layer: int) -> LayerPages:
        """A layer's tensors, by the names of `attention_paged`'s arguments."""
        return self._state.memory.layers[layer]

    @locked
    def write(self, layer: int, key: Tensor, value: Tensor, slots: Tensor, **options: Any) -> None:
        """`saccade.write_kv_cache` into a layer's pages."""
        pages = self.pages(layer)
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        write_kv_cache(key, value, pages.key_pages, pages.value_pages, slots, **scales, **options)

    def attend(self, layer: int, query: Tensor, sequences: Sequence[int], **options: Any) -> Any:
        """`saccade.attention_paged` over a layer's pages, under the window's mask, if any."""
        table, lens = self.tables(sequences)
        if self._state.window is not None:
            seen, mask = window_mask(self._state.window), options.get("mask")
            options["mask"] = seen if mask is None else as_mask(mask) & seen
        pages = self.pages(layer)
        scales = {"key_scales": pages.key_scales, "value_scales": pages.value_scales}
        return attention_paged(
            query, pages.key_pages, pages.value_pages, table, lens, **scales, **options
        )

    @locked
    def statistics(self) -> CacheStatistics:
        """What the cache holds now, and what it has done so far."""
        return statistics.of_cache(self._state)

    @locked
    def sequence_statistics(self, sequence: int) -> SequenceStatistics:
        """What one sequence holds."""
        return statistics.of_sequence(self._state.find(sequence, on_device=False))

    @locked
    def check(self) -> None:
        """Look whether every page is where the state say.

        Raises:
            AssertionError: saying what is broken.
        """
        found = statistics.broken(self._state)
        if found:
            raise AssertionError("WindowCache: " + "; ".join(found))

    def _mend(self) -> None:
        self._state.mend()
