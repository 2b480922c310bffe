"""Rests of rows and of keys apart: the same pairs, in a form that costs a comparison a pair."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from interpreted import coordinates, mask_of_kernel

from saccade import masks
from saccade.modifiers import triton_source
from saccade.modifiers.division import with_rests_apart
from saccade.modifiers.evaluate import evaluate
from saccade.modifiers.expression import mentions, needed, parse, slots

SHAPE = (2, 2, 11, 14)
STEP = torch.tensor(3)
WIDE = torch.tensor(2**33 + 1)
TABLE = torch.tensor([1, -4, 0, 2, 9, -7, 3, 3, 5, 8, -2, 6, 4, 7])

APART: dict[str, Callable[..., Any]] = {
    "dilated": lambda b, h, q, k: (q - k) % 4 == 0,
    "keys first": lambda b, h, q, k: (k - q) % 3 == 1,
    "a sum": lambda b, h, q, k: (q + k) % 5 == 2,
    "both below 0": lambda b, h, q, k: (-q - k) % 5 == 2,
    "not": lambda b, h, q, k: (q - k) % 7 != 1,
    "no rest": lambda b, h, q, k: (q - k) % 3 == 3,
    "below 0": lambda b, h, q, k: (q - k) % 3 == -1,
    "by head": lambda b, h, q, k: (q - k + h) % 2 == b,
    "beside a row": lambda b, h, q, k: (q - k) % 6 == q // 4,
    "beside a key": lambda b, h, q, k: (q - k) % 6 == k - 3,
    "of a table": lambda b, h, q, k: (q + STEP - TABLE[k]) % 4 == 1,
    "of 64 bits": lambda b, h, q, k: (q * WIDE - k) % 9 == 2,
    "by 1": lambda b, h, q, k: (q - k) % 1 == 0,
    "by much": lambda b, h, q, k: (k - q) % (2**31 - 1) == 3,
    "by more": lambda b, h, q, k: (k - q) % 2**40 == 3,
}
TOGETHER: dict[str, Callable[..., Any]] = {
    "beside both": lambda b, h, q, k: (q - k) % 6 == torch.minimum(q, k),
    "of a product": lambda b, h, q, k: (q * k) % 3 == 1,
    "of a distance": lambda b, h, q, k: (q - k).abs() % 2 == 1,
    "less": lambda b, h, q, k: (q - k) % 5 < 2,
    "a quotient": lambda b, h, q, k: (q - k) // 5 == -1,
    "of a row": lambda b, h, q, k: q % 5 == k,
    "by a literal": lambda b, h, q, k: (q - k) % (h + 2) == 1,
}


@pytest.mark.parametrize("name", [*APART, *TOGETHER])
def test_the_same_pairs(name: str) -> None:
    mask = masks.as_mask((APART | TOGETHER)[name])
    seen = mask.to_dense(*SHAPE)
    assert int(seen.sum()) > 0 or name in ("no rest", "below 0")
    expression = parse(mask.key)
    found, (result,) = with_rests_apart(expression, (len(expression) - 1,))
    assert (found != expression) == (name in APART)
    again = evaluate(found, mask.captured, coordinates(SHAPE))[result]
    assert torch.equal(again.expand(SHAPE), seen)
    assert torch.equal(mask_of_kernel(mask, SHAPE), seen)


@pytest.mark.parametrize("name", APART)
def test_a_pair_costs_a_comparison(name: str) -> None:
    """All else is computed once for a row or for a key, and neither by division."""
    mask = masks.as_mask(APART[name])
    expression = parse(mask.key)
    found, _ = with_rests_apart(expression, (len(expression) - 1,))
    both = [mentions(found, [row]) for row in ("query_row", "kv_row")]
    steps = sorted(needed(found, len(found) - 1))
    of_pairs = [found[n].op for n in steps if both[0][n] and both[1][n]]
    assert of_pairs in (["=="], ["==", "~"])
    order, last = slots(mask.key), len(expression) - 1
    text = triton_source.function("visible", expression, order, last, score=False)
    assert "floor_" not in text and text.count("remainder(") == 2


ENDS = (-(2**40), -(2**30), -20, -1, 0, 3, 2**30, 2**31 - 1, 2**40)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_a_window_is_one_comparison_whatever_its_numbers_are(align: str) -> None:
    @masks.function(align=align)
    def window(b: Any, h: Any, q: Any, k: Any, left: int, right: int) -> Any:
        return (q - k <= left) & (k - q <= right)

    for left, right in itertools.product(ENDS, ENDS):
        mask = window(left, right)
        expression, order = parse(mask.key), slots(mask.key)
        last = len(expression) - 1
        text = triton_source.function("visible", expression, order, last, score=False)
        assert f"v{last} = within(" in text
        found = mask_of_kernel(mask, (1, 1, 6, 9))
        assert torch.equal(found, mask.to_dense(1, 1, 6, 9)), (left, right)


@pytest.mark.parametrize("strictly", [False, True])
def test_a_distance_is_one_comparison_whatever_its_number_is(strictly: bool) -> None:
    far = torch.tensor([2**31 - 1, -(2**31), 5, 0, 3, -(2**30)], dtype=torch.int32)

    @masks.function
    def neighbours(b: Any, h: Any, q: Any, k: Any, most: int) -> Any:
        distance = (torch.clamp(q // 2, 1, 3) - k // 3).abs()
        return distance < most if strictly else distance <= most

    for most in ENDS:
        mask = neighbours(most)
        expression, order = parse(mask.key), slots(mask.key)
        text = triton_source.function(
            "visible", expression, order, len(expression) - 1, score=False
        )
        assert "= near(" in text
        found = mask_of_kernel(mask, (1, 1, 9, 12))
        assert torch.equal(found, mask.to_dense(1, 1, 9, 12)), most
        table = masks.as_mask(lambda b, h, q, k, most=most: (far[q] - far[k]).abs() <= most)
        assert torch.equal(mask_of_kernel(table, (1, 1, 6, 6)), table.to_dense(1, 1, 6, 6)), most
