"""Growth: pages and slots for new tokens of any number of sequences, in one step."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from saccade.kv_cache.sequences import CacheState, Change, Held
from saccade.runtime.arguments import check_whole_number

# ---- tokens --------------------------------------------------------------------------------------
# A caller's token numbers, as whole numbers of Python's own.

MOST = 2**63 - 1  # what the prefix index hashes in eight bytes


def token_list(tokens: Sequence[int] | Tensor) -> list[int]:
    """Tokens as whole numbers of Python's own.

    Raises:
        TypeError: for what are no whole numbers, True and False among them.
        ValueError: for numbers below 0 or above 2^63 - 1.
    """
    given: Any = tokens.tolist() if isinstance(tokens, Tensor) else tokens
    found = [_token(token) for token in given]
    if found and not (min(found) >= 0 and max(found) <= MOST):
        got = min(found) if min(found) < 0 else max(found)
        raise ValueError(f"tokens: got {got}, takes 0 to 2^63 - 1")
    return found


def _token(token: object) -> int:
    if isinstance(token, bool) or not hasattr(token, "__index__"):
        raise TypeError(f"tokens: got {type(token).__name__}, takes whole numbers")
    return operator.index(token)  # pyright: ignore[reportArgumentType]  # it has __index__


Tokens = int | Sequence[int]  # new tokens, or only how many


class Wanted(NamedTuple):
    """What one sequence needs.

    Attributes:
        num_tokens: that are new.
        copies: whether it must copy its last page before it writes there, as others hold it too.
        skipped: pages between its last one and the next, which nobody will see.
        pages: how many it gets beside the copy.
    """

    sequence: int
    held: Held
    tokens: Tokens
    num_tokens: int
    copies: bool
    skipped: int
    pages: int


def checked(tokens: Mapping[int, Tokens]) -> dict[int, Tokens]:
    """A caller's new tokens, for each sequence.

    Raises:
        TypeError, ValueError: naming what is no token and no number of them.
    """
    given: dict[int, Tokens] = {}
    for sequence, new in tokens.items():
        if isinstance(new, int):
            check_whole_number("tokens", new, least=0)
        given[sequence] = new if isinstance(new, int) else token_list(new)
    return given


def wanted(
    state: CacheState, tokens: Mapping[int, Tokens], spare: int | None = None
) -> list[Wanted]:
    """What each sequence needs to grow by its new tokens.

    spare: None, or what nobody sees any more gets no pages, and slots of -1: behind the window of
    the token that stands so many before the end.
    """
    found: list[Wanted] = []
    holders: dict[int, int] = {}
    for sequence, given in tokens.items():
        held = state.find(sequence)
        count = given if isinstance(given, int) else len(given)
        copies = _copies(state, held, count, holders)
        length, have = held.length + count, len(held.pages)
        first_kept = have if spare is None else _unseen(state, length - spare)
        skipped = max(first_kept - have, 0)
        pages = max(-(-length // state.page_size) - have - skipped, 0)
        found.append(Wanted(sequence, held, given, count, copies, skipped, pages))
    return found


def pages_needed(growing: Sequence[Wanted]) -> int:
    """How many pages that takes."""
    return sum(each.pages + each.copies for each in growing)


def grown(
    state: CacheState, growing: Sequence[Wanted], spare: int | None = None
) -> tuple[Change, list[int]]:
    """Sequences with their new tokens, and the slots of these; pages are taken and copied.

    Raises:
        OutOfPagesError: if there are too few pages; then nothing has changed.
    """
    state.pool.require(pages_needed(growing))
    state.torn = True
    change, slots = Change(state), list[int]()
    sources, targets = [], []
    for each in growing:
        last = each.held.pages[-1] if each.held.pages else None
        fresh = state.pool.take(each.copies + each.pages, last)
        if each.copies:
            assert last is not None  # a shared page is one that is kept
            sources.append(last)
            targets.append(fresh[0])
            change.dropped.append(last)
        elif each.num_tokens and each.held.length % state.page_size and last is not None:
            change.overwritten.append(last)  # after a trim it may be known by other tokens
        change.written.append(each.held)
        longer = _longer(state, each, fresh)
        released = _release(state, longer, each.held, spare)
        change.dropped += released
        change.counts["released"] += len(released)
        change.sequences[each.sequence] = longer
        slots += _slots(state, longer, each.num_tokens)
    state.memory.copy(sources, targets)
    change.counts["copied"] += len(sources)
    return change, slots


def _copies(state: CacheState, held: Held, count: int, holders: dict[int, int]) -> bool:
    """Whether a sequence must copy its last page; `holders` counts those that still share it."""
    last = held.pages[-1] if held.pages else None
    if last is None or count == 0 or held.length % state.page_size == 0:
        return False
    others = holders.setdefault(last, state.pool.holders[last]) - 1
    holders[last] -= others > 0
    return others > 0


def _unseen(state: CacheState, position: int) -> int:
    """How many of the first pages no token from `position` on sees through the window."""
    return 0 if state.window is None else max(position - state.window, 0) // state.page_size


def _longer(state: CacheState, each: Wanted, fresh: list[int]) -> Held:
    """A sequence with its new pages and tokens."""
    held = each.held
    kept = held.pages[:-1] if each.copies else held.pages
    copied, new = fresh[: each.copies], fresh[each.copies :]
    pages = [*kept, *copied, *[None] * each.skipped, *new] if fresh or each.skipped else held.pages
    if not isinstance(each.tokens, int) and held.named:
        held.tokens.extend(each.tokens)  # both have the list; names beyond its length are no one's
    return replace(
        held, pages=pages, length=held.length + each.num_tokens, written=held.length,
        copies=held.copies + each.copies,
    )  # fmt: skip


def _release(state: CacheState, longer: Held, before: Held, spare: int | None) -> list[int]:
    """Take from a sequence the pages that nobody sees any more, and say which."""
    position = before.length if spare is None else max(before.length, longer.length - spare)
    end = _unseen(state, position)
    start = stop = min(end, len(before.pages))  # behind those there are none but skipped ones
    while start and longer.pages[start - 1] is not None:
        start -= 1
    released = [page for page in longer.pages[start:stop] if page is not None]
    if released:
        longer.pages = [*[None] * stop, *longer.pages[stop:]]
    return released


def _slots(state: CacheState, longer: Held, count: int) -> list[int]:
    """Where the last tokens of a sequence go."""
    slots = []
    for row in range(longer.length - count, longer.length):
        page = longer.pages[row // state.page_size]
        slots.append(-1 if page is None else page * state.page_size + row % state.page_size)
    return slots
