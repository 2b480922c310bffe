"""Free ranges: the free page numbers, as stretches of neighbours.

Neighbouring pages of one sequence are read as one view on a CPU, so a sequence gets the page
behind its last one where that is free, and a new one starts in the middle of the longest stretch,
which leaves room to grow to the sequence before it.
"""

from __future__ import annotations


class FreeRuns:
    """A set of page numbers that knows its stretches of neighbours."""

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
        if page in self._first:  # a stretch ends just before it
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
