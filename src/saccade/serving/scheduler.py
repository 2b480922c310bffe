"""Scheduler: who takes part in the next step, and who gives up pages when there are too few.

Plain Python over a `PagedCache`; it knows no model. Older requests go first and are never
displaced by younger ones, so every request is served: the oldest can always have all pages.
"""

from __future__ import annotations

import bisect
import operator
import time
from collections.abc import Sequence
from typing import Literal, NamedTuple

from torch import Tensor

from saccade import OutOfPagesError, PagedCache
from saccade.serving.request import Request, RequestState

Preemption = Literal["swap", "recompute"]
by_age = operator.attrgetter("number")


class Share(NamedTuple):
    """A request's part in a step: its tokens start … stop - 1 are computed."""

    request: Request
    start: int
    stop: int

    @property
    def draws(self) -> bool:
        """Whether the logits of its last row give a new token."""
        return self.stop == self.request.num_tokens


class StepPlan(NamedTuple):
    """One step: the shares in the order of their rows, and the slots of these in each kind of
    layer."""

    shares: list[Share]
    slots: list[Tensor]


class Scheduler:
    """Requests that wait and requests that run, both in the order of arrival.

    Args:
        cache: where their keys and values go.
        max_batch_tokens: rows of one step; longer prompts are cut into chunks.
        max_sequences: requests that run at once.
        preemption: what becomes of the pages of a displaced request: they are swapped to the host
            (or given up, where the host is full), or given up and computed again.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        preemption: Preemption,
    ):
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self._cache = cache
        # Whoever is not done, by number: all else can be made anew from that.
        self._living: dict[int, Request] = {}
        self._max_batch_tokens, self._max_sequences = max_batch_tokens, max_sequences
        self._preemption = preemption

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def knows(self, request: Request) -> bool:
        """Whether a request was added, and is not done."""
        return request.number in self._living

    def pages_for(self, tokens: int) -> list[int]:
        """The most pages that a sequence holds while it grows to so many tokens, by kind."""
        size, rows = self._cache.page_size, self._max_batch_tokens
        return [most_pages(tokens, window, size, rows) for window in self._cache.windows]

    def add(self, request: Request) -> None:
        """One more request that waits, with those that follow it."""
        everyone = (request, *request.followers)
        self._living.update({each.number: each for each in everyone})
        bisect.insort(self.waiting, request, key=by_age)

    def plan(self) -> StepPlan | None:
        """The next step, with room made for its tokens; None if there is nothing to do.

        Requests of which one token is left to compute come first. Then come prompts, the oldest
        first, as far as the rows go, and then those that wait.

        Raises:
            OutOfPagesError: if one request alone cannot have its pages; nothing is lost.
        """
        admitting = True
        while True:
            shares = self._of_running()
            if admitting:
                shares += self._admitted(self._max_batch_tokens - sum(map(_rows, shares)))
            if not shares:
                return None
            try:
                slots = self._cache.append({_sequence(s.request): _tokens(s) for s in shares})
            except OutOfPagesError:
                if len(self.running) == 1:
                    raise
                self._displace_youngest()
                admitting = False
                continue
            for request, _, stop in shares:
                request.most_pages = max(request.most_pages, sum(self.pages_for(stop)))
            return StepPlan(shares, slots)

    def commit(self, shares: Sequence[Share]) -> None:
        """These shares are computed: their keys and values are written, and others may find
        them."""
        for request, start, stop in shares:
            request.computed = stop
            if stop // self._cache.page_size > start // self._cache.page_size:
                self._cache.commit(_sequence(request))

    def distrust(self, request: Request) -> None:
        """What a request computed, or found, is wrong: nobody is to find it any more."""
        self._cache.forget(_sequence(request))

    def recover(self) -> list[Request]:
        """Let everybody who is not done wait without pages, after an exception anywhere in a step.

        Little is lost: full pages that were computed before are found again.

        Returns:
            These requests, to be restarted.
        """
        self._cache.clear()
        self._living = {
            number: request
            for number, request in self._living.items()
            if request.state is not RequestState.DONE
        }
        living = sorted(self._living.values(), key=by_age)
        led = {follower.number for request in living for follower in request.followers}
        self.running = []
        self.waiting = [request for request in living if request.number not in led]
        return living

    def fork(self, request: Request) -> None:
        """Let those that waited for a request's prompt go on from it."""
        while request.followers:
            follower = request.followers[0]
            follower.sequence = self._cache.fork(_sequence(request))
            follower.computed = follower.computed_from_cache = request.computed
            follower.times.started = time.perf_counter()
            self._run(follower)
            del request.followers[0]

    def remove(self, request: Request) -> None:
        """A request that is done, or is not wanted any more; its pages are let go of."""
        self._living.pop(request.number, None)
        if request.sequence is not None:
            self._cache.free(request.sequence)
            request.sequence = None
        for requests in (self.running, self.waiting):
            if request in requests:
                requests.remove(request)
            for leader in requests:
                if request in leader.followers:
                    leader.followers.remove(request)
        if request.followers:  # the next of them leads now
            leader, *leader.followers = request.followers
            request.followers = []
            self.add(leader)

    def _of_running(self) -> list[Share]:
        rows, shares = self._max_batch_tokens, []
        nearly = [request for request in self.running if request.left == 1]
        prompts = [request for request in self.running if request.left > 1]
        for request in nearly + prompts:
            count = min(rows, request.left)
            if count:
                shares.append(Share(request, request.computed, request.computed + count))
                rows -= count
        return shares

    def _admitted(self, rows: int) -> list[Share]:
        """Start requests that wait, in their order, as long as there are rows, places and pages."""
        shares = []
        places = self._max_sequences - sum(request.width for request in self.running)
        while self.waiting and rows > 0 and self.waiting[0].width <= places:
            request = self.waiting[0]
            if not self._brought_in(request):
                break
            del self.waiting[0]
            self._run(request)
            count = min(rows, request.left)
            shares.append(Share(request, request.computed, request.computed + count))
            rows, places = rows - count, places - request.width
        return shares

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        bisect.insort(self.running, request, key=by_age)

    def _brought_in(self, request: Request) -> bool:
        """Give a request its sequence on the device, if all of its tokens have room there."""
        if request.state is RequestState.SWAPPED:
            if self.running and not self._spares(self.pages_for(request.num_tokens)):
                return False
            try:
                self._cache.swap_in(_sequence(request))
            except OutOfPagesError:
                if not self.running:
                    raise
                return False
            return True
        if self.running and not self._spares([1] * len(self._cache.windows)):
            return False
        sequence = self._cache.allocate(request.tokens)
        found = self._cache.length(sequence)
        if self.running and not self._spares(self._missing(request.num_tokens, found)):
            self._cache.free(sequence)
            return False
        request.sequence, request.computed = sequence, found
        if request.times.started is None:
            request.times.started = time.perf_counter()
            request.computed_from_cache = found
        return True

    def _missing(self, tokens: int, computed: int) -> list[int]:
        """Pages that a sequence lacks of those that it needs, by kind."""
        wanted, held = self.pages_for(tokens), self.pages_for(computed)
        return [max(most - now, 0) for most, now in zip(wanted, held, strict=True)]

    def _spares(self, wanted: list[int]) -> bool:
        """Whether so many pages of each kind are left when all that run have theirs, and one more
        each to go on."""
        promised = [self._missing(request.num_tokens, request.computed) for request in self.running]
        return all(
            available - sum(of_kind) - len(promised) >= pages
            for available, pages, *of_kind in zip(
                self._cache.available(), wanted, *promised, strict=True
            )
        )

    def _displace_youngest(self) -> None:
        """Take the pages of the youngest request that runs; it waits for its next turn."""
        request = self.running[-1]
        sequence, state = _sequence(request), RequestState.WAITING
        if self._preemption == "swap":
            try:
                self._cache.swap_out(sequence)
                state = RequestState.SWAPPED
            except OutOfPagesError:
                pass  # the host is full, so it is computed again
        if state is RequestState.WAITING:
            self._cache.free(sequence)
            request.recomputed += request.computed
            request.sequence, request.computed = None, 0
        del self.running[-1]
        request.state = state
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)


def most_pages(tokens: int, window: int | None, page_size: int, max_batch_tokens: int) -> int:
    """The most pages that a sequence holds in layers of a window while it grows to so many tokens.

    New pages are taken before old ones are let go, and these by the chunk before.
    """
    if window is not None:
        tokens = min(tokens, window + 2 * max_batch_tokens + page_size)
    return -(-tokens // page_size)


def _rows(share: Share) -> int:
    return share.stop - share.start


def _tokens(share: Share) -> list[int]:
    return share.request.tokens_between(share.start, share.stop)


def _sequence(request: Request) -> int:
    assert request.sequence is not None  # whoever runs, or is swapped, has one
    return request.sequence
