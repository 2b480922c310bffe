"""Verdicts on whole tiles that are exact: of the built-in masks, and of what they join."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import classified_by_kernel, coordinates, reduced
from torch import Tensor

from saccade import masks
from saccade.masks import Mask, as_mask
from saccade.modifiers import evaluate, intervals
from saccade.modifiers.intervals import rows
from saccade.testing import make_case


class Grid(NamedTuple):
    """The rows of a problem, cut into tiles."""

    query_len: int = 12
    kv_len: int = 12
    query_tile: int = 4
    kv_tile: int = 4
    batch: int = 2
    heads: int = 2

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.heads, self.query_len, self.kv_len


def verdicts(mask: Mask, grid: Grid) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Possible, certain, and what is true of them, by looking at every pair."""
    at = coordinates(grid.shape)
    tiles = at._replace(
        query_row=rows(0, grid.query_len, grid.query_tile, 2),
        kv_row=rows(0, grid.kv_len, grid.kv_tile, 3),
    )
    truth = intervals.classify(mask.key, mask.captured, tiles)
    seen = evaluate.visible(mask.key, mask.captured, at).expand(grid.shape)
    some, every = reduced(seen, (grid.query_tile, grid.kv_tile))
    return truth.possible.expand_as(some), truth.certain.expand_as(every), some, every


def check_sound(mask: Mask, grid: Grid) -> None:
    possible, certain, some, every = verdicts(mask, grid)
    assert not (some & ~possible).any(), "a tile with a visible pair was called impossible"
    assert not (certain & ~every).any(), "a tile with a hidden pair was called certain"


def check_exact(mask: Mask, grid: Grid) -> None:
    possible, certain, some, every = verdicts(mask, grid)
    assert torch.equal(possible, some)
    assert torch.equal(certain, every)


GRIDS = [Grid(), Grid(12, 20, 5, 3), Grid(19, 7, 3, 2), Grid(9, 9, 100, 1), Grid(1, 16, 1, 4)]
each_grid = pytest.mark.parametrize("grid", GRIDS, ids=lambda grid: "x".join(map(str, grid[:4])))


@each_grid
@pytest.mark.parametrize("align", ["top_left", "bottom_right"])
def test_causal_and_window_are_exact(grid, align):
    check_exact(masks.causal(align), grid)
    check_exact(~masks.causal(align), grid)
    for left, right in ((0, 0), (3, 0), (1, 2), (4, 9), (50, 50)):
        check_exact(masks.window(left, right, align), grid)


@each_grid
def test_key_lengths_are_exact(grid):
    for lengths in ([0, grid.kv_len], [1, grid.kv_len + 5], [grid.kv_len - 1, 4], [3]):
        check_exact(masks.key_lengths(torch.tensor(lengths)), grid)


