"""An engine over two processes: what one gives, and errors in seconds where one of them ends."""

import json
import os
import signal
import sys
import time
from pathlib import Path

import launched
import programs
import pytest
import rank_cases
import torch

from saccade.serving import launch

pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available())
    or not hasattr(os, "fork"),
    reason="this PyTorch has no gloo, or this system no fork",
)
LIMIT_SECONDS = 300


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """What each rank says of each case: "" or what went wrong."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, rank_cases.__file__, str(folder)]
    programs.run(command, LIMIT_SECONDS, {**os.environ, "OMP_NUM_THREADS": "1"})
    return [
        json.loads((folder / f"found.{rank}").read_text("utf-8"))
        for rank in range(rank_cases.WORLD)
    ]


@pytest.mark.parametrize("name", rank_cases.CASES)
def test_ranks_serve_as_one_process_does(answers: list[dict[str, str]], name: str) -> None:
    assert [said[name] for said in answers] == ["", ""]


@pytest.mark.parametrize("name", rank_cases.ENDINGS)
def test_a_rank_that_ends_is_told_of(answers: list[dict[str, str]], name: str) -> None:
    said = [each[name] for each in answers if name in each]  # of ranks that went on
    assert said and not any(said)


# ---- processes that one starts -------------------------------------------------------------------


def test_ranks_join_and_end_well(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    assert launch.run_ranks(launched.add_up, [tmp_path], 2, 30.0) == 0
    assert [(tmp_path / name).read_text() for name in "01"] == ["3", "3"]
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_rank_that_dies_ends_all(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.2)
    begin = time.monotonic()
    assert launch.run_ranks(launched.die, [int(signal.SIGKILL)], 2, 30.0) == 1
    assert time.monotonic() - begin < launched.SLEEP
    said = "saccade serve: rank 1 ended by SIGKILL; the 1 that still ran are ended"
    assert said in capfd.readouterr().err
