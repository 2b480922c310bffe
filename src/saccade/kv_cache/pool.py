"""Pool: page numbers, who holds them, which are free, and what full pages are known to hold.

An interrupt (KeyboardInterrupt, or what another signal's handler raises) can come between any two
instructions of Python. So a call of a cache works out first what will be, and then enters it
`at_once`. All that it does before or after that, such as counting who holds a page, can be done
again from what is entered: a flag marks it as perhaps half done, and the next call mends it before
anything else.
"""

from __future__ import annotations

import array
import functools
import hashlib
import operator
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Concatenate, NamedTuple, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

call = operator.methodcaller("__call__")


def at_once(steps: Iterable[Callable[[], object]]) -> None:
    """Call one function after another, with no moment between for an interrupt.

    A loop in C over functions of C holds no instruction of Python. So each step is a method of a
    built-in type, or of a tensor, bound by `functools.partial`; and none of them can fail.
    """
    deque(map(call, tuple(steps)), maxlen=0)


def locked(method: Callable[Concatenate[Any, P], R]) -> Callable[Concatenate[Any, P], R]:
    """A method of an object with a lock: one thread runs it at a time, and finds nothing torn."""

    @functools.wraps(method)
    def alone(self: Any, *args: P.args, **kwargs: P.kwargs) -> R:
        with self._lock:
            self._mend()
            return method(self, *args, **kwargs)

    return alone


class FreeRanges:
    """The free page numbers, as ranges of neighbours.

    Neighbouring pages of one sequence are read as one view on a CPU, so a sequence gets the page
    behind its last one where that is free, and a new one starts in the middle of the longest range,
    which leaves room to grow to the sequence before it.
    """

    def __init__(self, num_pages: int):
        self._length: dict[int, int] = {}  # by first page
        self._first: dict[int, int] = {}  # by the page behind the last
        self._count = 0
        if num_pages:
            self._add(0, num_pages)

    def __len__(self) -> int:
        return self._count

    def pages(self) -> list[int]:
        """Every free page, ascending."""
        return [
            page
            for first in sorted(self._length)
            for page in range(first, first + self._length[first])
        ]

    def take(self, count: int, after: int | None) -> list[int]:
        """So many pages, neighbours of each other and of `after` as far as they can be.

        The caller knows that there are so many.
        """
        taken: list[int] = []
        while len(taken) < count:
            last = taken[-1] if taken else after
            if last is not None and last + 1 in self._length:
                taken += self._cut(last + 1, 0, count - len(taken))
                continue
            first = max(self._length, key=lambda start: (self._length[start], -start))
            wanted = min(count - len(taken), self._length[first])
            room = (self._length[first] - wanted) // 2 if first > 0 else 0
            taken += self._cut(first, room, wanted)
        return taken

    def give(self, page: int) -> None:
        """Make a page free."""
        first, length = page, 1
        if page in self._first:  # a range ends just before it
            first = self._first[page]
            length += self._remove(first)
        if page + 1 in self._length:
            length += self._remove(page + 1)
        self._add(first, length)

    def _cut(self, first: int, room: int, wanted: int) -> list[int]:
        length = self._remove(first)
        wanted = min(wanted, length - room)
        if room:
            self._add(first, room)
        if room + wanted < length:
            self._add(first + room + wanted, length - room - wanted)
        return list(range(first + room, first + room + wanted))

    def _add(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length] = first
        self._count += length

    def _remove(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length]
        self._count -= length
        return length


