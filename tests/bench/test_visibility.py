"""Pairs and tiles are counted as a mask written out by hand has them."""

import pytest
import torch

from saccade.bench.visibility import CAUSAL, FULL, MOST_BLOCKS, Visibility, block_layout

CPU = torch.device("cpu")
LENGTHS = (1, 7, 12)
KINDS = [
    FULL, CAUSAL, Visibility("window", 3), Visibility("window", 99), Visibility("prefix", 5),
    Visibility("prefix", 99), Visibility("blocks", 4), Visibility("blocks", 5),
]  # fmt: skip


def cut(length, kind, size=0):
    """Documents of 4 rows, and a shorter one at the end."""
    whole, rest = divmod(length, 4)
    return Visibility(kind, size, (4,) * whole + (rest,) * (rest > 0))


def everything():
    for length in LENGTHS:
        yield from ((visibility, length) for visibility in KINDS)
        yield from ((cut(length, kind), length) for kind in ("full", "causal"))
        yield cut(length, "window", 2), length
    yield Visibility("causal", documents=(5, 1, 1, 3, 2)), 12


def visible(visibility, query_row, kv_row):
    """One pair, by the words that describe the kind."""
    if visibility.documents:
        ids = [number for number, size in enumerate(visibility.documents) for _ in range(size)]
        if ids[query_row] != ids[kv_row]:
            return False
    size = visibility.size
    past = kv_row <= query_row
    if visibility.kind == "blocks":
        return bool(block_layout(MOST_BLOCKS)[query_row // size, kv_row // size])
    return {
        "full": True, "causal": past, "window": past and query_row - kv_row <= size,
        "prefix": past or kv_row < size,
    }[visibility.kind]  # fmt: skip


@pytest.mark.parametrize(("visibility", "length"), list(everything()), ids=str)
def test_masks_and_counts_agree_with_pairs_judged_one_by_one(visibility, length):
    rows = range(length)
    mask = torch.tensor([[visible(visibility, row, column) for column in rows] for row in rows])
    assert torch.equal(visibility.tensor(length, length, CPU), mask)
    assert visibility.pairs(length, length) == int(mask.sum())
    for tile in ((4, 2), (2, 4), (3, 5), (1, 1), (16, 16)):
        tiles = [part for strip in mask.split(tile[0]) for part in strip.split(tile[1], dim=1)]
        assert visibility.tiles(length, length, tile) == sum(bool(part.any()) for part in tiles)


def test_full_takes_unequal_lengths():
    assert FULL.pairs(3, 8) == 24
    assert FULL.tiles(3, 8, (2, 4)) == 4


def test_most_blocks_are_hidden_and_no_row_sees_nothing():
    layout = block_layout(128)
    assert layout.shape == (128, 128)
    assert 0.09 < layout.float().mean() < 0.11
    assert layout.any(1).all()
    assert torch.equal(layout[:6, :6], block_layout(6))


def test_documents_as_ids_and_as_offsets():
    visibility = Visibility("full", documents=(3, 1, 2))
    assert visibility.document_ids(CPU).tolist() == [0, 0, 0, 1, 2, 2]
    assert visibility.offsets(CPU).tolist() == [0, 3, 4, 6]
    assert visibility.offsets(CPU).dtype == visibility.document_ids(CPU).dtype == torch.int32


@pytest.mark.parametrize("kind", ["prefix", "blocks"])
def test_what_counts_from_the_start_has_no_documents(kind):
    with pytest.raises(ValueError, match="from the sequence's start"):
        Visibility(kind, 4, (4, 4))


def test_names_in_words():
    assert str(Visibility("prefix", 5)) == "prefix 5"
    assert str(Visibility("full", documents=(4, 4))) == "documents 4"
    assert str(Visibility("causal", documents=(4, 4))) == "causal documents 4"
    assert str(Visibility("causal", documents=(8, 4, 4))) == "causal documents 8+2x4"


def test_only_full_and_causal_need_no_table():
    alone = Visibility("causal", documents=(8,))
    assert [kind.needs_table for kind in (FULL, CAUSAL, alone)] == [False] * 3
    others = (*KINDS[2:], Visibility("full", documents=(4, 4)))
    assert all(kind.needs_table for kind in others)
