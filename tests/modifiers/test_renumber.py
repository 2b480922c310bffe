"""Renumbering: some rows of a whole see what they see in it, on whatever call they lie."""

from __future__ import annotations

import pytest
import torch

from saccade import masks, scores
from saccade.masks import Mask
from saccade.modifiers.renumber import RowNumbers, renumbered
from saccade.testing.cases import MASKS, Description

LENGTH = 24
SCATTERED = torch.tensor([0, 1, 2, 10, 11, 23])
ROWS = {
    "scattered": (SCATTERED, torch.tensor([1, 5, 6, 7, 20])),
    "a range": (torch.arange(4, 9), torch.arange(LENGTH)),
    "out of order": (SCATTERED.flip(0), torch.arange(3, 17)),
}


@pytest.mark.parametrize("name", [name for name in MASKS if name != "none"])
def test_masks_are_those_of_the_whole(name: str) -> None:
    description = Description(lengths=((LENGTH, LENGTH),))
    mask = masks.as_mask(MASKS[name](description, torch.Generator().manual_seed(1)))
    whole = mask.to_dense(2, 4, LENGTH, LENGTH)
    for query, kv in ROWS.values():
        key, captured = renumbered(mask.key, mask.captured, RowNumbers(query), RowNumbers(kv))
        found = Mask(key, captured).to_dense(2, 4, len(query), len(kv))
        assert torch.equal(found, whole[:, :, query][..., kv])


def test_sequences_laid_end_to_end_have_their_own_batch() -> None:
    lengths = torch.tensor([3, 9])
    batch = torch.tensor([0] * 10 + [1] * 14)
    rows = torch.cat([torch.arange(10), torch.arange(14)])
    mask = masks.causal() & masks.key_lengths(lengths)
    whole = mask.to_dense(2, 1, 14, 14)
    picked = torch.tensor([2, 9, 10, 23])
    numbers = RowNumbers(rows[picked], batch[picked])
    key, captured = renumbered(mask.key, mask.captured, numbers, RowNumbers(rows[picked]))
    found = Mask(key, captured).to_dense(1, 1, 4, 4)[0, 0]
    wanted = whole[batch[picked][:, None], 0, rows[picked][:, None], rows[picked][None, :]]
    assert torch.equal(found, wanted)


def test_a_row_that_lies_in_a_range_needs_no_table() -> None:
    mask, everything = masks.causal(), RowNumbers(torch.arange(LENGTH))
    key, captured = renumbered(mask.key, mask.captured, RowNumbers(torch.arange(4, 9)), everything)
    assert not captured.tensors and list(captured.ints) == [4]
    key, captured = renumbered(mask.key, mask.captured, everything, everything)
    assert key == masks.causal("top_left").key


def test_a_bias_is_cut_and_keeps_its_gradient() -> None:
    bias = torch.randn(1, 2, LENGTH, LENGTH, requires_grad=True)
    score = scores.bias(bias)
    query, kv = ROWS["scattered"]
    key, captured = renumbered(score.key, score.captured, RowNumbers(query), RowNumbers(kv))
    assert key == score.key
    assert torch.equal(captured.tensors[0], bias[:, :, query][..., kv])
    captured.tensors[0].sum().backward()
    assert bias.grad is not None and bias.grad.sum() == 2 * len(query) * len(kv)
