"""Each mask against a double loop over pairs, written from its docstring in plain Python."""

import itertools
import sys
from collections.abc import Callable
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import saccade
from saccade import masks
from saccade.masks import Mask

IMPLEMENTATIONS = ["reference", "cpu"]
Rule = Callable[[int, int, int, int], bool]
Sizes = tuple[int, int, int, int]  # batch, heads, query rows, key rows

SIZES: list[Sizes] = [(2, 3, 7, 7), (2, 2, 5, 9), (2, 2, 9, 5), (1, 1, 1, 6), (1, 2, 6, 1)]
IDS = ["square", "more-keys", "more-queries", "one-query", "one-key"]


def seen(mask: Any, sizes: Sizes, implementation: str = "cpu", **more: Any) -> torch.Tensor:
    """The visible pairs, as the public call shows them: equal weights of one-hot values."""
    batch, heads, query_len, kv_len = sizes
    query, key = torch.zeros(batch, heads, query_len, 2), torch.zeros(batch, heads, kv_len, 2)
    value = torch.eye(kv_len).expand(batch, heads, kv_len, kv_len)
    output = saccade.attention(query, key, value, mask=mask, implementation=implementation, **more)
    assert isinstance(output, torch.Tensor)
    return output > 0


def expected(rule: Rule, sizes: Sizes) -> torch.Tensor:
    batch, heads, query_len, kv_len = sizes
    table = torch.empty(sizes, dtype=torch.bool)
    for b, h in itertools.product(range(batch), range(heads)):
        for i, j in itertools.product(range(query_len), range(kv_len)):
            table[b, h, i, j] = bool(rule(b, h, i, j))
    return table


def check(mask: Any, rule: Rule, sizes: Sizes) -> None:
    truth = expected(rule, sizes)
    for implementation in IMPLEMENTATIONS:
        assert torch.equal(seen(mask, sizes, implementation), truth), implementation
    tiny = saccade.KernelConfig(query_tile=2, kv_tile=3)
    assert torch.equal(seen(mask, sizes, "cpu", config=tiny), truth), "cpu in small tiles"


def place(align: str, sizes: Sizes) -> int:
    """What is added to a query row to stand beside its key row."""
    return sizes[3] - sizes[2] if align == "bottom_right" else 0


def random_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(sum(shape)))


def random_bools(*shape: int) -> torch.Tensor:
    return random_ids(*shape) > 0


# ---- the built-in masks -----------------------------------------------------------------------

ALIGNS = ["bottom_right", "top_left"]
each_align = pytest.mark.parametrize("align", ALIGNS)
each_size = pytest.mark.parametrize("sizes", SIZES, ids=IDS)


@each_align
@each_size
def test_causal(sizes, align):
    shift = place(align, sizes)
    check(masks.causal(align), lambda b, h, i, j: j <= i + shift, sizes)


def test_causal_is_aligned_at_the_bottom_right():
    for sizes in SIZES:
        assert torch.equal(seen(masks.causal(), sizes), seen(masks.causal("bottom_right"), sizes))
    assert seen(masks.causal(), (1, 1, 1, 6)).all()


@each_align
@each_size
@pytest.mark.parametrize(("left", "right"), [(0, 0), (2, 0), (1, 3), (0, 2), (100, 100)])
def test_window(sizes, align, left, right):
    shift = place(align, sizes)
    rule: Rule = lambda b, h, i, j: i + shift - left <= j <= i + shift + right  # noqa: E731
    check(masks.window(left, right, align), rule, sizes)


@pytest.mark.parametrize("far", [2**62, sys.maxsize, 2**70])
def test_more_rows_than_there_can_be_are_all_of_them(far):
    sizes = (1, 1, 5, 9)
    assert seen(masks.window(far, far), sizes).all()
    assert torch.equal(seen(masks.window(far), sizes), seen(masks.causal(), sizes))
    layout = torch.tensor([[[[True]]]])
    assert seen(masks.blocks(layout, far), sizes).all()


