"""Kernels drop the same pairs as `saccade.runtime.dropout` says, whatever the tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.gpu.kernel_args import dropout_argument
from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import plain
from saccade.modifiers.expression import Captured
from saccade.runtime import dropout
from saccade.runtime.spec import Inputs, Variant

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")


@triton.jit
def draw(
    given, batch, head, query_start, kv_start, result,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    rows = query_start + tl.arange(0, QUERY_TILE)
    keep = given.kept(given, batch, head, rows, kv_start, KV_TILE)
    positions = tl.arange(0, QUERY_TILE)[:, None] * KV_TILE + tl.arange(0, KV_TILE)[None, :]
    tl.store(result + positions, keep)


NOTHING = Captured()
ROWS = torch.zeros(1, 1, 1, 8)


def drawn(
    seed: int, position: tuple[int, int, int, int], tile: tuple[int, int], dropout_p: float,
    numbers: dropout.Numbers | None = None, offsets: tuple[torch.Tensor, ...] = (),
) -> torch.Tensor:  # fmt: skip
    result = torch.zeros(tile, dtype=torch.bool)
    inputs = Inputs(ROWS, ROWS, ROWS, None, torch.tensor(seed), *offsets)
    variant = Variant("", "", NOTHING, NOTHING, 1.0, dropout_p)
    if numbers is not None:
        inputs = inputs._replace(numbers=numbers.table)
        variant = variant._replace(grouped=numbers.grouped)
    kernel: Any = draw
    kernel[(1,)](plain(dropout_argument(inputs, variant)), *position, result, *tile)
    return result


def wanted(
    seed: int, position: tuple[int, int, int, int], tile: tuple[int, int], dropout_p: float
) -> torch.Tensor:
    batch, head, query_start, kv_start = position
    rows = torch.arange(query_start, query_start + tile[0])[:, None]
    keys = torch.arange(kv_start, kv_start + tile[1])[None, :]
    numbers = torch.tensor(seed), torch.tensor(batch), torch.tensor(head)
    return dropout.kept(*numbers, rows, keys, dropout_p).expand(tile)


@pytest.mark.parametrize("dropout_p", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("tile", [(16, 16), (32, 16), (16, 64)], ids=str)
@pytest.mark.parametrize("seed", [0, -1, 2**40 + 3, -(2**63)])
def test_kept_equals_the_pure_function(seed: int, tile: tuple[int, int], dropout_p: float) -> None:
    starts = [(0, 0, 0, 0), (2, 1, 4 * tile[0] + 5, 4 * tile[1]), (70000, 40, 10**6, 2**20 + 64)]
    for position in starts:
        found = drawn(seed, position, tile, dropout_p)
        assert torch.equal(found, wanted(seed, position, tile, dropout_p)), position


def test_a_tile_drops_what_its_parts_drop() -> None:
    whole = drawn(11, (1, 3, 64, 128), (16, 64), 0.4)
    parts = [drawn(11, (1, 3, 64, 128 + start), (16, 16), 0.4) for start in range(0, 64, 16)]
    assert torch.equal(whole, torch.cat(parts, 1))
    assert 0.5 < float(whole.float().mean()) < 0.7


@pytest.mark.parametrize("changed", range(5), ids=["seed", "batch", "head", "query", "key"])
def test_every_part_of_the_counter_counts(changed: int) -> None:
    numbers = [5, 1, 2, 32, 64]
    other = [
        n + (16 if position == 4 else 1) * (position == changed)
        for position, n in enumerate(numbers)
    ]
    first, second = (drawn(n[0], (n[1], n[2], n[3], n[4]), (16, 16), 0.5) for n in (numbers, other))
    assert not torch.equal(first, second)


# ---- rows of a longer call -----------------------------------------------------------------------

LENGTHS = (64, 96)  # of sequences of a longer call
PARTS = {
    "groups": (torch.arange(32, 64), torch.arange(8, 72), True),
    "a start between groups": (torch.arange(30, 62), torch.arange(9, 73), False),
    "pieces": (torch.arange(96)[::3], torch.cat([torch.arange(20), torch.arange(40, 84)]), True),
    "some": (torch.arange(96)[::3], torch.arange(96)[torch.arange(96) % 3 > 0], False),
}


@pytest.mark.parametrize("tile", [(16, 16), (32, 64)], ids=str)
@pytest.mark.parametrize("name", PARTS)
def test_rows_of_a_part_are_dropped_as_in_the_whole(name: str, tile: tuple[int, int]) -> None:
    query_row, kv_row, grouped = PARTS[name]
    added = torch.full_like(query_row, 5)
    places = torch.arange(len(kv_row))
    numbers = dropout.Numbers.of_rows(3, query_row, added, kv_row, places)
    assert numbers.grouped == grouped
    found = drawn(7, (1, 2, 0, 0), tile, 0.4, numbers)
    one = torch.ones((), dtype=torch.int64)
    rows, keys = query_row[: tile[0], None], kv_row[None, : tile[1]]
    assert torch.equal(found, dropout.kept(one * 7, one * 6, one * 5, rows, keys, 0.4))


@pytest.mark.parametrize("start", [4, 6])
def test_packed_rows_of_a_part_are_dropped_as_in_the_whole(start: int) -> None:
    offsets = (
        torch.tensor([0, 17, 49], dtype=torch.int32),
        torch.tensor([0, 9, 80], dtype=torch.int32),
    )
    query_row = torch.cat([torch.arange(17), torch.arange(20, 52)])
    kv_row = torch.cat([torch.arange(9), torch.arange(start, start + 71)])
    places = torch.cat([torch.arange(9), torch.arange(71)])
    added = torch.tensor([2] * 17 + [4] * 32)
    numbers = dropout.Numbers.of_rows(0, query_row, added, kv_row, places)
    assert numbers.grouped == (start == 4)
    found = drawn(7, (1, 2, 0, 0), (32, 64), 0.4, numbers, offsets)
    one = torch.ones((), dtype=torch.int64)
    rows, keys = query_row[17:, None], kv_row[None, 9 : 9 + 64]
    assert torch.equal(found, dropout.kept(one * 7, one * 5, one * 2, rows, keys, 0.4))


def test_heads_of_a_part_are_dropped_as_in_the_whole() -> None:
    found = drawn(7, (1, 2, 16, 32), (32, 64), 0.4, dropout.Numbers.of_heads(6))
    assert torch.equal(found, wanted(7, (1, 8, 16, 32), (32, 64), 0.4))
