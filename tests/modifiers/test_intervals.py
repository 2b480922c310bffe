"""Classes of whole tiles on tensors and in kernels: never wrong, alike, exact where they can be."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from interpreted import classified_by_kernel, coordinates, mask_of_kernel, reduced
from random_masks import SHAPE, made, programs
from torch import Tensor
from written_functions import MASKS
from written_functions import SHAPE as WRITTEN

from saccade import masks
from saccade.masks import Mask, as_mask
from saccade.modifiers import evaluate, intervals
from saccade.modifiers.expression import parse, slots
from saccade.modifiers.form import form_of
from saccade.modifiers.intervals import rows
from saccade.modifiers.triton_source import tile_function
from saccade.testing import make_case

in_interpreter = pytest.mark.skipif(
    torch.cuda.is_available(), reason="runs in Triton's interpreter"
)
often = settings(
    deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)  # what is drawn is deep
TILES = [(4, 4), (5, 3), (1, 8), (16, 16)]


def visible(mask: Mask, shape: tuple[int, ...] = SHAPE) -> Tensor:
    return evaluate.visible(mask.key, mask.captured, coordinates(shape)).expand(shape)


def classified(
    mask: Mask,
    tiles: tuple[int, int],
    shape: tuple[int, ...] = SHAPE,
    most_spans: int | None = None,
) -> tuple[Tensor, Tensor]:
    at = coordinates(shape)._replace(
        query_row=rows(0, shape[2], tiles[0], 2), kv_row=rows(0, shape[3], tiles[1], 3)
    )
    verdict = intervals.classify(mask.key, mask.captured, at, most_spans)
    counts = (shape[0], shape[1], -(-shape[2] // tiles[0]), -(-shape[3] // tiles[1]))
    return verdict.possible.expand(counts), verdict.certain.expand(counts)


def check_sound(verdict: tuple[Tensor, Tensor], seen: Tensor, tiles: tuple[int, int]) -> None:
    some, every = reduced(seen, tiles)
    assert not bool((some & ~verdict[0]).any()), "a visible pair would be skipped"
    assert not bool((verdict[1] & ~every).any()), "a hidden pair would be seen"


def made_or_refused(program: Any, align: str) -> Mask | None:
    """A mask; None of what is refused when it is made: kinds that do not go together."""
    try:
        return made(program, align)
    except TypeError as error:
        known = ("joins", "read at a real", "takes a bool result", "takes a truth", "divides by 0")
        assert any(word in str(error) for word in known), error
        return None


aligned = st.sampled_from(["top_left", "bottom_right"])


@settings(often, max_examples=400)
@given(programs, aligned, st.sampled_from(TILES))
def test_random_masks_are_never_classified_wrongly(program, align, tiles):
    mask = made_or_refused(program, align)
    if mask is not None:
        check_sound(classified(mask, tiles), visible(mask), tiles)


@in_interpreter
@settings(often, max_examples=150)
@given(programs, aligned)
def test_random_masks_are_the_same_in_kernels(program, align):
    mask = made_or_refused(program, align)
    if mask is not None:
        assert torch.equal(mask_of_kernel(mask, SHAPE), visible(mask))


def check_alike(
    mask: Mask, tiles: tuple[int, int], over_keys: bool, seen: Tensor, coarse: bool = False
) -> None:
    """Kernels classify as intervals on tensors do, and never wrongly. Tiles that the lengths cut
    short are never certain in kernels; reads that no row of a tile bounds say "perhaps" there."""
    by_kernel = classified_by_kernel(mask, SHAPE, tiles, over_keys, coarse)
    check_sound(by_kernel, seen, tiles)
    possible, certain = classified(mask, tiles, most_spans=1 if coarse else 2)
    queries, keys = (
        torch.arange(1, count + 1) * tile <= length
        for count, tile, length in zip(possible.shape[2:], tiles, SHAPE[2:], strict=True)
    )
    whole = keys if over_keys else queries[:, None] & keys
    assert torch.equal(by_kernel[0], possible), "possible"
    assert torch.equal(by_kernel[1], certain & whole), "certain"
    exact = classified(mask, tiles)
    check_sound(exact, seen, tiles)
    assert not bool((exact[0] & ~possible).any()), "possible where a bound says that it is not"
    assert not bool((certain & ~exact[1]).any()), "not certain where a bound says that it is"


@in_interpreter
@settings(often, max_examples=100)
@given(programs, aligned, st.sampled_from([(4, 4), (2, 8), (8, 1)]), st.booleans(), st.booleans())
def test_random_masks_are_classified_alike_by_kernels(program, align, tiles, over_keys, coarse):
    mask = made_or_refused(program, align)
    if mask is not None:
        check_alike(mask, tiles, over_keys, visible(mask), coarse)


# ---- what was classified wrongly once, or could be -----------------------------------------------

nonfinite = torch.ones(18).index_fill(0, torch.tensor([5]), torch.nan)
limits = torch.tensor([1.0, -torch.inf, 3.0, torch.nan, torch.inf, 2.0]).repeat(3)
truths = torch.arange(18) % 5 < 2
most = torch.full((18,), 2**31 - 1, dtype=torch.int32)
least = torch.tensor([3, -(2**31), 5] * 6, dtype=torch.int32)
least_of_all = torch.tensor([3, -(2**63), 5] * 6)
cube = (torch.arange(18 * 18 * 3) % 97 < 60).view(18, 18, 3)
square = cube[..., 0].triu(-4)
narrow = torch.tensor([3, -128, 127] * 6, dtype=torch.int8)
unsigned = torch.tensor([3, 255, 128] * 6, dtype=torch.uint8)
BILLION, HUGE, LEAST = 10**9, 2**31 - 5, -(2**31)

SUBTLE: dict[str, Any] = {
    "truths compared": lambda b, h, q, k: (q < 4) == (k < 4),
    "truths that differ": lambda b, h, q, k: (q < 4) != (k < 4),
    "entries compared": lambda b, h, q, k: truths[q] == truths[k],
    "exclusive or": lambda b, h, q, k: (q < 4) ^ (k < 4),
    "rests of halves": lambda b, h, q, k: (q * 0.5 + k) % 2 > 1,
    "rests by a fraction": lambda b, h, q, k: (q + k) % 2.5 > 1.5,
    "NaN in a table": lambda b, h, q, k: nonfinite[k] > 0.5,
    "NaN in a table, turned": lambda b, h, q, k: ~(nonfinite[k] > 0.5),
    "NaN within all numbers": lambda b, h, q, k: (limits[k] <= torch.inf) | (limits[q] == k),
    "NaN within a function": lambda b, h, q, k: torch.sigmoid(limits[k]) >= 0,
    "NaN made whole": lambda b, h, q, k: nonfinite[k].int() < 0,
    "infinity made whole": lambda b, h, q, k: (limits[k] * 2).long() > q,
    "logarithms below 0": lambda b, h, q, k: torch.log(q - 3) < 2,
    "roots below 0": lambda b, h, q, k: ~(torch.sqrt(k - 5) < 9),
    "0 / 0": lambda b, h, q, k: (q - 3) / 0 <= torch.inf,
    "infinity times 0": lambda b, h, q, k: limits[q] * (k - 4) < 1e30,
    "infinity less itself": lambda b, h, q, k: limits[q] - limits[k] <= 0,
    "products of large numbers": lambda b, h, q, k: q * BILLION < k * 2 * BILLION,
    "sums of large numbers": lambda b, h, q, k: q + HUGE + HUGE * (k // k.clamp(min=1)) > 2**31,
    "a row less the least number": lambda b, h, q, k: (b - LEAST > 0) & (h + LEAST - 9 < q),
    "sums of large entries": lambda b, h, q, k: most[q] + most[k] > q,
    "differences of large entries": lambda b, h, q, k: least[q] - most[k] < k,
    "magnitude of the least": lambda b, h, q, k: abs(least[k]) > q,
    "the least turned": lambda b, h, q, k: -least[k] > q,
    "magnitude of the least of all": lambda b, h, q, k: abs(least_of_all[k]) >= 0,
    "narrow entries": lambda b, h, q, k: -narrow[k] + narrow[q] * 2 > q,
    "magnitude of narrow entries": lambda b, h, q, k: abs(narrow[k]) > 100,
    "unsigned entries": lambda b, h, q, k: unsigned[q] - unsigned[k] < narrow[k],
    "unsigned entries turned": lambda b, h, q, k: (-unsigned[k] < q) & (~unsigned[q] < 0),
    "product of truths": lambda b, h, q, k: (q <= k).int() * (k < 9) == 1,
    "entries that count from the end": lambda b, h, q, k: truths[k - 7] & (narrow[q - 13] < 9),
    "entries of rows of the batch": lambda b, h, q, k: truths[k * 0 + b * 5 + q] | (k < 2),
    "entries from each batch's first": lambda b, h, q, k: most[q + least[b] % 4] > least[k + b - 9],
    "entries along rows twice": lambda b, h, q, k: square[q, k] | square[q, q - 3],
    "entries along three dimensions": lambda b, h, q, k: cube[q, k, q.clamp(max=2)] & (k > 3),
    "entries of batches": lambda b, h, q, k: (unsigned[b + 4 * h] * 2 - q) % 3 < narrow[b] // 2 + k,
    "bits of rows": lambda b, h, q, k: (k ^ 1) == q,
    "truth that nothing bounds": lambda b, h, q, k: truths[(q * k) % 18] & truths[k],
    "shifted": lambda b, h, q, k: (1 << (q % 3)) * (k >> 1) > 9,
    "chosen by what varies": lambda b, h, q, k: torch.where(q < 5, k, -q) >= torch.where(
        k < 9, 3, q
    ),
    "by a row": lambda b, h, q, k: (k - 20) // (q + 1) < (k - 20) % (q + 1) - 9,
    "of an entry of rows": lambda b, h, q, k: truths[most[q] % (k + 2)],
}  # fmt: skip


@in_interpreter
@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_masks_are_never_classified_wrongly(name):
    mask = as_mask(SUBTLE[name])
    seen = visible(mask)
    for tiles in ((1, 1), (2, 3), (5, 5), (13, 18)):
        check_sound(classified(mask, tiles), seen, tiles)
    assert torch.equal(mask_of_kernel(mask, SHAPE), seen)
    check_alike(mask, (4, 4), True, seen)
    check_alike(mask, (2, 8), False, seen)
    check_alike(mask, (4, 4), True, seen, coarse=True)
    for most in (0, 1, 2):
        text = tile_function("classify", parse(mask.key), slots(mask.key), most)
        assert text.spans_read <= most


LARGE = [sign * 2**bits + by for sign in (-1, 1) for bits in (30, 31) for by in (-2, -1, 0, 1, 2)]
MEETS_A_NUMBER: dict[str, Any] = {
    "less": lambda b, h, q, k, n: q - n > k,
    "more": lambda b, h, q, k, n: n + q - 9 < k,
    "from it": lambda b, h, q, k, n: (n - q < k - 3) | (n - k > q),
    "turned": lambda b, h, q, k, n: (-n > q) & (abs(n + 0 * k) > 5),
    "chosen": lambda b, h, q, k, n: torch.where(q < 3, n, k) - 4 < torch.minimum(k - q, n + k),
}


@in_interpreter
@pytest.mark.parametrize("name", MEETS_A_NUMBER)
def test_rows_meet_numbers_of_about_32_bits(name):
    """Whether a number stays what it is (a mask made for a call) or may change (in a graph)."""
    function, shape = MEETS_A_NUMBER[name], (1, 2, 5, 7)
    form = form_of(function, "top_left", ("i",))
    for number in LARGE:
        made = masks.function(function)(number)
        for mask in (made, Mask(form.key, form.captured([number]))):
            seen = visible(mask, shape)
            assert torch.equal(mask_of_kernel(mask, shape), seen)
            check_sound(classified_by_kernel(mask, shape, (4, 4), True), seen, (4, 4))


def test_a_table_without_entries_is_classified():
    empty = torch.zeros(0, dtype=torch.long)
    mask = as_mask(lambda b, h, q, k: masks.take(empty, k) > q)
    shape = (2, 2, 3, 0)
    assert classified(mask, (2, 2), shape)[0].shape == (2, 2, 2, 0)


# ---- how often classes are exact -------------------------------------------------------------


def exactness(verdict: tuple[Tensor, Tensor], seen: Tensor, tiles: tuple[int, int]) -> Tensor:
    """How many tiles are all visible or all hidden, and how many of them are told apart."""
    some, every = reduced(seen, tiles)
    alike = (every | ~some).sum()
    found = (verdict[1] & every).sum() + (~verdict[0] & ~some).sum()
    return torch.stack([found, alike])


@in_interpreter
def test_most_tiles_of_written_masks_are_told_apart():
    """Of those that are all alike 89 of 100 on the CPU; in kernels 75, where the last tile of keys
    is never called certain, nor is a table read at what no row bounds."""
    totals = torch.zeros(2, 2)
    for number, function in enumerate(MASKS.values()):
        mask = as_mask(function)
        seen = visible(mask, WRITTEN)
        totals[0] += exactness(classified(mask, (3, 3), WRITTEN), seen, (3, 3))
        if number % 3 == 0:  # they take long to interpret
            totals[1] += exactness(classified_by_kernel(mask, WRITTEN, (4, 4), True), seen, (4, 4))
    shares = totals[:, 0] / totals[:, 1]
    assert shares[0] > 0.89 and shares[1] > 0.75, shares


# ---- exact: the built-in masks, and what they join ---------------------------------------------


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
        possible, certain, some, every = verdicts(mask, grid)
        assert not (some & ~possible).any() and not (certain & ~every).any()


# ---- in kernels -------------------------------------------------------------------------------

BUILT_IN = ["causal", "causal_top_left", "window", "key_lengths", "prefix", "documents", "blocks"]
# (query, key) lengths with (query, kv) tiles
SIZES = [((40, 50), (16, 16)), ((33, 55), (32, 16)), ((40, 36), (16, 32)), ((1, 17), (16, 16))]


@in_interpreter
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
