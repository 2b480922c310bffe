"""Masks and scores as FlexAttention's users write them, for the tests that trace them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

BATCH, HEADS, QUERY_LEN, KV_LEN = 2, 3, 11, 13
SHAPE = (BATCH, HEADS, QUERY_LEN, KV_LEN)
LONGEST = KV_LEN
WINDOW, STEP = 4, 2.5


def whole(low: int, high: int, *shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


document = whole(0, 3, LONGEST).sort().values
documents = whole(0, 3, BATCH, LONGEST, seed=1).sort(-1).values
lengths = torch.tensor([KV_LEN, 6])
permutation = torch.randperm(LONGEST, generator=torch.Generator().manual_seed(2))
flags = whole(0, 4, BATCH, HEADS, QUERY_LEN, KV_LEN, seed=3) > 0
small = whole(-3, 4, HEADS, LONGEST, seed=4).to(torch.int8)
bytes_ = whole(0, 200, LONGEST, seed=5).to(torch.uint8)
halves = normal(LONGEST, seed=6).half()
slopes, gate = normal(HEADS, seed=7), normal(HEADS, seed=8)
relative = normal(HEADS, 2 * LONGEST - 1, seed=9)
buckets = normal(32, HEADS, seed=10)
offsets = torch.tensor([0, 3, 7, LONGEST])
parents = torch.tensor([-1, 0, 1, 1, 3, 0, 5, 5, 7, 8, 9, 9, 9])
ancestors = torch.eye(LONGEST, dtype=torch.bool)
for _row, _parent in enumerate(parents.tolist()):
    if _parent >= 0:
        ancestors[_row] |= ancestors[_parent]
sequence = torch.searchsorted(offsets[1:], torch.arange(LONGEST), right=True)
temperature = torch.tensor(0.7)


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    return q >= k


def of_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k <= WINDOW) & (q >= k)


def window(size: int) -> Callable[..., Any]:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k).abs() <= size

    return inner


def both(*masks: Callable[..., Any]) -> Callable[..., Any]:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = torch.ones((), dtype=torch.bool)
        for mask in masks:
            result = result & mask(b, h, q, k)
        return result

    return inner


def either(*masks: Callable[..., Any]) -> Callable[..., Any]:
    def inner(b: Any, h: Any, q: Any, k: Any) -> Any:
        result = q.new_zeros((), dtype=torch.bool)
        for mask in masks:
            result = result | mask(b, h, q, k)
        return result

    return inner


def neighbourhood(b: Any, h: Any, q: Any, k: Any, width: int = 4) -> Any:
    x, y, other_x, other_y = q // width, q % width, k // width, k % width
    return (torch.abs(x - other_x) <= 1) & (torch.abs(y - other_y) <= 2)


def neighbourhood_of_three(b: Any, h: Any, q: Any, k: Any) -> Any:
    def place(row: Any) -> tuple[Any, Any, Any]:
        return row // 6, row // 3 % 2, row % 3

    near = [(one - other).abs() <= 1 for one, other in zip(place(q), place(k), strict=True)]
    return near[0] & near[1] & near[2]


def steps(b: Any, h: Any, q: Any, k: Any) -> Any:
    distance = q - k
    distance *= 2
    distance -= 3
    distance //= 3
    distance %= 4
    return distance == 1


def tiles(b: Any, h: Any, q: Any, k: Any) -> Any:
    by = [q.remainder(5), k.floor_divide(3), torch.div(q, 4, rounding_mode="floor")]
    return (by[0] <= by[1]) | torch.eq(by[2], 1)


def unrolled(b: Any, h: Any, q: Any, k: Any) -> Any:
    seen = k == 0
    for step in range(1, 4):
        seen = seen | (k == q - step * step)
    return seen


def own_branch(b: Any, h: Any, q: Any, k: Any) -> Any:
    if WINDOW > 3:  # of a number, not of a row
        return torch.logical_and(q >= k, torch.logical_not(k == 2))
    return q < k


class Holder:
    def __init__(self) -> None:
        self.step, self.ids = 3, document

    def check(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return ((q - k) % self.step == 0) & (self.ids[q] == self.ids[k])

    @staticmethod
    def plain(b: Any, h: Any, q: Any, k: Any) -> Any:
        return q != k

    def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return self.check(b, h, q, k) | (k < self.step)


class Sizes(NamedTuple):
    left: int
    right: int

    def near(self, b: Any, h: Any, q: Any, k: Any) -> Any:
        return (k - q <= self.right) & (q - k <= self.left)


def within(size: int, b: Any, h: Any, q: Any, k: Any) -> Any:
    return abs(q - k) < size


tables = {"ids": [document, permutation]}

MASKS: dict[str, Callable[..., Any]] = {
    "causal": causal,
    "global number": of_global,
    "window": window(3),
    "document": lambda b, h, q, k: document[q] == document[k],
    "documents, causal and window": both(
        lambda b, h, q, k: documents[b, q] == documents[b, k], causal, window(5)
    ),
    "either": either(causal, lambda b, h, q, k: k < 3),
    "prefix or window": lambda b, h, q, k: (k < 4) | ((q >= k) & (q - k < 3)),
    "prefix by batch": lambda b, h, q, k: (k < lengths[b]) | (q >= k),
    "padding": lambda b, h, q, k: (k < lengths[b]) & (q < lengths[b]),
    "neighbourhood": neighbourhood,
    "neighbourhood of three": neighbourhood_of_three,
    "dilated": lambda b, h, q, k: (torch.abs(q - k) <= 6) & ((q - k) % 2 == 0),
    "dilated both ways": lambda b, h, q, k: (k - q) % 3 == 1,
    "tree": lambda b, h, q, k: ancestors[q, k],
    "tree behind a prefix": lambda b, h, q, k: (k < 2) | ancestors[q][torch.clamp(k - 2, min=0)],
    "shared question": lambda b, h, q, k: (q >= k) & ((k < 4) | (document[q] == document[k])),
    "per head": lambda b, h, q, k: torch.where(h % 2 == 0, q >= k, k - q < 4),
    "table": lambda b, h, q, k: flags[b, h, q, k],
    "table in parts": lambda b, h, q, k: flags[b][h][q][k],
    "table in pairs": lambda b, h, q, k: flags[b, h][q, k],
    "table of one head": lambda b, h, q, k: flags[0][h, q][k],
    "permuted": lambda b, h, q, k: permutation[q] >= permutation[k],
    "nested index": lambda b, h, q, k: document[permutation[q]] >= document[permutation[k]],
    "from the end": lambda b, h, q, k: document[-1 - k] < document[q - 5] + 1,
    "shared row": lambda b, h, q, k: documents[0][k] <= documents[1, q],
    "attribute": Holder().check,
    "static method": Holder.plain,
    "callable": Holder(),
    "method of a tuple": Sizes(3, 1).near,
    "partial": functools.partial(within, 3),
    "partial with keywords": functools.partial(neighbourhood, width=3),
    "kept in a dictionary": lambda b, h, q, k: tables["ids"][0][q] < tables["ids"][1][k],
    "negated": lambda b, h, q, k: ~((q < k) | (document[k] == 2)),
    "minimum": lambda b, h, q, k: torch.minimum(q, k) % 5 < 3,
    "maximum": lambda b, h, q, k: q.maximum(k) < 9,
    "everything": lambda b, h, q, k: q * 0 == 0,
    "nothing": lambda b, h, q, k: torch.zeros((), dtype=torch.bool),
    "plainly true": lambda b, h, q, k: True,
    "new ones": lambda b, h, q, k: q.new_ones((), dtype=torch.bool) & (k <= q),
    "like ones": lambda b, h, q, k: torch.ones_like(q, dtype=torch.bool) & (k != 3),
    "logical": lambda b, h, q, k: torch.logical_or(q > k, torch.logical_xor(h == 1, k == 2)),
    "logical of numbers": lambda b, h, q, k: torch.logical_and(q - k, h) | (q % 2).logical_not(),
    "to bool": lambda b, h, q, k: ((q - k) % 3).bool() | (b * h).to(torch.bool),
    "true counts as one": lambda b, h, q, k: (q > k).int() + (k > 3).long() == 1,
    "compared truths": lambda b, h, q, k: (q < 5) == (k < 5),
    "exclusive": lambda b, h, q, k: (q < 4) ^ (k < 6) ^ flags[0, 0, 0, 0],
    "bits": lambda b, h, q, k: ((q ^ 1) == k) | ((bytes_[k] >> (q % 8)) & 1 == 1),
    "shifted bits": lambda b, h, q, k: (1 << (k % 4)) & q != 0,
    "powers": lambda b, h, q, k: (q - k) ** 2 < 10,
    "square": lambda b, h, q, k: torch.square(q - k) + torch.pow(h, 2) < 17,
    "circle": lambda b, h, q, k: torch.sqrt((q - k) ** 2 + h * h) < 4.5,
    "clamped": lambda b, h, q, k: torch.clamp(q - k, 0, 3) == (q - k),
    "clamped from above": lambda b, h, q, k: (q - k).clamp(max=2) + k.clamp_min(4) > 4,
    "powers of two": lambda b, h, q, k: (q - k < 2.0**h)
    & (torch.exp2(h) < torch.log2(k + 9.0) * 2),
    "chosen by a method": lambda b, h, q, k: (q > k).where(h == 0, q < 3),
    "chosen by a flag": lambda b, h, q, k: flags[0, 0, 0, 0].where(h == 0, q < 3),
    "decimal steps": lambda b, h, q, k: (k * 0.1) // 0.1 == q * 0.1 // 0.1 % 3,
    "decimal rests": lambda b, h, q, k: ((q - k) * 0.3) % 0.1 < 0.05,
    "negative rests": lambda b, h, q, k: ((q - k) * 0.7) % (h - 2.5) < (q - 4.5) // (k + 0.25 - 3),
    "ceiling": lambda b, h, q, k: torch.ceil((q - k) / 3) == torch.max(h, k % 2),
    "least": lambda b, h, q, k: torch.min(q, k + 2).less(q.max(k) - 3),
    "true division": lambda b, h, q, k: q / 3 <= k,
    "half steps": lambda b, h, q, k: (q * 0.5 + k) % 2 > 1,
    "real quotient": lambda b, h, q, k: (q + k) // STEP == 2,
    "negative divisor": lambda b, h, q, k: (q // -3 >= (k - 9) // 2) | ((q - k) % -3 == -1),
    "divided by a row": lambda b, h, q, k: (q + 3) % (k + 1) == 0,
    "number before a row": lambda b, h, q, k: (5 - q < k) & (20 // (k + 1) > 2) & (7 % (q + 2) > 0),
    "turned": lambda b, h, q, k: (-q) // 4 == (-k) // 4,
    "small table": lambda b, h, q, k: small[h, k] * 2 <= small[h, q % LONGEST],
    "bytes": lambda b, h, q, k: bytes_[q].int() - bytes_[k] < 100,
    "halves": lambda b, h, q, k: halves[k] > halves[q] * 0.5,
    "float of a row": lambda b, h, q, k: q.float() * 0.3 > k.to(torch.float32) - 1.5,
    "whole of a real": lambda b, h, q, k: (halves[k] * 3).to(torch.int32) == (q - 5) % 3,
    "logarithm": lambda b, h, q, k: torch.log(q + 1.0).long() >= torch.log(k + 1.0).to(torch.int64),
    "jagged": lambda b, h, q, k: (sequence[q] == sequence[k])
    & (q - offsets[sequence[q]] >= k - offsets[sequence[k]]),
    "jagged without a table": lambda b, h, q, k: torch.where(q < 7, q - 0, q - 7) >= k % 5,
    "chunks": lambda b, h, q, k: (q // 4 == k // 4) & (q >= k),
    "sinks and window": lambda b, h, q, k: (k < 2) | ((k <= q) & (q - k < 4)),
    "by head": lambda b, h, q, k: q - k <= torch.tensor([1, 3, 5])[h],
    "0-d tensor": lambda b, h, q, k: q - k <= lengths[1],
    "steps": steps,
    "tiles": tiles,
    "unrolled": unrolled,
    "own branch": own_branch,
}  # fmt: skip


def t5(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    """T5's buckets: exact near by, logarithmic further away."""
    num, far, exact = 16, 20, 8
    distance = k - q
    bucket = (distance > 0).to(torch.long) * num
    distance = torch.abs(distance)
    ratio = torch.log(distance.float() / exact + 1e-6) / math.log(far / exact)
    large = exact + (ratio * (num - exact)).to(torch.long)
    large = torch.min(large, torch.full_like(large, num - 1))
    return score + buckets[bucket + torch.where(distance < exact, distance, large), h]


