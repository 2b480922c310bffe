"""Shares: the line of all work tiles is covered once, and few work tiles each begin with a
program."""

# Triton's language has no types that a checker follows.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.gpu import language
from saccade.gpu.language import tl, triton
from saccade.ops.paged_attention.triton import split_kv
from saccade.ops.paged_attention.triton import split_kv as schedule
from saccade.ops.paged_attention.triton.split_kv import GROUPS, PLAN, SplitSchedule

pytestmark = pytest.mark.skipif(not language.INTERPRETED, reason="it takes the interpreter")


@triton.jit
def count_given(schedule, query, key, groups, TOKENS: tl.constexpr, KV_TILE: tl.constexpr):
    """Units and work tiles as they were written down."""
    work_tiles = schedule.data[PLAN] + schedule.data[GROUPS]
    return tl.load(schedule.data[PLAN] + groups), tl.load(work_tiles + groups)


@triton.jit
def write_shares(schedule, found, AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr):
    """A row for each program."""
    program = tl.program_id(0)
    partial_dq = schedule.begin(schedule, None, None, program, 1, 1, AT_ONCE, LONG, LEAST, 1, True)
    for number in tl.static_range(6):
        tl.store(found + program * 6 + number, partial_dq[number].to(tl.int32))


@triton.jit
def write_splits(schedule, found, AT_ONCE: tl.constexpr, LONG: tl.constexpr, LEAST: tl.constexpr):
    """A row for each work tile: group, its number in it, in how many parts it was cut, by which."""
    row = found + tl.program_id(0) * 4
    cut = schedule.cut(
        schedule, None, None, tl.load(row), tl.load(row + 1), 1, 1, AT_ONCE, LONG, LEAST, 1
    )
    tl.store(row + 2, cut[0])
    tl.store(row + 3, cut[1])


def dq_accumulate(
    groups: list[tuple[int, int]], programs: int, long: bool = False
) -> tuple[list[list[int]], list[list[int]]]:
    """(group, index, offset, budget, share, goes_on) of each program, for (units, work tiles) of
    each group; and (group, index, parts, first program) of each work tile."""
    numbers = torch.tensor([*zip(*groups, strict=True)], dtype=torch.int32).flatten()
    found = torch.zeros(programs, 6, dtype=torch.int32)
    zero = 0
    data: Any = (len(groups), zero, programs, *[zero] * 4, numbers)
    given = SplitSchedule(
        schedule.equal_payloads, split_kv.split_of_programs, count_given, None, data
    )
    at_once = 1 if len(groups) == 1 else 1 << (len(groups) - 1).bit_length()
    write_shares[(programs,)](given, found, at_once, long, 2)
    pairs = [
        (group, index)
        for group, (_, work_tiles) in enumerate(groups)
        for index in range(work_tiles)
    ]
    cut = torch.tensor([(*pair, 0, 0) for pair in pairs], dtype=torch.int32)
    if pairs:
        write_splits[(len(pairs),)](given, cut, at_once, long, 2)
    return found.tolist(), cut.tolist()


def overlap_softmax(
    groups: list[tuple[int, int]], found: list[list[int]]
) -> tuple[list[int], bool]:
    """The units of the line, as programs run over it; and whether one goes on to another work
    tile."""
    starts, at = {}, 0
    for group, (units, work_tiles) in enumerate(groups):
        for index in range(work_tiles):
            starts[group, index] = at
            at += units
    line, crosses = [0] * at, False
    for group, index, offset, budget, *_ in found:
        crosses |= offset + budget > groups[group][0]
        for unit in range(budget):
            line[starts[group, index] + offset + unit] += 1
    return line, crosses


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(1, 70), st.integers(0, 5)), min_size=1, max_size=9),
    st.integers(1, 40),
    st.booleans(),
)
def test_every_unit_is_somebodys_once(
    groups: list[tuple[int, int]], programs: int, long: bool
) -> None:
    found, cut = dq_accumulate(groups, programs, long)
    line, crosses = overlap_softmax(groups, found)
    assert set(line) <= {1}
    ideal = max(-(-len(line) // programs), 2)
    longest = max(budget for _, _, _, budget, _, _ in found)
    assert longest <= ideal + (0 if crosses else 1 + ideal // 16)
    begun = [row for row in found if row[3]]
    for before, (group, index, offset, _budget, partial_dq, goes_on) in itertools.pairwise(begun):
        # The one before began the work tile, and did not end it.
        ends = before[2] + before[3]
        assert goes_on == (offset > 0 and (before[2] == 0 or ends > groups[before[0]][0]))
        if goes_on and before[:3] == [group, index, 0]:
            units = groups[group][0]
            parts = 1 + -(-(units - offset) // partial_dq)
            assert parts == 1 + sum(row[:2] == [group, index] and row[2] > 0 for row in begun)
    for group, index, parts, first in cut:
        # Found again from the work tile: who began it, without ending it, and how many had a part.
        visited = line_of(groups, found)[group, index]
        assert parts == (len(visited) if len(visited) > 1 else 0)
        assert not parts or visited == list(range(first, first + parts))


def line_of(
    groups: list[tuple[int, int]], found: list[list[int]]
) -> dict[tuple[int, int], list[int]]:
    """The programs that have a part of each work tile."""
    programs: dict[tuple[int, int], list[int]] = {
        (group, index): []
        for group, (_, work_tiles) in enumerate(groups)
        for index in range(work_tiles)
    }
    for program, (group, index, offset, budget, *_) in enumerate(found):
        while budget > 0:
            done = min(budget, groups[group][0] - offset)
            programs[group, index].append(program)
            budget, offset, index = budget - done, 0, index + 1
            while budget > 0 and index >= groups[group][1]:
                group, index = group + 1, 0
    return programs


@pytest.mark.parametrize(
    ("groups", "programs"),
    [([(129, 8)], 264), ([(65, 8)], 132), ([(129, 8)] * 16, 264), ([(2049, 8)], 264)],
    ids=str,
)
def test_few_items_begin_with_programs(groups: list[tuple[int, int]], programs: int) -> None:
    found, _ = dq_accumulate(groups, programs)
    line, crosses = overlap_softmax(groups, found)
    assert set(line) == {1} and not crosses
    assert sum(offset == 0 and budget > 0 for _, _, offset, budget, *_ in found) == sum(
        work_tiles for _, work_tiles in groups
    )
