"""Pool: the numbers of pages, how many hold each, and which are free."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from saccade.cache.runs import FreeRuns


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

    @contextmanager
    def taking(self, needed: int) -> Iterator[Callable[[int, int | None], list[int]]]:
        """A function that takes (count, after) pages; all are given back if the block fails.

        Raises:
            OutOfPages: before the block, if fewer than `needed` can be had.
        """
        self.require(needed)
        taken: list[int] = []

        def take(count: int, after: int | None) -> list[int]:
            pages = self._take(count, after)
            taken.extend(pages)
            return pages

        try:
            yield take
        except BaseException:
            self.drop(taken)
            raise

    def _take(self, count: int, after: int | None) -> list[int]:
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

    def renumber(self, new_number: dict[int, int]) -> None:
        """Call every page in use or idle by a new number."""
        holders = [0] * self.num_pages
        for old, new in new_number.items():
            holders[new] = self.holders[old]
        self.holders = holders
        self.idle = OrderedDict((new_number[page], None) for page in self.idle)
        self.free = FreeRuns(0)
        for page in sorted(set(range(self.num_pages)) - set(new_number.values())):
            self.free.give(page)
