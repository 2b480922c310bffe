"""One rectangle in plain tiles, anywhere in a problem, against the same part of the whole."""

import math
from typing import Any

import pytest
import torch

import saccade
from saccade import masks, scores
from saccade.masks import Mask
from saccade.modifiers import evaluate
from saccade.modifiers.expression import Captured
from saccade.ops.attention.cpu import dense_tile
from saccade.ops.attention.cpu.dense_tile import PairBlock
from saccade.runtime import dropout
from saccade.runtime.spec import Variant
from saccade.scores import Score

BATCH, HEADS, KV_HEADS, QUERY_LEN, KV_LEN, DIM, VALUE_DIM = 3, 4, 2, 11, 13, 8, 5
SCALE, SEED = 0.4, torch.tensor(77)
WHOLE = PairBlock((0, BATCH), (0, HEADS), (0, QUERY_LEN), (0, KV_LEN), KV_LEN - QUERY_LEN)
PLACES = {
    "whole": WHOLE,
    "later rows": WHOLE._replace(query_rows=(4, 11), kv_rows=(5, 12)),
    "later batch": WHOLE._replace(batch=(1, 3)),
    "one kv head": WHOLE._replace(heads=(2, 4), kv_rows=(1, 13)),
    "one row": WHOLE._replace(batch=(2, 3), query_rows=(7, 8), kv_rows=(3, 4)),
}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def tensors() -> list[torch.Tensor]:
    """Query, key and value of the whole problem."""
    return [
        normal(BATCH, HEADS, QUERY_LEN, DIM, seed=1),
        normal(BATCH, KV_HEADS, KV_LEN, DIM, seed=2),
        normal(BATCH, KV_HEADS, KV_LEN, VALUE_DIM, seed=3),
    ]


