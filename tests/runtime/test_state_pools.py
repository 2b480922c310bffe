"""State pools: which tensors have memory of their own for every number."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from saccade.runtime.state_pools import check_own_memory

SIZES = st.lists(st.integers(1, 4), min_size=1, max_size=4)


def own(tensor: torch.Tensor) -> bool:
    try:
        check_own_memory("state", tensor)
    except ValueError as error:
        assert "takes one whose numbers all have memory of their own" in str(error)
        return False
    return True


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_numbers_that_share_memory_are_found(data):
    shape = data.draw(SIZES)
    strides = data.draw(st.lists(st.integers(0, 12), min_size=len(shape), max_size=len(shape)))
    places = [
        sum(index * stride for index, stride in zip(at, strides, strict=True))
        for at in itertools.product(*map(range, shape))
    ]
    if len(set(places)) < len(places):
        assert not own(torch.zeros(200).as_strided(shape, strides))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_slices_and_permutations_are_taken(data):
    shape = data.draw(SIZES)
    tensor = torch.zeros([2 * size + 1 for size in shape])
    for dim, size in enumerate(shape):
        step, first = data.draw(st.integers(1, 2)), data.draw(st.integers(0, 1))
        tensor = tensor.transpose(0, dim)[first::step][:size].transpose(0, dim)
    assert own(tensor.permute(data.draw(st.permutations(range(len(shape))))))


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_no_numbers_share_nothing(shape):
    assert own(torch.zeros(1).expand(1, 1).as_strided(shape, (0, 1)))
