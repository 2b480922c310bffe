"""PagedCache: keys and values of many sequences in pages, for all layers of a model."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kv_cache import growth, sequences
from saccade.kv_cache.growth import token_list
from saccade.kv_cache.pool import locked
from saccade.kv_cache.statistics import CacheStatistics, SequenceStatistics, together
from saccade.kv_cache.storage import LayerPages, PageSizes
from saccade.kv_cache.window_cache import WindowCache
from saccade.runtime.arguments import LARGEST_PAGE, check_whole_number
from saccade.runtime.spec import DTYPES, QUANTISED


class LayerAddress(NamedTuple):
    """Where a layer's pages are: in which group, and as which layer of it."""

    group: int
    layer: int


class PagedCache:
    """Keys and values of many sequences in pages of one pool, for all layers of a model.

    A sequence is a number. `append` says where new tokens go, `write` puts them there layer by
    layer, `attend` reads them. Every method may be called from any thread; slots and tables hold
    until the next call that changes their sequence, or `compact`.

    Layers of unlike windows (`windows`) form groups, each with a pool of its own: layers with a
    sliding window give pages back while others keep theirs. All groups have the same sequences, and
    a call changes all of them or none. Slots, tables and counts of pages then come in a list, one
    entry for each group.

    Args:
        num_pages: pages of the pool; each holds `page_size` tokens in every layer. With `windows`
            of each group, or a mapping from windows to numbers.
        page_size: 1 to 1024 tokens.
        num_layers: of the model, where all layers have one window.
        kv_heads, head_dim: of the model. value_dim: head_dim unless given.
        dtype: of the pages; int8 and float8_e4m3fn come with a scale for each token and head.
        device: where the pages lie.
        host_pages: pages of host memory (page-locked beside a GPU) for what is swapped out; as
            num_pages.
        window: tokens that a token sees before itself, as in `masks.window(window)`: pages behind
            it are let go, and `attend` applies the mask. None: everything is seen.
        windows: in the place of num_layers and window, a window or None for each layer.
        prefix_caching: whether full pages are found again by equal beginnings.

    Attributes:
        windows: the window of each group: None first, then the widest.
        addresses: where each layer's pages are. num_pages: of each group.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: PagedAttention (Kwon et al. 2023), section 4.

    >>> cache = saccade.PagedCache(64, num_layers=2, kv_heads=8, head_dim=128)
    >>> sequence = cache.allocate(prompt)
    >>> slots = cache.append({sequence: prompt[cache.length(sequence):]})
    """

    def __init__(
        self,
        num_pages: int | Mapping[int | None, int],
        page_size: int = 16,
        *,
        num_layers: int | None = None,
        kv_heads: int,
        head_dim: int,
        value_dim: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        host_pages: int | Mapping[int | None, int] = 0,
        window: int | None = None,
        windows: Sequence[int | None] | None = None,
        prefix_caching: bool = True,
    ):
        value_dim = head_dim if value_dim is None else value_dim
        for name, value in (
            ("page_size", page_size), ("kv_heads", kv_heads), ("head_dim", head_dim),
            ("value_dim", value_dim),
        ):  # fmt: skip
            check_whole_number(name, value, least=1)
        if page_size > LARGEST_PAGE:
            raise ValueError(f"page_size: got {page_size}, takes 1 to {LARGEST_PAGE}")
        if dtype not in DTYPES + QUANTISED:
            raise TypeError(f"dtype: got {dtype}, takes a floating-point dtype or int8")
        self._grouped = windows is not None
        of_layers = _windows_of(num_layers, window, windows)
        some = {each for each in of_layers if each is not None}
        everything: list[int | None] = [None] if None in of_layers else []
        self.windows = (*everything, *sorted(some, reverse=True))
        self.num_pages = _of_windows("num_pages", num_pages, self.windows, least=1)
        of_host = _of_windows("host_pages", host_pages, self.windows, least=0)
        self.page_size, self.device = page_size, torch.device(device)
        self.groups = [
            WindowCache(
                PageSizes(page_size, of_layers.count(each), kv_heads, head_dim, value_dim, dtype),
                pages,
                on_host,
                self.device,
                each,
                prefix_caching,
            )
            for each, pages, on_host in zip(self.windows, self.num_pages, of_host, strict=True)
        ]
        self.addresses = [
            LayerAddress(self.windows.index(each), of_layers[:layer].count(each))
            for layer, each in enumerate(of_layers)
        ]
        self._sequences: dict[int, tuple[int, ...]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._torn = False  # whether an exception now leaves sequences in some groups alone

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
        tokens = token_list(tokens)
        self._torn = True
        numbers = [cache.allocate(tokens, salt) for cache in self.groups]
        length = min(map(WindowCache.length, self.groups, numbers))
        for cache, number in zip(self.groups, numbers, strict=True):
            cache.trim(number, length)
        return self._enter(numbers)

    @locked
    def fork(self, sequence: int) -> int:
        """A second sequence with the same tokens; pages are shared until one of the two writes."""
        there = self._each(sequence)
        self._torn = True
        return self._enter([cache.fork(number) for cache, number in there])

    @locked
    def append(
        self,
        tokens: Mapping[int, int | Sequence[int]],
        *,
        spare: Sequence[int | None] | None = None,
    ) -> Any:
        """Make room for new tokens of any number of sequences, in one step.

        A last page that others hold too is copied first. What was appended before counts as
        written from now on, and its full pages can be found by others (see `commit`).

        Args:
            tokens: for each sequence its new tokens, or only how many (then its pages are not
                found by others from there on).
            spare: for each group None, or, where these tokens are attended to where they are and
                not in pages, how many of them may be trimmed: a group with a window keeps what is
                seen from there on. Tokens before that have slots of -1, and take no pages.

        Returns:
            int64 [tokens]: the slot of each new token, sequence after sequence, as `write_kv_cache`
            takes them; with `windows` a list of such, one for each group.

        Raises:
            OutOfPagesError: if there are too few pages for all of it; then nothing has changed.
            KeyError, ValueError: for a sequence that is not there, or is swapped out.
        """
        asked = growth.checked(tokens)
        spares = [None] * len(self.groups) if spare is None else spare
        growing = []
        for group, (cache, spared) in enumerate(zip(self.groups, spares, strict=True)):
            of_group = {self._of(sequence)[group]: new for sequence, new in asked.items()}
            growing.append((cache._state, growth.wanted(cache._state, of_group, spared), spared))
        for state, wanted, _ in growing:  # before anything is evicted to make room
            state.pool.require(growth.pages_needed(wanted))
        grown = [growth.grown(*each) for each in growing]
        sequences.enter(*(change for change, _ in grown))
        return self._by_group(
            [torch.tensor(slots, dtype=torch.int64, device=self.device) for _, slots in grown]
        )

    @locked
    def commit(self, sequence: int) -> None:
        """Say that all tokens so far are written: their full pages may be found by others."""
        for cache, number in self._each(sequence):
            cache.commit(number)

    @locked
    def forget(self, sequence: int) -> None:
        """Let nobody find a sequence's pages any more, nor others that begin with the same tokens.

        For what turns out to be wrong: another that begins so is computed again.
        """
        for cache, number in self._each(sequence):
            cache.forget(number)

    @locked
    def trim(self, sequence: int, length: int) -> None:
        """Forget all but the first tokens (drafts that were not accepted, say).

        Raises:
            ValueError: if there are fewer, or if a window would reach back to released pages.
        """
        sequences.enter(*(sequences.trimmed(c._state, n, length) for c, n in self._each(sequence)))

    @locked
    def free(self, sequence: int) -> None:
        """End a sequence; its pages that hold a known beginning stay until room is needed."""
        there = self._each(sequence)
        self._torn = True
        del self._sequences[sequence]
        for cache, number in there:
            cache.free(number)
        self._torn = False

    @locked
    def clear(self) -> None:
        """End every sequence, as `free` ends one."""
        for sequence in list(self._sequences):
            self.free(sequence)

    @locked
    def swap_out(self, sequence: int) -> None:
        """Move a sequence's pages to the host; shared pages are copied there.

        Raises:
            OutOfPagesError: if the host has too few pages; then nothing has changed.
        """
        there = [(cache._state, number) for cache, number in self._each(sequence)]
        for state, number in there:
            state.host_pool.require(len(state.find(number).kept))
        sequences.enter(*(sequences.swapped_out(*each) for each in there))

    @locked
    def swap_in(self, sequence: int) -> None:
        """Move a sequence's pages back from the host.

        Raises:
            OutOfPagesError: if there are too few pages; then nothing has changed.
            ValueError: if it is not swapped out.
        """
        there = [(cache._state, number) for cache, number in self._each(sequence)]
        for state, number in there:
            state.pool.require(len(state.find(number, on_device=False).kept_on_host))
        sequences.enter(*(sequences.swapped_in(*each) for each in there))

    @locked
    def compact(self) -> int:
        """Move all pages to the lowest numbers, each sequence's side by side; how many moved.

        Slots and tables that were handed out before no longer hold.
        """
        return sum(cache.compact() for cache in self.groups)

    @locked
    def tables(self, sequences: Sequence[int]) -> Any:
        """page_table int32 [batch, max_pages] and kv_lens int32 [batch] for `attention_paged`; with
        `windows` a list of such pairs, one for each group.

        In place of a released page stands one that the sequence holds: its mask must be the
        window's.
        """
        asked = list(sequences)
        return self._by_group([self._tables(group, asked) for group in range(len(self.groups))])

    def pages(self, layer: int) -> LayerPages:
        """A layer's tensors, by the names of `attention_paged`'s arguments."""
        group, of_group = self._address(layer)
        return self.groups[group].pages(of_group)

    @locked
    def write(
        self, layer: int, key: Tensor, value: Tensor, slots: Tensor | Sequence[Tensor],
        **options: Any,
    ) -> None:  # fmt: skip
        """`saccade.write_kv_cache` into a layer's pages; slots as `append` gave them."""
        group, of_group = self._address(layer)
        here = slots if isinstance(slots, Tensor) else slots[group]
        self.groups[group].write(of_group, key, value, here, **options)

    def attend(self, layer: int, query: Tensor, sequences: Sequence[int], **options: Any) -> Any:
        """`saccade.attention_paged` over a layer's pages, under the mask of its window, if any."""
        group, of_group = self._address(layer)
        table, lens = self._tables(group, sequences)
        return self.groups[group].attend(of_group, query, table, lens, **options)

    @locked
    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self.groups[0].length(self._of(sequence)[0])

    @locked
    def available(self) -> Any:
        """Pages that can be had; with `windows` a list, one number for each group."""
        return self._by_group([cache._state.pool.available for cache in self.groups])

    @locked
    def statistics(self) -> CacheStatistics:
        """What the cache holds now, and what it has done so far.

        Pages of all groups are added up; each token counts once.
        """
        return together([cache.statistics() for cache in self.groups])

    @locked
    def sequence_statistics(self, sequence: int) -> SequenceStatistics:
        """What one sequence holds, pages of all groups added up."""
        found = [cache.sequence_statistics(number) for cache, number in self._each(sequence)]
        first = found[0]
        pages, copied = (sum(getattr(each, name) for each in found) for name in ("pages", "copied"))
        return SequenceStatistics(first.length, first.cached, pages, copied, first.swapped_out)

    @locked
    def check(self) -> None:
        """Look whether every page is where the state says, and all groups have the same sequences.

        Raises:
            AssertionError: saying what is broken.
        """
        for cache in self.groups:
            cache.check()
        found = []
        for group, (window, cache) in enumerate(zip(self.windows, self.groups, strict=True)):
            known = {each[group] for each in self._sequences.values()}
            if known != set(cache._state.sequences):
                found.append(f"layers of window {window} have other sequences")
        for sequence in self._sequences:
            held = [c._state.sequences.get(n) for c, n in self._each(sequence)]
            if len({each and (each.length, each.host_pages is None) for each in held}) > 1:
                found.append(f"sequence {sequence} is not the same in all groups")
        if found:
            raise AssertionError("PagedCache: " + "; ".join(found))

    def _address(self, layer: int) -> LayerAddress:
        count = len(self.addresses)
        if not -count <= layer < count:
            raise IndexError(f"layer: got {layer}, takes 0 to {count - 1}")
        return self.addresses[layer]

    @locked
    def _tables(self, group: int, sequences: Sequence[int]) -> tuple[Tensor, Tensor]:
        return self.groups[group].tables([self._of(sequence)[group] for sequence in sequences])

    def _enter(self, numbers: Sequence[int]) -> int:
        sequence = next(self._numbers)
        self._sequences[sequence] = tuple(numbers)
        self._torn = False
        return sequence

    def _mend(self) -> None:
        """Let go of what only some groups have: an exception came while it was made or ended."""
        for cache in self.groups:
            cache._state.mend()
        if not self._torn:
            return
        for group, cache in enumerate(self.groups):
            known = {numbers[group] for numbers in self._sequences.values()}
            for number in set(cache._state.sequences) - known:
                cache.free(number)
        self._torn = False

    def _by_group(self, found: list[Any]) -> Any:
        """A list, one entry for each group; without `windows` the one entry."""
        return found if self._grouped else found[0]

    def _of(self, sequence: int) -> tuple[int, ...]:
        found = self._sequences.get(sequence)
        if found is None:
            raise KeyError(f"sequence: got {sequence}, takes one that was allocated and not freed")
        return found

    def _each(self, sequence: int) -> list[tuple[WindowCache, int]]:
        return list(zip(self.groups, self._of(sequence), strict=True))


def _of_windows(
    name: str,
    given: int | Mapping[int | None, int],
    windows: Sequence[int | None],
    *,
    least: int,
) -> tuple[int, ...]:
    """Numbers of pages, one for each window."""
    found = []
    for window in windows:
        if isinstance(given, Mapping) and window not in given:
            got = dict(given)
            raise ValueError(f"{name}: got {got}, takes a number for the window {window} too")
        found.append(given[window] if isinstance(given, Mapping) else given)
        check_whole_number(name, found[-1], least=least)
    return tuple(found)


def _windows_of(
    num_layers: int | None, window: int | None, windows: Sequence[int | None] | None
) -> list[int | None]:
    """The window of each layer."""
    if windows is None:
        if num_layers is None:
            raise TypeError("num_layers: got None, takes a whole number, or windows for each layer")
        check_whole_number("num_layers", num_layers, least=1)
        check_whole_number("window", 0 if window is None else window, least=0)
        return [window] * num_layers
    if num_layers is not None or window is not None:
        raise TypeError("windows: got it beside num_layers or window, takes either")
    if not isinstance(windows, Sequence):
        got = type(windows).__name__
        raise TypeError(f"windows: got {got}, takes a window or None for each layer")
    if not windows:
        raise ValueError("windows: got none, takes one for each layer")
    for each in windows:
        check_whole_number("windows", 0 if each is None else each, least=0)
    return list(windows)
