"""Books: all that a paged cache keeps count of, and the steps that change one sequence."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from saccade.cache.memory import PageMemory
from saccade.cache.pool import PagePool
from saccade.cache.prefix import PrefixIndex


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
    def named(self) -> bool:
        """Whether all of its tokens are known."""
        return len(self.tokens) == self.length


@dataclass
class Books:
    """The state of a cache."""

    memory: PageMemory
    pool: PagePool
    host_pool: PagePool
    index: PrefixIndex
    page_size: int
    window: int | None
    prefix_caching: bool
    sequences: dict[int, Held] = field(default_factory=dict)
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

    def release(self, held: Held, position: int) -> None:
        """Let go of the pages that no token from `position` on sees through the window."""
        if self.window is None:
            return
        unseen = max(position - self.window, 0) // self.page_size
        for number in range(min(unseen, len(held.pages))):
            page = held.pages[number]
            if page is not None:
                held.pages[number] = None
                self.drop([page])
                self.counts["released"] += 1


def begin(books: Books, tokens: list[int], salt: bytes) -> Held:
    """A sequence with the pages that hold the beginning of its tokens, if any."""
    root = PrefixIndex.root(salt)
    found = books.index.match(tokens, root) if books.prefix_caching else []
    length = len(found) * books.page_size
    books.pool.hold(page for page, _ in found)
    books.counts["asked"] += len(tokens)
    books.counts["matched"] += length
    digests = [digest for _, digest in found]
    pages: list[int | None] = [page for page, _ in found]
    return Held(root, pages, tokens[:length], length, length, digests, cached=length)


def append(books: Books, tokens: Mapping[int, int | Sequence[int]]) -> list[int]:
    """Give new tokens their slots; see `PagedCache.append`."""
    with growing(books, tokens) as enter:
        pass
    return enter()


@contextmanager
def growing(
    books: Books, tokens: Mapping[int, int | Sequence[int]], spare: int | None = None
) -> Iterator[Callable[[], list[int]]]:
    """Take pages for new tokens, and copy what must be; all is given back if the block fails.

    After the block the function enters what was taken, and gives the slots. It cannot fail.

    spare: None, or what nobody sees any more gets no pages, and slots of -1: behind the window of
    the token that stands so many before the end.
    """
    grown, counts, shared, new = _wanted(books, tokens, spare)
    with books.pool.taking(sum(new) + sum(shared)) as take:
        fresh, sources, targets = [], [], []
        for (held, _), copied, wanted in zip(grown, shared, new, strict=True):
            last = held.pages[-1] if held.pages else None
            pages = take(copied + wanted, last)
            fresh.append(pages)
            if copied:
                assert last is not None  # a shared page is one that is kept
                sources.append(last)
                targets.append(pages[0])
        books.memory.copy(sources, targets)

        def enter() -> list[int]:
            slots: list[int] = []
            for index, (held, given) in enumerate(grown):
                first_kept = _first_kept(books, held, counts[index], spare)
                if first_kept > len(held.pages):
                    held.pages += [None] * (first_kept - len(held.pages))
                slots += _grow(books, held, given, counts[index], fresh[index], shared[index])
                if spare is not None:
                    books.release(held, held.length - spare)
            books.counts["copied"] += len(sources)
            return slots

        yield enter


def pages_needed(
    books: Books, tokens: Mapping[int, int | Sequence[int]], spare: int | None = None
) -> int:
    """How many pages `growing` will take."""
    _, _, shared, new = _wanted(books, tokens, spare)
    return sum(new) + sum(shared)


def _first_kept(books: Books, held: Held, count: int, spare: int | None) -> int:
    """The first page that anybody will see, after so many new tokens of which `spare` may go."""
    if books.window is None or spare is None:
        return 0
    return max(held.length + count - spare - books.window, 0) // books.page_size


def _wanted(
    books: Books, tokens: Mapping[int, int | Sequence[int]], spare: int | None
) -> tuple[list[tuple[Held, int | Sequence[int]]], list[int], list[bool], list[int]]:
    """Sequences with their new tokens, how many these are, whether each copies its last page, and
    how many pages it gets beside."""
    grown = [(books.find(sequence), given) for sequence, given in tokens.items()]
    counts = [given if isinstance(given, int) else len(given) for _, given in grown]
    shared = _pages_to_copy(books, [held for held, _ in grown], counts)
    new = []
    for (held, _), count in zip(grown, counts, strict=True):
        there_are = max(len(held.pages), _first_kept(books, held, count, spare))
        new.append(max(-(-(held.length + count) // books.page_size) - there_are, 0))
    return grown, counts, shared, new


def _pages_to_copy(books: Books, grown: Sequence[Held], counts: Sequence[int]) -> list[bool]:
    """Whether each sequence must copy its last page before it writes there."""
    holders: dict[int, int] = {}
    shared = []
    for held, count in zip(grown, counts, strict=True):
        last = held.pages[-1] if held.pages else None
        if last is None or count == 0 or held.length % books.page_size == 0:
            shared.append(False)
            continue
        others = holders.setdefault(last, books.pool.holders[last]) - 1
        shared.append(others > 0)
        if others > 0:
            holders[last] -= 1
    return shared


def _grow(
    books: Books, held: Held, given: int | Sequence[int], count: int, fresh: list[int], copied: bool
) -> list[int]:
    """Enter pages that were taken, and say where the new tokens go. Nothing here can fail."""
    books.commit(held)
    if copied:
        books.drop([page for page in held.pages[-1:] if page is not None])
        held.pages[-1] = fresh[0]
        held.copies += 1
    elif count and held.length % books.page_size and held.pages[-1] is not None:
        books.index.forget(held.pages[-1])  # after a trim it holds other tokens from now on
    held.pages += fresh[copied:]
    if not isinstance(given, int) and held.named:
        held.tokens += given
    rows = range(held.length, held.length + count)
    books.release(held, held.length)
    held.length += count
    slots = []
    for row in rows:
        page = held.pages[row // books.page_size]
        slots.append(-1 if page is None else page * books.page_size + row % books.page_size)
    return slots


def trim(books: Books, held: Held, length: int) -> None:
    """Forget the last tokens; see `PagedCache.trim`."""
    check_trim(books, held, length)
    keep = -(-length // books.page_size)
    books.drop([page for page in held.pages[keep:] if page is not None])
    del held.pages[keep:], held.tokens[length:], held.digests[length // books.page_size :]
    held.length, held.written = length, min(held.written, length)
    held.cached = min(held.cached, length)


def check_trim(books: Books, held: Held, length: int) -> None:
    """Raise ValueError if a sequence cannot be trimmed to so many tokens."""
    if not 0 <= length <= held.length:
        raise ValueError(f"length: got {length}, takes 0 to {held.length}")
    released = next((n for n, page in enumerate(held.pages) if page is not None), len(held.pages))
    if books.window is not None and released and length - books.window < released * books.page_size:
        least = released * books.page_size + books.window
        raise ValueError(
            f"length: got {length}, takes at least {least}: earlier pages are released"
        )
