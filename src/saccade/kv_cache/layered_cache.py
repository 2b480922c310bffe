"""LayeredCache: the same sequences in several paged caches, one for each kind of layer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.kv_cache import growth, sequences
from saccade.kv_cache.growth import token_list
from saccade.kv_cache.paged_cache import PagedCache
from saccade.kv_cache.pool import locked
from saccade.kv_cache.statistics import CacheStatistics, SequenceStatistics, together
from saccade.kv_cache.storage import LayerPages
from saccade.runtime.arguments import check_whole_number


class Place(NamedTuple):
    """Where a layer's pages are: in which cache, and as which layer of it."""

    kind: int
    layer: int


class LayeredCache:
    """Paged keys and values of a model whose layers look back unlike far.

    Layers of one window are a kind, and a kind is a `PagedCache` of its own: layers with a sliding
    window give pages back while others keep theirs. All kinds have the same sequences, and a call
    changes all of them or none. Slots and tables come once for each kind.

    Args:
        num_pages: of each kind by its window, or one number for every kind.
        page_size: tokens of a page.
        windows: for each layer of the model the tokens that a token sees before itself, or None
            where it sees everything.
        host_pages: as num_pages, of host memory.
        options: of `PagedCache`: kv_heads, head_dim, value_dim, dtype, device, prefix_caching.

    Attributes:
        kinds: the windows that there are, None first, then the widest. places: where each layer's
            pages are. num_pages: of each kind.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    >>> cache = saccade.LayeredCache(64, windows=[None, 128, None, 128], kv_heads=8, head_dim=128)
    >>> slots = cache.append({cache.allocate(): 100})
    """

    def __init__(
        self,
        num_pages: int | Mapping[int | None, int],
        page_size: int = 16,
        *,
        windows: Sequence[int | None],
        host_pages: int | Mapping[int | None, int] = 0,
        **options: Any,
    ):
        if not windows:
            raise ValueError("windows: got none, takes one for each layer")
        for window in windows:
            check_whole_number("windows", 0 if window is None else window, least=0)
        some = {window for window in windows if window is not None}
        everything: list[int | None] = [None] if None in windows else []
        self.kinds = (*everything, *sorted(some, reverse=True))
        self.num_pages = tuple(_of_kind("num_pages", num_pages, window) for window in self.kinds)
        self.caches = [
            PagedCache(
                pages, page_size, window=window, num_layers=windows.count(window),
                host_pages=_of_kind("host_pages", host_pages, window), **options,
            )
            for window, pages in zip(self.kinds, self.num_pages, strict=True)
        ]  # fmt: skip
        self.places = [
            Place(self.kinds.index(window), windows[:layer].count(window))
            for layer, window in enumerate(windows)
        ]
        self.page_size, self.device = page_size, self.caches[0].device
        self._sequences: dict[int, tuple[int, ...]] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self._torn = False  # whether an exception now leaves sequences in some kinds alone

    @locked
    def allocate(self, tokens: Sequence[int] = (), *, salt: bytes = b"") -> int:
        """As `PagedCache.allocate`; it starts with what all kinds find of `tokens`."""
        given = token_list(tokens)
        self._torn = True
        numbers = [cache.allocate(given, salt=salt) for cache in self.caches]
        length = min(map(PagedCache.length, self.caches, numbers))
        for cache, number in zip(self.caches, numbers, strict=True):
            cache.trim(number, length)
        return self._enter(numbers)

    @locked
    def fork(self, sequence: int) -> int:
        """As `PagedCache.fork`."""
        there = self._each(sequence)
        self._torn = True
        return self._enter([cache.fork(number) for cache, number in there])

    @locked
    def append(
        self,
        tokens: Mapping[int, int | Sequence[int]],
        *,
        spare: Sequence[int | None] | None = None,
    ) -> list[Tensor]:
        """As `PagedCache.append`: the slots of new tokens, for each kind.

        Args:
            tokens: as there.
            spare: for each kind None, or, where these tokens are attended to where they are and not
                in pages, how many of them may be trimmed: a kind with a window keeps what is seen
                from there on. Tokens before that have slots of -1, and take no pages.

        Raises:
            OutOfPagesError: if one kind has too few pages; then nothing has changed in any.
        """
        given = growth.checked(tokens)
        spares = [None] * len(self.caches) if spare is None else spare
        growing = []
        for kind, (cache, spared) in enumerate(zip(self.caches, spares, strict=True)):
            of_kind = {self._of(sequence)[kind]: new for sequence, new in given.items()}
            wanted = growth.wanted(cache._books, of_kind, spared)
            growing.append((cache._books, wanted, spared))
        for books, wanted, _ in growing:  # before anything is evicted to make room
            books.pool.require(growth.pages_needed(wanted))
        grown = [growth.grown(*each) for each in growing]
        sequences.enter(*(change for change, _ in grown))
        return [torch.tensor(slots, dtype=torch.int64, device=self.device) for _, slots in grown]

    @locked
    def commit(self, sequence: int) -> None:
        """As `PagedCache.commit`."""
        for cache, number in self._each(sequence):
            cache.commit(number)

    @locked
    def forget(self, sequence: int) -> None:
        """As `PagedCache.forget`."""
        for cache, number in self._each(sequence):
            cache.forget(number)

    @locked
    def trim(self, sequence: int, length: int) -> None:
        """As `PagedCache.trim`; the narrowest window decides how far back."""
        sequences.enter(*(sequences.trimmed(c._books, n, length) for c, n in self._each(sequence)))

    @locked
    def free(self, sequence: int) -> None:
        """As `PagedCache.free`."""
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
        """As `PagedCache.swap_out`."""
        there = [(cache._books, number) for cache, number in self._each(sequence)]
        for books, number in there:
            books.host_pool.require(len(books.find(number).kept))
        sequences.enter(*(sequences.swapped_out(*each) for each in there))

    @locked
    def swap_in(self, sequence: int) -> None:
        """As `PagedCache.swap_in`."""
        there = [(cache._books, number) for cache, number in self._each(sequence)]
        for books, number in there:
            books.pool.require(len(books.find(number, on_device=False).kept_on_host))
        sequences.enter(*(sequences.swapped_in(*each) for each in there))

    @locked
    def compact(self) -> int:
        """As `PagedCache.compact`, kind by kind."""
        return sum(cache.compact() for cache in self.caches)

    @locked
    def tables(self, sequences: Sequence[int]) -> list[tuple[Tensor, Tensor]]:
        """As `PagedCache.tables`, for each kind."""
        numbers = [self._of(sequence) for sequence in sequences]
        return [
            cache.tables([each[kind] for each in numbers]) for kind, cache in enumerate(self.caches)
        ]

    def pages(self, layer: int) -> LayerPages:
        """A layer's tensors, by the names of `attention_paged`'s arguments."""
        place = self.places[layer]
        return self.caches[place.kind].pages(place.layer)

    def write(
        self, layer: int, key: Tensor, value: Tensor, slots: Sequence[Tensor], **options: Any
    ) -> None:
        """As `PagedCache.write`; slots are those of all kinds."""
        place = self.places[layer]
        self.caches[place.kind].write(place.layer, key, value, slots[place.kind], **options)

    def attend(self, layer: int, query: Tensor, sequences: Sequence[int], **options: Any) -> Any:
        """As `PagedCache.attend`, under the window of the layer."""
        place = self.places[layer]
        numbers = [self._of(sequence)[place.kind] for sequence in sequences]
        return self.caches[place.kind].attend(place.layer, query, numbers, **options)

    @locked
    def length(self, sequence: int) -> int:
        """Tokens of a sequence."""
        return self.caches[0].length(self._of(sequence)[0])

    @locked
    def available(self) -> list[int]:
        """Pages that can be had, for each kind."""
        return [cache._books.pool.available for cache in self.caches]

    @locked
    def statistics(self) -> CacheStatistics:
        """What all kinds hold and have done, pages added up; each token counts once."""
        return together([cache.statistics() for cache in self.caches])

    @locked
    def sequence_statistics(self, sequence: int) -> SequenceStatistics:
        """What one sequence holds, pages of all kinds added up."""
        found = [cache.sequence_statistics(number) for cache, number in self._each(sequence)]
        first = found[0]
        pages, copied = (sum(getattr(each, name) for each in found) for name in ("pages", "copied"))
        return SequenceStatistics(first.length, first.cached, pages, copied, first.swapped_out)

    @locked
    def check(self) -> None:
        """As `PagedCache.check`; and whether all kinds have the same sequences.

        Raises:
            AssertionError: saying what is broken.
        """
        for cache in self.caches:
            cache.check()
        found = []
        for kind, cache in zip(self.kinds, self.caches, strict=True):
            known = {each[self.kinds.index(kind)] for each in self._sequences.values()}
            if known != set(cache._books.sequences):
                found.append(f"layers of window {kind} have other sequences")
        for sequence in self._sequences:
            held = [c._books.sequences.get(n) for c, n in self._each(sequence)]
            if len({each and (each.length, each.host_pages is None) for each in held}) > 1:
                found.append(f"sequence {sequence} is not the same in all kinds")
        if found:
            raise AssertionError("LayeredCache: " + "; ".join(found))

    def _enter(self, numbers: Sequence[int]) -> int:
        sequence = next(self._numbers)
        self._sequences[sequence] = tuple(numbers)
        self._torn = False
        return sequence

    def _mend(self) -> None:
        """Let go of what only some kinds have: an exception came while it was made or ended."""
        for cache in self.caches:
            cache._books.mend()
        if not self._torn:
            return
        for kind, cache in enumerate(self.caches):
            known = {numbers[kind] for numbers in self._sequences.values()}
            for number in set(cache._books.sequences) - known:
                cache.free(number)
        self._torn = False

    def _of(self, sequence: int) -> tuple[int, ...]:
        found = self._sequences.get(sequence)
        if found is None:
            raise KeyError(f"sequence: got {sequence}, takes one that was allocated and not freed")
        return found

    def _each(self, sequence: int) -> list[tuple[PagedCache, int]]:
        return list(zip(self.caches, self._of(sequence), strict=True))


def _of_kind(name: str, given: int | Mapping[int | None, int], window: int | None) -> int:
    if not isinstance(given, Mapping):
        return given
    if window not in given:
        raise ValueError(f"{name}: got {dict(given)}, takes a number for the window {window} too")
    return given[window]
