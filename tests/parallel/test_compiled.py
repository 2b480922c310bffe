"""Graphs of calls over ranks: two processes compile calls and compute what they do uncompiled."""

from __future__ import annotations

import os
from pathlib import Path

import parallel_compiled_cases as compiled_cases
import pytest
import torch
from worlds import answers_of

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available())
    or not hasattr(os, "fork"),
    reason="this PyTorch has no gloo, or this system no fork",
)
RANKS = [(compiled_cases.WORLD, rank) for rank in range(compiled_cases.WORLD)]


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, int], dict[str, str]]:
    """What each rank says of each case."""
    folder = tmp_path_factory.mktemp("compiled")
    return answers_of([compiled_cases.__file__], folder, [compiled_cases.WORLD], 300)


@pytest.mark.parametrize("name", compiled_cases.CASES)
def test_graphs_compute_what_eager_calls_do(
    answers: dict[tuple[int, int], dict[str, str]], name: str
) -> None:
    assert {which: answers[which][name] for which in RANKS} == dict.fromkeys(RANKS, "")


@pytest.mark.slow  # a C++ compiler's minutes
def test_graphs_of_inductor_and_of_more_calls_do_too(tmp_path: Path) -> None:
    program = [compiled_cases.__file__, "--slow"]
    found = answers_of(program, tmp_path, [compiled_cases.WORLD], 900)
    assert found == {which: dict.fromkeys(compiled_cases.SLOW_CASES, "") for which in RANKS}
