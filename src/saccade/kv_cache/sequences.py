"""Sequences: what a group of layers knows of every sequence, and the changes of it.

A call works out a `Change` for each group, and `enter` makes all of them at once. Everything else
that a group counts follows from its sequences, and is counted again after an interrupt.
"""

from __future__ import annotations

import itertools
from collections import Counter, OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from torch import Tensor

from saccade.kv_cache.pool import PagePool, PrefixEntry, PrefixIndex, at_once
from saccade.kv_cache.storage import Memory

Tokens = int | Sequence[int]  # new tokens, or only how many
WHOLE = 2**62  # as a page size: a page holds a whole sequence, whatever its length
COUNTS = ("copied", "released", "moved", "swapped_out", "swapped_in", "asked", "matched")


@dataclass
class PageList:
    """One sequence: its pages in order, and what is known of its tokens.

    Attributes:
        before: what comes before the first page (PrefixIndex.root).
        pages: page numbers; None where a page was released behind the window. A list is never
            changed: a sequence whose pages change gets another one.
        tokens: its tokens, as far as they were named (all, or the sequence shares nothing new).
        written: tokens whose keys and values lie in the pages for sure.
        digests: of the leading full pages that were offered to the prefix index.
        cached: tokens that were found in the prefix index. copies: pages copied on write.
        host_pages: where its pages lie on the host, while it is swapped out.
        known: tokens of its beginning whose pages were known, where the state after them was not.
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
    known: int = 0

    @property
    def kept(self) -> list[int]:
        """The pages that it holds on the device."""
        return [page for page in self.pages if page is not None]

    @property
    def kept_on_host(self) -> list[int]:
        """The pages that it holds on the host."""
        return [page for page in self.host_pages or () if page is not None]

    @property
    def released(self) -> int:
        """How many pages at its beginning it does not hold any more."""
        return next((n for n, page in enumerate(self.pages) if page is not None), len(self.pages))

    def has_released(self, token: int, page_size: int) -> bool:
        """Whether the page of one of its tokens is released."""
        page = max(token, 0) // page_size
        return page < len(self.pages) and self.pages[page] is None

    @property
    def named(self) -> bool:
        """Whether all of its tokens are known."""
        return len(self.tokens) >= self.length

    def cut(self, page_size: int) -> None:
        """Forget names of tokens that it does not have, or not any more."""
        del self.tokens[self.length :], self.digests[self.written // page_size :]

    def faults(self, page_size: int, window: int | None) -> Iterator[str]:
        """What is not as it must be, in words."""
        if len(self.pages) != -(-self.length // page_size):
            yield f"{len(self.pages)} pages for {self.length} tokens"
        if not 0 <= self.written <= self.length or len(self.tokens) > self.length:
            yield "more tokens written or named than there are"
        if len(self.digests) > self.written // page_size:
            yield "a page was published before it was written"
        if None in self.pages and window is None and self.host_pages is None:
            yield "a page was released, and there is no window"
        if self.host_pages is not None and len(self.host_pages) != len(self.pages):
            yield "other pages on the host than were swapped out"


class Group:
    """The pages of all layers that look back equally far, and what each sequence has of them.

    States of whole sequences are such a group, too. Its pages are `WHOLE`: a sequence has one as
    soon as it has a token, never a full one, and copies it before it writes where others hold it.
    A state after full pages of tokens can be known as these are: then it is copied as well, and
    the one before stays for others.

    Attributes:
        window: tokens that a token of these layers sees before itself; None: all.
        sequences: by number; all other counts follow from them.
        torn: whether an exception now leaves something half counted, which `mend` counts again.
        counts: what was done so far.
    """

    def __init__(
        self, memory: Memory, page_size: int, window: int | None, prefix_caching: bool,
        *, whole: bool = False,
    ) -> None:  # fmt: skip
        self.memory, self.window, self.whole = memory, window, whole
        self.page_size = WHOLE if whole else page_size
        self.prefix_caching = prefix_caching
        self.index = PrefixIndex(page_size)
        kind = "states" if whole else "pages"
        self.pool = PagePool(memory.num_pages, "device", self.index.forget, kind)
        self.host_pool = PagePool(memory.host_pages, "host", lambda page: None, kind)
        self.sequences: dict[int, PageList] = {}
        self.torn = False
        self.counts: dict[str, int] = dict.fromkeys(COUNTS, 0)

    def find(self, sequence: int, *, on_device: bool = True) -> PageList:
        """A sequence by its number."""
        if type(sequence) is not int:  # equal hashes would find it by True and 1.0, too
            _check_number(sequence)
        held = self.sequences.get(sequence)
        if held is None:
            raise KeyError(f"sequence: got {sequence}, takes one that was allocated and not freed")
        if on_device and held.host_pages is not None:
            raise ValueError(f"sequence: got {sequence}, which is swapped out; swap it in first")
        return held

    def drop(self, pages: Sequence[int]) -> None:
        """Let go of pages, the last first, so that beginnings are evicted after ends."""
        self.pool.drop(reversed(pages), keep=self.index.__contains__)

    def publish(self, held: PageList) -> None:
        """All tokens of a sequence are written: offer full pages of named ones to others.

        What an interrupt leaves half done is mended, so `torn` is set by the caller.
        """
        held.written = held.length
        if not self.prefix_caching or self.whole:
            return
        if len(held.digests) >= held.length // self.page_size:  # all full pages were offered
            return
        known = min(held.written, len(held.tokens))
        for number in range(len(held.digests), known // self.page_size):
            page = held.pages[number]
            if page is None:
                return
            tokens = held.tokens[number * self.page_size : (number + 1) * self.page_size]
            before = held.digests[-1] if held.digests else held.before
            held.digests.append(self.index.publish(page, before, tokens))

    def forget(self, held: PageList) -> None:
        """Take a sequence's full pages, and others of the same tokens, out of the prefix index."""
        self.torn = True
        digests = held.digests
        if self.whole:
            digests = [entry.digest for entry in self.index.entries(held.tokens, held.before)]
        for digest in digests:
            page = self.index.page_of.get(digest)
            if page is not None:
                self.index.forget(page)
        self.mend()

    def known_state(
        self, tokens: Sequence[int], root: bytes, most: int
    ) -> tuple[int, list[int | None]]:
        """How many of the first pages of tokens a state is known after, and that state, if any."""
        if self.prefix_caching:
            entries = self.index.entries(tokens[: most * self.index.page_size], root)
            for count in range(len(entries), 0, -1):
                page = self.index.knows(entries[count - 1])
                if page is not None:
                    return count, [page]
        return 0, []

    def border_of(self, held: PageList) -> PrefixEntry | None:
        """What the state of a sequence would be known by, if it is one after full pages."""
        if not self.prefix_caching or held.length == 0 or len(held.tokens) < held.length:
            return None
        if held.length % self.index.page_size:
            return None
        return self.index.entries(held.tokens[: held.length], held.before)[-1]

    def mend(self) -> None:
        """Count anew, from the sequences, what an exception may have left half counted."""
        if not self.torn:
            return
        everyone = self.sequences.values()
        for held in everyone:
            held.cut(self.page_size)
        self.index.mend()
        self.pool.recount((page for held in everyone for page in held.kept), self.index.entry_of)
        self.host_pool.recount(page for held in everyone for page in held.kept_on_host)
        self.torn = False

    def faults(self) -> list[str]:
        """What is not as it must be between two calls, in words; empty if all is."""
        everyone = self.sequences.values()
        found = self.pool.faults(page for held in everyone for page in held.kept)
        found += self.host_pool.faults(page for held in everyone for page in held.kept_on_host)
        found += self.index.faults(self.pool)
        for number, held in self.sequences.items():
            faults = held.faults(self.page_size, self.window)
            found += [f"sequence {number}: {fault}" for fault in faults]
        return found

    def unseen(self, position: int) -> int:
        """How many of the first pages no token from `position` on sees through the window."""
        return 0 if self.window is None else max(position - self.window, 0) // self.page_size


