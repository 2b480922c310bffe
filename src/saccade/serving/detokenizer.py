"""Detokenizer: tokens become text as they come, and stop strings are noticed in it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

UNFINISHED = "\ufffd"  # what decoders give for bytes that are no whole character yet


class Tokenizer(Protocol):
    """What the engine needs of a tokenizer; those of transformers have it."""

    def encode(self, text: str) -> list[int]:
        """The tokens of a text."""
        ...

    def decode(self, token_ids: list[int], skip_special_tokens: bool = ...) -> str:
        """The text of tokens."""
        ...


class TextStream:
    """The text of a growing list of tokens, given out piece by piece.

    Nothing that was given out changes later: bytes of an unfinished character are held back, and
    so is an end that may become a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop_strings: Sequence[str]):
        self.text = ""
        self.stopped = False
        self._tokenizer, self._stop_strings = tokenizer, tuple(stop_strings)
        self._context: list[int] = []  # tokens whose text is known, as what follows may need them
        self._pending: list[int] = []  # tokens whose text is not known yet
        self._given = 0
        self._finished = False

    def push(self, token: int) -> None:
        """One more token."""
        self._pending.append(token)
        known = self._decode(self._context)
        text = self._decode(self._context + self._pending)
        if text.endswith(UNFINISHED) or len(text) <= len(known):
            return
        self._extend(text[len(known) :])
        self._context, self._pending = self._pending, []

    def finish(self) -> None:
        """No more tokens come: unfinished characters are given as they are."""
        if self._pending and not self.stopped:
            known = self._decode(self._context)
            self._extend(self._decode(self._context + self._pending)[len(known) :])
        self._pending = []
        self._finished = True

    def replay(self, tokens: Sequence[int]) -> None:
        """Begin again with these tokens; what was given out is not given out again."""
        again = TextStream(self._tokenizer, self._stop_strings)
        for token in tokens:
            again.push(token)
        again._given = self._given
        vars(self).update(vars(again))

    def piece(self) -> str:
        """The text that became certain since the last call."""
        whole = self.stopped or self._finished
        end = len(self.text) - (0 if whole else self._held_back())
        piece = self.text[self._given : end]
        self._given = max(self._given, end)
        return piece

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True) if tokens else ""

    def _extend(self, text: str) -> None:
        longest = max(map(len, self._stop_strings), default=1)
        searched_from = max(len(self.text) - longest + 1, 0)
        self.text += text
        found = [self.text.find(stop, searched_from) for stop in self._stop_strings]
        places = [place for place in found if place >= 0]
        if places:
            self.text, self.stopped = self.text[: min(places)], True

    def _held_back(self) -> int:
        """How many characters at the end begin a stop string."""
        return max(
            (
                length
                for stop in self._stop_strings
                for length in range(1, min(len(stop), len(self.text) + 1))
                if self.text.endswith(stop[:length])
            ),
            default=0,
        )
