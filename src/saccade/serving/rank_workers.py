"""Workers of ranks: rank 0 tells the others what it does, and they do the same.

Each keeps the whole books: which requests run, which pages are whose. Nothing in them depends on
time or chance, so they stay equal where requests and tokens do; that they have is compared before
every step, by one number.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakValueDictionary

from saccade.serving.ranks import Arrival, Ranks, Told
from saccade.serving.request import EngineStatistics, Request, RequestState, TokenLogprob
from saccade.serving.worker import Worker

R = TypeVar("R")


class RankWorker(Worker):
    """A worker that knows where it stands, and ends with the first error.

    A step that one rank has left halfway cannot be begun again: the others are in the middle of it.
    """

    tries_again = False

    def __init__(self, ranks: Ranks, *parts: Any, ahead: bool):
        super().__init__(*parts, ahead=ahead)
        self._ranks, self._drawn = ranks, 0
        # A device waits for others' parts of a sum without end, whatever has become of them.
        self.device_seconds = ranks.seconds

    def stands(self) -> int:
        """A number for all that was done so far."""
        counts, scheduler = self._counts, self._scheduler
        held = len(scheduler.running), len(scheduler.waiting) + len(self._submitted)
        done = counts.steps, counts.rows, counts.done, scheduler.preemptions
        return zlib.crc32(repr((self._drawn, held, done, self._cache.available())).encode())

    def _blame(self, error: Exception) -> None:
        """All have ended."""

    def _accept(self, request: Request, token: int, logprob: TokenLogprob | None) -> None:
        self._drawn = zlib.crc32(b"%d %d" % (request.number, token), self._drawn)
        super()._accept(request, token, logprob)

    def _exclusively(self, work: Callable[[], R]) -> R:
        try:
            return super()._exclusively(work)
        except BaseException as error:
            self._ranks.fail(error, f"taking step {self._counts.steps}")


class LeadingWorker(RankWorker):
    """Rank 0's, which has the requests."""

    def __init__(self, ranks: Ranks, *parts: Any, ahead: bool):
        super().__init__(ranks, *parts, ahead=ahead)
        self._arrived: deque[Request] = deque()  # that the other ranks do not know of
        ranks.lead()

    def submit(self, request: Request) -> None:
        """One more request, with those that follow it; from any thread."""
        self._arrived.append(request)

    def step(self) -> bool:
        """Take one step, on all ranks; False if there was nothing to do."""
        with self._lock:
            self._tell("step")
            return super().step()

    def cancel(self, request: Request) -> None:
        """End a request that is not wanted any more, on all ranks."""
        with self._lock:
            if request.state is not RequestState.DONE:
                self._tell("cancel", request.number)
                super().cancel(request)

    def statistics(self) -> EngineStatistics:
        """What there is now, and what was done so far."""
        found = super().statistics()
        return dataclasses.replace(found, waiting=found.waiting + len(self._arrived))

    def _tell(self, kind: str, cancelled: int = -1) -> None:
        arrived = [self._arrived.popleft() for _ in range(len(self._arrived))]
        told = Told(kind, self.stands(), [Arrival.of(each) for each in arrived], cancelled)
        self._ranks.tell(told)
        self._submitted.extend(arrived)


class FollowingWorker(RankWorker):
    """Another rank's, which does what rank 0 tells."""

    def follow(self, made: Callable[[Arrival], Request]) -> None:
        """Do what rank 0 does, until it ends.

        Args:
            made: the requests of an arrival, those that follow it with it.
        """
        known: WeakValueDictionary[int, Request] = WeakValueDictionary()
        while (told := self._ranks.hear()).kind != "end":
            if told.kind == "wait":
                continue
            if told.stands != self.stands():
                self._ranks.differ(self.stands(), told)
            for arrival in told.arrivals:
                leader = made(arrival)
                known.update({each.number: each for each in (leader, *leader.followers)})
                self.submit(leader)
            if told.kind == "step":
                self.step()
            else:
                self.cancel(known[told.cancelled])


def worker_for(ranks: Ranks | None, *parts: Any, ahead: bool) -> Worker:
    """The worker of this process; parts as `Worker` takes them."""
    if ranks is None:
        return Worker(*parts, ahead=ahead)
    kind = FollowingWorker if ranks.rank else LeadingWorker
    return kind(ranks, *parts, ahead=ahead)
