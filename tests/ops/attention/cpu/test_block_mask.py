"""The plan of a dense problem: complete, free of hidden tiles, long where nothing is hidden."""

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade import masks
from saccade.masks import Mask
from saccade.modifiers import evaluate, intervals
from saccade.modifiers.evaluate import index_range
from saccade.modifiers.expression import Captured, Coordinates
from saccade.ops.attention.cpu import block_mask
from saccade.ops.attention.cpu.block_mask import (
    MOST_COMPARED,
    QueryTile,
    Remembered,
    Run,
    TileSizes,
)
from saccade.runtime.spec import Variant


def variant_of(mask: Mask | None) -> Variant:
    captured = mask.captured if mask is not None else Captured()
    return Variant(mask.key if mask is not None else "", "", captured, Captured(), 1.0, 0.0)


def sizes_of(**changes: int) -> TileSizes:
    defaults = {
        "batch": 2, "heads": 3, "query_len": 50, "kv_len": 70, "first_batch": 0, "query_tile": 8,
        "kv_tile": 8,
    }  # fmt: skip
    return TileSizes(**{**defaults, **changes})


def visible(sizes: TileSizes, mask: Mask) -> torch.Tensor:
    first = sizes.first_batch
    at = Coordinates(
        index_range(first, first + sizes.batch, 0),
        index_range(0, sizes.heads, 1),
        index_range(0, sizes.query_len, 2),
        index_range(0, sizes.kv_len, 3),
        sizes.kv_len - sizes.query_len,
    )
    full = (sizes.batch, sizes.heads, sizes.query_len, sizes.kv_len)
    return evaluate.visible(mask.key, mask.captured, at).expand(full)


def check(sizes: TileSizes, mask: Mask, *, exact: bool = True) -> tuple[block_mask.HeadGroup, ...]:
    """Compare a plan with the mask, pair by pair.

    exact: the mask is one whose tiles are known exactly, so that no hidden tile is visited.
    """
    seen = visible(sizes, mask)
    groups = block_mask.head_groups(sizes, variant_of(mask))
    visited = torch.zeros_like(seen, dtype=torch.int)
    unmasked = torch.zeros_like(seen)
    for group in groups:
        part = slice(*group.batch), slice(*group.heads)
        assert [tile.start for tile in group.tiles] == [
            0,
            *(tile.stop for tile in group.tiles[:-1]),
        ]
        assert group.tiles[-1].stop == sizes.query_len
        for tile in group.tiles:
            check_runs(tile, sizes)
            for run in tile.runs:
                at = (*part, slice(tile.start, tile.stop), slice(run.start, run.stop))
                visited[at] += 1
                if not run.masked:
                    unmasked[at] = True
    assert visited.max() <= 1, "a pair is visited twice"
    assert not (seen & (visited == 0)).any(), "a visible pair is not visited"
    assert not (unmasked & ~seen).any(), "a hidden pair is visited without a mask"
    if exact and not sizes.short:
        check_no_hidden_tile(seen, visited.bool(), sizes)
    return groups


def check_runs(tile: QueryTile, sizes: TileSizes) -> None:
    """Runs ascend, do not overlap, hold something, and end inside the keys."""
    ends = [0]
    for run in tile.runs:
        assert ends[-1] <= run.start < run.stop <= sizes.kv_len
        ends.append(run.stop)


def check_no_hidden_tile(seen: torch.Tensor, visited: torch.Tensor, sizes: TileSizes) -> None:
    for rows_seen, rows_visited in zip(
        seen.split(sizes.query_tile, 2), visited.split(sizes.query_tile, 2), strict=True
    ):
        for pairs_seen, pairs_visited in zip(
            rows_seen.split(sizes.kv_tile, 3), rows_visited.split(sizes.kv_tile, 3), strict=True
        ):
            hidden = ~pairs_seen.flatten(2).any(-1)
            assert not pairs_visited.flatten(2).any(-1)[hidden].any(), "a hidden tile is visited"


