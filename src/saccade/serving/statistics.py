"""Statistics: what became of one request, and what an engine has done."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from saccade.serving.request import Request

if TYPE_CHECKING:
    from saccade import LayeredCache

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
        preemptions: how often it gave up its place; recomputed_tokens: what that cost.
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
        preemptions: how often a request gave up its place.
        busy: the time spent in steps. tokens_per_second: new tokens over that time.
        pages: of all kinds of layers. cache: `saccade.LayeredCache.statistics()`.
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


def of_engine(
    counts: Counts, *, waiting: int, running: int, preemptions: int, pages: int, cache: LayeredCache
) -> EngineStatistics:
    """What an engine holds now, and what it has done so far."""
    return EngineStatistics(
        waiting=waiting,
        running=running,
        preemptions=preemptions,
        pages=pages,
        tokens_per_second=counts.new_tokens / counts.busy if counts.busy else 0.0,
        cache=cache.statistics(),
        **vars(counts),
    )
