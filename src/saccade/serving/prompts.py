"""Prompts: what a caller asks of an engine, checked before it joins the queue."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict

from torch import Tensor

from saccade.serving.request import Limits
from saccade.serving.sampling import check_number
from saccade.serving.text import Tokenizer

Prompt = str | Sequence[int] | Tensor


class RequestOptions(TypedDict, total=False):
    """The options of `Engine.submit`, for type checkers."""

    max_new_tokens: int | None
    temperature: float
    top_k: int | None
    top_p: float
    seed: int
    stop: str | Sequence[str]
    stop_tokens: Iterable[int] | None


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """A prompt as tokens that the model knows."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("prompt: got text, takes token numbers where tokenizer is None")
        prompt = tokenizer.encode(prompt)
    tokens = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not tokens:
        raise ValueError("prompt: got no token, takes at least one")
    for token in tokens:
        if isinstance(token, bool) or not isinstance(token, int):
            raise TypeError(f"prompt: got a {type(token).__name__}, takes text or token numbers")
        if not 0 <= token < vocabulary:
            raise ValueError(f"prompt: got token {token}, takes 0 to {vocabulary - 1}")
    return tokens


def read_limits(
    options: RequestOptions, prompt_tokens: int, max_length: int, stop_tokens: frozenset[int],
    *, with_text: bool,
) -> Limits:  # fmt: skip
    """When a request is done."""
    room = max_length - prompt_tokens
    most = options.get("max_new_tokens")
    if room < 1:
        raise ValueError(
            f"prompt: got {prompt_tokens} tokens, takes fewer than max_length, {max_length}"
        )
    if most is None:
        most = room
    check_number("max_new_tokens", most, least=1)
    if most > room:
        raise ValueError(
            f"max_new_tokens: got {most} after a prompt of {prompt_tokens}, takes at most {room} "
            f"(max_length is {max_length})"
        )
    own = options.get("stop_tokens")
    stop = options.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop: got {stop!r}, takes texts that are not empty")
    if stop and not with_text:
        raise ValueError("stop: got texts where tokenizer is None, takes none there")
    return Limits(most, stop_tokens if own is None else frozenset(own), stop)
