"""Completion: what `Engine.submit` hands back, with its tokens, its text and its statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from saccade.serving.request import Request, RequestState

CacheStatistics = Any  # saccade.PagedCache.statistics()'s; the class itself has no public name


@dataclass(frozen=True)
class RequestStatistics:
    """One request, so far or in the end; times in seconds.

    Attributes:
        state: "waiting", "running", "swapped" or "done".
        reason: why it is done: "length", "stop_token", "stop_string", "cancelled" or "error".
        prompt_tokens, new_tokens: how many.
        cached_tokens: prompt tokens that were found in the cache and not computed.
        queued: until it started (so far, if it has not).
        to_first_token: from its arrival to its first new token; None before that.
        total: from its arrival to its end, or until now.
        tokens_per_second: new tokens after the first, over the time since the first.
        preemptions: how often it was preempted; recomputed_tokens: what that cost.
        pages: the most pages that it held.
    """

    state: str
    reason: str | None
    prompt_tokens: int
    new_tokens: int
    cached_tokens: int
    queued: float
    to_first_token: float | None
    total: float
    tokens_per_second: float | None
    preemptions: int
    recomputed_tokens: int
    pages: int


@dataclass(frozen=True)
class EngineStatistics:
    """What an engine holds now, and what it has done so far; times in seconds.

    Attributes:
        waiting, running, done: requests.
        steps: forward passes. rows: tokens computed in them.
        prompt_tokens, cached_tokens, new_tokens: of the requests that were started.
        preemptions: how often a request was preempted.
        busy: the time spent in steps. tokens_per_second: new tokens over that time.
        pages: of all groups of layers. cache: `saccade.PagedCache.statistics()`.
    """

    waiting: int
    running: int
    done: int
    steps: int
    rows: int
    prompt_tokens: int
    cached_tokens: int
    new_tokens: int
    preemptions: int
    busy: float
    tokens_per_second: float
    pages: int
    cache: CacheStatistics


@dataclass
class Counts:
    """What an engine counts as it goes."""

    done: int = 0
    steps: int = 0
    rows: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    new_tokens: int = 0
    busy: float = 0.0


def of_request(request: Request) -> RequestStatistics:
    """One request, so far or in the end."""
    times, now = request.times, time.perf_counter()
    end = times.finished or now
    speed = None
    if times.first_token is not None and len(request.generated) > 1 and end > times.first_token:
        speed = (len(request.generated) - 1) / (end - times.first_token)
    return RequestStatistics(
        state=request.state.value,
        reason=request.reason,
        prompt_tokens=len(request.prompt),
        new_tokens=len(request.generated),
        cached_tokens=request.computed_from_cache,
        queued=(times.started or end) - times.submitted,
        to_first_token=None if times.first_token is None else times.first_token - times.submitted,
        total=end - times.submitted,
        tokens_per_second=speed,
        preemptions=request.preemptions,
        recomputed_tokens=request.recomputed,
        pages=request.most_pages,
    )


@dataclass(frozen=True)
class Generated:
    """What a request gave in the end.

    Attributes:
        tokens: the new tokens, a stop token included.
        text: their text without special tokens, up to a stop string; None without a tokenizer.
        reason: "length", "stop_token", "stop_string" or "cancelled".
        statistics: of the request.
    """

    tokens: list[int]
    text: str | None
    reason: str
    statistics: RequestStatistics


class Completion:
    """One submitted request. Waiting for it takes the engine's steps, with all other requests.

    Iterating gives pieces of text as they come (token numbers, if the engine has no tokenizer);
    each piece is given once, to one iterator.

    >>> for piece in engine.submit("Once upon a time"):
    ...     print(piece, end="", flush=True)
    """

    def __init__(
        self, request: Request, step: Callable[[], bool], cancel: Callable[[Request], None]
    ):
        self._request, self._step, self._cancel = request, step, cancel

    def __iter__(self) -> Iterator[Any]:
        return self.tokens() if self._request.stream is None else self.texts()

    def tokens(self) -> Iterator[int]:
        """The new tokens, as they come; always from the first one on."""
        count = 0
        while True:
            done = self.done  # looked at before, or the last ones might be missed
            generated = self._request.generated
            yield from generated[count : (count := len(generated))]
            if done:
                return self._raise_error()
            self._wait_beyond(count)

    def texts(self) -> Iterator[str]:
        """Pieces of text, as soon as nothing that follows can change them.

        Raises:
            ValueError: if the engine has no tokenizer.
        """
        stream = self._request.stream
        if stream is None:
            raise ValueError("tokenizer: got None, takes a tokenizer where text is wanted")
        while True:
            done, seen = self.done, len(self._request.generated)
            piece = stream.piece()
            if piece:
                yield piece
            if done:
                return self._raise_error()
            self._wait_beyond(seen)

    def result(self) -> Generated:
        """Wait until it is done.

        Raises:
            RuntimeError: if nothing can come any more.
            Exception: what made the request fail, if anything did.
        """
        while not self.done:
            self._go_on()
        self._raise_error()
        request = self._request
        text = None if request.stream is None else request.stream.text
        assert request.reason is not None  # it is done
        return Generated([*request.generated], text, request.reason, self.statistics)

    def cancel(self) -> None:
        """Ask for no more; its pages are free when this returns. What came so far stays."""
        self._cancel(self._request)

    def text_so_far(self) -> str:
        """The text that has come; the end of it may still change. "" without a tokenizer."""
        return "" if self._request.stream is None else self._request.stream.text

    @property
    def done(self) -> bool:
        """Whether nothing more comes."""
        return self._request.state is RequestState.DONE

    @property
    def statistics(self) -> RequestStatistics:
        """Its times and counts, so far."""
        return of_request(self._request)

    def _wait_beyond(self, tokens: int) -> None:
        """Take steps until there are more new tokens than that."""
        while not self.done and len(self._request.generated) <= tokens:
            self._go_on()

    def _go_on(self) -> None:
        """Take a step.

        Raises:
            RuntimeError: if there is none to take and this is not done: waiting would never end.
        """
        if not self._step() and not self.done:
            raise RuntimeError(
                f"request {self._request.number}: the engine has nothing to do, and this is not "
                "done; submit it again"
            )

    def _raise_error(self) -> None:
        if self._request.error is not None:
            raise self._request.error
