"""Scheduler: which requests take part in the next step, on how many threads.

The order of requests is plain Python over a `PagedCache`, without a model. Older requests go first
and are never preempted by younger ones, so every request is served: the oldest can always have all
pages. How many pages there are is said in capacity.py.

PyTorch takes a thread for each core. Where other programs keep the cores busy, or two cores are
halves of one, its threads wait for one another at every operation and fewer of them are faster.
"""

from __future__ import annotations

import bisect
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from saccade import OutOfPagesError, PagedCache
from saccade.serving.capacity import most_pages
from saccade.serving.request import Request, RequestState

Preemption = Literal["swap", "recompute"]
by_age = operator.attrgetter("number")


class Chunk(NamedTuple):
    """A chunk of a request's tokens, start … stop - 1, that is computed in one step.

    Attributes:
        draws: whether the logits of its last row give a new token.
    """

    request: Request
    start: int
    stop: int
    draws: bool

    @property
    def rows(self) -> int:
        """How many tokens they are."""
        return self.stop - self.start

    @property
    def tokens(self) -> list[int]:
        """The tokens themselves, if they are known by now."""
        return self.request.tokens_between(self.start, self.stop)

    @property
    def given(self) -> int:
        """How many new tokens there are with the one that it gives."""
        return self.stop + 1 - len(self.request.prompt)

    @classmethod
    def next_of(cls, request: Request, rows: int) -> Chunk:
        """The next tokens of a request, at most so many."""
        start, end = request.computed, request.num_tokens
        stop = min(start + rows, end)
        return cls(request, start, stop, stop == end)

    @property
    def known(self) -> bool:
        """Whether its tokens are known by now; else it is the one that a step under way gives."""
        return self.start < self.request.num_tokens

    def cut(self, borders: Sequence[int]) -> Chunk:
        """The part of it before the first of some borders, or all of it where none is within."""
        for border in borders:
            if self.start < border < self.stop:
                return Chunk(self.request, self.start, border, False)
        return self

    def following(self, rows: int) -> Chunk:
        """What comes after this chunk: the one token that it gives, or at most so many others."""
        if self.draws:
            return Chunk(self.request, self.stop, self.stop + 1, True)
        stop = min(self.stop + rows, self.request.num_tokens)
        return Chunk(self.request, self.stop, stop, stop == self.request.num_tokens)


class StepPlan(NamedTuple):
    """One step: chunks in the order of their rows, and the rows' slots in each group of layers.

    Attributes:
        ahead: whether tokens of the step before are not known yet.
    """

    chunks: list[Chunk]
    slots: list[list[int]]
    ahead: bool = False

    @property
    def rows(self) -> int:
        """How many tokens are computed."""
        return sum([chunk.stop - chunk.start for chunk in self.chunks])

    @property
    def can_be_followed(self) -> bool:
        """Whether a step can follow before its tokens are seen: none begins others' texts."""
        return not any([chunk.draws and chunk.request.followers for chunk in self.chunks])

    @property
    def decodes(self) -> bool:
        """Whether every chunk is one token that gives the next, to its own request alone."""
        alone = len(self.chunks) == self.rows
        return alone and self.can_be_followed and all([chunk.draws for chunk in self.chunks])


