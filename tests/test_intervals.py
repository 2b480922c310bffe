"""What a mask makes of whole tiles: never wrong, and exact where it matters."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade import expressions, intervals, masks
from saccade.expressions import Coordinates
from saccade.intervals import Interval
from saccade.language import index_range
from saccade.masks import Mask


class Grid(NamedTuple):
    """The rows of a problem, cut into tiles."""

    batch: int = 2
    heads: int = 2
    query_len: int = 12
    kv_len: int = 12
    query_tile: int = 4
    kv_tile: int = 4

    def rows(self) -> Coordinates:
        sizes = (self.batch, self.heads, self.query_len, self.kv_len)
        rows = [index_range(0, size, dim) for dim, size in enumerate(sizes)]
        return Coordinates(*rows, shift=self.kv_len - self.query_len)

    def tiles(self) -> Coordinates:
        return self.rows()._replace(
            query_row=Interval.rows(0, self.query_len, self.query_tile, 2),
            kv_row=Interval.rows(0, self.kv_len, self.kv_tile, 3),
        )

    def fold(self, visible: torch.Tensor, *, every: bool) -> torch.Tensor:
        """Whether any (or every) pair of each tile is visible."""
        visible = visible.expand(self.batch, self.heads, self.query_len, self.kv_len)
        judge = torch.all if every else torch.any
        rows = [judge(part, 2) for part in visible.split(self.query_tile, 2)]
        tiles = [judge(part, 3) for part in torch.stack(rows, 2).split(self.kv_tile, 3)]
        return torch.stack(tiles, 3)


def verdicts(
    mask: Mask, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Possible, certain, and what is true of them, by looking at every pair."""
    truth = intervals.classify(mask.key, mask.captured, grid.tiles())
    visible = expressions.visible(mask.key, mask.captured, grid.rows())
    some, every = grid.fold(visible, every=False), grid.fold(visible, every=True)
    return truth.possible.expand_as(some), truth.certain.expand_as(every), some, every


def check_sound(mask: Mask, grid: Grid) -> None:
    possible, certain, some, every = verdicts(mask, grid)
    assert not (some & ~possible).any(), "a tile with a visible pair was called impossible"
    assert not (certain & ~every).any(), "a tile with a hidden pair was called certain"


def check_tight(mask: Mask, grid: Grid) -> None:
    possible, certain, some, every = verdicts(mask, grid)
    assert torch.equal(possible, some)
    assert torch.equal(certain, every)


# ---- exact where it matters -------------------------------------------------------------------

GRIDS = [
    Grid(),
    Grid(query_len=12, kv_len=20, query_tile=5, kv_tile=3),
    Grid(query_len=19, kv_len=7, query_tile=3, kv_tile=2),
    Grid(query_len=9, kv_len=9, query_tile=100, kv_tile=1),
    Grid(query_len=1, kv_len=16, query_tile=1, kv_tile=4),
]


def name_of(grid: Grid) -> str:
    return f"{grid.query_len}x{grid.kv_len}-in-{grid.query_tile}x{grid.kv_tile}"


each_grid = pytest.mark.parametrize("grid", GRIDS, ids=name_of)


@each_grid
@pytest.mark.parametrize("align", expressions.ALIGNMENTS)
def test_causal_and_window_are_exact(grid, align):
    check_tight(masks.causal(align), grid)
    check_tight(~masks.causal(align), grid)
    for left, right in ((0, 0), (3, 0), (1, 2), (4, 9), (50, 50)):
        check_tight(masks.window(left, right, align), grid)


@each_grid
def test_key_lengths_are_exact(grid):
    for lengths in ([0, grid.kv_len], [1, grid.kv_len + 5], [grid.kv_len - 1, 4], [3]):
        check_tight(masks.key_lengths(torch.tensor(lengths)), grid)


