"""Prompts: what a caller asks of an engine, checked before it joins the queue."""

from __future__ import annotations

import difflib
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, SupportsIndex, TypedDict, cast

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


def check_options(options: RequestOptions) -> None:
    """Refuse what is no option.

    Raises:
        TypeError: naming it, and the option of the nearest name.
    """
    known = list(RequestOptions.__annotations__)
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            meant = f" (did you mean {near[0]}?)" if near else ""
            raise TypeError(f"{name}: is no option of a request{meant}, takes {', '.join(known)}")


def list_prompts(prompts: Prompt | Iterable[Prompt]) -> list[Prompt]:
    """Prompts one by one, where one alone may be given: a text, or token numbers.

    Raises:
        TypeError: for what is neither prompts nor one prompt.
    """
    takes = "prompts, each of them text or token numbers, or one of them"
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise TypeError(f"prompts: got a {type(prompts).__name__}, takes {takes}")
    if isinstance(prompts, Tensor):
        return [prompts] if prompts.dim() == 1 else list(prompts)
    several = list(prompts)
    if several and not any(isinstance(each, (str, Iterable)) for each in several):
        return [cast("list[int]", several)]
    return cast("list[Prompt]", several)


def read_prompt(prompt: Prompt, tokenizer: Tokenizer | None, vocabulary: int) -> list[int]:
    """A prompt as tokens that the model knows."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise TypeError("prompt: got text, takes token numbers where tokenizer is None")
        prompt = tokenizer.encode(prompt)
    if isinstance(prompt, Mapping) or not isinstance(prompt, Iterable):
        raise TypeError(f"prompt: got a {type(prompt).__name__}, takes text or token numbers")
    tokens: list[Any] = prompt.tolist() if isinstance(prompt, Tensor) else list(prompt)
    if not tokens:
        raise ValueError("prompt: got no token, takes at least one")
    return [read_token("prompt", token, vocabulary) for token in tokens]


def read_token(name: str, token: object, vocabulary: int) -> int:
    """A token number that the model knows, as Python's own."""
    if isinstance(token, bool) or not hasattr(token, "__index__") or isinstance(token, Tensor):
        takes = "text or token numbers" if name == "prompt" else "token numbers"
        raise TypeError(f"{name}: got a {type(token).__name__}, takes {takes}")
    number = operator.index(cast("SupportsIndex", token))
    if not 0 <= number < vocabulary:
        raise ValueError(f"{name}: got token {number}, takes 0 to {vocabulary - 1}")
    return number


def read_stop_tokens(
    given: Iterable[int] | None, of_model: frozenset[int], vocabulary: int
) -> frozenset[int]:
    """The tokens at which a request ends."""
    if given is None:
        return of_model
    if isinstance(given, (str, Mapping)) or not isinstance(given, Iterable):
        raise TypeError(f"stop_tokens: got a {type(given).__name__}, takes a list of token numbers")
    tokens = given.tolist() if isinstance(given, Tensor) else given
    return frozenset(read_token("stop_tokens", token, vocabulary) for token in tokens)


def read_limits(
    options: RequestOptions, prompt_tokens: int, max_length: int, stop_tokens: frozenset[int],
    vocabulary: int, *, with_text: bool,
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
    stop_tokens = read_stop_tokens(options.get("stop_tokens"), stop_tokens, vocabulary)
    stop = options.get("stop", ())
    stop = (stop,) if isinstance(stop, str) else tuple(stop)
    if not all(isinstance(text, str) and text for text in stop):
        raise ValueError(f"stop: got {stop!r}, takes texts that are not empty")
    if stop and not with_text:
        raise ValueError("stop: got texts where tokenizer is None, takes none there")
    return Limits(most, stop_tokens, stop)
