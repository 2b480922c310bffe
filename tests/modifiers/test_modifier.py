"""Shard: a part of a call sees of a mask or score what the whole call does there."""

import pytest
import torch

import saccade
from saccade import masks, scores
from saccade.masks import Mask, as_mask
from saccade.modifiers.modifier import ShardRange, restricted
from saccade.scores import Score, as_score

BATCH, HEADS, QUERY_LEN, KV_LEN = 4, 6, 5, 7
LENGTHS = torch.tensor([7, 3, 0, 5])
TABLE = torch.tensor([[1, 4, 7], [2, 5, 3], [6, 0, 1], [3, 3, 2]])
IDS = torch.tensor([[0, 0, 1, 1, 2], [0, 1, 1, 1, 1], [0, 0, 0, 1, 2], [0, 0, 0, 0, 0]])
MASKS = {
    "causal": masks.causal(),
    "lengths": masks.key_lengths(LENGTHS),
    "lengths or a window": masks.key_lengths(LENGTHS) | masks.window(1),
    "numbers": lambda b, h, i, j: (2 * b + 3 * h + i - j) % 4 > 0,
    "groups": masks.function(lambda b, h, i, j, table: j < masks.take(table, b, h // 2))(TABLE),
    "one table twice": masks.function(
        lambda b, h, i, j, ids: masks.take(ids, b, i) == masks.take(ids, j % 4, b)
    )(IDS),
    "a short table": masks.function(
        lambda b, h, i, j, lengths: j < masks.take(lengths, b)  # its last entry for the others
    )(LENGTHS[:2]),
    "dense": torch.rand(BATCH, HEADS, QUERY_LEN, KV_LEN, generator=torch.Generator()) > 0.3,
    "dense, one for all": torch.rand(1, 1, QUERY_LEN, KV_LEN, generator=torch.Generator()) > 0.3,
    "dense, one for all in numbers": as_mask(
        torch.rand(1, HEADS, QUERY_LEN, KV_LEN, generator=torch.Generator()) > 0.3
    ) & as_mask(lambda b, h, i, j: (b + h + i) % 3 > 0),
}  # fmt: skip
SCORES = {
    "slopes": scores.alibi(2.0 ** -torch.arange(HEADS)),
    "bias": scores.bias(torch.randn(1, HEADS, QUERY_LEN, KV_LEN, generator=torch.Generator())),
    "numbers": lambda score, b, h, i, j: score * (h + 1) + b,
}
PARTS = [
    (ShardRange(0, 4, BATCH), ShardRange(2, 2, HEADS)),
    (ShardRange(1, 2, BATCH), ShardRange(0, 6, HEADS)),
    (ShardRange(3, 1, BATCH), ShardRange(3, 3, HEADS)),
    (ShardRange(4, 0, BATCH), ShardRange(0, 6, HEADS)),
]


@pytest.mark.parametrize("score", [None, *SCORES])
@pytest.mark.parametrize("mask", MASKS)
def test_a_part_gives_a_part_of_the_result(mask, score):
    torch.manual_seed(0)
    whole_mask, whole_score = as_mask(MASKS[mask]), as_score(SCORES.get(score))
    rows = [torch.randn(BATCH, HEADS, length, 8) for length in (QUERY_LEN, KV_LEN, KV_LEN)]
    wanted = saccade.attention(*rows, mask=whole_mask, score=whole_score)
    for batch, head in PARTS:
        cut = (
            slice(batch.start, batch.start + batch.size),
            slice(head.start, head.start + head.size),
        )
        found = saccade.attention(
            *(each[cut] for each in rows),
            mask=Mask(*restricted(whole_mask.key, whole_mask.captured, batch, head)),
            score=Score(*restricted(whole_score.key, whole_score.captured, batch, head)),
        )
        torch.testing.assert_close(found, wanted[cut])


def test_what_is_read_at_the_batch_entry_stays_what_it_is():
    """Lengths are still lengths, which implementations know by their key."""
    whole = masks.key_lengths(LENGTHS)
    key, captured = restricted(
        whole.key, whole.captured, ShardRange(1, 2, BATCH), ShardRange(0, 6, HEADS)
    )
    assert key == whole.key
    assert captured.tensors[0].tolist() == [3, 0]


def test_nothing_changes_without_batch_or_head():
    whole = masks.causal() & masks.window(3)
    found = restricted(whole.key, whole.captured, ShardRange(1, 2, BATCH), ShardRange(2, 2, HEADS))
    assert found == (whole.key, whole.captured)