def test_window_looks_back_only_unless_told():
    sizes = (1, 1, 6, 6)
    assert torch.equal(seen(masks.window(2), sizes), seen(masks.window(2, 0), sizes))


@each_size
def test_key_lengths(sizes):
    lengths = [sizes[3] // 2, sizes[3] + 4][: sizes[0]]
    for dtype in (torch.int32, torch.int64):
        mask = masks.key_lengths(torch.tensor(lengths, dtype=dtype))
        check(mask, lambda b, h, i, j: j < lengths[b], sizes)
    check(masks.key_lengths(torch.tensor([1])), lambda b, h, i, j: j < 1, sizes)
    check(masks.key_lengths(torch.tensor([0])), lambda b, h, i, j: False, sizes)


@each_align
@each_size
def test_prefix_is_a_prefix_language_model(sizes, align):
    lengths, shift = [3, 0][: sizes[0]], place(align, sizes)
    mask = masks.prefix(torch.tensor(lengths), align)
    check(mask, lambda b, h, i, j: j < lengths[b] or j <= i + shift, sizes)


@each_size
def test_documents(sizes):
    batch, _, query_len, kv_len = sizes
    query_ids, kv_ids = random_ids(batch, query_len), random_ids(batch, kv_len)
    rule: Rule = lambda b, h, i, j: int(query_ids[b, i]) == int(kv_ids[b, j])  # noqa: E731
    check(masks.documents(query_ids, kv_ids), rule, sizes)
    check(masks.documents(query_ids.int(), kv_ids), rule, sizes)
    shared: Rule = lambda b, h, i, j: int(query_ids[0, i]) == int(kv_ids[0, j])  # noqa: E731
    check(masks.documents(query_ids[:1], kv_ids[:1]), shared, sizes)


def test_documents_of_keys_are_those_of_queries_where_left_out():
    ids = torch.tensor([[0, 0, 4, 4, 4, -1], [2, 1, 2, 1, 1, 1]])
    check(masks.documents(ids), lambda b, h, i, j: bool(ids[b, i] == ids[b, j]), (2, 2, 6, 6))


@each_size
@pytest.mark.parametrize("block_size", [1, 3, (2, 3), (4, 1), (100, 2)], ids=str)
def test_blocks(sizes, block_size):
    batch, heads, query_len, kv_len = sizes
    rows, keys = block_size if isinstance(block_size, tuple) else (block_size, block_size)
    layout = random_bools(batch, heads, -(-query_len // rows), -(-kv_len // keys))
    rule: Rule = lambda b, h, i, j: bool(layout[b, h, i // rows, j // keys])  # noqa: E731
    check(masks.blocks(layout, block_size), rule, sizes)
    alike: Rule = lambda b, h, i, j: bool(layout[0, 0, i // rows, j // keys])  # noqa: E731
    check(masks.blocks(layout[0, 0], block_size), alike, sizes)


@each_size
@pytest.mark.parametrize("kept", ["bhij", "hij", "ij", "j", "", "b--j", "-hi-", "b---", "--i-"])
def test_dense_broadcasts(sizes, kept):
    full = random_bools(*sizes)
    lead = 4 - len(kept)
    for dim, axis in enumerate("-" * lead + kept):
        full = full.narrow(dim, 0, 1) if axis == "-" else full
    tensor = full.reshape(full.shape[lead:])
    grown = full.expand(sizes)
    check(masks.dense(tensor), lambda b, h, i, j: bool(grown[b, h, i, j]), sizes)
    check(tensor, lambda b, h, i, j: bool(grown[b, h, i, j]), sizes)


# ---- the algebra ------------------------------------------------------------------------------


@st.composite
def trees(draw: Any, sizes: Sizes, depth: int = 3) -> tuple[Mask, Rule]:
    """A random mask and the same as a Python function of (batch, head, query row, key row)."""
    if depth > 0 and draw(st.booleans()):
        combiner = draw(st.sampled_from("&|~"))
        mask, rule = draw(trees(sizes, depth - 1))
        if combiner == "~":
            return ~mask, lambda *at: not rule(*at)
        other, other_rule = draw(trees(sizes, depth - 1))
        if combiner == "&":
            return mask & other, lambda *at: rule(*at) and other_rule(*at)
        return mask | other, lambda *at: rule(*at) or other_rule(*at)
    return draw(leaves(sizes))


@st.composite
def leaves(draw: Any, sizes: Sizes) -> tuple[Mask, Rule]:
    batch, heads, query_len, kv_len = sizes
    kind = draw(
        st.sampled_from(["causal", "window", "lengths", "documents", "blocks", "dense", "own"])
    )
    align = draw(st.sampled_from(ALIGNS))
    shift = place(align, sizes)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))

    def randoms(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    if kind == "causal":
        return masks.causal(align), lambda b, h, i, j: j <= i + shift
    if kind == "window":
        left, right = draw(st.integers(0, 4)), draw(st.integers(0, 4))
        return masks.window(left, right, align), lambda b, h, i, j: -left <= j - i - shift <= right
    if kind == "lengths":
        lengths = randoms(0, kv_len + 2, batch)
        return masks.key_lengths(lengths), lambda b, h, i, j: j < int(lengths[b])
    if kind == "documents":
        ids = randoms(0, 3, batch, query_len), randoms(0, 3, batch, kv_len)
        return masks.documents(*ids), lambda b, h, i, j: bool(ids[0][b, i] == ids[1][b, j])
    if kind == "blocks":
        layout = randoms(0, 2, heads, -(-query_len // 2), -(-kv_len // 3)).bool()
        return masks.blocks(layout, (2, 3)), lambda b, h, i, j: bool(layout[h, i // 2, j // 3])
    if kind == "dense":
        table = randoms(0, 2, batch, 1, query_len, kv_len).bool()
        return masks.dense(table), lambda b, h, i, j: bool(table[b, 0, i, j])
    table, step = randoms(0, 2, kv_len, heads), draw(st.integers(1, 4))
    return strided(table, step), lambda b, h, i, j: (i - j) % step == 0 or int(table[j, h]) > 0


@masks.function
def strided(batch, head, query_row, kv_row, table, step):
    return ((query_row - kv_row) % step == 0) | (masks.take(table, kv_row, head) > 0)


@settings(deadline=None, max_examples=120, derandomize=True)
@given(st.data())
def test_expressions_mean_what_their_leaves_say(data):
    sizes = tuple(data.draw(st.integers(1, high)) for high in (2, 2, 8, 9))
    mask, rule = data.draw(trees(sizes))
    check(mask, rule, sizes)


def test_laws_of_logic():
    sizes = (1, 2, 7, 9)
    left, right = masks.causal(), masks.dense(random_bools(2, 7, 9))
    pairs = [
        (~~left, left),
        (~(left & right), ~left | ~right),
        (~(left | right), ~left & ~right),
        (left & (left | right), left),
        ((left & right) | (left & ~right), left),
    ]
    for one, other in pairs:
        assert torch.equal(seen(one, sizes), seen(other, sizes))
    assert not seen(left & ~left, sizes).any()
    assert seen(left | ~left, sizes).all()


def test_masks_do_not_combine_with_other_things_or_words():
    mask: Any = masks.causal()
    for other in (True, torch.tensor(True), saccade.scores.softcap(1.0)):
        with pytest.raises(TypeError):
            _ = mask & other
        with pytest.raises(TypeError):
            _ = mask | other
    for combine in (lambda: mask and mask, lambda: mask or mask, lambda: not mask):
        with pytest.raises(TypeError, match="combine masks with"):
            combine()


# ---- functions of one's own -------------------------------------------------------------------


@pytest.mark.parametrize("align", ALIGNS)
def test_own_function_counts_rows_as_it_says(align):
    @masks.function(align=align)
    def diagonal(batch, head, query_row, kv_row):
        return query_row == kv_row

    sizes = (1, 1, 4, 7)
    check(diagonal(), lambda b, h, i, j: i + place(align, sizes) == j, sizes)


def test_own_function_counts_rows_from_the_top_left_unless_told():
    check(strided(torch.zeros(7, 1), 3), lambda b, h, i, j: (i - j) % 3 == 0, (1, 1, 4, 7))


def test_own_functions_of_one_name_stay_apart():
    def make(limit: int) -> masks.MaskFunction:
        @masks.function
        def limited(batch, head, query_row, kv_row):
            return kv_row < limit

        return limited

    one, three = make(1), make(3)
    assert one().key == three().key  # one program serves both
    assert one() != three()
    sizes = (1, 1, 2, 5)
    check(one(), lambda b, h, i, j: j < 1, sizes)
    check(three(), lambda b, h, i, j: j < 3, sizes)
    check(three() & ~one(), lambda b, h, i, j: 1 <= j < 3, sizes)


def test_own_function_gets_captured_values_in_its_own_order():
    @masks.function
    def ordered(batch, head, query_row, kv_row, first, table, half, second, other):
        return (
            (kv_row >= first) & (kv_row < second)
            & (masks.take(table, head) * half == masks.take(other, kv_row))
        )  # fmt: skip

    table, other = torch.tensor([2.0, 4.0]), torch.tensor([1.0, 2.0, 1.0, 2.0, 1.0])
    mask = ordered(1, table, 0.5, 4, other) | masks.dense(torch.zeros(5, dtype=torch.bool))
    check(mask, lambda b, h, i, j: 1 <= j < 4 and bool(table[h] * 0.5 == other[j]), (2, 2, 3, 5))


def test_own_function_may_give_the_same_answer_everywhere():
    @masks.function
    def everything(batch, head, query_row, kv_row):
        return True

    check(everything(), lambda *at: True, (1, 2, 3, 4))
    check(~everything(), lambda *at: False, (1, 2, 3, 4))


def test_own_function_that_gives_no_bool_is_refused_by_name():
    @masks.function
    def parity(batch, head, query_row, kv_row):
        return (query_row - kv_row) % 2

    with pytest.raises(TypeError, match=r"parity .test_masks.py:\d+. gave whole numbers, takes"):
        parity()


# ---- what the constructors refuse -------------------------------------------------------------

INTEGERS, BOOLS = "takes a tensor of int32 or int64", "takes a tensor of torch.bool"
ALIGN, PLAIN = "takes 'bottom_right' or 'top_left'", "must be tensors, ints or floats"
FROM_0, FROM_1 = (f"takes a whole number of at least {least}" for least in (0, 1))
IDS_1D, IDS_2D = torch.ones(4).int(), torch.ones(1, 4).int()
FLAGS, FLAGS_5D = torch.ones(2, 2).bool(), torch.ones(1, 1, 1, 1, 1).bool()
REFUSED: list[tuple[Any, tuple[Any, ...], type[Exception], str, str]] = [
    (masks.causal, ("left",), ValueError, "align: got 'left'", ALIGN),
    (masks.causal, (None,), ValueError, "align: got None", ALIGN),
    (masks.window, (1, 0, "x"), ValueError, "align: got 'x'", ALIGN),
    (masks.window, (-1,), ValueError, "left: got -1", FROM_0),
    (masks.window, (2.0,), TypeError, "left: got 2.0", FROM_0),
    (masks.window, (True,), TypeError, "left: got True", FROM_0),
    (masks.window, (None,), TypeError, "left: got None", FROM_0),
    (masks.window, (torch.tensor(1),), TypeError, "left: got tensor(1)", FROM_0),
    (masks.window, (1, -2), ValueError, "right: got -2", FROM_0),
    (masks.window, (1, "2"), TypeError, "right: got '2'", FROM_0),
    (masks.prefix, (IDS_1D, "x"), ValueError, "align: got 'x'", ALIGN),
    (masks.prefix, ([1],), TypeError, "lengths: got list", INTEGERS),
    (masks.key_lengths, (3,), TypeError, "lengths: got int", INTEGERS),
    (masks.key_lengths, (IDS_1D.float(),), TypeError, "lengths: got torch.float32", INTEGERS),
    (masks.key_lengths, (IDS_2D,), ValueError, "lengths: got 2", "takes 1"),
    (masks.documents, (IDS_2D.bool(),), TypeError, "query_ids: got torch.bool", INTEGERS),
    (masks.documents, (IDS_1D,), ValueError, "query_ids: got 1", "takes 2"),
    (masks.documents, (IDS_2D, IDS_2D.short()), TypeError, "kv_ids: got torch.int16", INTEGERS),
    (masks.documents, (IDS_2D, IDS_1D), ValueError, "kv_ids: got 1", "takes 2"),
    (masks.blocks, (IDS_2D, 2), TypeError, "layout: got torch.int32", BOOLS),
    (masks.blocks, ([True], 2), TypeError, "layout: got list", BOOLS),
    (masks.blocks, (FLAGS_5D, 2), ValueError, "layout: got 5", "at most 4"),
    (masks.blocks, (FLAGS, 0), ValueError, "block_size: got 0", FROM_1),
    (masks.blocks, (FLAGS, 1.5), TypeError, "block_size: got 1.5", FROM_1),
    (masks.blocks, (FLAGS, True), TypeError, "block_size: got True", FROM_1),
    (masks.blocks, (FLAGS, (4, -4)), ValueError, "block_size: got -4", FROM_1),
    (masks.blocks, (FLAGS, (1, 2, 3)), ValueError, "block_size: got (1, 2, 3)", "number or two"),
    (masks.dense, (IDS_2D.float(),), TypeError, "tensor: got torch.float32", BOOLS),
    (masks.dense, (None,), TypeError, "tensor: got NoneType", BOOLS),
    (masks.dense, (FLAGS_5D,), ValueError, "tensor: got 5", "at most 4"),
    (strided, (IDS_2D, [1]), TypeError, "got list", PLAIN),
    (strided, (IDS_2D, "1"), TypeError, "got str", PLAIN),
    (strided, (IDS_2D, None), TypeError, "got NoneType", PLAIN),
]


@pytest.mark.parametrize(
    ("make", "arguments", "error", "got", "takes"),
    [pytest.param(*row, id=row[3].replace(": got ", "-")) for row in REFUSED],
)
def test_constructors_refuse(make, arguments, error, got, takes, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(error) as caught:
        make(*arguments)
    assert got in str(caught.value)
    assert takes in str(caught.value)


def test_function_refuses_an_alignment_that_does_not_exist():
    with pytest.raises(ValueError, match=r"align: got 'x', takes 'bottom_right' or 'top_left'"):
        masks.function(align="x")


def test_written_out():
    lengths = torch.tensor([1, 3])
    mask = masks.key_lengths(lengths) & masks.window(1)
    row, key = torch.arange(2)[:, None] + 2, torch.arange(4)
    wanted = (row - 1 <= key) & (key <= row) & (key < lengths.view(2, 1, 1, 1))
    assert torch.equal(mask.to_dense(2, 3, 2, 4), wanted.expand(2, 3, 2, 4))
    assert masks.as_mask(None).to_dense(1, 1, 2, 2).all()


def test_what_where_joins_is_what_operators_join():
    lengths = torch.tensor([3])
    union = masks.as_mask(lambda b, h, q, k: torch.where(k < lengths[b], True, q >= k))
    assert union == masks.as_mask(lambda b, h, q, k: (k < lengths[b]) | (q >= k))
    both = masks.as_mask(lambda b, h, q, k: torch.where(k < lengths[b], q >= k, False))
    assert both == masks.as_mask(lambda b, h, q, k: (k < lengths[b]) & (q >= k))