@each_grid
def test_sorted_documents_are_exact(grid):
    query_ids = torch.arange(grid.query_len) * 3 // grid.query_len
    kv_ids = torch.arange(grid.kv_len) * 3 // max(grid.kv_len, 3)
    both = torch.stack([query_ids, query_ids // 2]), torch.stack([kv_ids, kv_ids // 2])
    check_exact(masks.documents(*both), grid)
    check_exact(~masks.documents(*both), grid)
    check_exact(as_mask(lambda b, h, q, k: query_ids[q] == kv_ids[k]), grid)


@pytest.mark.parametrize("factor", [1, 2])
def test_blocks_that_tiles_divide_are_exact(factor):
    layout = torch.randint(0, 2, (2, 2, -(-22 // (4 * factor)), -(-30 // (6 * factor))))
    check_exact(masks.blocks(layout.bool(), (4 * factor, 6 * factor)), Grid(22, 30, 4, 6))


@each_grid
def test_dense_tensors_are_exact(grid):
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 2, grid.query_len, grid.kv_len), (2, 1, grid.query_len, 1), (grid.kv_len,)):
        table = torch.randint(0, 5, shape, generator=generator) > 0
        check_exact(masks.dense(table), grid)
        check_exact(~masks.dense(table), grid)
    check_exact(masks.dense(torch.zeros(grid.query_len, grid.kv_len).bool()), grid)
    check_exact(masks.dense(torch.ones(grid.query_len, grid.kv_len).bool()), grid)


EXACT: dict[str, Any] = {
    "dilated rows": lambda b, h, q, k: (q // 4 == k // 4) & (q >= k),
    "by head": lambda b, h, q, k: torch.where(h == 0, q >= k, q <= k),
    "distance": lambda b, h, q, k: abs(q - k) <= 5,
    "product": lambda b, h, q, k: (q - 4) * 3 > k,
    "sum": lambda b, h, q, k: q + k < 13,
    "turned": lambda b, h, q, k: -(q - 3) >= 2 - k,
    "quotient": lambda b, h, q, k: (q - k) // 3 <= 1,
    "division": lambda b, h, q, k: q / 3 < k,
    "least": lambda b, h, q, k: torch.minimum(q, k) < 7,
    "grows": lambda b, h, q, k: torch.exp(q / 5) > k,
    "clamped": lambda b, h, q, k: torch.clamp(q - k, 0, 4) > 2,
}


@each_grid
@pytest.mark.parametrize("name", EXACT)
def test_what_rows_bound_is_exact(grid, name):
    check_exact(as_mask(EXACT[name]), grid)


def test_no_mask_is_certain():
    assert verdicts(masks.NOTHING_HIDDEN, Grid())[1].all()


def test_a_mask_that_varies_by_batch_only_is_classified_once_for_all_rows():
    mask, at = masks.key_lengths(torch.tensor([3, 9])), coordinates(Grid().shape)
    tiles = at._replace(query_row=rows(0, 12, 4, 2), kv_row=rows(0, 12, 4, 3))
    assert intervals.classify(mask.key, mask.captured, tiles).possible.shape == (2, 1, 1, 3)


@settings(deadline=None, max_examples=40, derandomize=True)
@given(
    st.tuples(*[st.integers(1, 14)] * 2, *[st.integers(1, 6)] * 2), st.integers(0, 99),
    st.integers(0, 5), st.integers(0, 5),
)  # fmt: skip
def test_combined_masks_are_never_classified_wrongly(sizes, seed, left, right):
    grid = Grid(*sizes)
    generator = torch.Generator().manual_seed(seed)
    lengths = (grid.query_len, grid.kv_len)
    ids = [torch.randint(0, 4, (grid.batch, n), generator=generator) for n in lengths]
    known = masks.key_lengths(torch.randint(0, grid.kv_len + 1, (2,), generator=generator))
    local = masks.window(left, right)
    for mask in (
        (masks.causal() & masks.documents(*ids)) | known,
        ~(local | ~known) & masks.causal("top_left"),
        (local & ~masks.documents(*ids)) | ~((masks.causal() | known) & local),
    ):
        check_sound(mask, grid)


# ---- in kernels -------------------------------------------------------------------------------

BUILT_IN = ["causal", "causal_top_left", "window", "key_lengths", "prefix", "documents", "blocks"]
# (query, key) lengths with (query, kv) tiles
SIZES = [((40, 50), (16, 16)), ((33, 55), (32, 16)), ((40, 36), (16, 32)), ((1, 17), (16, 16))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")
@pytest.mark.parametrize("name", BUILT_IN)
def test_kernels_classify_built_in_masks_as_plans_do(name):
    for lengths, tiles in SIZES:
        grid = Grid(*lengths, *tiles)
        sizes: dict[str, Any] = {"batch": 2, "kv_heads": 1, "group": 2, "head_dim": 16}
        mask = as_mask(make_case(mask=name, lengths=(lengths,), seed=3, **sizes).mask)
        possible, certain, some, every = verdicts(mask, grid)
        found = classified_by_kernel(mask, grid.shape, tiles, True)
        whole_tiles = torch.arange(1, possible.shape[3] + 1) * tiles[1] <= lengths[1]
        assert torch.equal(found[0], possible)
        assert torch.equal(found[1], certain & whole_tiles)
        if name not in ("documents", "prefix"):  # one truth, or two that cannot both be in doubt
            assert torch.equal(possible, some)
            assert torch.equal(certain & whole_tiles, every & whole_tiles)