def two_steps(score: Any, b: Any, h: Any, q: Any, k: Any) -> Any:
    inner = (score + (q - k) * 0.01) / (slopes[h] ** 2 + 3.0)
    return 5 * torch.tanh(inner) * (1 + h * 0.1)


SCORES: dict[str, Callable[..., Any]] = {
    "softcap": lambda score, b, h, q, k: 20 * torch.tanh(score / 20),
    "alibi": lambda score, b, h, q, k: score + slopes[h] * (k - q),
    "alibi made of heads": lambda score, b, h, q, k: (
        score - torch.exp(-(h + 1) * math.log(2) * 8 / HEADS) * (q - k).abs()
    ),
    "alibi of FlexAttention": lambda score, b, h, q, k: (
        score + torch.exp2(-((h + 1) * 8.0 / HEADS)) * (k - q)
    ),
    "alibi by a power": lambda score, b, h, q, k: score + 2 ** (-8.0 * (h + 1) / HEADS) * (k - q),
    "gate": lambda score, b, h, q, k: (
        score * torch.sigmoid(gate[h]) + torch.maximum(score, gate[h] * 0.1)
    ),
    "two steps": two_steps,
    "relative": lambda score, b, h, q, k: score + relative[h, q - k + LONGEST - 1],
    "relative in parts": lambda score, b, h, q, k: score + relative[h][q - k],
    "t5": t5,
    "hidden by where": lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
    "hidden by masked_fill": lambda score, b, h, q, k: score.masked_fill(q < k, -float("inf")),
    "temperature": lambda score, b, h, q, k: score * temperature / torch.sqrt(h + 1.0),
    "per head": lambda score, b, h, q, k: score * (1.0 + 0.5 * h) - b,
    "clamped": lambda score, b, h, q, k: torch.clamp(score, -1.0, 1.5) + score.clamp(min=0.3),
    "powers": lambda score, b, h, q, k: score**2 - score**3 / 10 + (score * score) ** 0.5,
    "roots": lambda score, b, h, q, k: torch.sqrt(score * score + 1.0) - torch.log(score.abs() + 2),
    "extremes": lambda score, b, h, q, k: (
        torch.minimum(score, 2 * score) - (score / 2).maximum(gate[h])
    ),
    "forgets": lambda score, b, h, q, k: -0.5 * (q - k),
    "distance": lambda score, b, h, q, k: score / (1 + (q - k).abs()),
    "halves": lambda score, b, h, q, k: score + halves[k] - halves[-1 - k],
    "rests": lambda score, b, h, q, k: (score * 3) % 0.7 + score % slopes[h] - 2 % (score + 9),
    "steps": lambda score, b, h, q, k: score + (score * 7) // 0.3 + score.ceil(),
    "inverted": lambda score, b, h, q, k: (
        (score + 9).rsqrt() + (score - 7).reciprocal() + score.relu()
    ),
    "chosen by a method": lambda score, b, h, q, k: score.where(q >= k, -1e9),
    "to base 2": lambda score, b, h, q, k: torch.exp2(score) - torch.log2(score * score + 0.5),
    "integers": lambda score, b, h, q, k: score + small[h, k] + bytes_[k] / 100 + flags[b, h, q, k],
    "square": lambda score, b, h, q, k: torch.square(score) * torch.abs(score),
    "negative exponent": lambda score, b, h, q, k: score * torch.exp(-((q - k) ** 2) / 50.0),
    "whole steps": lambda score, b, h, q, k: score + (score * 2).floor() * 0.1 + score.trunc(),
    "subtracted from": lambda score, b, h, q, k: 1.0 - torch.sub(2, score) + torch.add(1, score),
    "divides": lambda score, b, h, q, k: 2.0 / (score * score + 1) + torch.true_divide(score, 3),
    "sigmoid": lambda score, b, h, q, k: torch.sigmoid(score) * score.tanh() - score.exp() / 90,
}
