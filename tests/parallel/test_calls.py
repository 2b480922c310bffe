"""Calls over ranks: two and four processes compute what one does, and tell how they differ."""

from __future__ import annotations

import os

import parallel_cases
import pytest
import torch
from worlds import answers_of

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available())
    or not hasattr(os, "fork"),
    reason="this PyTorch has no gloo, or this system no fork",
)
LIMIT_SECONDS = 300
WORLDS = (4, 2)


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, str]]:
    """What each rank of each world says of each case: "" or what went wrong."""
    program = [parallel_cases.__file__, *map(str, WORLDS)]
    return answers_of(program, tmp_path_factory.mktemp("parallel"), WORLDS, LIMIT_SECONDS)


@pytest.mark.parametrize("name", parallel_cases.CASES)
def test_ranks_compute_what_one_process_does(
    answers: dict[tuple[int, int], dict[str, str]], name: str
) -> None:
    assert {which: said[name] for which, said in answers.items()} == dict.fromkeys(answers, "")
