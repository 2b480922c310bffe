"""Completion: what `Engine.submit` hands back; its tokens and text come as they are made."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from saccade.serving import statistics
from saccade.serving.request import Request, State
from saccade.serving.statistics import RequestStatistics


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
    """One submitted request. Whoever waits for it drives the engine, with all its other requests.

    Iterating gives pieces of text as they come (token numbers, if the engine has no tokenizer);
    each piece is given once, whoever iterates.

    >>> for piece in engine.submit("Once upon a time"):
    ...     print(piece, end="", flush=True)
    """

    def __init__(
        self, request: Request, step: Callable[[], bool], cancel: Callable[[Request], None]
    ):
        self._request, self._step, self._cancel = request, step, cancel
        self._given = 0

    def __iter__(self) -> Iterator[Any]:
        return self.tokens() if self._request.stream is None else self.texts()

    def tokens(self) -> Iterator[int]:
        """The new tokens, as they come; always from the first one on."""
        given = 0
        while True:
            done = self.done  # looked at before, or the last ones might be missed
            generated = self._request.generated
            yield from generated[given : (given := len(generated))]
            if done:
                return self._raise_error()
            self._wait_beyond(given)

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
        return self._request.state is State.DONE

    @property
    def statistics(self) -> RequestStatistics:
        """Its times and counts, so far."""
        return statistics.of_request(self._request)

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
