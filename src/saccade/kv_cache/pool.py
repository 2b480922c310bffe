"""Pool: the numbers of pages, how many hold each, and which are free."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable

from saccade.kv_cache.free_ranges import FreeRuns


class OutOfPages(RuntimeError):
    """There are too few pages for what was asked; nothing has changed.

    Attributes:
        needed: pages that the call asked for.
        available: pages that could be had, those of the prefix cache included.
        where: "device" or "host".
    """

    def __init__(self, needed: int, available: int, where: str):
        super().__init__(
            f"out of pages on the {where}: {needed} needed, {available} available; free, trim or "
            "swap out a sequence, or make the pool larger"
        )
        self.needed, self.available, self.where = needed, available, where


class PagePool:
    """Page numbers 0 … num_pages - 1, each free, held by sequences, or idle.

    An idle page has no holder, but what lies in it may still be asked for (the prefix cache). It
    is given away when no free page is left, the one that has been idle longest first.
    """

    def __init__(self, num_pages: int, where: str, on_evict: Callable[[int], None]):
        self.num_pages, self.where = num_pages, where
        self.holders = [0] * num_pages
        self.free = FreeRuns(num_pages)
        self.idle: OrderedDict[int, None] = OrderedDict()
        self.evictions = 0
        self._on_evict = on_evict

    @property
    def available(self) -> int:
        """Pages that can be taken."""
        return len(self.free) + len(self.idle)

    def require(self, needed: int) -> None:
        """Raise OutOfPages if fewer pages can be had."""
        if needed > self.available:
            raise OutOfPages(needed, self.available, self.where)

    def take(self, count: int, after: int | None) -> list[int]:
        """So many pages with one holder each, neighbours of `after` as far as they can be.

        Raises:
            OutOfPages: if fewer can be had; then nothing has changed.
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
        self.free = FreeRuns(0)
        for page, holders in enumerate(self.holders):
            if not holders and page not in self.idle:
                self.free.give(page)
