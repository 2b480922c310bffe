"""Request: one prompt, how it is to be continued, and how far that has come."""

from __future__ import annotations

import enum
import time
from dataclasses import dataclass, field

from saccade.serving.sampling import Dice, Draw, Sampling
from saccade.serving.text import TextStream


class State(enum.Enum):
    """Where a request stands."""

    WAITING = "waiting"  # for its turn, with no pages
    RUNNING = "running"
    SWAPPED = "swapped"  # its pages lie on the host
    DONE = "done"


@dataclass(frozen=True)
class Limits:
    """When a request is done: after so many new tokens, or at a token or a text."""

    max_new_tokens: int
    stop_tokens: frozenset[int] = frozenset()
    stop_strings: tuple[str, ...] = ()


@dataclass
class Times:
    """Seconds on the clock of `time.perf_counter`; None for what has not happened."""

    submitted: float = field(default_factory=time.perf_counter)
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None


@dataclass(eq=False)  # two requests may be alike in everything and are two all the same
class Request:
    """One request, as the engine and its scheduler see it.

    Attributes:
        number: counted in the order of arrival; smaller ones are older and go first.
        prompt: its tokens.
        generated: the tokens that came so far.
        sequence: its number in the cache, while it has one there.
        computed: how many of its tokens have their keys and values there.
        followers: requests that share the prompt and begin where it ends (n samples of one).
        computed_from_cache: prompt tokens that the prefix cache held when it first started.
        recomputed: tokens that were computed again after it lost its pages.
        most_pages: the most pages that it held at once.
        reason: why it is done: "length", "stop_token", "stop_string", "cancelled" or "error".
    """

    number: int
    prompt: list[int]
    sampling: Sampling
    limits: Limits
    stream: TextStream | None = None
    generated: list[int] = field(default_factory=list)
    state: State = State.WAITING
    sequence: int | None = None
    computed: int = 0
    followers: list[Request] = field(default_factory=list)
    times: Times = field(default_factory=Times)
    computed_from_cache: int = 0
    preemptions: int = 0
    recomputed: int = 0
    most_pages: int = 0
    reason: str | None = None
    error: BaseException | None = None

    def __post_init__(self) -> None:
        self._dice = Dice(self.sampling.seed)

    @property
    def tokens(self) -> list[int]:
        """Prompt and what came after it."""
        return self.prompt + self.generated

    @property
    def num_tokens(self) -> int:
        """How many tokens there are."""
        return len(self.prompt) + len(self.generated)

    @property
    def left(self) -> int:
        """How many tokens are to be computed before the next one can be drawn."""
        return self.num_tokens - self.computed

    @property
    def most_tokens(self) -> int:
        """How many tokens its pages must ever hold: the last new one is not read any more."""
        return len(self.prompt) + self.limits.max_new_tokens - 1

    @property
    def width(self) -> int:
        """How many requests it is: itself, and those that wait for its prompt."""
        return 1 + len(self.followers)

    def tokens_between(self, start: int, stop: int) -> list[int]:
        """Tokens start … stop - 1."""
        if start >= len(self.prompt):
            return self.generated[start - len(self.prompt) : stop - len(self.prompt)]
        return self.tokens[start:stop]

    def draw(self) -> Draw:
        """How the next token is drawn; the same until that token is accepted."""
        greedy = self.sampling.greedy
        return Draw(self.sampling, 0.0 if greedy else self._dice.number(len(self.generated)))

    def accept(self, token: int) -> str | None:
        """One new token; why the request is done with it, or None."""
        if self.times.first_token is None:
            self.times.first_token = time.perf_counter()
        self.generated.append(token)
        if self.stream is not None and token not in self.limits.stop_tokens:
            self.stream.push(token)
        return self.outcome()

    def outcome(self) -> str | None:
        """Why the request is done with the tokens that it has, or None."""
        if self.generated and self.generated[-1] in self.limits.stop_tokens:
            return "stop_token"
        if self.stream is not None and self.stream.stopped:
            return "stop_string"
        return "length" if len(self.generated) >= self.limits.max_new_tokens else None

    def restart(self) -> None:
        """Wait for a turn, with no pages; what follows from its tokens is worked out anew."""
        self.recomputed += self.computed
        self.sequence, self.computed, self.state = None, 0, State.WAITING
        if self.stream is not None:
            self.stream.replay(
                [token for token in self.generated if token not in self.limits.stop_tokens]
            )

    def finish(self, reason: str, error: BaseException | None = None) -> None:
        """Nothing more comes."""
        if self.stream is not None and error is None:
            self.stream.finish()
        self.times.finished = time.perf_counter()
        self.reason, self.error = reason, error
        self.state = State.DONE  # the last: whoever sees it sees all the rest
