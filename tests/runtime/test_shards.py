"""Shards: two processes with DTensors compute what one process computes without them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import shard_cases
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()),
    reason="this PyTorch has no gloo",
)
LIMIT_SECONDS = 300


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each of the two processes says of each case: "" or what went wrong."""
    folder = tmp_path_factory.mktemp("shards")
    program, store, found = Path(shard_cases.__file__), folder / "store", folder / "found"
    processes = [
        subprocess.Popen(
            [sys.executable, str(program), str(rank), str(store), str(found)],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(shard_cases.WORLD)
    ]  # fmt: skip
    try:
        said = [process.communicate(timeout=LIMIT_SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], said
    files = [folder / f"found.{rank}" for rank in range(shard_cases.WORLD)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("name", shard_cases.CASES)
def test_two_processes_compute_what_one_does(answers, name):
    assert [answer[name] for answer in answers] == ["", ""]
