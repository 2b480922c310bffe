"""Nothing of a function is kept: what it reached does not go stale, and nothing leaks."""

# A decorator of functions without annotations looks to pyright as if it gave them back.
# pyright: reportCallIssue=false

from __future__ import annotations

import cProfile
import gc
import sys
import time
from typing import Any

import pytest
import torch
from torch import Tensor

import saccade
from saccade.masks import as_mask
from saccade.scores import as_score

IMPLEMENTATIONS = ["reference", "cpu", "triton"]
each_implementation = pytest.mark.parametrize(
    "implementation",
    [
        pytest.param(
            name,
            marks=pytest.mark.skipif(
                name == "triton" and torch.cuda.is_available(), reason="runs in the interpreter"
            ),
        )
        for name in IMPLEMENTATIONS
    ],
)
WIDTH = 2


def seen(mask: Any, implementation: str = "cpu", length: int = 20) -> Tensor:
    """Which pairs are visible, by the public call: equal weights of one-hot values."""
    rows, value = torch.zeros(1, 1, length, 16), torch.eye(length, 32)[None, None]
    return saccade.attention(rows, rows, value, mask=mask, implementation=implementation) > 0


def of_global(b: Any, h: Any, q: Any, k: Any) -> Any:
    return (q - k <= WIDTH) & (q >= k)


def test_a_global_number_is_the_one_when_the_mask_was_made(monkeypatch):
    before = as_mask(of_global)
    shown = seen(before)
    monkeypatch.setitem(globals(), "WIDTH", 5)
    after = as_mask(of_global)
    assert torch.equal(seen(before), shown)
    assert torch.equal(seen(after), seen(saccade.masks.window(5)))
    assert before.key == after.key and before != after


def test_a_number_of_a_closure_is_the_one_when_the_mask_was_made():
    width = 2

    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (q - k <= width) & (q >= k)

    before = as_mask(near)
    width = 7
    assert before == saccade.masks.window(2, align="top_left")
    assert as_mask(near) == saccade.masks.window(7, align="top_left")


def test_an_attribute_is_the_one_when_the_mask_was_made():
    class Near:
        def __init__(self) -> None:
            self.width, self.ids = 2, torch.arange(20) // 5

        def __call__(self, b: Any, h: Any, q: Any, k: Any) -> Any:
            return (q - k <= self.width) & (q >= k) & (self.ids[q] == self.ids[k])

    near = Near()
    before = as_mask(near)
    shown = seen(before)
    near.width, near.ids = 9, torch.arange(20) // 10
    assert torch.equal(seen(before), shown)
    assert not torch.equal(seen(as_mask(near)), shown)


def test_functions_made_in_a_loop_keep_their_own_numbers():
    made = [as_mask(lambda b, h, q, k: q - k == step) for step in range(3)]  # noqa: B023
    rows = torch.arange(20)
    for step, mask in enumerate(made):
        assert torch.equal(seen(mask)[0, 0, :, :20], rows[:, None] - rows == step)


# ---- tensors are read by each call ------------------------------------------------------------


