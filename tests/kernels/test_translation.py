"""A user's function means in a kernel what it means on tensors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import saccade
from saccade import expressions
from saccade.expressions import Coordinates
from saccade.kernels.launch import itself
from saccade.masks import Mask, take
from saccade.portable.arguments import mask_argument, score_argument
from saccade.problem import Variant
from saccade.scores import Score, absolute, exp, log, maximum, minimum, tanh, where

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

WIDTH = 32
NOTHING = expressions.Captured()


@triton.jit
def see(mask, batch, head, starts, shift, result, WIDTH: tl.constexpr):
    places = tl.arange(0, WIDTH)
    rows, keys = starts[0] + places[:, None], starts[1] + places[None, :]
    visible = mask.visible(batch, head, rows, keys, shift, mask.data)
    tl.store(result + places[:, None] * WIDTH + places[None, :], visible)


@triton.jit
def bend(score, batch, head, starts, given, results, WIDTH: tl.constexpr):
    places = tl.arange(0, WIDTH)
    rows, keys = starts[0] + places[:, None], starts[1] + places[None, :]
    offsets = places[:, None] * WIDTH + places[None, :]
    scores = tl.load(given + offsets)
    changed = score.change(scores, batch, head, rows, keys, 0, score.data)
    tl.store(results[0] + offsets, changed)
    slope = score.derivative(scores, batch, head, rows, keys, 0, score.data)
    tl.store(results[1] + offsets, slope)


def coordinates(batch: int, head: int, starts: tuple[int, int], shift: int) -> Coordinates:
    rows, keys = (torch.arange(start, start + WIDTH) for start in starts)
    return Coordinates(
        torch.tensor(batch), torch.tensor(head), rows.view(-1, 1), keys.view(1, -1), shift
    )


def assert_same_mask(
    mask: Mask, starts: tuple[int, int] = (0, 0), batch: int = 0, head: int = 0, shift: int = 0
) -> Tensor:
    """Compare a mask on 32 x 32 pairs in a kernel and on tensors; give what is visible."""
    variant = Variant(mask.key, "", mask.captured, NOTHING, 1.0, 0.0)
    found = torch.zeros(WIDTH, WIDTH, dtype=torch.bool)
    kernel: Any = see
    kernel[(1,)](mask_argument(variant, itself), batch, head, starts, shift, found, WIDTH)
    at = coordinates(batch, head, starts, shift)
    wanted = expressions.visible(mask.key, mask.captured, at).expand(1, 1, WIDTH, WIDTH)[0, 0]
    assert torch.equal(found, wanted)
    return wanted


def assert_same_score(
    score: Score, starts: tuple[int, int] = (0, 0), head: int = 0, tolerance: float = 3e-6
) -> None:
    """Compare a score and its derivative in a kernel and in float64 on tensors."""
    variant = Variant("", score.key, NOTHING, score.captured, 1.0, 0.0)
    given = torch.linspace(-6, 6, WIDTH * WIDTH).view(WIDTH, WIDTH)
    found = torch.zeros_like(given), torch.zeros_like(given)
    kernel: Any = bend
    kernel[(1,)](score_argument(variant, itself), 0, head, starts, given, found, WIDTH)
    leaf = expressions.leaves(expressions.parse(score.key))[0]
    at = coordinates(0, head, starts, 0)[:4]
    function = leaf.function
    assert function.derivative is not None
    for mine, body in zip(found, (function.body, function.derivative), strict=True):
        wanted = body(given.double(), *at, *leaf.data(score.captured))
        wanted = torch.as_tensor(wanted, dtype=torch.float64).expand(given.shape)
        torch.testing.assert_close(mine.double(), wanted, rtol=tolerance, atol=tolerance)


# ---- what functions may be made of ------------------------------------------------------------

NEAR, FAR, LIMIT = 3, -5, 2.5


def gap(first: Any, second: Any) -> Any:
    """A helper with a docstring."""
    difference = first - second
    return difference


def twice(first: Any, second: Any) -> Any:
    return gap(first, second) + gap(first, second)


def uses_helpers(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    return (twice(query_row, kv_row) <= NEAR) & (gap(kv_row, query_row) >= FAR)


def uses_attributes(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    return (query_row - kv_row) * 1.0 < math.pi * LIMIT


def chains(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    row = query_row
    other = row = kv_row + 1
    return (row > query_row) & (other != 4)


def steps(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    distance: Any = query_row - kv_row
    distance *= 2
    distance -= 3
    distance //= 3
    distance %= 4
    return distance == 1


def operators(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    bits = (query_row ^ kv_row) & 5 | (kv_row << 1)
    return ~((bits >> 1) > -query_row + (+kv_row)) ^ (query_row / 4 < kv_row)


def says_true(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    return True


def by_head(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    return (kv_row + batch) % (head + 2) == 0


def folds(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    half = 16 // NEAR
    return kv_row // (17 // FAR + 9) <= query_row % half


def method_like(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    nearest = kv_row // 2  # names that device functions have as well
    read = query_row % 7
    return abs(nearest - read) < 3


def defaults(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    return within(query_row, kv_row)


def within(first: Any, second: Any, width: int = 3) -> Any:
    return (first - second <= width) & (second - first <= width)


def infinite(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
    return (kv_row * 1.0 < math.inf) & (query_row >= kv_row)


PLAIN: list[Callable[..., Any]] = [
    uses_helpers, uses_attributes, chains, steps, operators, says_true, by_head, folds,
    method_like, defaults, infinite,
]  # fmt: skip


@pytest.mark.parametrize("body", PLAIN, ids=lambda body: body.__name__)
def test_functions_mean_the_same(body: Callable[..., Any]) -> None:
    for starts in ((0, 0), (40, 25), (3, 1000)):
        for batch, head in ((0, 0), (1, 3)):
            assert_same_mask(saccade.masks.function(body)(), starts, batch, head)


@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_alignment_shifts_query_rows(align: str) -> None:
    mask = saccade.masks.function(align=align)(uses_helpers)()
    for shift in (0, 5, -7):
        seen = assert_same_mask(mask, shift=shift)
        moved = assert_same_mask(mask, (shift if align == "bottom_right" else 0, 0))
        assert torch.equal(seen, moved)


def test_a_closure_keeps_the_numbers_it_was_made_with() -> None:
    def made(width: int) -> Mask:
        @saccade.masks.function
        def closed(batch: Any, head: Any, query_row: Any, kv_row: Any) -> Any:
            return query_row - kv_row <= width

        return closed()

    assert not torch.equal(assert_same_mask(made(2)), assert_same_mask(made(9)))


@saccade.masks.function
def divided(batch: Any, head: Any, query_row: Any, kv_row: Any, by: Any, at: Any) -> Any:
    distance = query_row - kv_row
    return (distance // by <= at) & (distance % by != at)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    by=st.integers(-9, 9).filter(bool),
    at=st.integers(-9, 9),
    starts=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_floors_of_negative_numbers(by: int, at: int, starts: tuple[int, int]) -> None:
    assert_same_mask(divided(by, at), starts)


@saccade.masks.function
def one_index(batch: Any, head: Any, query_row: Any, kv_row: Any, a: Any, by: Any) -> Any:
    return take(a, kv_row - by) > take(a, query_row * by)


@saccade.masks.function
def two_indices(batch: Any, head: Any, query_row: Any, kv_row: Any, a: Any, by: Any) -> Any:
    return take(a, head - by, kv_row - query_row) > 1


@saccade.masks.function
def three_indices(batch: Any, head: Any, query_row: Any, kv_row: Any, a: Any, by: Any) -> Any:
    return take(a, batch, query_row // by, kv_row // by) > 1


@saccade.masks.function
def four_indices(batch: Any, head: Any, query_row: Any, kv_row: Any, a: Any, by: Any) -> Any:
    return take(a, batch, head, query_row - by, kv_row + by) > 1


TAKERS = [one_index, two_indices, three_indices, four_indices]


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.int32, torch.float32, torch.bfloat16], ids=str
)
@pytest.mark.parametrize("dims", [1, 2, 3, 4])
def test_take_reads_the_nearest_entry(dims: int, dtype: torch.dtype) -> None:
    torch.manual_seed(dims)
    for sizes in ((2, 4, 9, 40), (1, 1, 40, 1), (3, 2, 1, 7)):
        table = torch.randint(0, 4, sizes[-dims:]).to(dtype)
        for laid_out in (table, table.mT.contiguous().mT if dims > 1 else table.flip(0)):
            for by in (1, 3):
                assert_same_mask(TAKERS[dims - 1](laid_out, by), (5, 2), batch=1, head=3)


def test_captured_values_keep_their_places_in_an_expression() -> None:
    first, second = torch.randint(0, 4, (50,)), torch.randint(0, 4, (4, 60))
    mixed = (one_index(first, 2) & divided(3, 1)) | ~(two_indices(second, 1) | divided(-4, 0))
    assert_same_mask(mixed, (7, 9), batch=1, head=2)


def lifted_slope(score, batch, head, query_row, kv_row, table, gain):
    inner = tanh(score * gain)
    return where(score > 0, gain * (1.0 - inner * inner), 0.5)


def lifted(score, batch, head, query_row, kv_row, table, gain):
    inner = where(score > 0, tanh(score * gain), score / 2)
    distance = absolute(query_row - kv_row)
    inner = maximum(minimum(inner, score + 100.0), score - 100.0)
    return inner - exp(take(table, head)) * log(distance + 1.0)


def logs(score, batch, head, query_row, kv_row, table, gain):
    return score + log(kv_row + 1) * gain - exp(take(table, head))


def one(score, batch, head, query_row, kv_row, table, gain):
    return 1


def test_scores_and_derivatives_mean_the_same() -> None:
    change = saccade.scores.function(lifted, derivative=lifted_slope)
    for head in range(3):
        assert_same_score(change(torch.tensor([-1.0, 0.0, 0.5]), 0.3), (9, 3), head)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16], ids=str)
def test_exp_and_log_of_whole_and_narrow_numbers(dtype: torch.dtype) -> None:
    table = torch.tensor([0, 1]).to(dtype)
    change = saccade.scores.function(logs, derivative=one)(table, 0.25)
    assert_same_score(
        change, (0, 7), 1, 0.02 if dtype == torch.bfloat16 else 3e-6
    )  # PyTorch rounds
