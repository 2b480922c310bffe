"""Verdicts on whole tiles, and the walks made of them, against every pair of the mask itself."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

import saccade
from saccade import expressions, intervals, language
from saccade.expressions import Captured, Coordinates
from saccade.intervals import Interval
from saccade.kernels.launch import itself
from saccade.kernels.packing import packed_program, packed_program_by_heads
from saccade.kernels.tiles import num_rows
from saccade.kernels.visibility import if_present, judge_tiles
from saccade.masks import Mask, as_mask, take
from saccade.portable.arguments import Extent, Geometry, mask_argument, view
from saccade.portable.planning import Planner
from saccade.problem import Inputs, Variant
from saccade.testing import make_case
from saccade.testing.kinds import MASKS

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs in Triton's interpreter")

BATCH, HEADS = 2, 2
NO_STRIDES = (0, 0, 0)


@triton.jit
def judge_all(
    here, other, mask, verdicts, sizes,  # of verdicts, from the heads on
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    batch, head, tile, _slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    tiles = tl.arange(0, AT_ONCE)
    possible, certain = judge_tiles(
        mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
    )
    place = (batch * sizes[0] + head) * sizes[1] + tile
    entries = verdicts + place * sizes[2] + tiles
    tl.store(entries, possible.to(tl.int8) + 2 * certain.to(tl.int8), mask=tiles < sizes[2])


@triton.jit
def visit_all(
    here, other, mask, places, clean, edges,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """Where each program stands, and how often it visits each tile as a clean one, as an edge."""
    program = tl.program_id(0)
    batch, head, tile, slot = here.find(program, here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    walk = mask.walk(mask, batch, head, slot, tile * TILE, lengths, TILE, OTHER, OVER_KEYS)
    walk = if_present(walk, tile * TILE < lengths[0])
    tl.store(places + program * 3, batch)
    tl.store(places + program * 3 + 1, head)
    tl.store(places + program * 3 + 2, tile)
    for index in range(0, walk[5]):
        entry = clean + program * MOST + mask.tile(mask, walk, index, True)
        tl.store(entry, tl.load(entry) + 1)
    for index in range(0, walk[3]):
        entry = edges + program * MOST + mask.tile(mask, walk, index, False)
        tl.store(entry, tl.load(entry) + 1)


# ---- functions of a user's own ----------------------------------------------------------------


def made(*data: Any, align: str = "top_left") -> Any:
    """A mask of a function, with what it captures."""
    return lambda body: saccade.masks.function(align=align)(body)(*data)


def whole(low: int, high: int, *shape: int) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(7))


@made(align="bottom_right")
def reassigned(batch, head, query_row, kv_row):
    row = query_row
    other = row = kv_row
    return row + other < 30


@made(-7, 3)
def negative_divisor(batch, head, query_row, kv_row, by, rest):
    return (query_row // by >= (kv_row - 50) // rest) | ((query_row - kv_row) % by == -3)


@made(5)
def products(batch, head, query_row, kv_row, by):
    return (query_row - 20) * (kv_row - by) > -(kv_row * -3)


@made(whole(0, 40, 9), whole(0, 90, 1, 64))
def short_tables(batch, head, query_row, kv_row, first, second):
    return (take(first, query_row - 15) <= kv_row) & (take(second, batch, kv_row + 2) > query_row)


@made(torch.where(whole(0, 9, 100) == 0, torch.nan, whole(0, 30, 100).sort().values * 1.0))
def spoilt_table(batch, head, query_row, kv_row, table):
    return ~(take(table, kv_row) > query_row * 0.5)


@made(whole(0, 5, 70).bool(), whole(0, 2, BATCH, HEADS).bool())
def truths(batch, head, query_row, kv_row, rows, of_head):
    return (take(rows, kv_row) & ~take(of_head, batch, head)) | ~take(rows, query_row)


@made(whole(-3, 30, HEADS), whole(0, 60, BATCH, 12), 4)
def by_batch_and_head(batch, head, query_row, kv_row, widths, ends, size):
    near = query_row - kv_row <= take(widths, head)
    return near & (kv_row < take(ends, batch, query_row // size)) & (kv_row != head)


@made(whole(0, 3, 8, 15), 8)
def blocks_of_numbers(batch, head, query_row, kv_row, table, size):
    return take(table, query_row // size, (kv_row + 5) // 6) == 1


@made(whole(-9, 9, 50, 60).float())
def pairs_of_numbers(batch, head, query_row, kv_row, table):
    return take(table, query_row - 3, kv_row) >= 0


@made()
def by_index(batch, head, query_row, kv_row):
    return (kv_row + batch * 20 <= query_row) | (kv_row // 16 == head + 1)


@made(-1)
def turned(batch, head, query_row, kv_row, sign):
    return (sign * query_row) // 8 == (sign * kv_row) // 8


@made(160)
def stripes(batch, head, query_row, kv_row, width):
    return (kv_row // width) % 2 == (query_row // width) % 2


OWN: dict[str, Mask] = {
    "reassigned": reassigned, "negative_divisor": negative_divisor, "products": products,
    "short_tables": short_tables, "spoilt_table": spoilt_table, "truths": truths,
    "by_batch_and_head": by_batch_and_head, "blocks_of_numbers": blocks_of_numbers,
    "pairs_of_numbers": pairs_of_numbers, "by_index": by_index, "turned": turned,
    "combined": reassigned | ~(short_tables & by_index), "stripes": stripes,
}  # fmt: skip

# (query, key) lengths with (query, kv) tiles
SIZES = [((40, 50), (16, 16)), ((33, 55), (32, 16)), ((40, 36), (16, 32)), ((1, 17), (16, 16))]


@functools.cache
def mask_of(name: str, lengths: tuple[int, int]) -> Mask:
    if name in OWN:
        return OWN[name]
    sizes: dict[str, Any] = {"batch": BATCH, "kv_heads": 1, "group": HEADS, "head_dim": 16}
    return as_mask(make_case(mask=name, lengths=(lengths,), seed=3, **sizes).mask)


def pairs(mask: Mask, lengths: tuple[int, int], batches: tuple[int, int] = (0, BATCH)) -> Tensor:
    """Which pairs are visible: [batch, head, query, key]."""
    query_len, kv_len = lengths
    sides = ((*batches, 0), (0, HEADS, 1), (0, query_len, 2), (0, kv_len, 3))
    at = Coordinates(
        *(language.index_range(*side) for side in sides),
        shift=kv_len - query_len,
    )
    seen = expressions.visible(mask.key, mask.captured, at)
    return seen.expand(batches[1] - batches[0], HEADS, query_len, kv_len)


def reduced(seen: Tensor, tiles: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Of each tile: is any pair visible, are all: [batch, head, query tiles, kv tiles]."""
    pads = (0, -seen.shape[3] % tiles[1], 0, -seen.shape[2] % tiles[0])
    filled = [torch.nn.functional.pad(seen, pads, value=value) for value in (False, True)]
    split = [part.unflatten(3, (-1, tiles[1])).unflatten(2, (-1, tiles[0])) for part in filled]
    return split[0].any(5).any(3), split[1].all(5).all(3)


