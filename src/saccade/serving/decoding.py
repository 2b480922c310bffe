"""Decoding: a token from each row of logits, and text from tokens as they come."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Float
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """How a request draws its tokens; temperature 0 takes the likeliest one (greedy).

    Args:
        temperature: below 1 sharpens, above 1 flattens.
        top_k: only so many of the likeliest tokens. None: all.
        top_p: only the likeliest tokens that together hold this much of the probability.
        seed: equal seeds draw equal numbers, whatever else the engine serves.

    Raises:
        TypeError, ValueError: naming the argument, what it got and what it takes.

    Source: nucleus sampling (Holtzman et al. 2020), section 3.1, for top_p.

    >>> Sampling(temperature=0.8, top_p=0.95, seed=7)
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("temperature", "top_p"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)):
                raise TypeError(f"{name}: got {type(value).__name__}, takes a number")
        if not 0 <= self.temperature <= sys.float_info.max:
            raise ValueError(f"temperature: got {self.temperature}, takes 0 or a positive number")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: got {self.top_p}, takes a number above 0, at most 1")
        if self.top_k is not None:
            check_number("top_k", self.top_k, least=1)
        check_number("seed", self.seed, least=None)

    @property
    def greedy(self) -> bool:
        """Whether nothing is drawn."""
        return self.temperature == 0


class Draw(NamedTuple):
    """How one row of logits is drawn from, and with which random number in [0, 1)."""

    sampling: Sampling
    number: float


def check_number(name: str, value: object, *, least: int | None) -> None:
    """Refuse what is no whole number, or too small a one."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {type(value).__name__}, takes a whole number")
    if least is not None and value < least:
        raise ValueError(f"{name}: got {value}, takes {least} or more")


class Dice:
    """Random numbers of one request: one for each token, equal for equal seeds."""

    def __init__(self, seed: int):
        # Random takes a negative number for its positive twin, and a text as it stands.
        source = random.Random(seed if seed >= 0 else str(seed))
        self._source = iter(source.random, None)
        self._numbers: list[float] = []

    def number(self, index: int) -> float:
        """The number in [0, 1) of the index-th token, however often it is asked for."""
        missing = max(index + 1 - len(self._numbers), 0)
        # Drawn and kept by one call of C: no interrupt comes between and loses a number.
        self._numbers.extend(itertools.islice(self._source, missing))
        return self._numbers[index]


def choose(logits: Float[Tensor, "rows vocabulary"], draws: Sequence[Draw]) -> list[int | None]:
    """One token for each row, which depends on that row and its draw only.

    None stands for a row whose largest logit is NaN or inf: that is no distribution.
    """
    largest, likeliest = logits.max(dim=-1)
    random_rows = [row for row, draw in enumerate(draws) if not draw.sampling.greedy]
    if random_rows:
        at = torch.tensor(random_rows, device=logits.device)
        drawn = _draw(logits[at], [draws[row] for row in random_rows])
        likeliest = likeliest.index_copy(0, at, drawn)
    found = zip(likeliest.tolist(), largest.isfinite().tolist(), strict=True)
    return [token if finite else None for token, finite in found]


def _draw(logits: Tensor, draws: list[Draw]) -> Tensor:
    """Rows at a temperature, cut to the likeliest, then the token under which the number falls."""

    def column(values: Sequence[float], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=logits.device).unsqueeze(1)

    # In float64: the sums below run over a whole vocabulary.
    scaled = logits.double() / column([d.sampling.temperature for d in draws], torch.float64)
    vocabulary = logits.shape[-1]
    most = [min(draw.sampling.top_k or vocabulary, vocabulary) for draw in draws]
    narrowest = max(most)
    values, tokens = scaled.topk(narrowest, dim=-1)  # the likeliest first
    kept = torch.arange(narrowest, device=logits.device) < column(most, torch.int64)
    weights = values.masked_fill(~kept, -torch.inf).softmax(-1)
    before = weights.cumsum(-1) - weights
    weights = weights.masked_fill(
        before >= column([d.sampling.top_p for d in draws], torch.float64), 0
    )
    reached = weights.cumsum(-1)
    wanted = column([d.number for d in draws], torch.float64) * reached[:, -1:]
    index = (reached <= wanted).sum(-1, keepdim=True)
    last = ((weights > 0).sum(-1, keepdim=True) - 1).clamp_min(0)  # a row of NaN has none
    return tokens.gather(1, torch.minimum(index, last)).squeeze(1)


# ---- text ----------------------------------------------------------------------------------------

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
        final = self.stopped or self._finished
        end = len(self.text) - (0 if final else self._held_back())
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
        starts = [start for start in found if start >= 0]
        if starts:
            self.text, self.stopped = self.text[: min(starts)], True

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