def sorted_ids(batch: int, length: int, documents: int) -> torch.Tensor:
    return (torch.arange(length) * documents // max(length, 1)).expand(batch, -1)


def built_in(sizes: TileSizes) -> dict[str, Mask]:
    batch = sizes.first_batch + sizes.batch
    generator = torch.Generator().manual_seed(0)
    grid = batch, sizes.heads, -(-sizes.query_len // sizes.query_tile), 5
    layout = torch.randint(0, 2, grid, generator=generator).bool()
    keys_in_block = sizes.kv_tile * -(-sizes.kv_len // (5 * sizes.kv_tile))
    layout = layout[..., : -(-sizes.kv_len // keys_in_block)]
    table = torch.rand(batch, 1, sizes.query_len, sizes.kv_len, generator=generator) < 0.02
    return {
        "causal": masks.causal(),
        "causal top left": masks.causal("top_left"),
        "window": masks.window(9, 4),
        "thin window": masks.window(0, 0, "top_left"),
        "lengths": masks.key_lengths(torch.arange(batch) * 17 % (sizes.kv_len + 3)),
        "one length": masks.key_lengths(torch.tensor([11])),
        "documents": masks.documents(
            sorted_ids(batch, sizes.query_len, 3), sorted_ids(batch, sizes.kv_len, 3)
        ),
        "blocks": masks.blocks(layout, (sizes.query_tile, keys_in_block)),
        "dense": masks.dense(table),
        "everything hidden": masks.dense(torch.zeros(1, 1, dtype=torch.bool)),
    }


GRIDS = {
    "more keys": sizes_of(),
    "more queries": sizes_of(query_len=70, kv_len=41),
    "one tile": sizes_of(query_len=5, kv_len=6),
    "uneven tiles": sizes_of(query_tile=7, kv_tile=13),
    "later sequences": sizes_of(first_batch=2),
    "one query": sizes_of(query_len=1, kv_len=90),
}


@pytest.mark.parametrize("name", list(built_in(sizes_of())))
@pytest.mark.parametrize("grid", GRIDS)
def test_plans_visit_what_is_visible_and_nothing_hidden(grid, name):
    check(GRIDS[grid], built_in(GRIDS[grid])[name])


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    st.builds(
        sizes_of, query_len=st.integers(1, 40), kv_len=st.integers(1, 40),
        query_tile=st.integers(1, 12), kv_tile=st.integers(1, 12), first_batch=st.integers(0, 2),
    ),
    st.data(),
)  # fmt: skip
def test_combined_masks_are_planned_completely(sizes, data):
    known = list(built_in(sizes).values())
    mask = data.draw(st.sampled_from(known))
    for _ in range(data.draw(st.integers(0, 3))):
        other = data.draw(st.sampled_from(known))
        combine = data.draw(st.sampled_from([Mask.__and__, Mask.__or__, lambda a, b: a & ~b]))
        mask = combine(mask, other)
    check(sizes, mask, exact=False)


def test_real_tile_sizes():
    sizes = sizes_of(
        batch=1, heads=1, query_len=700, kv_len=9000, query_tile=block_mask.QUERY_TILE,
        kv_tile=block_mask.KV_TILE,
    )  # fmt: skip
    for mask in (masks.causal(), masks.causal("top_left"), masks.window(5000, 100)):
        check(sizes, mask)


# ---- runs -------------------------------------------------------------------------------------


def runs_of(sizes: TileSizes, mask: Mask) -> list[tuple[Run, ...]]:
    (group,) = block_mask.head_groups(sizes, variant_of(mask))
    return [tile.runs for tile in group.tiles]


def test_no_mask_is_one_tile_and_one_run():
    (group,) = block_mask.head_groups(sizes_of(), variant_of(None))
    assert group == block_mask.HeadGroup((0, 2), (0, 3), (QueryTile(0, 50, (Run(0, 70, False),)),))


def test_query_tiles_that_see_the_same_without_a_mask_are_joined():
    sizes = sizes_of(query_len=64, kv_len=64)
    (group,) = block_mask.head_groups(sizes, variant_of(masks.key_lengths(torch.tensor([24]))))
    assert group.tiles == (QueryTile(0, 64, (Run(0, 24, False),)),)
    documents = masks.documents((torch.arange(64) // 32)[None])
    (group,) = block_mask.head_groups(sizes, variant_of(documents))
    assert group.tiles == (
        QueryTile(0, 32, (Run(0, 32, False),)),
        QueryTile(32, 64, (Run(32, 64, False),)),
    )


def test_query_tiles_that_need_the_mask_are_not_joined():
    (group,) = block_mask.head_groups(sizes_of(), variant_of(masks.key_lengths(torch.tensor([20]))))
    assert len(group.tiles) == 7
    assert all(tile.runs == (Run(0, 24, True),) for tile in group.tiles)


def test_long_full_ranges_run_without_the_mask():
    sizes = sizes_of(query_len=256, kv_len=8192, query_tile=256, kv_tile=128)
    (runs,) = runs_of(sizes, masks.causal())
    assert runs == (Run(0, 7936, False), Run(7936, 8192, True))
    (runs,) = runs_of(sizes, masks.window(4000, 0))
    assert [run.masked for run in runs] == [True, False, True]
    assert runs[1].stop - runs[1].start >= block_mask.LONG_RANGE
    assert sum(run.stop - run.start for run in runs if run.masked) <= 256 + 4 * 128


def test_short_full_ranges_run_with_their_neighbours():
    sizes = sizes_of(query_len=8, kv_len=96)
    (runs,) = runs_of(sizes, masks.causal())
    assert runs == (Run(0, 96, True),)
    (runs,) = runs_of(sizes, masks.key_lengths(torch.tensor([64])))
    assert runs == (Run(0, 64, False),)


def test_masked_runs_are_of_bounded_length():
    sizes = sizes_of(batch=1, heads=1, query_len=8, kv_len=20000)
    scattered = masks.dense(torch.arange(20000) % 2 == 0)
    (runs,) = runs_of(sizes, scattered)
    assert all(run.masked and run.stop - run.start <= block_mask.MASKED_RANGE for run in runs)
    assert len(runs) == -(-20000 // block_mask.MASKED_RANGE)
    check(sizes, scattered)


# ---- groups ------------------------------------------------------------------------------------


def test_masks_that_differ_by_batch_or_head_get_a_unit_each():
    sizes = sizes_of(batch=3, heads=2, query_len=16, kv_len=24)
    by_batch = masks.key_lengths(torch.tensor([8, 0, 24]))
    groups = check(sizes, by_batch)
    assert [(group.batch, group.heads) for group in groups] == [
        ((b, b + 1), (0, 2)) for b in range(3)
    ]
    assert [group.tiles[0].runs for group in groups] == [
        (Run(0, 8, False),), (), (Run(0, 24, False),),
    ]  # fmt: skip
    by_head = masks.dense(torch.tensor([True, False]).view(2, 1, 1))
    groups = check(sizes, by_head)
    assert [(group.batch, group.heads) for group in groups] == [
        ((0, 3), (h, h + 1)) for h in range(2)
    ]
    assert [bool(group.tiles[0].runs) for group in groups] == [True, False]
    groups = check(sizes, by_batch & by_head)
    assert [group.batch for group in groups] == [(0, 1), (1, 2), (2, 3), (0, 3)]
    assert [group.heads for group in groups] == [(0, 1)] * 3 + [(1, 2)]


def test_neighbours_that_visit_the_same_keys_are_one_unit():
    sizes = sizes_of(batch=5, heads=2, query_len=16, kv_len=24)
    groups = check(sizes, masks.key_lengths(torch.tensor([24, 20, 16, 12, 24])))
    assert [group.batch for group in groups] == [(0, 2), (2, 4), (4, 5)]
    assert [group.tiles[0].runs for group in groups] == [
        (Run(0, 24, True),), (Run(0, 16, True),), (Run(0, 24, False),),
    ]  # fmt: skip


def test_as_many_go_together_as_a_mask_may_hold(monkeypatch):
    monkeypatch.setattr(block_mask, "PAIRS_TOGETHER", 2 * 16 * 24)
    sizes = sizes_of(batch=5, query_len=16, kv_len=24)
    groups = check(sizes, masks.key_lengths(torch.full((5,), 20)))
    assert [group.batch for group in groups] == [(0, 2), (2, 4), (4, 5)]


@pytest.mark.parametrize("kv_len", [5, 16])
def test_short_sequences_go_together(kv_len, monkeypatch):
    sizes = sizes_of(batch=4, query_len=8, kv_len=kv_len)
    mask = masks.key_lengths(torch.tensor([5, 0, 3, 5])) & masks.causal()
    assert check(sizes, mask) == (
        block_mask.HeadGroup((0, 4), (0, 3), (QueryTile(0, 8, (Run(0, kv_len, True),)),)),
    )
    monkeypatch.setattr(block_mask, "PAIRS_TOGETHER", 2 * 8 * kv_len)
    assert len(check(sizes, masks.key_lengths(torch.tensor([5, 0, 3, 4])))) > 1


# ---- memory and time --------------------------------------------------------------------------


def test_memory_of_a_plan_is_bounded_by_strips(monkeypatch):
    """The classes that exist at once: one strip of query tiles against all key tiles."""
    classified_by_kernel = []
    classify = intervals.classify

    def measure(*arguments: Any) -> Any:
        truth = classify(*arguments)
        classified_by_kernel.append(max(truth.possible.numel(), truth.certain.numel()))
        return truth

    monkeypatch.setattr(intervals, "classify", measure)
    length = 2**17
    sizes = TileSizes(1, 1, length, length, 0, block_mask.QUERY_TILE, block_mask.KV_TILE)
    started = time.process_time()
    (group,) = block_mask.head_groups(sizes, variant_of(masks.window(4096)))
    assert time.process_time() - started < 10
    assert max(classified_by_kernel) <= block_mask.STRIP * (length // block_mask.KV_TILE)
    assert len(classified_by_kernel) == length // (block_mask.QUERY_TILE * block_mask.STRIP)
    assert len(group.tiles) == length // block_mask.QUERY_TILE
    assert sum(len(tile.runs) for tile in group.tiles) <= 4 * len(group.tiles)
    keys = [sum(run.stop - run.start for run in tile.runs) for tile in group.tiles]
    assert max(keys) <= 4096 + block_mask.QUERY_TILE + 2 * block_mask.KV_TILE


# ---- what is remembered is right whatever happens to what a mask captured ---------------------


def counting(results: Remembered[int], tensors: list[torch.Tensor], key: str = "a") -> int:
    """What is remembered; a new result is the sum of the tensors."""
    return results.get(key, tensors, lambda: int(sum(tensor.sum() for tensor in tensors)))


def test_equal_contents_are_made_once():
    made = []
    results: Remembered[int] = Remembered(most=4)
    for _ in range(3):
        results.get("a", [torch.arange(3)], lambda: made.append(1) or 7)
    assert made == [1]
    results.get("a", [torch.arange(3).int()], lambda: made.append(1) or 7)
    results.get("b", [torch.arange(3)], lambda: made.append(1) or 7)
    assert len(made) == 3


def test_a_change_without_pytorchs_knowledge_is_seen():
    results: Remembered[int] = Remembered(most=4)
    tensor = torch.arange(3)
    assert counting(results, [tensor]) == 3
    tensor.numpy()[0] = 5
    assert counting(results, [tensor]) == 8
    tensor.data.zero_()
    assert counting(results, [tensor]) == 0


def test_the_oldest_go_first():
    results: Remembered[int] = Remembered(most=10, size=lambda result: result)
    for key, size in (("a", 4), ("b", 4), ("c", 4), ("too large", 11)):
        results.get(key, [], lambda size=size: size)
    assert list(results.entries) == [("b",), ("c",)] and results.total == 8
    results.get("b", [], lambda: 4)
    results.get("d", [], lambda: 4)
    assert list(results.entries) == [("b",), ("d",)] and results.total == 8


def test_large_and_real_tensors_are_not_compared():
    results: Remembered[int] = Remembered(most=4)
    counting(results, [torch.zeros(MOST_COMPARED + 1, dtype=torch.int8)])
    counting(results, [torch.zeros(3)])
    assert not results.entries


def test_what_inference_mode_made_serves_training():
    query = torch.randn(3, 2, 8, 4)
    mask = masks.key_lengths(torch.tensor([3, 8, 5])) & masks.causal()
    with torch.inference_mode():
        wanted = saccade.attention(query, query, query, mask=mask)
    learns = query.clone().requires_grad_()
    found = saccade.attention(learns, learns, learns, mask=mask)
    torch.testing.assert_close(found, wanted.clone())
    found.sum().backward()
    assert learns.grad is not None and bool(learns.grad.isfinite().all())