def problem(mask: Mask, lengths: tuple[int, int]) -> tuple[Inputs, Variant, Geometry]:
    query = torch.zeros(BATCH, HEADS, lengths[0], 16)
    key = torch.zeros(BATCH, HEADS, lengths[1], 16)
    inputs = Inputs(query, key, key)
    variant = Variant(mask.key, "", mask.captured, Captured(), 1.0, 0.0)
    return inputs, variant, Geometry.of(inputs)


def judged(
    mask: Mask, lengths: tuple[int, int], tiles: tuple[int, int], over_keys: bool
) -> tuple[Tensor, Tensor]:
    """The verdicts of a kernel, laid out as `reduced`."""
    _, variant, geometry = problem(mask, lengths)
    (here, tile), (other, other_tile) = zip(geometry, tiles, strict=True)
    if not over_keys:
        here, tile, other, other_tile = other, other_tile, here, tile
    counts = -(-here.length // tile), -(-other.length // other_tile)
    verdicts = torch.full((BATCH, HEADS, *counts), -1, dtype=torch.int8)
    sides = [view(itself, None, NO_STRIDES, side, None) for side in (here, other)]
    kernel: Any = judge_all
    kernel[(here.programs(tile),)](
        *sides, mask_argument(variant, itself), verdicts, (HEADS, *counts),
        tile, other_tile, over_keys, triton.next_power_of_2(counts[1]),
    )  # fmt: skip
    verdicts = verdicts if over_keys else verdicts.mT
    assert bool((verdicts >= 0).all())
    return verdicts % 2 == 1, verdicts >= 2


@pytest.mark.parametrize("over_keys", [True, False], ids=["over_keys", "over_queries"])
@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"] + list(OWN))
def test_verdicts_are_sound(name: str, over_keys: bool) -> None:
    for lengths, tiles in SIZES:
        mask = mask_of(name, lengths)
        possible, certain = judged(mask, lengths, tiles, over_keys)
        some, every = reduced(pairs(mask, lengths), tiles)
        assert not bool((some & ~possible).any()), f"{lengths}: a visible pair would be skipped"
        assert not bool((certain & ~every).any()), f"{lengths}: a hidden pair would be seen"


EXACT = ["causal", "causal_top_left", "window", "key_lengths", "prefix", "documents", "blocks"]


@pytest.mark.parametrize("name", EXACT)
def test_built_in_masks_are_judged_as_intervals_judge_them(name: str) -> None:
    for lengths, tiles in SIZES:
        mask, (query_len, kv_len) = mask_of(name, lengths), lengths
        possible, certain = judged(mask, lengths, tiles, True)
        at = Coordinates(
            language.index_range(0, BATCH, 0), language.index_range(0, HEADS, 1),
            Interval.rows(0, query_len, tiles[0], 2), Interval.rows(0, kv_len, tiles[1], 3),
            kv_len - query_len,
        )  # fmt: skip
        wanted = intervals.classify(mask.key, mask.captured, at)
        whole_tiles = torch.arange(1, possible.shape[3] + 1) * tiles[1] <= kv_len
        assert torch.equal(possible, wanted.possible.expand(possible.shape))
        assert torch.equal(certain, wanted.certain.expand(possible.shape) & whole_tiles)
        if name not in ("documents", "prefix"):  # one truth, or two that cannot both be in doubt
            some, every = reduced(pairs(mask, lengths), tiles)
            assert torch.equal(possible, some)
            assert torch.equal(certain, every & whole_tiles)


def walked(
    inputs: Inputs, variant: Variant, geometry: Geometry, tiles: tuple[int, int], over_keys: bool,
    find: Any = packed_program,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """What `visit_all` finds."""
    plan = Planner(inputs, variant, geometry, tiles, over_keys)(inputs, variant)
    mask = mask_argument(variant, itself, plan.argument(itself))
    offsets = (inputs.cu_seqlens_q, inputs.cu_seqlens_k)
    sides: list[tuple[Extent, int, Any]] = list(zip(geometry, tiles, offsets, strict=True))
    (here, tile, mine), (other, other_tile, others) = sides if over_keys else sides[::-1]
    programs = here.programs(tile)
    places = torch.full((programs, 3), -1)
    clean = torch.zeros(programs, -(-other.length // other_tile), dtype=torch.int32)
    edges = torch.zeros_like(clean)
    kernel: Any = visit_all
    kernel[(programs,)](
        view(itself, None, NO_STRIDES, here, mine, find),
        view(itself, None, NO_STRIDES, other, others),
        mask, places, clean, edges, tile, other_tile, over_keys, clean.shape[1],
    )  # fmt: skip
    return places, clean, edges


def assert_visits(
    found: tuple[Tensor, Tensor, Tensor],
    seen: list[Tensor],
    tiles: tuple[int, int],
    over_keys: bool,
) -> None:
    """Every visible pair is visited, nothing twice, and clean tiles are whole and all visible."""
    rows_seen = 0
    for (batch, head, tile), clean, edges in zip(found[0].tolist(), *found[1:], strict=True):
        of_head = seen[batch][head] if over_keys else seen[batch][head].mT
        size, other_size = tiles if over_keys else tiles[::-1]
        strip = of_head[tile * size : (tile + 1) * size]
        rows_seen += strip.shape[0]
        visits = clean + edges
        assert int(visits.max()) <= 1
        if strip.shape[0] == 0:
            assert int(visits.max()) == 0
            continue
        for number in range(clean.shape[0]):
            pairs_there = strip[:, number * other_size : (number + 1) * other_size]
            if bool(pairs_there.any()):
                assert int(visits[number]) == 1, f"tile {number} of {(batch, head, tile)} skipped"
            if int(clean[number]):
                complete = pairs_there.shape[1] == other_size
                complete &= over_keys or pairs_there.shape[0] == size  # of keys, in both cases
                assert complete and bool(pairs_there.all()), f"tile {number} is not clean"
    assert rows_seen == sum(mask[0].shape[0 if over_keys else 1] * HEADS for mask in seen)


@pytest.mark.parametrize("over_keys", [True, False], ids=["over_keys", "over_queries"])
@pytest.mark.parametrize("name", list(MASKS) + list(OWN))
def test_walks_visit_what_is_visible(name: str, over_keys: bool) -> None:
    for lengths, tiles in SIZES[1:3]:
        mask = mask_of(name, lengths)
        found = walked(*problem(mask, lengths), tiles, over_keys)
        assert_visits(found, list(pairs(mask, lengths)), tiles, over_keys)


@pytest.mark.parametrize("over_keys", [True, False], ids=["over_keys", "over_queries"])
@pytest.mark.parametrize(
    "name", ["causal", "window", "key_lengths", "negative_divisor", "by_index", "stripes"]
)
def test_walks_along_many_tiles(name: str, over_keys: bool) -> None:
    """So many that spans of tiles are judged first (`visibility.found`)."""
    tiles, short, long = (16, 16), 20, 16 * 70 + 5
    lengths = (short, long) if over_keys else (long, short)
    mask = mask_of(name, lengths)
    found = walked(*problem(mask, lengths), tiles, over_keys)
    assert_visits(found, list(pairs(mask, lengths)), tiles, over_keys)


@pytest.mark.parametrize("find", [packed_program, packed_program_by_heads], ids=["rows", "heads"])
@pytest.mark.parametrize("sequences", [1, 33, 70])
def test_programs_of_many_packed_sequences(sequences: int, find: Any) -> None:
    """So many that a search for one of them takes several steps (`packing.packed_program`)."""
    sizes = torch.randint(0, 20, (sequences,), generator=torch.Generator().manual_seed(sequences))
    offsets = torch.cat((torch.zeros(1), sizes.cumsum(0))).int()
    rows = torch.zeros(int(offsets[-1]), HEADS, 16)
    inputs = Inputs(rows, rows, rows, None, None, offsets, offsets)
    mask = mask_of("causal", (20, 20))
    variant = Variant(mask.key, "", mask.captured, Captured(), 1.0, 0.0)
    found = walked(inputs, variant, Geometry.of(inputs), (16, 16), True, find)
    seen = [pairs(mask, (size, size), (0, 1))[0] for size in sizes.tolist()]
    assert_visits(found, seen, (16, 16), True)


SEQUENCES = ((20, 40), (0, 7), (17, 17), (5, 0), (32, 16))
OF_TWO = (
    "truths",
    "by_batch_and_head",
    "combined",
    "short_tables",
)  # their tables are of two batch entries


@pytest.mark.parametrize("over_keys", [True, False], ids=["over_keys", "over_queries"])
@pytest.mark.parametrize(
    "name", [*EXACT, "own_table", "mixed", *(name for name in OWN if name not in OF_TWO)]
)
def test_walks_of_packed_sequences(name: str, over_keys: bool) -> None:
    ends = [torch.tensor([0, *lengths]).cumsum(0).int() for lengths in zip(*SEQUENCES, strict=True)]
    sizes: dict[str, Any] = {"kv_heads": 1, "group": HEADS, "packed": True, "lengths": SEQUENCES}
    mask = OWN[name] if name in OWN else as_mask(make_case(mask=name, seed=4, **sizes).mask)
    query = torch.zeros(int(ends[0][-1]), HEADS, 16)
    key = torch.zeros(int(ends[1][-1]), HEADS, 16)
    inputs = Inputs(query, key, key, None, None, *ends)
    variant = Variant(mask.key, "", mask.captured, Captured(), 1.0, 0.0)
    found = walked(inputs, variant, Geometry.of(inputs), (16, 16), over_keys)
    seen = [pairs(mask, lengths, (n, n + 1))[0] for n, lengths in enumerate(SEQUENCES)]
    assert_visits(found, seen, (16, 16), over_keys)
