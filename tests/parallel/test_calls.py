"""Calls over ranks: two and four processes compute what one does, and tell how they differ."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import parallel_cases
import pytest
import torch

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
    folder = tmp_path_factory.mktemp("parallel")
    program = [sys.executable, parallel_cases.__file__, str(folder), *map(str, WORLDS)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        program, capture_output=True, text=True, timeout=LIMIT_SECONDS, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return {
        (world, rank): json.loads(Path(folder / f"found.{world}.{rank}").read_text("utf-8"))
        for world in WORLDS
        for rank in range(world)
    }


@pytest.mark.parametrize("name", parallel_cases.CASES)
def test_ranks_compute_what_one_process_does(
    answers: dict[tuple[int, int], dict[str, str]], name: str
) -> None:
    assert {which: said[name] for which, said in answers.items()} == dict.fromkeys(answers, "")
