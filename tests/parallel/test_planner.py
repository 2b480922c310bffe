"""Plans: even work and rows, the keys that are needed, and shards, for simulated ranks."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest
import torch

from saccade import masks
from saccade.parallel import Machine, plan
from saccade.parallel.work import WholeCall, needs, row_work
from saccade.testing.cases import MASKS, Description

LENGTH = 37
ROWS = 2**20


def documents_of(rows: int, count: int, seed: int = 0) -> torch.Tensor:
    """Offsets of so many documents of random lengths."""
    generator = torch.Generator().manual_seed(seed)
    cuts = torch.randperm(rows - 1, generator=generator)[: count - 1].sort().values + 1
    return torch.cat([torch.tensor([0]), cuts, torch.tensor([rows])]).int()


def mask_of(name: str) -> masks.Mask:
    description = Description(lengths=((LENGTH, LENGTH),))
    return masks.as_mask(MASKS[name](description, torch.Generator().manual_seed(1)))


def visible_of(mask: masks.Mask) -> torch.Tensor:
    return mask.to_dense(2, 4, LENGTH, LENGTH) if mask.key else torch.ones(2, 4, LENGTH, LENGTH) > 0


@pytest.mark.parametrize("name", MASKS)
def test_work_and_needs_are_those_of_the_mask(name: str) -> None:
    mask = mask_of(name)
    call, seen = WholeCall(mask, LENGTH, 2, 4), visible_of(mask)
    pairs, wanted = row_work(call).pairs, seen.sum((0, 1, 3)).double()
    edges = torch.tensor([0, 5, 5, 9, LENGTH])
    needed = needs(call, edges, edges)
    blocks = [seen[:, :, a:b].any(2).any(1).any(0) for a, b in itertools.pairwise(edges)]
    exact = torch.stack(
        [torch.stack([one[a:b].any() for a, b in itertools.pairwise(edges)])
         for one in blocks]
    )  # fmt: skip
    assert not (exact & ~needed).any()
    if name in ("tree", "own_table", "nothing"):  # intervals do not know all that these compute
        assert (pairs >= wanted).all()
    else:
        assert torch.equal(pairs, wanted) and torch.equal(needed, exact)


def test_large_tiles_count_what_they_visit() -> None:
    length, tile = 2**13, 8
    seen = masks.window(100).to_dense(1, 1, length, length)[0, 0]
    found = row_work(WholeCall(masks.window(100), length, 1, 3))
    visited = seen.unflatten(0, (-1, tile)).unflatten(2, (-1, tile)).any(3).any(1)
    assert found.tile == tile
    assert torch.equal(found.pairs, visited.sum(1).double() * tile * tile * 3)


def test_a_million_rows_are_planned_in_a_second() -> None:
    for mask, length in ((masks.causal(), ROWS), (masks.causal(), documents_of(ROWS, 1000))):
        seconds = 0.0
        for _ in range(3):  # another program may take the caches
            start = time.process_time()
            plan(mask, length, 64)
            seconds = time.process_time() - start
            if seconds < 1:
                break
        assert seconds < 1


@pytest.mark.parametrize("ranks", [3, 64, 512])
@pytest.mark.parametrize("length", [ROWS, ROWS - 12345])
def test_causal_rows_are_dealt_evenly(length: int, ranks: int) -> None:
    found = plan(masks.causal(), length, ranks)
    sizes = torch.tensor([len(found.rows_of(rank)) for rank in range(ranks)]).double()
    assert found.imbalance <= 0.03
    assert sizes.max() / sizes.mean() <= 1.05
    # The pairs themselves, not those of whole tiles: row r sees r + 1.
    pairs = torch.stack([(found.rows_of(rank) + 1).sum() for rank in range(ranks)]).double()
    assert pairs.max() / pairs.mean() <= 1.03


@pytest.mark.parametrize("causal", [True, False])
def test_documents_are_dealt_evenly(causal: bool) -> None:
    offsets = documents_of(ROWS, 1000)
    found = plan(None, offsets, 64, causal=causal)
    starts = offsets[:-1].repeat_interleave(offsets.diff()).long()
    lengths = offsets.diff().repeat_interleave(offsets.diff()).long()
    seen = torch.arange(ROWS) - starts + 1 if causal else lengths
    pairs = torch.stack([seen[found.rows_of(rank)].sum() for rank in range(64)]).double()
    assert pairs.max() / pairs.mean() <= 1.10
    assert len({len(found.rows_of(rank)) for rank in range(64)}) == 1
    assert (found.sent.sum(1) / ROWS).max() < 0.05  # most rows stay beside their keys


@pytest.mark.parametrize("name", ["window", "prefix", "blocks"])
def test_other_masks_are_dealt_evenly(name: str) -> None:
    length = 2**16
    layout = torch.rand(64, 64, generator=torch.Generator().manual_seed(0)) < 0.2
    mask = {
        "window": masks.window(4096),
        "prefix": masks.prefix(torch.tensor([20000])),
        "blocks": masks.blocks(layout, 1024),
    }[name]
    found = plan(mask, length, 16)
    assert found.imbalance <= (0.1 if name == "window" else 0.03)
    if name == "window":  # rows lie together, so that neighbours' keys are all that is sent
        assert found.sent.sum(1).max() <= length / 16 + 4096 + length / 2048


def test_four_thousand_ranks() -> None:
    found = plan(masks.causal(), 2**17, 4096)
    assert found.imbalance <= 0.03 and len(found.order.unique()) == 2**17
    assert {len(found.rows_of(rank)) for rank in (0, 1, 2048, 4095)} == {32}


@pytest.mark.parametrize(("length", "ranks"), [(61, 4), (5, 8), (0, 3), (1, 1), (64, 4)])
def test_shards_hold_each_row_once(length: int, ranks: int) -> None:
    found = plan(masks.causal(), length, ranks)
    whole = torch.arange(3 * length).view(3, length)
    shards = [found.at(rank).shard(whole, dim=1) for rank in range(ranks)]
    assert torch.equal(found.unshard(shards, dim=1), whole)
    assert torch.equal(found.order.sort().values, torch.arange(length))
    assert all(torch.equal(found.at(r).positions, found.rows_of(r)) for r in range(ranks))


@pytest.mark.parametrize("name", ["causal", "window", "documents", "mixed"])
def test_needed_rows_hold_every_visible_key(name: str) -> None:
    mask = mask_of(name)
    found = plan(mask, LENGTH, 4, batch=2, query_heads=4, kv_heads=2)
    seen = visible_of(mask).any(1).any(0)
    for rank in range(4):
        keys = torch.cat([found.needed_rows(rank, owner) for owner in range(4)])
        wanted = seen[found.rows_of(rank)].any(0).nonzero().flatten()
        assert set(wanted.tolist()) <= set(keys.tolist()) and len(keys.unique()) == len(keys)
        assert float(found.sent[rank].sum()) == len(keys)


def test_positions_of_sequences() -> None:
    offsets = torch.tensor([0, 5, 5, 12], dtype=torch.int32)
    found = plan(None, offsets, 3, causal=True)
    positions = torch.cat([torch.arange(5), torch.arange(7)])
    for rank in range(3):
        assert torch.equal(found.at(rank).positions, positions[found.rows_of(rank)])


def test_another_mask_on_the_same_rows() -> None:
    first = plan(masks.causal(), 4096, 4)
    other = first.for_mask(masks.window(64))
    assert torch.equal(other.order, first.order) and other.sent.sum() < first.sent.sum() / 2
    again = plan(masks.window(64), 4096, 4).for_mask(None, causal=True)
    assert again.mask == masks.causal() and again.imbalance > 0.5  # rows of a window, kept


def test_the_cost_model_chooses() -> None:
    assert plan(masks.window(512), 65536, 64).method == "gather"
    assert plan(masks.window(512), 65536, 64).costs["ulysses"].refused
    # Heads that few rows see cost little to exchange; all keys of many heads cost much.
    slow = Machine(link_bytes=5e9)
    assert plan(None, 65536, 8, kv_heads=32, machine=slow).method == "ulysses"
    many = plan(None, 65536, 7, kv_heads=32, machine=slow)  # 7 ranks do not divide 32 heads
    assert many.method in ("gather", "ring") and "32 query heads on 7" in str(many)
    costs = plan(masks.causal(), 65536, 8).costs
    assert costs["ring"].held < costs["gather"].held and costs["ring"].total > costs["gather"].total


def test_a_plan_is_shown(tmp_path: Any) -> None:
    found = plan(masks.causal(), 4096, 4, method="ring")
    text = str(found)
    assert "4,096 rows on 4 ranks, imbalance 0.0%" in text and 'method "ring", named' in text
    assert "0 to 511, 3,584 to 4,095" in text and "assumed: 32/8 heads" in text
    figure = found.plot(tmp_path / "plan.png")
    tiles, work, keys = figure.axes
    shown = tiles.images[0].get_array()
    assert shown is not None
    assert (shown[0, -1] == 1).all() and not (shown[-1, 0] == 1).all()  # white above the diagonal
    assert len(work.patches) == len(keys.patches) == 4 and (tmp_path / "plan.png").exists()


@pytest.mark.parametrize(
    ("arguments", "options", "text"),
    [
        ((None, 64, 2.0), {}, "mesh: got float, takes a ProcessGroup"),
        ((None, 64, 0), {}, "mesh: got 0"),
        ((None, -1, 2), {}, "length: got -1"),
        ((None, torch.tensor([0, 4, 2], dtype=torch.int32), 2), {}, "length: "),
        ((None, torch.tensor([0, 4]), 2), {}, "length: got torch.int64"),
        ((None, torch.tensor([0, 4], dtype=torch.int32), 2), {"batch": 2}, "batch: got 2 beside"),
        ((None, 64, 2), {"method": "zigzag"}, "method: got 'zigzag', takes one of"),
        ((None, 64, 3), {"method": "ulysses"}, 'method: got "ulysses" with 32 query heads on 3'),
        ((None, 64, 2), {"kv_heads": 5}, "kv_heads: got 5"),
        ((None, 64, 2), {"verify": "never"}, "verify: got 'never'"),
        ((torch.ones(8, 8) > 0, 64, 2), {}, "mask: tensor: got shape"),
        ((None, 64, 2), {"methods": "ring"}, "methods: an unknown option; write method="),
        ((None, 64, 2), {"whatever": 1}, "whatever: an unknown option; takes causal, method, "),
    ],
)
def test_what_is_refused(arguments: Any, options: Any, text: str) -> None:
    with pytest.raises((TypeError, ValueError), match=text):
        plan(*arguments, **options)


def test_a_simulated_plan_sends_nothing() -> None:
    with pytest.raises(ValueError, match="shards: got a tensor with simulated ranks"):
        plan(None, 64, 2).unshard(torch.zeros(1, 32), dim=1)
    with pytest.raises(ValueError, match="tensor: got 63 rows along dimension 1, takes 64"):
        plan(None, 64, 2).shard(torch.zeros(1, 63), dim=1)


@pytest.mark.parametrize(
    ("shape", "dim", "text"),
    [
        ((1, 64), 7, "dim: got 7 of tensor of 2 dimensions, takes -2 to 1"),
        ((1, 64), -3, "dim: got -3 of tensor of 2 dimensions, takes -2 to 1"),
        ((), 0, "dim: got 0 of tensor of 0 dimensions, has none"),
        ((1, 64), True, "dim: got bool, takes a whole number"),
        ((1, 64), 1.0, "dim: got float, takes a whole number"),
    ],
)
def test_a_dimension_that_is_not_there_is_refused(
    shape: tuple[int, ...], dim: Any, text: str
) -> None:
    found = plan(None, 64, 2)
    with pytest.raises((TypeError, ValueError), match=text):
        found.shard(torch.zeros(shape), dim=dim)
    with pytest.raises((TypeError, ValueError), match=text.replace("tensor of", r"shards\[0\] of")):
        found.unshard([torch.zeros(shape)] * 2, dim=dim)