@each_implementation
def test_a_tensor_that_changes_is_seen_by_the_next_call(implementation):
    ids = torch.zeros(40, dtype=torch.long)
    mask = as_mask(lambda b, h, q, k: ids[q] == ids[k]) & saccade.masks.causal()
    for step in (40, 20, 7, 3):
        ids.copy_(torch.arange(40) // step)
        wanted = seen(
            saccade.masks.documents(ids[None].clone()) & saccade.masks.causal(), length=40
        )
        assert torch.equal(seen(mask, implementation, 40), wanted)


@each_implementation
def test_a_changed_view_and_a_changed_number_are_seen(implementation):
    table, width = torch.zeros(3, 20, dtype=torch.long), torch.tensor(3)
    mask = as_mask(lambda b, h, q, k: (table[1][q] == table[1, k]) & (q - k < width))
    assert torch.equal(
        seen(mask, implementation), seen(saccade.masks.function(lambda b, h, q, k: q - k < 3)())
    )
    table[1] = torch.arange(20) // 6
    width.fill_(2)
    wanted = as_mask(lambda b, h, q, k: (q // 6 == k // 6) & (q - k < 2))
    assert torch.equal(seen(mask, implementation), seen(wanted))


@each_implementation
def test_a_parameter_that_learns_is_seen_forward_and_backward(implementation):
    slopes = torch.nn.Parameter(torch.tensor([0.5, 1.0]))
    temperature = torch.nn.Parameter(torch.tensor(0.3))
    score = as_score(lambda s, b, h, q, k: s * torch.exp(temperature) - slopes[h] * (q - k).abs())
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 20, 16).unbind()
    for _ in range(3):
        results = []
        for name, change in (
            (implementation, score),
            (
                "reference",
                lambda s, b, h, q, k: s * torch.exp(temperature) - slopes[h] * (q - k).abs(),
            ),
        ):
            output = saccade.attention(query, key, value, score=change, implementation=name)
            loss = output.square().sum()
            results.append((output, *torch.autograd.grad(loss, [slopes, temperature])))
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            slopes.mul_(2).sub_(0.1)
            temperature.add_(0.5)


def test_a_computed_table_that_learns_is_refused():
    """It would be computed once, and neither follow what it is computed from nor learn twice."""
    logs = torch.nn.Parameter(torch.zeros(2))
    for table in (
        lambda: torch.exp(logs), lambda: (logs * 2)[None][0], lambda: torch.cat([logs, logs]),
        lambda: logs.double(),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=r"computed of it inside of the function.*read first"):
            as_score(lambda s, b, h, q, k: s + table()[h])  # noqa: B023
    outside = torch.exp(logs)  # of whoever makes the score: kept as it is
    kept = as_score(lambda s, b, h, q, k: s + outside[h] * logs.view(2, 1)[h, 0] + logs.float()[h])
    assert kept.captured.tensors[0] is outside


def test_a_learned_number_is_followed_through_what_is_computed_of_it():
    number = torch.nn.Parameter(torch.tensor(2.0))
    score = as_score(lambda s, b, h, q, k: s * (1 / number.exp() + number**2 - number.clamp(min=1)))
    assert score.captured.tensors == (number,)


# ---- nothing leaks ----------------------------------------------------------------------------


def forward(ids: Tensor, width: int) -> tuple[Any, Any]:
    def near(b: Any, h: Any, q: Any, k: Any) -> Any:
        return (ids[q] == ids[k]) & (q - k <= width) & (q >= k)

    @saccade.scores.function
    def slope(score: Any, b: Any, h: Any, q: Any, k: Any, by: Any) -> Any:
        return score - (q - k) * by

    return as_mask(near), slope(width * 0.25)


def test_functions_made_in_forward_leak_nothing():
    """Of 5,000 the last take as many calls as the first, about their time, and no memory."""
    ids = torch.arange(50)

    def hundred(first: int) -> float:
        start = time.process_time()
        for number in range(first, first + 100):
            forward(ids, number)
        return time.process_time() - start

    def calls(number: int) -> int:
        """Functions that run in one forward pass: a number that a busy machine does not change."""
        gc.collect()  # what it would call in between is not the pass's own
        gc.disable()
        try:
            profile = cProfile.Profile()
            profile.runcall(forward, ids, number)
        finally:
            gc.enable()
        return sum(entry.callcount for entry in profile.getstats())

    hundred(0)
    first_calls = calls(100)
    first = min(hundred(100 * part) for part in range(2, 7))
    gc.collect()
    blocks = sys.getallocatedblocks()
    for part in range(7, 45):
        hundred(100 * part)
    last = min(hundred(100 * part) for part in range(45, 50))
    gc.collect()
    assert sys.getallocatedblocks() - blocks < 1000  # twenty for each would be 80,000
    assert calls(5000) == first_calls
    assert last < 4 * first  # by work that no call shows, such as a long list that is searched
