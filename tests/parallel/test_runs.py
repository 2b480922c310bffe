"""Runs: plain calls for rows that follow one another see the pairs that the mask lets them see."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from saccade import masks
from saccade.masks import Mask
from saccade.modifiers.normal_form import by_distance
from saccade.parallel import Plan, plan
from saccade.parallel.runs import Part, parts_of

CPU = torch.device("cpu")
LENGTH = 256
OFFSETS = torch.tensor([0, 9, 9, 100, 101, 180, LENGTH], dtype=torch.int32)


def seen_by(part: Part) -> torch.Tensor:
    """The pairs of a part's call."""
    queries, keys = part.query[1], part.kv[1]
    if part.offsets is None:
        return dense(part.mask, queries, keys)
    found = torch.zeros(queries, keys, dtype=torch.bool)
    edges = zip(*(itertools.pairwise(each.tolist()) for each in part.offsets[:2]), strict=True)
    for (first, end), (kv_first, kv_end) in edges:
        found[first:end, kv_first:kv_end] = dense(part.mask, end - first, kv_end - kv_first)
        assert end - first <= part.offsets.longest_query
        assert kv_end - kv_first <= part.offsets.longest_kv
    return found


def dense(mask: Mask, queries: int, keys: int) -> torch.Tensor:
    if not mask.key:
        return torch.ones(queries, keys, dtype=torch.bool)
    return mask.to_dense(1, 1, queries, keys)[0, 0].expand(queries, keys)


def whole(found: Plan) -> torch.Tensor:
    seen = dense(found.mask, LENGTH, LENGTH)
    if found.cu_seqlens is None:
        return seen
    offsets = found.cu_seqlens
    sequence = torch.searchsorted(offsets[1:].contiguous(), torch.arange(LENGTH), right=True)
    return seen & (sequence[:, None] == sequence)


@pytest.mark.parametrize(
    ("mask", "packed", "most"),
    [
        (masks.causal(), False, 2),
        (masks.causal("top_left"), False, 2),
        (masks.window(7), False, 3),
        (masks.causal() & masks.window(40), False, 3),
        (masks.causal(), True, 2),
        (masks.window(7), True, 2),
        (None, True, 2),
    ],
)
def test_parts_see_what_the_mask_shows(mask: Any, packed: bool, most: int) -> None:
    mask = masks.as_mask(mask)
    for ranks in (2, 3):
        found = plan(mask, OFFSETS if packed else LENGTH, ranks)
        for rank in range(ranks):
            here = found.at(rank)
            arrived = here.routes.arrived
            parts = parts_of(here, arrived, CPU)
            assert parts is not None and len(parts) <= most
            pairs = torch.zeros(len(here.rows), LENGTH, dtype=torch.bool)
            for part in parts:
                (first, size), (kv_first, kv_size) = part.query, part.kv
                keys = arrived[kv_first : kv_first + kv_size]
                pairs[first : first + size, keys] = seen_by(part)
            assert torch.equal(pairs, whole(found)[here.rows])


@pytest.mark.parametrize(
    "mask",
    [
        masks.prefix(torch.tensor([9])),
        masks.window(7, 2),  # later keys: calls cannot end where queries do
        masks.documents(torch.arange(LENGTH)[None] // 50) & masks.causal(),
        masks.dense(torch.ones(LENGTH, LENGTH) > 0),
        ~masks.causal(),
    ],
)
def test_other_masks_are_told_row_numbers(mask: Mask) -> None:
    found = plan(mask, LENGTH, 2)
    ranks = [found.at(rank) for rank in range(2)]
    parts = [parts_of(here, here.routes.arrived, CPU) for here in ranks]
    # Of the last rows' keys none are later than the sequence, so that their call is a plain one.
    last = mask == masks.window(7, 2)
    assert [each is None for each in parts].count(True) == (1 if last else 2)


def test_masks_by_distance() -> None:
    near = masks.window(3)
    assert all(by_distance(each.key) for each in (masks.causal(), near, near | masks.window(0, 9)))
    others: list[Any] = [
        lambda batch, head, query_row, kv_row: kv_row < 4,
        lambda batch, head, query_row, kv_row: kv_row + kv_row <= query_row,
        lambda batch, head, query_row, kv_row: kv_row <= query_row,  # aligned at the top left
    ]
    assert not any(by_distance(masks.function(each)().key) for each in others)
    assert not by_distance("")
