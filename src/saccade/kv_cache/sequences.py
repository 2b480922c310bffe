"""Sequences: all that a paged cache keeps count of, and the steps that change one sequence.

Which full pages hold which tokens comes first.
"""

from __future__ import annotations

import array
import hashlib
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from saccade.kv_cache.pool import PagePool, at_once
from saccade.kv_cache.storage import PageMemory

# ---- prefix --------------------------------------------------------------------------------------
# Which full pages hold which tokens, so that equal beginnings are computed once.
#
# A page is known by a hash of 128 bits over its tokens and the hash of the page before it: equal
# hashes mean equal beginnings. The tokens themselves are compared as well. Source: vLLM's automatic
# prefix caching (Kwon et al. 2023, section 4.4, on shared prefixes).


class PrefixEntry(NamedTuple):
    """What a page is known by."""

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


@dataclass
class Held:
    """One sequence: its pages in order, and what is known of its tokens.

    Attributes:
        pages: page numbers; None where a page was released behind the window.
        tokens: its tokens, as far as they were named (all, or the sequence shares nothing new).
        written: tokens whose keys and values lie in the pages for sure.
        digests: of the leading full pages that were offered to the prefix index.
        before: what comes before the first page (PrefixIndex.root).
        host_pages: where its pages lie on the host, while it is swapped out.
    """

    before: bytes
    pages: list[int | None] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    length: int = 0
    written: int = 0
    digests: list[bytes] = field(default_factory=list)
    cached: int = 0
    copies: int = 0
    host_pages: list[int | None] | None = None

    @property
    def kept(self) -> list[int]:
        """The pages that it holds on the device."""
        return [page for page in self.pages if page is not None]

    @property
    def kept_on_host(self) -> list[int]:
        """The pages that it holds on the host."""
        return [page for page in self.host_pages or () if page is not None]

    @property
    def named(self) -> bool:
        """Whether all of its tokens are known."""
        return len(self.tokens) >= self.length

    def cut(self, page_size: int) -> None:
        """Forget names of tokens that it does not have, or not any more."""
        del self.tokens[self.length :], self.digests[self.written // page_size :]


@dataclass
class CacheState:
    """The state of a cache.

    Attributes:
        sequences: what all else about pages can be counted from.
        torn: whether an exception now leaves something half counted, which `mend` counts anew.
    """

    memory: PageMemory
    pool: PagePool
    host_pool: PagePool
    index: PrefixIndex
    page_size: int
    window: int | None
    prefix_caching: bool
    sequences: dict[int, Held] = field(default_factory=dict)
    torn: bool = False
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(
            ("copied", "released", "moved", "swapped_out", "swapped_in", "asked", "matched"), 0
        )
    )

    def find(self, sequence: int, *, on_device: bool = True) -> Held:
        """A sequence by its number.

        Raises:
            KeyError: if there is none of that number.
            ValueError: if it is swapped out and must not be.
        """
        held = self.sequences.get(sequence)
        if held is None:
            raise KeyError(f"sequence: got {sequence}, takes one that was allocated and not freed")
        if on_device and held.host_pages is not None:
            raise ValueError(f"sequence: got {sequence}, which is swapped out; swap it in first")
        return held

    def drop(self, pages: Sequence[int]) -> None:
        """Let go of pages, the last first, so that beginnings are evicted after ends."""
        self.pool.drop(reversed(pages), keep=self.index.__contains__)

    def commit(self, held: Held) -> None:
        """All tokens so far are written: offer the full pages to others."""
        self.torn = True
        self.publish(held)
        self.torn = False

    def publish(self, held: Held) -> None:
        """As `commit`, within a change."""
        held.written = held.length
        if not self.prefix_caching or not held.named:
            return
        for number in range(len(held.digests), held.written // self.page_size):
            page = held.pages[number]
            if page is None:
                return
            tokens = held.tokens[number * self.page_size : (number + 1) * self.page_size]
            before = held.digests[-1] if held.digests else held.before
            held.digests.append(self.index.publish(page, before, tokens))

    def forget(self, held: Held) -> None:
        """Let nobody find what lies in a sequence's pages, nor the same tokens elsewhere."""
        self.torn = True
        for digest in held.digests:
            page = self.index.page_of.get(digest)
            if page is not None:
                self.index.forget(page)
        self.mend()

    def end(self, sequence: int) -> None:
        """Let go of a sequence and its pages."""
        held = self.find(sequence, on_device=False)
        self.torn = True
        del self.sequences[sequence]
        self.drop(held.kept)
        self.host_pool.drop(held.kept_on_host)
        self.torn = False

    def mend(self) -> None:
        """Count anew, from the sequences, what an exception may have left half counted."""
        if not self.torn:
            return
        for held in self.sequences.values():
            held.cut(self.page_size)
        self.index.mend()
        everyone = self.sequences.values()
        self.pool.recount((page for held in everyone for page in held.kept), self.index.entry_of)
        self.host_pool.recount(page for held in everyone for page in held.kept_on_host)
        self.torn = False


@dataclass
class Change:
    """What a call will enter in the state, worked out before anything is.

    Attributes:
        sequences: as they will be; those in the state stay as they are.
        written: sequences, as they are, all of whose tokens are written.
        overwritten: pages that will hold other tokens than they are known by.
        dropped, dropped_on_host: pages that the sequences will hold no longer.
        counts: what the state will count.
    """

    state: CacheState
    sequences: dict[int, Held] = field(default_factory=dict)
    written: list[Held] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    dropped_on_host: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def enter(*changes: Change) -> None:
    """Enter changes, all of them or none. Nothing here fails; an interrupt is mended."""
    for change in changes:
        change.state.torn = True
        for held in change.written:
            change.state.publish(held)
        for page in change.overwritten:
            change.state.index.forget(page)
    at_once(partial(change.state.sequences.update, change.sequences) for change in changes)
    for change in changes:
        state = change.state
        for held in change.sequences.values():
            held.cut(state.page_size)
        state.drop(change.dropped)
        state.host_pool.drop(change.dropped_on_host)
        for name, count in change.counts.items():
            state.counts[name] += count
        state.torn = False


def begun(state: CacheState, number: int, tokens: list[int], salt: bytes) -> Change:
    """A new sequence with the pages that hold the beginning of its tokens, if any."""
    root = PrefixIndex.root(salt)
    found = state.index.match(tokens, root) if state.prefix_caching else []
    length = len(found) * state.page_size
    digests = [digest for _, digest in found]
    pages: list[int | None] = [page for page, _ in found]
    held = Held(root, pages, tokens[:length], length, length, digests, cached=length)
    state.torn = True
    state.pool.hold(held.kept)
    counts = Counter(asked=len(tokens), matched=length)
    return Change(state, {number: held}, counts=counts)


def forked(state: CacheState, number: int, sequence: int) -> Change:
    """A new sequence with the tokens and pages of another one."""
    held = state.find(sequence)
    state.torn = True
    state.pool.hold(held.kept)
    twin = replace(
        held, pages=[*held.pages], tokens=[*held.tokens], digests=[*held.digests],
        cached=held.length, copies=0,
    )  # fmt: skip
    return Change(state, {number: twin})


def trimmed(state: CacheState, sequence: int, length: int) -> Change:
    """A sequence without its last tokens; see `PagedCache.trim`."""
    held = state.find(sequence)
    check_trim(state, held, length)
    keep = -(-length // state.page_size)
    shorter = replace(
        held, pages=held.pages[:keep], length=length, written=min(held.written, length),
        cached=min(held.cached, length),
    )  # fmt: skip
    dropped = [page for page in held.pages[keep:] if page is not None]
    return Change(state, {sequence: shorter}, dropped=dropped)


def check_trim(state: CacheState, held: Held, length: int) -> None:
    """Raise ValueError if a sequence cannot be trimmed to so many tokens."""
    if not 0 <= length <= held.length:
        raise ValueError(f"length: got {length}, takes 0 to {held.length}")
    released = next((n for n, page in enumerate(held.pages) if page is not None), len(held.pages))
    if state.window is not None and released and length - state.window < released * state.page_size:
        least = released * state.page_size + state.window
        raise ValueError(
            f"length: got {length}, takes at least {least}: earlier pages are released"
        )


# ---- swap ----------------------------------------------------------------------------------------
# A sequence's pages to the host and back, and all pages to lower numbers.


def swapped_out(state: CacheState, sequence: int) -> Change:
    """A sequence on the host, to which its pages are copied; see `PagedCache.swap_out`.

    Raises:
        OutOfPagesError: if the host has too few pages; then nothing has changed.
    """
    held = state.find(sequence)
    kept = held.kept
    state.host_pool.require(len(kept))
    state.torn = True
    taken = state.host_pool.take(len(kept), None)
    state.memory.to_host(kept, taken)
    away = replace(held, pages=[None] * len(held.pages), host_pages=_in_place_of(held.pages, taken))
    counts = Counter(swapped_out=len(kept))
    return Change(state, {sequence: away}, dropped=kept, counts=counts)


def swapped_in(state: CacheState, sequence: int) -> Change:
    """The same the other way: back from the host.

    Raises:
        ValueError: if it is not swapped out.
        OutOfPagesError: if there are too few pages; then nothing has changed.
    """
    held = state.find(sequence, on_device=False)
    if held.host_pages is None:
        raise ValueError(f"sequence: got {sequence}, takes one that is swapped out")
    kept = held.kept_on_host
    state.pool.require(len(kept))
    state.torn = True
    taken = state.pool.take(len(kept), None)
    state.memory.to_device(kept, taken)
    back = replace(held, pages=_in_place_of(held.host_pages, taken), host_pages=None)
    counts = Counter(swapped_in=len(kept))
    return Change(state, {sequence: back}, dropped_on_host=kept, counts=counts)


def _in_place_of(pages: list[int | None], others: list[int]) -> list[int | None]:
    """Other pages in the places of those that are kept."""
    following = iter(others)
    return [None if page is None else next(following) for page in pages]


def compact(state: CacheState) -> int:
    """Move all pages to the lowest numbers; see `PagedCache.compact`."""
    pool, index = state.pool, state.index
    order = [page for held in state.sequences.values() for page in held.kept]
    order += pool.idle
    number = {page: new for new, page in enumerate(dict.fromkeys(order))}
    moves = [(old, new) for old, new in number.items() if old != new]
    moved = {
        sequence: replace(
            held, pages=[None if page is None else number[page] for page in held.pages]
        )
        for sequence, held in state.sequences.items()
    }
    idle = OrderedDict((number[page], None) for page in pool.idle)
    entries = {number[page]: entry for page, entry in index.entry_of.items()}
    state.torn = True
    at_once(  # pages, and all that says where they are
        [
            *state.memory.moves([old for old, _ in moves], [new for _, new in moves]),
            partial(state.sequences.update, moved),
            partial(setattr, pool, "idle", idle),
            partial(setattr, index, "entry_of", entries),
        ]
    )
    state.mend()
    state.counts["moved"] += len(moves)
    return len(moves)
