"""Swap: a sequence's pages to the host and back, and all pages to lower numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from saccade.cache.books import Books, Held


@contextmanager
def leaving(books: Books, held: Held) -> Iterator[Callable[[], None]]:
    """Copy a sequence's pages to the host; pages there are given back if the block fails.

    After the block the function lets go of those on the device. It cannot fail.
    """
    kept = held.kept
    with books.host_pool.taking(len(kept)) as take:
        taken = take(len(kept), None)
        books.memory.to_host(kept, taken)

        def leave() -> None:
            held.host_pages = _in_place_of(held.pages, taken)
            books.drop(kept)
            held.pages = [None] * len(held.pages)
            books.counts["swapped_out"] += len(kept)

        yield leave


@contextmanager
def returning(books: Books, held: Held) -> Iterator[Callable[[], None]]:
    """The same the other way: back from the host."""
    before = held.host_pages
    assert before is not None
    kept = [page for page in before if page is not None]
    with books.pool.taking(len(kept)) as take:
        taken = take(len(kept), None)
        books.memory.to_device(kept, taken)

        def come_back() -> None:
            held.pages = _in_place_of(before, taken)
            held.host_pages = None
            books.host_pool.drop(kept)
            books.counts["swapped_in"] += len(kept)

        yield come_back


def swap_out(books: Books, held: Held) -> None:
    """Copy a sequence's pages to the host and let go of them; see `PagedCache.swap_out`."""
    with leaving(books, held) as leave:
        pass
    leave()


def swap_in(books: Books, held: Held) -> None:
    """Copy a sequence's pages back from the host; see `PagedCache.swap_in`."""
    with returning(books, held) as come_back:
        pass
    come_back()


def _in_place_of(pages: list[int | None], others: list[int]) -> list[int | None]:
    """Other pages in the places of those that are kept."""
    following = iter(others)
    return [None if page is None else next(following) for page in pages]


def compact(books: Books) -> int:
    """Move all pages to the lowest numbers; see `PagedCache.compact`."""
    order = [page for held in books.sequences.values() for page in held.kept]
    order += books.pool.idle
    new_number = {page: number for number, page in enumerate(dict.fromkeys(order))}
    moves = [(old, new) for old, new in new_number.items() if old != new]
    books.memory.copy([old for old, _ in moves], [new for _, new in moves])
    books.pool.renumber(new_number)
    books.index.renumber(new_number)
    for held in books.sequences.values():
        held.pages = [None if page is None else new_number[page] for page in held.pages]
    books.counts["moved"] += len(moves)
    return len(moves)
