"""Pairs: a few combinations of parameters in which every two values meet.

Most faults need one value or two that meet. A suite with many parameters runs these combinations
instead of all; what more than two values break is left to the random problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations, product
from typing import Any

Pair = tuple[int, int, int, int]  # a parameter and its value, another one and its value


def covering(*parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Combinations of values, one of each parameter, that hold every pair of values.

    The same in every process, so that each combination is a test with a name of its own. Each is
    begun with a pair that is missing and filled with the values that bring most others.
    """
    counts = [len(values) for values in parameters]
    if len(counts) < 2:
        return list(product(*parameters))
    missing: dict[Pair, None] = dict.fromkeys(_all_pairs(counts))  # in order, unlike a set
    rows: list[list[int]] = []
    while missing:
        first, its_value, second, other = next(iter(missing))
        row = {first: its_value, second: other}
        for parameter, count in enumerate(counts):
            if parameter not in row:
                row[parameter] = _most_useful(row, parameter, count, len(rows), missing)
        chosen = [row[parameter] for parameter in range(len(counts))]
        for pair in _pairs_of(chosen):
            missing.pop(pair, None)
        rows.append(chosen)
    return [tuple(values[at] for values, at in zip(parameters, row, strict=True)) for row in rows]


def _all_pairs(counts: list[int]) -> Iterator[Pair]:
    for one, other in combinations(range(len(counts)), 2):
        for value, beside in product(range(counts[one]), range(counts[other])):
            yield one, value, other, beside


def _pairs_of(row: Sequence[int]) -> Iterator[Pair]:
    for one, other in combinations(range(len(row)), 2):
        yield one, row[one], other, row[other]


def _most_useful(
    row: dict[int, int], parameter: int, count: int, turn: int, missing: dict[Pair, None]
) -> int:
    """The value that makes most missing pairs with those that are chosen, the ties by turns."""

    def brought(value: int) -> int:
        here = (parameter, value)
        pairs = [sorted([here, (other, beside)]) for other, beside in row.items()]
        return sum((*one, *two) in missing for one, two in pairs)

    return max(((turn + step) % count for step in range(count)), key=brought)
