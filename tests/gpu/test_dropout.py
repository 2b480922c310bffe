"""Kernels drop the same pairs as `saccade.runtime.dropout` says, whatever the tiles."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from saccade.gpu.kernel_args import Dropout, kept
from saccade.gpu.language import tl, triton
from saccade.runtime import dropout

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")


@triton.jit
def draw(
    given, batch, head, query_start, kv_start, result,
    QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr,
):  # fmt: skip
    rows = query_start + tl.arange(0, QUERY_TILE)
    keep = kept(given, batch, head, rows, kv_start, KV_TILE)
    positions = tl.arange(0, QUERY_TILE)[:, None] * KV_TILE + tl.arange(0, KV_TILE)[None, :]
    tl.store(result + positions, keep)


def drawn(
    seed: int, position: tuple[int, int, int, int], tile: tuple[int, int], dropout_p: float
) -> torch.Tensor:
    result = torch.zeros(tile, dtype=torch.bool)
    given = Dropout(torch.tensor(seed), dropout.threshold(dropout_p), 1 / (1 - dropout_p))
    kernel: Any = draw
    kernel[(1,)](given, *position, result, *tile)
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