def cut(whole: list[torch.Tensor], pair_block: PairBlock) -> list[torch.Tensor]:
    """The rows of a rectangle."""
    group = HEADS // KV_HEADS
    batch, kv_heads = (
        slice(*pair_block.batch),
        slice(pair_block.heads[0] // group, pair_block.heads[1] // group),
    )
    queries = whole[0][batch, slice(*pair_block.heads), slice(*pair_block.query_rows)]
    return [queries, *(rows[batch, kv_heads, slice(*pair_block.kv_rows)] for rows in whole[1:])]


def variant_of(mask: Mask | None, score: Score | None, dropout_p: float = 0.0) -> Variant:
    mask = Mask("") if mask is None else mask
    score = Score("") if score is None else score
    return Variant(mask.key, score.key, mask.captured, score.captured, SCALE, dropout_p)


def plain(inputs: list[torch.Tensor], variant: Variant, pair_block: PairBlock, masked: bool) -> Any:
    """The rectangle in float64: autograd does the rest."""
    query, key, value = inputs
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    at = pair_block.coordinates()
    changed = evaluate.change(variant.score, variant.score_captured, SCALE * query @ key.mT, at)
    if masked:
        seen = evaluate.visible(variant.mask, variant.mask_captured, at)
        changed = changed.masked_fill(~seen, -torch.inf)
    lse = changed.logsumexp(-1)
    weights = (changed - lse.masked_fill(lse == -torch.inf, 0).unsqueeze(-1)).exp()
    if variant.dropout_p:
        kept = dropout.kept(SEED, at.batch, at.head, at.query_row, at.kv_row, variant.dropout_p)
        weights = weights * kept / (1 - variant.dropout_p)
    return weights @ value, lse


@scores.function
def uneven(score, batch, head, query_row, kv_row):
    return score * (1.0 + (kv_row % 3))


BIAS = normal(BATCH, 1, QUERY_LEN, KV_LEN, seed=5)
VARIANTS = {
    "plain": variant_of(None, None),
    "causal": variant_of(masks.causal(), None),
    "hides rows": variant_of(masks.window(1, 0, "top_left") & ~masks.window(0, 0), None),
    "by head": variant_of(masks.dense(normal(HEADS, 1, KV_LEN) > 0), None),
    "by batch": variant_of(masks.key_lengths(torch.tensor([13, 0, 6])), scores.softcap(1.5)),
    "bias": variant_of(None, scores.bias(BIAS) >> scores.softcap(2.0)),
    "alibi": variant_of(masks.causal(), scores.alibi(torch.tensor([0.1, 0.2, 0.3, 0.4]))),
    "own": variant_of(masks.window(6, 6), uneven()),
    "dropout": variant_of(None, None, 0.4),
    "everything": variant_of(masks.causal(), uneven() >> scores.bias(BIAS), 0.4),
}


def draws_of(variant: Variant) -> dense_tile.Draws | None:
    return dense_tile.Draws(SEED) if variant.dropout_p else None


def forward(
    rows: list[torch.Tensor], variant: Variant, pair_block: PairBlock, masked: bool, nan_safe: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Query, key and value by the tile; dropout with the one seed where the variant has any."""
    query, key, value = rows
    found = dense_tile.forward(
        query, key, value, variant, draws_of(variant), pair_block, masked, nan_safe
    )
    return found.output, found.lse


def backward(
    rows: list[torch.Tensor],
    variant: Variant,
    pair_block: PairBlock,
    masked: bool,
    nan_safe: bool,
    wanted: tuple[int, ...] = (),
) -> dense_tile.Contributions:
    """The same for grad_output, query, key, value, lse and row_dot."""
    grad_output, query, key, value, lse, row_dot = rows
    return dense_tile.backward(
        grad_output, query, key, value, lse, row_dot, variant, draws_of(variant), pair_block,
        masked, nan_safe, wanted,
    )  # fmt: skip


@pytest.mark.parametrize("nan_safe", [False, True], ids=["", "nan_safe"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("pair_block", PLACES)
def test_forward(pair_block, name, nan_safe):
    at, variant = PLACES[pair_block], VARIANTS[name]
    inputs, masked = cut(tensors(), at), bool(variant.mask)
    found = forward(inputs, variant, at, masked, nan_safe)
    wanted = plain(inputs, variant, at, masked)
    torch.testing.assert_close(found[0], wanted[0], rtol=1e-11, atol=1e-12)
    torch.testing.assert_close(found[1], wanted[1], rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("nan_safe", [False, True], ids=["", "nan_safe"])
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("pair_block", PLACES)
def test_backward(pair_block, name, nan_safe):
    at, variant = PLACES[pair_block], VARIANTS[name]
    masked = bool(variant.mask)
    inputs = [rows.clone().requires_grad_() for rows in cut(tensors(), at)]
    # The bias is differentiable, so give the formula one that records its gradient.
    tables = [
        t.clone().requires_grad_(t.is_floating_point()) for t in variant.score_captured.tensors
    ]
    recorded = variant._replace(score_captured=variant.score_captured._replace(tensors=tables))
    output, lse = plain(inputs, recorded, at, masked)
    sees_nothing = (lse == -torch.inf).detach()
    grad_output = normal(*output.shape, seed=6).masked_fill(sees_nothing.unsqueeze(-1), 0)
    grad_lse = normal(*lse.shape, seed=7).masked_fill(sees_nothing, 0)
    finite_lse = lse.masked_fill(sees_nothing, 0)
    wanted = torch.autograd.grad(
        [output, finite_lse], [*inputs, *tables], [grad_output, grad_lse], allow_unused=True
    )
    row_dot = (grad_output * output.detach()).sum(-1) - grad_lse
    rows = [grad_output, *(part.detach() for part in inputs), finite_lse.detach(), row_dot]
    places = tuple(place for place, table in enumerate(tables) if table.requires_grad)
    contributions = backward(rows, variant, at, masked, nan_safe, places)
    for found, exact in zip(contributions[:3], wanted, strict=False):
        torch.testing.assert_close(found, exact.nan_to_num(0), rtol=1e-10, atol=1e-11)
    assert sorted(taken.slot for taken in contributions.taken) == list(places)
    for taken in contributions.taken:
        total = torch.zeros_like(tables[taken.slot])
        taken.add_to(total)
        exact = wanted[len(inputs) + taken.slot].nan_to_num(0)
        torch.testing.assert_close(total, exact, rtol=1e-10, atol=1e-11)


def test_the_bias_is_taken_where_it_is_wanted():
    at, variant = WHOLE, VARIANTS["everything"]
    inputs = cut(tensors(), at)
    output, lse = forward(inputs, variant, at, True, False)
    rows = [output, *inputs, lse, output.sum(-1)]
    assert backward(rows, variant, at, True, False).taken == []
    contributions = backward(rows, variant, at, True, False, (0,))
    assert [taken.slot for taken in contributions.taken] == [0]
    assert contributions.taken[0].gradient.shape == (BATCH, HEADS, QUERY_LEN, KV_LEN)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_are_wide(dtype):
    inputs = [rows.to(dtype) for rows in tensors()]
    variant = VARIANTS["by batch"]
    output, lse = forward(inputs, variant, WHOLE, True, False)
    wanted = plain([rows.double() for rows in inputs], variant, WHOLE, True)
    assert output.dtype == lse.dtype == torch.float32
    torch.testing.assert_close(output.double(), wanted[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("trash", [torch.nan, torch.inf, -torch.inf])
def test_nan_safe_keeps_trash_where_nothing_sees_it(trash):
    variant = variant_of(masks.key_lengths(torch.tensor([9, 5, 0])), scores.softcap(2.0))
    full, nonfinite = tensors(), tensors()
    for batch, length in enumerate((9, 5, 0)):
        nonfinite[1][batch, :, length:, 1] = trash
        nonfinite[2][batch, :, length:] = trash
    found = forward(nonfinite, variant, WHOLE, True, True)
    wanted = forward(full, variant, WHOLE, True, False)
    torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-13)
    lse = wanted[1].masked_fill(wanted[1] == -torch.inf, 0)
    grad = normal(*wanted[0].shape, seed=8)
    rest = lse, (grad * wanted[0]).sum(-1)
    contributions = backward([grad, *nonfinite, *rest], variant, WHOLE, True, True)
    exact = backward([grad, *full, *rest], variant, WHOLE, True, False)
    for contribution, other in zip(contributions[:3], exact[:3], strict=True):
        torch.testing.assert_close(contribution, other, rtol=1e-11, atol=1e-12)


def test_nan_safe_shows_trash_that_is_seen():
    inputs = tensors()
    inputs[1][0, 0, 3, 2] = torch.nan
    variant = variant_of(masks.causal("top_left"), None)
    output, lse = forward(inputs, variant, WHOLE, True, True)
    wanted = torch.zeros(BATCH, HEADS, QUERY_LEN, dtype=torch.bool)
    wanted[0, : HEADS // KV_HEADS, 3:] = True
    assert torch.equal(output.isnan().any(-1), wanted)
    assert torch.equal(lse.isnan(), wanted)


def visible_in(name: str) -> torch.Tensor:
    variant = VARIANTS[name]
    return evaluate.visible(variant.mask, variant.mask_captured, WHOLE.coordinates())


def test_visible_has_as_few_dimensions_as_the_mask_varies_in():
    shapes = {
        "causal": (1, 1, QUERY_LEN, KV_LEN), "by head": (1, HEADS, 1, KV_LEN),
        "by batch": (BATCH, 1, 1, KV_LEN), "plain": (1, 1, 1, 1),
    }  # fmt: skip
    for name, shape in shapes.items():
        assert visible_in(name).shape == shape
    assert Captured() == VARIANTS["plain"].mask_captured


@pytest.mark.parametrize("options", [{"score": scores.softcap(20.0)}, {"dropout_p": 0.2}], ids=str)
@pytest.mark.parametrize("heads", [1, 8])
def test_fine_tiles_leave_out_what_a_causal_mask_hides(monkeypatch, options, heads):
    """Both passes compute 10 of 16 tiles where many heads go together; few heads are not cut up."""
    computed = {"forward": 0, "backward": 0}

    def counted(name: str) -> Any:
        compute = getattr(dense_tile, name)

        def call(*arguments: Any) -> Any:
            (block,) = (each for each in arguments if isinstance(each, PairBlock))
            sides = (block.batch, block.heads, block.query_rows, block.kv_rows)
            computed[name] += math.prod(stop - start for start, stop in sides)
            return compute(*arguments)

        return call

    for name in computed:
        monkeypatch.setattr(dense_tile, name, counted(name))
    rows = [normal(1, heads, 256, 8, seed=n).requires_grad_() for n in range(3)]
    saccade.attention(*rows, mask=masks.causal(), **options).sum().backward()
    pairs = heads * 256 * 256 * (10 if heads == 8 else 16) // 16
    assert computed == {"forward": pairs, "backward": pairs}
