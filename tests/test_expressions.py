"""Keys there and back, captured values by kind, tables read by rows and by ranges."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade import expressions, masks
from saccade.expressions import Branch, Captured, Coordinates, Leaf
from saccade.language import index_range, take

# ---- keys -------------------------------------------------------------------------------------


def test_key_tells_functions_alignments_and_kinds():
    mask = masks.causal() & ~masks.window(2, 3, "top_left")
    assert mask.key == "(& causal:bottom_right# (~ window:top_left#ii))"
    tree = expressions.parse(mask.key)
    window = Leaf("window", "top_left", (("i", 0), ("i", 1)))
    wanted = Branch("&", (Leaf("causal", "bottom_right", ()), Branch("~", (window,))))
    assert tree == wanted


def test_key_does_not_hold_captured_values():
    assert masks.window(1, 2).key == masks.window(30, 40).key
    lengths = torch.tensor([3])
    assert masks.key_lengths(lengths).key == masks.key_lengths(lengths + 1).key
    assert masks.causal().key != masks.causal("top_left").key


def test_the_empty_key_has_no_tree():
    assert expressions.parse("") is None
    assert expressions.leaves(None) == []
    at = Coordinates(*(index_range(0, 2, dim) for dim in range(4)), shift=0)
    assert expressions.visible("", Captured(), at).all()


def test_what_is_left_behind_a_key_is_refused():
    with pytest.raises(ValueError, match="not the key of an expression"):
        expressions.parse("causal:top_left# causal:top_left#")


@st.composite
def trees(draw, depth=4):
    """A random key with the values it captures, leaf by leaf."""
    if depth > 0 and draw(st.booleans()):
        combiner = draw(st.sampled_from(["&", "|", "~", ">>"]))
        parts = [draw(trees(depth - 1)) for _ in range(expressions.COMBINERS[combiner])]
        key = " ".join(part[0] for part in parts)
        return f"({combiner} {key})", [values for part in parts for values in part[1]]
    values = draw(st.lists(st.sampled_from([7, 2.5, "tensor", 3, 0.5]), max_size=4))
    values = [torch.tensor(len(values)) if value == "tensor" else value for value in values]
    align = draw(st.sampled_from(expressions.ALIGNMENTS))
    return expressions.leaf_key("tests.leaf-2", align, values), [values]


@settings(deadline=None, max_examples=100, derandomize=True)
@given(trees())
def test_every_leaf_finds_its_captured_values(tree):
    key, by_leaf = tree
    captured = Captured()
    for values in by_leaf:
        captured = captured.joined(expressions.capture(values))
    found = [leaf.data(captured) for leaf in expressions.leaves(expressions.parse(key))]
    assert len(found) == len(by_leaf)
    for values, wanted in zip(found, by_leaf, strict=True):
        assert len(values) == len(wanted)
        assert all(a is b or a == b for a, b in zip(values, wanted, strict=True))


def test_kinds():
    assert [expressions.kind_of(v) for v in (torch.ones(1), 3, 2.0)] == ["t", "i", "f"]
    for value in ("3", None, [1], 1j):
        with pytest.raises(TypeError, match="tensors, ints or floats"):
            expressions.kind_of(value)


# ---- take -------------------------------------------------------------------------------------

TABLE = torch.arange(2 * 3 * 4 * 5).reshape(2, 3, 4, 5)


def rows(*stops: int) -> list[torch.Tensor]:
    return [index_range(0, stop, dim) for dim, stop in enumerate(stops)]


def test_take_reads_one_entry_a_pair():
    batch, head, query_row, kv_row = rows(2, 3, 4, 5)
    assert torch.equal(take(TABLE, batch, head, query_row, kv_row), TABLE)
    assert torch.equal(take(TABLE[0, 0], query_row, kv_row), TABLE[0, 0].view(1, 1, 4, 5))
    assert torch.equal(take(TABLE[:, 0, 0], batch, kv_row), TABLE[:, 0, 0].view(2, 1, 1, 5))
    transposed = take(TABLE[0, 0].T, kv_row, query_row)
    assert torch.equal(transposed.expand(1, 1, 4, 5), TABLE[0, 0].view(1, 1, 4, 5))
    diagonal = take(TABLE[0, 0, :, :4], query_row, query_row)
    assert torch.equal(diagonal.flatten(), TABLE[0, 0].diagonal())


@settings(deadline=None, max_examples=80, derandomize=True)
@given(
    st.lists(st.integers(0, 3), min_size=1, max_size=4),
    st.lists(st.booleans(), min_size=4, max_size=4),
    st.lists(st.integers(0, 1), min_size=4, max_size=4),
)
def test_ranges_read_what_single_rows_read(dims, broadcast, starts):
    sizes = (2, 3, 4, 5)
    shape = [1 if broadcast[k] else sizes[dim] for k, dim in enumerate(dims)]
    table = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    ranges = [index_range(starts[dim], sizes[dim], dim) for dim in range(4)]
    known = take(table, *(ranges[dim] for dim in dims))
    gathered = take(table, *(ranges[dim].clone() for dim in dims))
    full = [sizes[dim] - starts[dim] for dim in range(4)]
    assert torch.equal(known.expand(full), gathered.expand(full))
    for at in torch.cartesian_prod(*(torch.arange(size) for size in full)).tolist():
        entry = [0 if broadcast[k] else at[dim] + starts[dim] for k, dim in enumerate(dims)]
        assert known.expand(full)[tuple(at)] == table[tuple(entry)]


def test_take_by_computed_rows():
    _, _, query_row, kv_row = rows(1, 1, 4, 5)
    line = torch.tensor([10, 11, 12])
    found = take(line, (query_row + kv_row) % 3)
    wanted = [[10 + (i + j) % 3 for j in range(5)] for i in range(4)]
    assert found.squeeze().tolist() == wanted


def test_a_dimension_of_size_1_serves_every_index():
    batch, head, query_row, kv_row = rows(2, 3, 4, 5)
    table = TABLE[:1, :, :1]
    found = take(table, batch, head, query_row, kv_row).expand(2, 3, 4, 5)
    assert torch.equal(found, table.expand(2, 3, 4, 5))
    assert take(torch.tensor([7]), query_row + 100).unique().tolist() == [7]


def test_take_wants_an_index_for_each_dimension():
    _, _, query_row, kv_row = rows(1, 1, 4, 5)
    with pytest.raises(ValueError, match=r"take: a table of 1 dimensions .* got 2"):
        take(torch.ones(4), query_row, kv_row)


@pytest.mark.parametrize("kind", ["range", "computed"])
def test_take_beyond_the_table_reads_its_nearest_entry(kind):
    row = index_range(0, 6, 3)
    row = row if kind == "range" else row - 1
    expected = [0, 1, 2, 3, 3, 3] if kind == "range" else [0, 0, 1, 2, 3, 3]
    assert take(torch.arange(4), row).flatten().tolist() == expected


def test_rows_are_shifted_for_the_bottom_right_only():
    at = Coordinates(*rows(1, 1, 2, 5), shift=3)
    right, left = Leaf("x", "bottom_right", ()).place(at), Leaf("x", "top_left", ()).place(at)
    assert right[2].flatten().tolist() == [3, 4]
    assert left[2].flatten().tolist() == [0, 1]
    assert right[3] is left[3] is at.kv_row