def _check_number(sequence: object) -> None:
    """Refuse what is no number of a sequence."""
    if isinstance(sequence, (bool, Tensor)) or not hasattr(sequence, "__index__"):
        got = repr(sequence) if isinstance(sequence, (bool, float, str)) else _kind(sequence)
        raise TypeError(f"sequence: got {got}, takes the number that allocate or fork gave")


def _kind(value: object) -> str:
    return "None" if value is None else type(value).__name__


# ---- changes -------------------------------------------------------------------------------------


@dataclass
class Change:
    """What a call will change in a group, worked out before anything is.

    Attributes:
        sequences: as they will be; those in the group stay as they are.
        ended: the numbers of those that will not be there.
        written: sequences, as they are, all of whose tokens are written.
        kept: pages with states, and what these are known by from now on.
        overwritten: pages that will hold other tokens than they are known by.
        dropped, dropped_on_host: pages that the sequences will hold no longer.
        counts: what the group will count.
    """

    group: Group
    sequences: dict[int, PageList] = field(default_factory=dict)
    ended: list[int] = field(default_factory=list)
    written: list[PageList] = field(default_factory=list)
    kept: list[tuple[int, PrefixEntry]] = field(default_factory=list)
    overwritten: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    dropped_on_host: list[int] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


def enter(changes: Sequence[Change]) -> None:
    """Make changes, all of them or none. Nothing here fails; an interrupt is mended."""
    for change in changes:
        change.group.torn = True
        for held in change.written:
            change.group.publish(held)
        for page, entry in change.kept:
            change.group.index.publish(page, entry.before, entry.tokens)
        for page in change.overwritten:
            change.group.index.forget(page)
    at_once(
        step
        for change in changes
        for step in (
            partial(change.group.sequences.update, change.sequences),
            *(partial(change.group.sequences.pop, number) for number in change.ended),
        )
    )
    for change in changes:
        group = change.group
        for held in change.sequences.values():
            held.cut(group.page_size)
        group.drop(change.dropped)
        group.host_pool.drop(change.dropped_on_host)
        for name, count in change.counts.items():
            group.counts[name] += count
        group.torn = False


