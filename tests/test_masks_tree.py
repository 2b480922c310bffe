"""Tree masks: the bits against the ancestors written out, and what is refused."""

import pytest
import torch

import saccade
from saccade import masks


def ancestors(parents: list[int]) -> list[set[int]]:
    """Each token's ancestors and itself, walked one by one."""
    found = []
    for token in range(len(parents)):
        seen, at = set(), token
        while at != -1:
            seen.add(at)
            at = parents[at]
        found.append(seen)
    return found


@pytest.mark.parametrize("length", [0, 1, 5, 64, 65, 150])
def test_bits_are_the_ancestors(length):
    generator = torch.Generator().manual_seed(length)
    parents = [
        int(torch.randint(-1, t, (), generator=generator)) if t else -1 for t in range(length)
    ]
    bits = masks.tree_bits(torch.tensor([parents], dtype=torch.int64).view(1, length))
    assert bits.shape == (1, length, -(-length // 64)) and bits.dtype == torch.int64
    for token, seen in enumerate(ancestors(parents)):
        words = [int(word) & (2**64 - 1) for word in bits[0, token]]
        assert sum(word << (64 * index) for index, word in enumerate(words)) == sum(
            1 << other for other in seen
        )


@pytest.mark.parametrize("length", [5, 70])
def test_a_tree_sees_its_branch_and_the_text_before_it(length):
    parents = torch.tensor([[max(-1, token - 1 - token % 3) for token in range(length)]])
    bits, context = masks.tree_bits(parents), 11
    visible = torch.zeros(1, 1, length, context + length, dtype=torch.bool)
    visible[..., :context] = True
    for token, seen in enumerate(ancestors(parents[0].tolist())):
        visible[0, 0, token, [context + other for other in seen]] = True
    query, key = torch.randn(1, 2, length, 8), torch.randn(1, 2, context + length, 8)
    for implementation in ("reference", "cpu"):
        tree = masks.tree(bits, torch.tensor([context]))
        output = saccade.attention(query, key, key, mask=tree, implementation=implementation)
        wanted = saccade.attention(query, key, key, mask=visible, implementation=implementation)
        torch.testing.assert_close(output, wanted)


def test_two_dimensions_are_one_word():
    bits = masks.tree_bits(torch.tensor([[-1, 0, 0]]))
    assert (
        masks.tree(bits[..., 0], torch.tensor([4])).key == masks.tree(bits, torch.tensor([4])).key
    )


def test_complaints():
    lens = torch.tensor([4])
    with pytest.raises(TypeError, match=r"bits: got torch\.int32, takes int64"):
        masks.tree(torch.zeros(1, 3, dtype=torch.int32), lens)
    with pytest.raises(TypeError, match=r"context_lens: got torch\.float32"):
        masks.tree(torch.zeros(1, 3, dtype=torch.int64), lens.float())
    for parents in ([[0, -1]], [[-1, -2]], [[-1, 2, 0]]):
        with pytest.raises(ValueError, match="parents: got a token at or after its child"):
            masks.tree_bits(torch.tensor(parents))
    query, key = torch.randn(1, 2, 65, 8), torch.randn(1, 2, 80, 8)
    with pytest.raises(ValueError, match="bits: got 1 words for 65 query rows"):
        saccade.attention(query, key, key, mask=masks.tree(torch.zeros(1, 65).long(), lens))
    with pytest.raises(ValueError, match="bits: got shape"):
        saccade.attention(query, key, key, mask=masks.tree(torch.zeros(1, 3, 2).long(), lens))