class Scheduler:
    """Requests that wait and requests that run, both in the order of arrival.

    Args:
        cache: where their keys and values go.
        max_batch_tokens: rows of one step; longer prompts are cut into chunks.
        max_sequences: requests that run at once. Where the cache keeps states of sequences, it
            has one for each of them.
        preemption: what becomes of the pages of a preempted request: they are swapped to the host
            (or freed, where the host is full), or freed and computed again.
        first_length: tokens past which all of a sequence is computed otherwise (`rotations.py`).

    Attributes:
        weights_version: of the model; what other weights computed is not found again.
        trying: requests of the step that is taken, at fault if it fails.
    """

    def __init__(
        self,
        cache: PagedCache,
        *,
        max_batch_tokens: int,
        max_sequences: int,
        preemption: Preemption,
        first_length: int | None = None,
    ):
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.preemptions = 0
        self.weights_version = 0
        self.trying: list[Request] = []
        self._cache = cache
        # Requests that are not done, by number: all else can be made anew from them.
        self._living: dict[int, Request] = {}
        self._max_batch_tokens, self._max_sequences = max_batch_tokens, max_sequences
        self._preemption, self._first_length = preemption, first_length
        self._refused = False  # whether those that wait could not start when it was last tried
        self._some_failed = False  # whether there may be requests whose last step failed

    @property
    def idle(self) -> bool:
        """Whether there is nothing to do."""
        return not self.waiting and not self.running

    def knows(self, request: Request) -> bool:
        """Whether a request was added, and is not done."""
        return request.number in self._living

    def pages_for(self, tokens: int) -> list[int]:
        """The most pages of each group that a sequence holds while it grows to so many tokens."""
        size, rows = self._cache.page_size, self._max_batch_tokens
        return [most_pages(tokens, window, size, rows) for window in self._cache.windows]

    def add(self, request: Request) -> None:
        """One more request that waits, with those that follow it."""
        self._living.update({each.number: each for each in (request, *request.followers)})
        self._refused = False
        bisect.insort(self.waiting, request, key=by_age)

    def plan(self) -> StepPlan | None:
        """The next step, with room made for its tokens; None if there is nothing to do.

        Requests of which one token is left to compute come first. Then come prompts, the oldest
        first, as far as the rows go, and then those that wait. A request whose last step failed
        has a step alone, so that one that always fails takes nobody with it.

        Raises:
            OutOfPagesError: if one request alone cannot have its pages; nothing is lost.
        """
        admitting = True
        if self._first_length is not None:
            self._restart_grown()
        while True:
            suspect = self._suspect()
            alone = suspect is not None and self._can_run_alone(suspect, admitting)
            if suspect is not None and alone:
                chunk = Chunk.next_of(suspect, self._max_batch_tokens)
                chunks = [chunk.cut(suspect.borders)]
            else:
                chunks = self._chunks_of_running()
            if admitting and suspect is None:
                rows = sum([chunk.stop - chunk.start for chunk in chunks])
                chunks += self._admit(self._max_batch_tokens - rows)
            if not chunks:
                return None
            self.trying = [chunk.request for chunk in chunks]
            try:
                slots = self._cache.grow(
                    {_sequence(c.request): c.stop - c.start for c in chunks},
                    keep=[_sequence(c.request) for c in chunks if c.start in c.request.borders],
                )
            except OutOfPagesError:
                if len(self.running) == 1:
                    raise
                self._preempt_youngest()
                admitting, self._refused = False, True
                continue
            self._note_pages(chunks)
            return StepPlan(chunks, slots)

    def plan_ahead(self, plan: StepPlan) -> StepPlan | None:
        """The step after one that is under way, from tokens that nobody has seen yet.

        None where that one has to be looked at first: others begin where a prompt ends, some that
        wait may start once a request has ended, a request is tried alone, or rows or pages run out.
        """
        if self._suspect() is not None:
            return None
        living = [chunk for chunk in plan.chunks if chunk.request.state is RequestState.RUNNING]
        if not plan.can_be_followed or len(living) != len(self.running):
            return None
        if any([chunk.draws and self._outgrows(chunk.request, chunk.stop + 1) for chunk in living]):
            return None
        more = [
            chunk for chunk in living
            if not chunk.draws or chunk.given < chunk.request.limits.max_new_tokens
        ]  # fmt: skip
        ends = len(more) < len(living)
        if not more or (self.waiting and ends):
            return None
        chunks, rows = list[Chunk](), self._max_batch_tokens
        for chunk in sorted(more, key=lambda chunk: not chunk.draws):
            chunks.append(chunk.following(rows))
            rows -= chunks[-1].rows
        if not all([chunk.rows for chunk in chunks]):
            return None
        if not self._refused:
            chunks += self._admit(rows)
        self.trying = [chunk.request for chunk in chunks]
        try:
            slots = self._cache.grow({_sequence(c.request): c.stop - c.start for c in chunks})
        except OutOfPagesError:
            return None
        self._note_pages(chunks)
        return StepPlan(chunks, slots, ahead=True)

    def _note_pages(self, chunks: Sequence[Chunk]) -> None:
        size = self._cache.page_size
        for request, start, stop, _ in chunks:
            if -(-stop // size) > -(-start // size):  # else it has those that it had
                request.most_pages = max(request.most_pages, sum(self.pages_for(stop)))

    def commit(self, chunks: Sequence[Chunk]) -> None:
        """Note that chunks are computed: other requests may find their keys and values."""
        for request, start, stop, _ in chunks:
            request.computed = stop
            if stop > request.reached:
                request.reached, request.failures = stop, 0
            if stop // self._cache.page_size > start // self._cache.page_size:
                self._cache.name(_sequence(request), request.tokens_between(0, stop))

    def blame(self, requests: Iterable[Request]) -> list[Request]:
        """Count a step that failed against those that took part; against all, where none did.

        Returns:
            Those of them that are not done, and the requests that wait for their prompts.
        """
        leaders = list(requests) or list(self._living.values())
        blamed = {each.number: each for one in leaders for each in (one, *one.followers)}
        living = [each for each in blamed.values() if each.state is not RequestState.DONE]
        for request in living:
            request.failures += 1
        self._some_failed = True
        return living

    def forget_computed(self, request: Request) -> None:
        """Take the pages that a request computed or found out of the prefix cache."""
        self._cache.forget(_sequence(request))

    def recover(self) -> list[Request]:
        """Let all requests that are not done wait without pages, after an exception in a step.

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
        self.running, self._refused = [], False
        self.waiting = [request for request in living if request.number not in led]
        return living

    def fork(self, request: Request) -> None:
        """Let those that waited for a request's prompt go on from it."""
        while request.followers:
            follower = request.followers[0]
            follower.sequence = self._cache.fork(_sequence(request))
            follower.computed = follower.computed_from_cache = request.computed
            follower.reached, follower.failures = request.computed, 0
            follower.is_long = request.is_long
            follower.times.started = time.perf_counter()
            self._run(follower)
            del request.followers[0]

    def remove(self, request: Request) -> None:
        """Forget a request that is done or cancelled, and free its pages."""
        self._living.pop(request.number, None)
        self._refused = False
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

    def _chunks_of_running(self) -> list[Chunk]:
        chunks, others = list[Chunk](), list[Request]()
        for request in self.running:
            if request.left == 1:
                chunks.append(Chunk(request, request.computed, request.computed + 1, True))
            else:
                others.append(request)
        rows = self._max_batch_tokens - len(chunks)
        if rows < 0:
            del chunks[rows:]
        for request in others:
            if rows <= 0:
                break
            chunk = Chunk.next_of(request, rows).cut(request.borders)
            if chunk.rows:
                chunks.append(chunk)
                rows -= chunk.rows
        return chunks

    def _suspect(self) -> Request | None:
        """The oldest request whose last step failed: of those that run, else of those that wait."""
        if not self._some_failed:
            return None
        for request in (*self.running, *self.waiting):
            if request.failures:
                return request
        self._some_failed = False
        return None

    def _can_run_alone(self, request: Request, admitting: bool) -> bool:
        """Whether a request has its pages, or can have them now; else others have to end first."""
        if request.state is RequestState.RUNNING:
            return True
        left = self._max_sequences - sum([each.width for each in self.running])
        if not admitting or request.width > left or not self._bring_in(request):
            return False
        self.waiting.remove(request)
        self._run(request)
        return True

    def _admit(self, rows: int) -> list[Chunk]:
        """Start waiting requests in their order, while there are rows, sequences and pages left."""
        chunks = []
        self._refused = True
        if not self.waiting:
            return chunks
        left = self._max_sequences - sum([request.width for request in self.running])
        while self.waiting and self.waiting[0].width <= left:
            if rows <= 0:
                self._refused = False  # by this step alone: the next one has rows
                break
            request = self.waiting[0]
            if not self._bring_in(request):
                break
            del self.waiting[0]
            self._run(request)
            chunks.append(Chunk.next_of(request, rows).cut(request.borders))
            rows, left = rows - chunks[-1].rows, left - request.width
        return chunks

    def _run(self, request: Request) -> None:
        request.state = RequestState.RUNNING
        bisect.insort(self.running, request, key=by_age)

    def _bring_in(self, request: Request) -> bool:
        """Give a request its sequence on the device, if all of its tokens have room there."""
        self.trying = [request]
        if request.state is RequestState.SWAPPED:
            if self.running and not self._has_room_for(self.pages_for(request.num_tokens)):
                return False
            try:
                self._cache.swap_in(_sequence(request))
            except OutOfPagesError:
                if not self.running:
                    raise
                return False
            return True
        if self.running and not self._has_room_for([1] * len(self._cache.windows)):
            return False
        request.is_long = self._is_long(request.num_tokens)
        salt = b"%d %d" % (self.weights_version, request.is_long)
        sequence = self._cache.allocate(request.tokens, salt=salt)
        found = self._cache.length(sequence)
        if self.running and not self._has_room_for(self._missing(request.num_tokens, found)):
            self._cache.free(sequence)
            return False
        request.sequence, request.computed = sequence, found
        request.borders = self._cache.state_borders(sequence, request.num_tokens)
        if request.times.started is None:
            request.times.started = time.perf_counter()
            request.computed_from_cache = found
        return True

    def _is_long(self, tokens: int) -> bool:
        return self._first_length is not None and tokens > self._first_length

    def _outgrows(self, request: Request, tokens: int) -> bool:
        """Whether a request that runs is computed otherwise once it has so many tokens."""
        return not request.is_long and self._is_long(tokens)

    def _restart_grown(self) -> None:
        """Let requests begin again that have grown past the first length since."""
        for request in [each for each in self.running if self._outgrows(each, each.num_tokens)]:
            self._cache.free(_sequence(request))
            request.lose_pages()
            self.running.remove(request)
            self.add(request)

    def _missing(self, tokens: int, computed: int) -> list[int]:
        """Pages of each group that a sequence needs and does not hold."""
        wanted, held = self.pages_for(tokens), self.pages_for(computed)
        return [max(most - now, 0) for most, now in zip(wanted, held, strict=True)]

    def _has_room_for(self, wanted: list[int]) -> bool:
        """Whether so many pages of each group are left beside those that running requests need.

        Each of them needs what its tokens take, and one more page to go on.
        """
        promised = [self._missing(request.num_tokens, request.computed) for request in self.running]
        return all(
            available - sum(of_group) - len(promised) >= pages
            for available, pages, *of_group in zip(
                self._cache.available(), wanted, *promised, strict=True
            )
        )

    def _preempt_youngest(self) -> None:
        """Take the pages of the youngest request that runs, and let it wait."""
        request = self.running[-1]
        if not (self._preemption == "swap" and self._swaps_out(request)):
            self._cache.free(_sequence(request))
            request.lose_pages()
        del self.running[-1]
        request.preemptions += 1
        self.preemptions += 1
        self.add(request)

    def _swaps_out(self, request: Request) -> bool:
        """Move its pages to the host; False where that is full."""
        try:
            self._cache.swap_out(_sequence(request))
        except OutOfPagesError:
            return False
        request.state = RequestState.SWAPPED
        return True


def _sequence(request: Request) -> int:
    assert request.sequence is not None  # it runs, or is swapped
    return request.sequence


TRIALS = 2


def choose_threads(work: Callable[[], object]) -> int:
    """Let PyTorch use all its threads, half of them or one, as is faster for some work."""
    every = torch.get_num_threads()
    counts = sorted({1, max(1, every // 2), every})
    seconds = {count: _seconds(work, count) for count in counts}
    best = min(counts, key=lambda count: seconds[count])
    torch.set_num_threads(best)
    return best


def _seconds(work: Callable[[], object], count: int) -> float:
    torch.set_num_threads(count)
    taken = []
    for _ in range(1 + TRIALS):  # the first one starts the threads
        begin = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begin)
    return min(taken[1:])
