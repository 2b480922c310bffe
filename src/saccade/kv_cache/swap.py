"""Swap: a sequence's pages to the host and back, and all pages to lower numbers."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import replace
from functools import partial

from saccade.kv_cache.sequences import Books, Change
from saccade.kv_cache.whole import at_once


def swapped_out(books: Books, sequence: int) -> Change:
    """A sequence on the host, to which its pages are copied; see `PagedCache.swap_out`.

    Raises:
        OutOfPages: if the host has too few pages; then nothing has changed.
    """
    held = books.find(sequence)
    kept = held.kept
    books.host_pool.require(len(kept))
    books.torn = True
    taken = books.host_pool.take(len(kept), None)
    books.memory.to_host(kept, taken)
    away = replace(held, pages=[None] * len(held.pages), host_pages=_in_place_of(held.pages, taken))
    counts = Counter(swapped_out=len(kept))
    return Change(books, {sequence: away}, dropped=kept, counts=counts)


def swapped_in(books: Books, sequence: int) -> Change:
    """The same the other way: back from the host.

    Raises:
        ValueError: if it is not swapped out.
        OutOfPages: if there are too few pages; then nothing has changed.
    """
    held = books.find(sequence, on_device=False)
    if held.host_pages is None:
        raise ValueError(f"sequence: got {sequence}, takes one that is swapped out")
    kept = held.kept_on_host
    books.pool.require(len(kept))
    books.torn = True
    taken = books.pool.take(len(kept), None)
    books.memory.to_device(kept, taken)
    back = replace(held, pages=_in_place_of(held.host_pages, taken), host_pages=None)
    counts = Counter(swapped_in=len(kept))
    return Change(books, {sequence: back}, dropped_on_host=kept, counts=counts)


def _in_place_of(pages: list[int | None], others: list[int]) -> list[int | None]:
    """Other pages in the places of those that are kept."""
    following = iter(others)
    return [None if page is None else next(following) for page in pages]


def compact(books: Books) -> int:
    """Move all pages to the lowest numbers; see `PagedCache.compact`."""
    pool, index = books.pool, books.index
    order = [page for held in books.sequences.values() for page in held.kept]
    order += pool.idle
    number = {page: new for new, page in enumerate(dict.fromkeys(order))}
    moves = [(old, new) for old, new in number.items() if old != new]
    moved = {
        sequence: replace(
            held, pages=[None if page is None else number[page] for page in held.pages]
        )
        for sequence, held in books.sequences.items()
    }
    idle = OrderedDict((number[page], None) for page in pool.idle)
    entries = {number[page]: entry for page, entry in index.entry_of.items()}
    books.torn = True
    at_once(  # pages, and all that says where they are
        [
            *books.memory.moves([old for old, _ in moves], [new for _, new in moves]),
            partial(books.sequences.update, moved),
            partial(setattr, pool, "idle", idle),
            partial(setattr, index, "entry_of", entries),
        ]
    )
    books.mend()
    books.counts["moved"] += len(moves)
    return len(moves)
