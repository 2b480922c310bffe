"""Shards: two processes with DTensors compute what one process computes without them."""

import json
import os
import sys

import programs
import pytest
import shard_cases
import torch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available())
    or not hasattr(os, "fork"),
    reason="this PyTorch has no gloo, or this system no fork",
)
LIMIT_SECONDS = 300


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What each of the two processes says of each case: "" or what went wrong."""
    folder = tmp_path_factory.mktemp("shards")
    command = [sys.executable, shard_cases.__file__, str(folder)]
    programs.run(command, LIMIT_SECONDS, {**os.environ, "OMP_NUM_THREADS": "1"})
    files = [folder / f"found.{rank}" for rank in range(shard_cases.WORLD)]
    return [json.loads(file.read_text(encoding="utf-8")) for file in files]


@pytest.mark.parametrize("name", shard_cases.CASES)
def test_two_processes_compute_what_one_does(answers, name):
    assert [answer[name] for answer in answers] == ["", ""]