class OutOfPagesError(RuntimeError):
    """There are too few pages for what was asked; nothing has changed.

    Attributes:
        needed: pages that the call asked for.
        available: pages that could be had, those of the prefix cache included.
        where: "device" or "host".
        kind: of what there is too little: "pages", or "states" of whole sequences.

    Examples:
        >>> cache = saccade.PagedCache(2, page_size=4, num_layers=1, kv_heads=2, head_dim=16)
        >>> sequence = cache.allocate()
        >>> try:
        ...     cache.append({sequence: list(range(20))})
        ... except saccade.OutOfPagesError as error:
        ...     print(error.needed, "pages needed,", error.available, "available")
        5 pages needed, 2 available
    """

    needed: int
    available: int
    where: str
    kind: str

    def __init__(self, needed: int, available: int, where: str, kind: str = "pages"):
        super().__init__(
            f"out of {kind} on the {where}: {needed} needed, {available} available; free, trim or "
            "swap out a sequence, or make the pool larger"
        )
        self.needed, self.available, self.where, self.kind = needed, available, where, kind

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.needed, self.available, self.where, self.kind)


class PagePool:
    """Page numbers 0 … num_pages - 1, each free, held by sequences, or idle.

    An idle page has no holder, but what lies in it may still be asked for (the prefix cache). It
    is given away when no free page is left, the one that has been idle longest first.
    """

    def __init__(
        self, num_pages: int, where: str, on_evict: Callable[[int], None], kind: str = "pages"
    ):
        self.num_pages, self.where, self.kind = num_pages, where, kind
        self.holders = [0] * num_pages
        self.free = FreeRanges(num_pages)
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self._on_evict = on_evict

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self.free) + len(self.idle)

    @property
    def used(self) -> int:
        """Pages that sequences hold."""
        return self.num_pages - self.available

    def require(self, needed: int) -> None:
        """Raise OutOfPagesError if fewer pages can be had."""
        if needed > self.available:
            raise OutOfPagesError(needed, self.available, self.where, self.kind)

    def take(self, count: int, after: int | None) -> list[int]:
        """So many pages with one holder each, neighbours of `after` as far as they can be.

        Raises:
            OutOfPagesError: if fewer can be had; then nothing has changed.
        """
        self.require(count)
        while len(self.free) < count:
            page, _ = self.idle.popitem(last=False)
            self._on_evict(page)
            self.evictions += 1
            self.free.give(page)
        pages = self.free.take(count, after)
        for page in pages:
            self.holders[page] = 1
        return pages

    def hold(self, pages: Iterable[int]) -> None:
        """One more holder of each page."""
        for page in pages:
            self.idle.pop(page, None)
            self.holders[page] += 1

    def drop(self, pages: Iterable[int], keep: Callable[[int], bool] = lambda page: False) -> None:
        """One holder fewer of each page; one without any is free, or idle where `keep` says so."""
        for page in pages:
            self.holders[page] -= 1
            if self.holders[page]:
                continue
            if keep(page):
                self.idle[page] = None
            else:
                self.free.give(page)

    def recount(self, held: Iterable[int], known: Collection[int] = ()) -> None:
        """Count anew who holds what, when an exception may have left counts half done.

        Args:
            held: every page that is held, as often as it is.
            known: pages in which something lies that may be asked for.
        """
        counted = Counter(held)
        self.idle = OrderedDict.fromkeys(
            page for page in [*self.idle, *known] if page in known and not counted[page]
        )
        self.holders = [counted[page] for page in range(self.num_pages)]
        self.free = FreeRanges(0)
        for page, holders in enumerate(self.holders):
            if not holders and page not in self.idle:
                self.free.give(page)

    def faults(self, held: Iterable[int]) -> list[str]:
        """What is not as it must be where these pages are held, in words."""
        counted, free = Counter(held), self.free.pages()
        found = [
            f"page {page} on the {self.where} counts {holders} holders and has {counted[page]}"
            for page, holders in enumerate(self.holders)
            if holders != counted[page]
        ]
        held_here = [page for page, holders in enumerate(self.holders) if holders]
        if sorted([*held_here, *self.idle, *free]) != list(range(self.num_pages)):
            found.append(f"pages on the {self.where} are lost, or in two states at once")
        if len(free) != len(self.free):
            found.append(f"the free pages on the {self.where} are miscounted")
        return found


