"""Statistics: what a cache holds, and what it has done."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

from saccade.kv_cache.sequences import Books, Held


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


def of_cache(books: Books) -> CacheStatistics:
    """What the cache holds now, and what it has done so far."""
    pool, host = books.pool, books.host_pool
    lengths = [held.length for held in books.sequences.values()]
    return CacheStatistics(
        used=pool.num_pages - pool.available,
        idle=len(pool.idle),
        free=len(pool.free),
        host_used=host.num_pages - host.available,
        sequences=len(lengths),
        tokens=sum(lengths),
        evicted=pool.evictions,
        **books.counts,
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
