"""Sampling: one token from each row of logits, as each request wants it."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

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
    """A request's own random numbers: one for each token, and the same ones from the same seed."""

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
    place = (reached <= wanted).sum(-1, keepdim=True)
    last = ((weights > 0).sum(-1, keepdim=True) - 1).clamp_min(0)  # a row of NaN has none
    return tokens.gather(1, torch.minimum(place, last)).squeeze(1)