# ---- prefix caching ------------------------------------------------------------------------------
# Which full pages hold which tokens, so that equal beginnings are computed once.
#
# A page is known by a hash of 128 bits over its tokens and the hash of the page before it: equal
# hashes mean equal beginnings. The tokens themselves are compared as well. Source: vLLM's automatic
# prefix caching (Kwon et al. 2023, section 4.4, on shared prefixes).


class PrefixEntry(NamedTuple):
    """The tokens that a full page is known to hold."""

    digest: bytes
    before: bytes  # the digest of the page before it
    tokens: tuple[int, ...]


class PrefixIndex:
    """Full pages by the tokens from the start of their sequence to their end."""

    def __init__(self, page_size: int):
        self.page_size = page_size
        self.page_of: dict[bytes, int] = {}
        self.entry_of: dict[int, PrefixEntry] = {}

    @staticmethod
    def root(salt: bytes) -> bytes:
        """What comes before the first page: sequences of unlike salt share nothing."""
        return hashlib.blake2b(salt, digest_size=16, person=b"saccade-root").digest()

    @staticmethod
    def digest(before: bytes, tokens: Sequence[int]) -> bytes:
        """The hash of a page behind another one."""
        words = array.array("q", tokens).tobytes()
        return hashlib.blake2b(before + words, digest_size=16).digest()

    def match(self, tokens: Sequence[int], root: bytes) -> list[tuple[int, bytes]]:
        """(page, digest) of the longest known beginning in whole pages, its last token left out.

        One token at least is left to be computed, so that there is a next one to predict.
        """
        found: list[tuple[int, bytes]] = []
        before = root
        for start in range(0, len(tokens) - self.page_size, self.page_size):
            wanted = tuple(tokens[start : start + self.page_size])
            digest = self.digest(before, wanted)
            page = self.page_of.get(digest)
            if page is None or self.entry_of[page] != PrefixEntry(digest, before, wanted):
                break
            found.append((page, digest))
            before = digest
        return found

    def entries(self, tokens: Sequence[int], root: bytes) -> list[PrefixEntry]:
        """What the full pages of some tokens would be known by."""
        found: list[PrefixEntry] = []
        for start in range(0, len(tokens) - self.page_size + 1, self.page_size):
            wanted = tuple(tokens[start : start + self.page_size])
            before = found[-1].digest if found else root
            found.append(PrefixEntry(self.digest(before, wanted), before, wanted))
        return found

    def knows(self, entry: PrefixEntry) -> int | None:
        """The page that is known by an entry."""
        page = self.page_of.get(entry.digest)
        return None if page is None or self.entry_of[page] != entry else page

    def publish(self, page: int, before: bytes, tokens: Sequence[int]) -> bytes:
        """Make a full page known, unless another one with the same beginning is; its digest."""
        digest = self.digest(before, tokens)
        if digest not in self.page_of and page not in self.entry_of:
            self.entry_of[page] = PrefixEntry(digest, before, tuple(tokens))
            self.page_of[digest] = page
        return digest

    def __contains__(self, page: int) -> bool:
        return page in self.entry_of

    def forget(self, page: int) -> None:
        """A page holds other tokens from now on."""
        entry = self.entry_of.pop(page, None)
        if entry is not None:
            del self.page_of[entry.digest]

    def mend(self) -> None:
        """Make the hashes lead to the pages again, when an exception may have come between."""
        self.page_of = {entry.digest: page for page, entry in self.entry_of.items()}

    def faults(self, pool: PagePool) -> list[str]:
        """What is not as it must be, in words."""
        found = []
        for page, entry in self.entry_of.items():
            if self.page_of.get(entry.digest) != page:
                found.append(f"page {page} is known by a hash that leads elsewhere")
            if not pool.holders[page] and page not in pool.idle:
                found.append(f"page {page} is known, and free")
            if self.digest(entry.before, entry.tokens) != entry.digest:
                found.append(f"page {page} is known by a hash of other tokens")
        if len(self.page_of) != len(self.entry_of):
            found.append("the prefix index knows a hash without a page")
        for page in pool.idle:
            if page not in self:
                found.append(f"page {page} is idle, and known by nothing")
        return found
