"""Statistics: what a cache holds, and what it has done."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, fields

from saccade.kv_cache.pool import PagePool
from saccade.kv_cache.sequences import CacheState, Held


@dataclass(frozen=True)
class CacheStatistics:
    """What a cache holds now, and what it has done so far; everything but tokens in pages.

    Attributes:
        used, idle, free: pages that sequences hold, that only the prefix cache knows, and others.
        host_used: pages on the host that hold what was swapped out.
        sequences, tokens: sequences, and tokens in them, shared ones counted each time.
        asked, matched: tokens that allocations named, and those of them that were found.
        copied: pages copied on write. evicted: idle pages that were given away.
        released: pages let go of behind the window. moved: by compaction.
        swapped_out, swapped_in: pages copied to the host, and back.
    """

    used: int
    idle: int
    free: int
    host_used: int
    sequences: int
    tokens: int
    asked: int
    matched: int
    copied: int
    evicted: int
    released: int
    moved: int
    swapped_out: int
    swapped_in: int


@dataclass(frozen=True)
class SequenceStatistics:
    """One sequence: its tokens, how many of them were found in the prefix cache, its pages on the
    device, pages copied on write for it, and whether it is swapped out."""

    length: int
    cached: int
    pages: int
    copied: int
    swapped_out: bool


def of_cache(state: CacheState) -> CacheStatistics:
    """What the cache holds now, and what it has done so far."""
    pool, host = state.pool, state.host_pool
    lengths = [held.length for held in state.sequences.values()]
    return CacheStatistics(
        used=pool.num_pages - pool.available,
        idle=len(pool.idle),
        free=len(pool.free),
        host_used=host.num_pages - host.available,
        sequences=len(lengths),
        tokens=sum(lengths),
        evicted=pool.evictions,
        **state.counts,
    )


def together(found: Sequence[CacheStatistics]) -> CacheStatistics:
    """Of several caches with the same sequences: pages added up, tokens as the first has them."""
    of_first = {name: getattr(found[0], name) for name in ("sequences", "tokens", "asked")}
    sums = {
        field.name: sum(getattr(each, field.name) for each in found)
        for field in fields(CacheStatistics)
    }
    matched = min(each.matched for each in found)
    return CacheStatistics(**(sums | of_first | {"matched": matched}))


def of_sequence(held: Held) -> SequenceStatistics:
    """What one sequence holds."""
    swapped_out = held.host_pages is not None
    return SequenceStatistics(held.length, held.cached, len(held.kept), held.copies, swapped_out)


# ---- checks --------------------------------------------------------------------------------------
# What must hold of a cache between any two calls.


def broken(state: CacheState) -> list[str]:
    """What does not hold, in words; empty if all does."""
    on_device = Counter(page for held in state.sequences.values() for page in held.kept)
    on_host = Counter(
        page
        for held in state.sequences.values()
        for page in held.host_pages or ()
        if page is not None
    )
    found = _of_pool(state.pool, on_device) + _of_pool(state.host_pool, on_host)
    found += [
        f"sequence {number}: {complaint}"
        for number, held in state.sequences.items()
        for complaint in _of_sequence(state, held)
    ]
    for page, entry in state.index.entry_of.items():
        if state.index.page_of.get(entry.digest) != page:
            found.append(f"page {page} is known by a hash that leads elsewhere")
        if not state.pool.holders[page] and page not in state.pool.idle:
            found.append(f"page {page} is known, and free")
        if state.index.digest(entry.before, entry.tokens) != entry.digest:
            found.append(f"page {page} is known by a hash of other tokens")
    if len(state.index.page_of) != len(state.index.entry_of):
        found.append("the prefix index knows a hash without a page")
    for page in state.pool.idle:
        if page not in state.index:
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


def _of_sequence(state: CacheState, held: Held) -> list[str]:
    size, found = state.page_size, []
    if len(held.pages) != -(-held.length // size):
        found.append(f"{len(held.pages)} pages for {held.length} tokens")
    if not 0 <= held.written <= held.length or len(held.tokens) > held.length:
        found.append("more tokens written or named than there are")
    if len(held.digests) > held.written // size:
        found.append("a page was published before it was written")
    if None in held.pages and state.window is None and held.host_pages is None:
        found.append("a page was released, and there is no window")
    if held.host_pages is not None and len(held.host_pages) != len(held.pages):
        found.append("other pages on the host than were swapped out")
    return found