def begun(groups: Sequence[Group], number: int, tokens: list[int], salt: bytes) -> list[Change]:
    """A new sequence with the pages that hold the beginning of its tokens in every group."""
    root = PrefixIndex.root(salt)
    found = [
        group.index.match(tokens, root) if group.prefix_caching else []
        for group in groups
        if not group.whole
    ]
    page_size = groups[0].index.page_size
    known = matched = min(map(len, found), default=max(len(tokens) - 1, 0) // page_size)
    states: list[int | None] = []
    if groups[-1].whole:  # pages are of use as far as there is a state
        matched, states = groups[-1].known_state(tokens, root, known)
    changes = []
    for group, pages in itertools.zip_longest(groups, found):
        length = matched * page_size
        held = PageList(root, states, tokens[:length], length, length, cached=length)
        if group.whole:
            held.known = known * page_size if found else 0
        else:
            held.pages = [page for page, _ in pages[:matched]]
            held.digests = [digest for _, digest in pages[:matched]]
        group.torn = True
        group.pool.hold(held.kept)
        counts = Counter(asked=len(tokens), matched=length)
        changes.append(Change(group, {number: held}, counts=counts))
    return changes


def forked(group: Group, number: int, sequence: int) -> Change:
    """A new sequence with the tokens and pages of another one."""
    held = group.find(sequence)
    group.torn = True
    group.pool.hold(held.kept)
    twin = replace(
        held, pages=[*held.pages], tokens=[*held.tokens], digests=[*held.digests],
        cached=held.length, copies=0,
    )  # fmt: skip
    return Change(group, {number: twin})


def ended(group: Group, sequence: int) -> Change:
    """A sequence less; its pages are let go of."""
    held = group.find(sequence, on_device=False)
    return Change(group, ended=[sequence], dropped=held.kept, dropped_on_host=held.kept_on_host)


def trimmed(group: Group, sequence: int, length: int) -> Change:
    """A sequence without its last tokens; see `PagedCache.trim`."""
    held, page_size = group.find(sequence), group.page_size
    if not 0 <= length <= held.length:
        raise ValueError(f"length: got {length}, takes 0 to {held.length}")
    released = held.released
    if group.window is not None and released and length - group.window < released * page_size:
        least = released * page_size + group.window
        raise ValueError(
            f"length: got {length}, takes at least {least}: earlier pages are released"
        )
    keep = -(-length // page_size)
    shorter = replace(
        held, pages=held.pages[:keep], length=length, written=min(held.written, length),
        cached=min(held.cached, length),
    )  # fmt: skip
    dropped = [page for page in held.pages[keep:] if page is not None]
    return Change(group, {sequence: shorter}, dropped=dropped)


def swapped_out(group: Group, sequence: int) -> Change:
    """A sequence on the host, to which its pages are copied; the host has enough pages."""
    held = group.find(sequence)
    kept = held.kept
    group.torn = True
    taken = group.host_pool.take(len(kept), None)
    group.memory.to_host(kept, taken)
    away = replace(held, pages=[None] * len(held.pages), host_pages=_in_place_of(held.pages, taken))
    counts = Counter(swapped_out=len(kept))
    return Change(group, {sequence: away}, dropped=kept, counts=counts)


def swapped_in(group: Group, sequence: int) -> Change:
    """A sequence back from the host; the device has enough pages."""
    held = group.find(sequence, on_device=False)
    if held.host_pages is None:
        raise ValueError(f"sequence: got {sequence}, takes one that is swapped out")
    kept = held.kept_on_host
    group.torn = True
    taken = group.pool.take(len(kept), None)
    group.memory.to_device(kept, taken)
    back = replace(held, pages=_in_place_of(held.host_pages, taken), host_pages=None)
    counts = Counter(swapped_in=len(kept))
    return Change(group, {sequence: back}, dropped_on_host=kept, counts=counts)


def _in_place_of(pages: list[int | None], others: list[int]) -> list[int | None]:
    """Other pages in the places of those that are kept."""
    following = iter(others)
    return [None if page is None else next(following) for page in pages]


def compact(group: Group) -> int:
    """Move all pages to the lowest numbers, each sequence's side by side; how many moved."""
    pool, index = group.pool, group.index
    order = [page for held in group.sequences.values() for page in held.kept]
    order += pool.idle
    number = {page: new for new, page in enumerate(dict.fromkeys(order))}
    moves = [(old, new) for old, new in number.items() if old != new]
    moved = {
        sequence: replace(
            held, pages=[None if page is None else number[page] for page in held.pages]
        )
        for sequence, held in group.sequences.items()
    }
    idle = OrderedDict((number[page], None) for page in pool.idle)
    entries = {number[page]: entry for page, entry in index.entry_of.items()}
    group.torn = True
    at_once(  # pages, and all that says where they are
        [
            *group.memory.moves([old for old, _ in moves], [new for _, new in moves]),
            partial(group.sequences.update, moved),
            partial(setattr, pool, "idle", idle),
            partial(setattr, index, "entry_of", entries),
        ]
    )
    group.mend()
    group.counts["moved"] += len(moves)
    return len(moves)


# ---- growth --------------------------------------------------------------------------------------


class Growth(NamedTuple):
    """What one sequence needs for its new tokens.

    Attributes:
        num_tokens: that are new.
        copies: whether it copies its last page before it writes there, as others hold it too, or
            may find it later.
        skipped: pages between its last one and the next, which no token will see.
        pages: how many it gets beside the copy.
    """

    sequence: int
    held: PageList
    tokens: Tokens
    num_tokens: int
    copies: bool
    skipped: int
    pages: int


class GroupGrowth:
    """New tokens of any number of sequences in one group, and the pages that they need.

    keep: sequences whose states may be found by others from now on, where there is room.
    spare: None, or pages that no token sees any more are not taken, and their tokens have slots of
        -1: those behind the window of the token that is so many before the end.
    """

    def __init__(
        self, group: Group, tokens: Mapping[int, Tokens], spare: int | None, keep: Collection[int]
    ):
        self.group, self.spare = group, spare
        self.sequences: list[Growth] = []
        holders: dict[int, int] = {}
        for sequence, new in tokens.items():
            held = group.find(sequence)
            count = new if isinstance(new, int) else len(new)
            copies = self._copies(held, count, holders)
            length, have = held.length + count, len(held.pages)
            skipped, pages = 0, -(-length // group.page_size) - have
            if spare is not None:
                skipped = max(group.unseen(length - spare) - have, 0)
                pages = max(pages - skipped, 0)
            self.sequences.append(Growth(sequence, held, new, count, copies, skipped, pages))
        self.kept: list[tuple[int, PrefixEntry]] = []
        if group.whole:
            self._keep(keep)

    def _keep(self, asked: Collection[int]) -> None:
        """Let states be copied that others may find, as far as there is room for it."""
        group = self.group
        room = group.pool.available - self.needed
        for number, each in enumerate(self.sequences):
            if not each.held.pages or not each.num_tokens:
                continue
            entry = group.border_of(each.held) if each.sequence in asked else None
            page = each.held.pages[0]
            assert page is not None  # a state is never let go of
            if entry is None and page not in group.index:
                continue
            if not each.copies and room <= 0:
                continue
            room -= not each.copies
            self.sequences[number] = each._replace(copies=True)
            if entry is not None and group.index.knows(entry) is None:
                self.kept.append((page, entry))

    @property
    def needed(self) -> int:
        """Pages that are taken."""
        return sum([each.pages + each.copies for each in self.sequences])

    def require(self) -> None:
        """Raise OutOfPagesError if there are too few pages."""
        self.group.pool.require(self.needed)

    def grown(self) -> tuple[Change, list[int]]:
        """Sequences with their new tokens, and the slots of these; pages are taken and copied."""
        group = self.group
        group.torn = True
        change, slots = Change(group, kept=self.kept), list[int]()
        sources, targets = [], []
        known = group.index.entry_of
        for each in self.sequences:
            held, wanted = each.held, each.copies + each.pages
            last = held.pages[-1] if held.pages else None
            fresh = group.pool.take(wanted, last) if wanted else []
            if each.copies:
                assert last is not None  # a shared page is one that is kept
                sources.append(last)
                targets.append(fresh[0])
                change.dropped.append(last)
            elif each.num_tokens and held.length % group.page_size and last in known:
                change.overwritten.append(last)  # after a trim: by other tokens
            change.written.append(held)
            longer = _longer(each, fresh)
            if group.window is not None:
                released = self._release(longer, held)
                change.dropped += released
                change.counts["released"] += len(released)
            change.sequences[each.sequence] = longer
            if not group.whole:
                slots += _slots(longer, each.num_tokens, group.page_size)
        group.memory.copy(sources, targets)
        change.counts["copied"] += len(sources)
        return change, slots

    def _copies(self, held: PageList, count: int, holders: dict[int, int]) -> bool:
        """Whether a sequence must copy its last page; `holders`: how many still share a page."""
        last = held.pages[-1] if held.pages else None
        if last is None or count == 0 or held.length % self.group.page_size == 0:
            return False
        of_page = self.group.pool.holders[last]
        if of_page == 1:
            return False
        others = holders.setdefault(last, of_page) - 1
        holders[last] -= others > 0
        return others > 0

    def _release(self, longer: PageList, before: PageList) -> list[int]:
        """Take from a sequence the pages that no token sees any more, and say which."""
        position = before.length
        if self.spare is not None:
            position = max(position, longer.length - self.spare)
        # Behind the pages that it had there are none but skipped ones.
        start = stop = min(self.group.unseen(position), len(before.pages))
        while start and longer.pages[start - 1] is not None:
            start -= 1
        released = [page for page in longer.pages[start:stop] if page is not None]
        if released:
            longer.pages = [*[None] * stop, *longer.pages[stop:]]
        return released


def _longer(each: Growth, fresh: list[int]) -> PageList:
    """A sequence with its new pages and tokens."""
    held = each.held
    kept = held.pages[:-1] if each.copies else held.pages
    copied, new = fresh[: each.copies], fresh[each.copies :]
    pages = [*kept, *copied, *[None] * each.skipped, *new] if fresh or each.skipped else held.pages
    if not isinstance(each.tokens, int) and held.named:
        held.tokens.extend(each.tokens)  # both have the list; names beyond its length are no one's
    return PageList(  # all of it by hand: `replace` takes several times as long
        before=held.before, pages=pages, tokens=held.tokens, length=held.length + each.num_tokens,
        written=held.length, digests=held.digests, cached=held.cached,
        copies=held.copies + each.copies, host_pages=held.host_pages, known=held.known,
    )  # fmt: skip


def _slots(longer: PageList, count: int, page_size: int) -> list[int]:
    """Where the last tokens of a sequence go."""
    slots, length = [], longer.length
    for row in range(length - count, length):
        page = longer.pages[row // page_size]
        slots.append(-1 if page is None else page * page_size + row % page_size)
    return slots
