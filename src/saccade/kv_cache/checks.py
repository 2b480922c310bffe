"""Checks: what must hold of a cache between any two calls."""

from __future__ import annotations

from collections import Counter

from saccade.kv_cache.pool import PagePool
from saccade.kv_cache.sequences import Books, Held


def broken(books: Books) -> list[str]:
    """What does not hold, in words; empty if all does."""
    on_device = Counter(page for held in books.sequences.values() for page in held.kept)
    on_host = Counter(
        page
        for held in books.sequences.values()
        for page in held.host_pages or ()
        if page is not None
    )
    found = _of_pool(books.pool, on_device) + _of_pool(books.host_pool, on_host)
    found += [
        f"sequence {number}: {complaint}"
        for number, held in books.sequences.items()
        for complaint in _of_sequence(books, held)
    ]
    for page, entry in books.index.entry_of.items():
        if books.index.page_of.get(entry.digest) != page:
            found.append(f"page {page} is known by a hash that leads elsewhere")
        if not books.pool.holders[page] and page not in books.pool.idle:
            found.append(f"page {page} is known, and free")
        if books.index.digest(entry.before, entry.tokens) != entry.digest:
            found.append(f"page {page} is known by a hash of other tokens")
    if len(books.index.page_of) != len(books.index.entry_of):
        found.append("the prefix index knows a hash without a page")
    for page in books.pool.idle:
        if page not in books.index:
            found.append(f"page {page} is idle, and known by nothing")
    return found


def _of_pool(pool: PagePool, holders: Counter[int]) -> list[str]:
    found = [
        f"page {page} on the {pool.where} counts {pool.holders[page]} holders and has "
        f"{holders[page]}"
        for page in range(pool.num_pages)
        if pool.holders[page] != holders[page]
    ]
    held = {page for page in range(pool.num_pages) if pool.holders[page]}
    free = pool.free.pages()
    everything = sorted([*held, *pool.idle, *free])
    if everything != list(range(pool.num_pages)):
        found.append(f"pages on the {pool.where} are lost, or in two states at once")
    if len(free) != len(pool.free):
        found.append(f"the free pages on the {pool.where} are miscounted")
    return found


def _of_sequence(books: Books, held: Held) -> list[str]:
    size, found = books.page_size, []
    if len(held.pages) != -(-held.length // size):
        found.append(f"{len(held.pages)} pages for {held.length} tokens")
    if not 0 <= held.written <= held.length or len(held.tokens) > held.length:
        found.append("more tokens written or named than there are")
    if len(held.digests) > held.written // size:
        found.append("a page was published before it was written")
    if None in held.pages and books.window is None and held.host_pages is None:
        found.append("a page was released, and there is no window")
    if held.host_pages is not None and len(held.host_pages) != len(held.pages):
        found.append("other pages on the host than were swapped out")
    return found
