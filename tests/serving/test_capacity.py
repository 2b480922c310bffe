"""The number of threads is the one that makes the work fastest."""

import time
from collections.abc import Iterator

import pytest
import torch

from saccade.serving.capacity import choose_threads


@pytest.fixture
def four() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(4)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("fastest", [1, 2, 4])
def test_the_fastest_is_taken(four: None, fastest: int) -> None:
    tried: list[int] = []

    def work() -> None:
        tried.append(torch.get_num_threads())
        time.sleep(0.001 if tried[-1] == fastest else 0.02)

    assert choose_threads(work) == torch.get_num_threads() == fastest
    assert set(tried) == {1, 2, 4}
