"""What a tape makes of a function is what a trace makes of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade import masks
from saccade.modifiers.evaluate import index_range, visible
from saccade.modifiers.expression import Captured, Coordinates, key_of
from saccade.modifiers.form import traced_in_graph
from saccade.modifiers.trace import trace

LENGTH = 6
IDS = torch.tensor([[0, 0, 1, 1, 2, 2], [0, 1, 1, 1, 1, 3]])
REAL = IDS < 3
SLOPES = torch.tensor([0.5, 2.0])


def pairs() -> Coordinates:
    ends = (2, 2, LENGTH, LENGTH)
    at: list[Any] = [index_range(0, end, dim) for dim, end in enumerate(ends)]
    return Coordinates(at[0], at[1], at[2], at[3], 0)


def shown(key: str, captured: Captured) -> torch.Tensor:
    return visible(key, captured, pairs()).expand(2, 2, LENGTH, LENGTH)


# As transformers writes them, as people do, and one for each kind of operand.
FUNCTIONS: dict[str, Any] = {
    "causal": lambda b, h, q, k: k <= q,
    "window": lambda b, h, q, k: (k <= q) & (q - k < 3),
    "joined": lambda b, h, q, k: (q.new_ones((), dtype=torch.bool) & (k <= q)).to(q.device),
    "documents": lambda b, h, q, k: IDS[b, q] == IDS[b, k],
    "document of a part": lambda b, h, q, k: IDS[b][q] == IDS[b][k],
    "remapped": lambda b, h, q, k: IDS[b, k] <= IDS[b, q],
    "padding": lambda b, h, q, k: REAL[b, k] & (k <= q),
    "chunks": lambda b, h, q, k: (k - IDS[b, 0]) // 2 == (q - IDS[b, 0]) // 2,
    "taken": lambda b, h, q, k: masks.take(IDS, b, q + 2) >= masks.take(IDS, b, k),
    "torch's": lambda b, h, q, k: torch.where(torch.abs(q - k) < 2, k <= q, ~(k < 3)),
    "methods": lambda b, h, q, k: (q - k).abs().clamp(min=1).eq(1) | k.eq(0),
    "swapped": lambda b, h, q, k: (5 - q >= k) | (2 * k == 8) | (7 % (k + 1) == 1),
    "real numbers": lambda b, h, q, k: (q - k) * SLOPES[h] < 1.5,
    "a power": lambda b, h, q, k: (q - k) ** 2 <= 4,
    "minimum": lambda b, h, q, k: torch.minimum(q, k) <= 2,
    "1 and 1.0": lambda b, h, q, k: (k == 1) & (q >= 1.0),
    "a number of a tensor": lambda b, h, q, k: k - q <= IDS[1, 5],
}


@pytest.mark.parametrize("offsets", [(0, 0), (2, 1)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_shows_the_same_pairs(name: str, offsets: tuple[int, int]) -> None:
    if {"IDS", "REAL"} & {*FUNCTIONS[name].__code__.co_names}:
        offsets = (0, 0)  # the tables have no further rows
    found = traced_in_graph(FUNCTIONS[name], offsets)
    expression, captured = trace(FUNCTIONS[name], offsets=offsets)
    wanted = shown(key_of(expression), captured)
    assert torch.equal(shown(*found), wanted)
    assert wanted.any() and not wanted.all()


@pytest.mark.parametrize("name", ["causal", "window", "documents", "padding", "chunks"])
def test_is_known_by_the_same_key(name: str) -> None:
    found = traced_in_graph(FUNCTIONS[name])
    assert found[0] == key_of(trace(FUNCTIONS[name])[0])


def test_tensors_are_captured_by_reference() -> None:
    found = traced_in_graph(FUNCTIONS["documents"])
    assert all(tensor is IDS for tensor in found[1].tensors)


def test_an_offset_may_be_a_tensor() -> None:
    found = traced_in_graph(FUNCTIONS["causal"], (torch.tensor([2]), 0))
    assert torch.equal(shown(*found), shown(masks.window(LENGTH, 2).key, Captured((), (LENGTH, 2))))


UNKNOWN: dict[str, Any] = {
    "branches": lambda b, h, q, k: k <= q if q > 2 else k > 2,
    "and": lambda b, h, q, k: k <= q and k > 2,
    "sums": lambda b, h, q, k: torch.cumsum(q, 0) > k,
    "numbers": lambda b, h, q, k: q - k,
    "no row": lambda b, h, q, k: True,
    "True": lambda b, h, q, k: ((k == 1) == True) & (q >= 1.0),  # noqa: E712
    "its value": lambda b, h, q, k: k <= int(q),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_no_trace_can_know_is_said(name: str) -> None:
    with pytest.raises(TypeError):
        traced_in_graph(UNKNOWN[name])