@each_grid
def test_sorted_documents_are_exact(grid):
    query_ids = torch.arange(grid.query_len) * 3 // grid.query_len
    kv_ids = torch.arange(grid.kv_len) * 3 // max(grid.kv_len, 3)
    both = torch.stack([query_ids, query_ids // 2]), torch.stack([kv_ids, kv_ids // 2])
    check_tight(masks.documents(*both), grid)
    check_tight(~masks.documents(*both), grid)


@pytest.mark.parametrize("factor", [1, 2])
def test_blocks_that_tiles_divide_are_exact(factor):
    grid = Grid(query_len=22, kv_len=30, query_tile=4, kv_tile=6)
    layout = torch.randint(0, 2, (2, 2, -(-22 // (4 * factor)), -(-30 // (6 * factor))))
    check_tight(masks.blocks(layout.bool(), (4 * factor, 6 * factor)), grid)


@each_grid
def test_dense_tensors_are_exact(grid):
    generator = torch.Generator().manual_seed(0)
    for shape in ((2, 2, grid.query_len, grid.kv_len), (2, 1, grid.query_len, 1), (grid.kv_len,)):
        table = torch.randint(0, 5, shape, generator=generator) > 0
        check_tight(masks.dense(table), grid)
        check_tight(~masks.dense(table), grid)
    check_tight(masks.dense(torch.zeros(grid.query_len, grid.kv_len).bool()), grid)
    check_tight(masks.dense(torch.ones(grid.query_len, grid.kv_len).bool()), grid)


def test_no_mask_is_certain():
    truth = intervals.classify("", masks.Mask("").captured, Grid().tiles())
    assert truth.certain.all()


def test_a_mask_that_varies_by_batch_only_is_judged_once_for_all_rows():
    truth = intervals.classify(*_parts(masks.key_lengths(torch.tensor([3, 9]))), Grid().tiles())
    assert truth.possible.shape == (2, 1, 1, 3)


def _parts(mask: Mask) -> tuple[Any, Any]:
    return mask.key, mask.captured


# ---- never wrong: arithmetic, then random functions --------------------------------------------


def arithmetic() -> dict[str, Callable[[Any, Any], Any]]:
    return {
        "sum": lambda i, j: i + j,
        "difference": lambda i, j: i - j,
        "number less rows": lambda i, j: 5 - i,
        "negative": lambda i, j: -(i - 3),
        "product": lambda i, j: (i - 4) * (j - 5),
        "multiple": lambda i, j: (i - 4) * -3,
        "quotient": lambda i, j: (i - j) // 3,
        "remainder": lambda i, j: (i - j) % 5,
    }


@each_grid
@pytest.mark.parametrize("name", arithmetic())
def test_arithmetic_holds_every_result(grid, name):
    """The bounds hold every number of their tile, and all but remainders meet them."""
    compute, rows, tiles = arithmetic()[name], grid.rows(), grid.tiles()
    numbers = compute(rows.query_row, rows.kv_row).expand(1, 1, grid.query_len, grid.kv_len)
    found = compute(tiles.query_row, tiles.kv_row)
    for row, part in enumerate(numbers.split(grid.query_tile, 2)):
        for column, tile in enumerate(part.split(grid.kv_tile, 3)):
            at = (0, 0, min(row, found.low.shape[2] - 1), min(column, found.low.shape[3] - 1))
            low, high = int(found.low[at]), int(found.high[at])
            assert low <= int(tile.min())
            assert high >= int(tile.max())
            assert name == "remainder" or (low, high) == (int(tile.min()), int(tile.max()))


Program = tuple[Any, ...]
running: list[Program] = []


@masks.function(align="bottom_right")
def interpreted(batch, head, query_row, kv_row, lengths, by_row, by_key, flags):
    """Run the program that the test has drawn: one registered function serves them all."""
    rows = {"b": batch, "h": head, "i": query_row, "j": kv_row}
    read = {
        "lengths": lambda: masks.take(lengths, batch),
        "by_row": lambda: masks.take(by_row, head, query_row % by_row.shape[1]),
        "by_key": lambda: masks.take(by_key, batch, kv_row),
        "flags": lambda: masks.take(flags, batch, head, query_row % 5 // 2, kv_row // 3),
    }
    return evaluate(running[-1], rows, read)


def evaluate(program: Program, rows: Any, read: Any) -> Any:
    word, *parts = program
    if word == "row":
        return rows[parts[0]]
    if word == "take":
        return read[parts[0]]()
    if word == "number":
        return parts[0]
    values = [evaluate(part, rows, read) for part in parts]
    return OPERATIONS[word](*values)


OPERATIONS: dict[str, Any] = {
    "+": lambda a, b: a + b, "-": lambda a, b: a - b, "*": lambda a, b: a * b,
    "//": lambda a, b: a // b, "%": lambda a, b: a % b, "neg": lambda a: -a,
    "<": lambda a, b: a < b, "<=": lambda a, b: a <= b, ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b, "==": lambda a, b: a == b, "!=": lambda a, b: a != b,
    "&": lambda a, b: a & b, "|": lambda a, b: a | b, "~": lambda a: ~a, "^": lambda a, b: a ^ b,
}  # fmt: skip

rows_or_entries = st.one_of(
    st.tuples(st.just("row"), st.sampled_from("bhijij")),
    st.tuples(st.just("take"), st.sampled_from(["lengths", "by_row", "by_key"])),
)
constants = st.tuples(st.just("number"), st.integers(-6, 14))
divisors = st.tuples(st.just("number"), st.integers(1, 7))
numbers = st.recursive(
    rows_or_entries,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("+-*"), inner, st.one_of(inner, constants)),
        st.tuples(st.sampled_from("+-*"), constants, inner),
        st.tuples(st.sampled_from(["//", "%"]), inner, divisors),
        st.tuples(st.just("neg"), inner),
    ),
    max_leaves=4,
)
comparisons = st.tuples(
    st.sampled_from(["<", "<=", ">", ">=", "==", "!="]), numbers, st.one_of(numbers, constants)
)
programs = st.recursive(
    st.one_of(comparisons, st.just(("take", "flags"))),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from("&|"), inner, inner), st.tuples(st.just("~"), inner)
    ),
    max_leaves=4,
)
grids = st.builds(
    Grid, st.integers(1, 2), st.integers(1, 2), st.integers(1, 14), st.integers(1, 14),
    st.integers(1, 6), st.integers(1, 6),
)  # fmt: skip


def captured_for(grid: Grid, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def integers(*shape: int) -> torch.Tensor:
        return torch.randint(-2, 9, shape, generator=generator)

    flags = integers(grid.batch, 1, 3, -(-grid.kv_len // 3)) > 2
    return [integers(grid.batch), integers(grid.heads, 7), integers(1, grid.kv_len), flags]


@settings(deadline=None, max_examples=500, derandomize=True)
@given(programs, grids, st.integers(0, 50))
def test_random_functions_are_never_judged_wrongly(program, grid, seed):
    running.append(program)
    try:
        check_sound(interpreted(*captured_for(grid, seed)), grid)
    finally:
        running.pop()


@settings(deadline=None, max_examples=60, derandomize=True)
@given(grids, st.integers(0, 99), st.integers(0, 5), st.integers(0, 5))
def test_combined_masks_are_never_judged_wrongly(grid, seed, left, right):
    generator = torch.Generator().manual_seed(seed)
    ids = [
        torch.randint(0, 4, (grid.batch, n), generator=generator)
        for n in (grid.query_len, grid.kv_len)
    ]
    lengths = torch.randint(0, grid.kv_len + 1, (grid.batch,), generator=generator)
    local, known = masks.window(left, right), masks.key_lengths(lengths)
    for mask in (
        (masks.causal() & masks.documents(*ids)) | known,
        ~(local | ~known) & masks.causal("top_left"),
        (local & ~masks.documents(*ids)) | ~(masks.prefix(lengths) & local),
    ):
        check_sound(mask, grid)


@masks.function
def same_side(batch, head, query_row, kv_row):
    return (query_row < 4) == (kv_row < 4)


@masks.function
def other_side(batch, head, query_row, kv_row):
    return (query_row < 4) != (kv_row < 4)


@masks.function
def same_flag(batch, head, query_row, kv_row, flags):
    return masks.take(flags, query_row) == masks.take(flags, kv_row)


@masks.function
def one_side(batch, head, query_row, kv_row):
    return (query_row < 4) ^ (kv_row < 4)


@masks.function
def half_steps(batch, head, query_row, kv_row):
    return (query_row * 0.5 + kv_row) % 2 > 1


@masks.function
def odd_step(batch, head, query_row, kv_row):
    return (query_row + kv_row) % 2.5 > 1.5


@masks.function
def large_entries(batch, head, query_row, kv_row, table):
    return masks.take(table, kv_row) > 0.5


@masks.function
def product(batch, head, query_row, kv_row):
    return (query_row <= kv_row) * (kv_row < 9)


@masks.function
def neighbours(batch, head, query_row, kv_row):
    return (kv_row ^ 1) == query_row


FLAGS = torch.arange(12) % 5 < 2
SUBTLE = {
    "bools compared": same_side(),
    "bools that differ": other_side(),
    "flags compared": same_flag(FLAGS),
    "exclusive or": one_side(),
    "remainder of halves": half_steps(),
    "remainder by a fraction": odd_step(),
    "NaN in a table": large_entries(torch.ones(12).index_fill(0, torch.tensor([5]), torch.nan)),
    "product of bools": product(),
    "bits of rows": neighbours(),
}


@pytest.mark.parametrize("name", SUBTLE)
def test_subtle_functions_are_never_judged_wrongly(name):
    for tile in (1, 2, 3, 5, 12):
        check_sound(SUBTLE[name], Grid(query_tile=tile, kv_tile=tile))


@masks.function
def previous_key(batch, head, query_row, kv_row, table):
    return masks.take(table, kv_row - 1)


@masks.function
def next_key(batch, head, query_row, kv_row, table):
    return masks.take(table, kv_row + 1)


@pytest.mark.parametrize(
    ("function", "visible"), [(previous_key, -1), (next_key, 0)], ids=["below-0", "beyond-the-end"]
)
def test_index_outside_a_table_means_the_same_on_every_implementation(function, visible):
    table = torch.zeros(300, dtype=torch.bool)
    table[visible] = True
    outcomes = []
    for implementation in ("reference", "cpu"):
        rows = torch.zeros(1, 1, 300, 4)
        try:
            arguments = {"mask": function(table), "implementation": implementation}
            outcomes.append(saccade.attention(rows, rows, torch.eye(300)[None, None], **arguments))
        except IndexError:
            outcomes.append(torch.tensor(torch.nan))  # refused: fine, if both refuse
    assert torch.equal(outcomes[0].isnan(), outcomes[1].isnan())
    torch.testing.assert_close(outcomes[0], outcomes[1], equal_nan=True)


def test_rows_have_no_single_truth_value():
    tiles = Grid().tiles()
    with pytest.raises(TypeError, match="no single truth value"):
        bool(tiles.query_row)
    with pytest.raises(TypeError):
        bool(tiles.query_row < tiles.kv_row)
