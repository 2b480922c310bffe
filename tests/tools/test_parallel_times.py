"""What the tool that times ranks beside one card prints and keeps, on one rank of a CPU."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import parallel_times
import pytest
import torch
import torch.distributed as dist

SIZES = "--rows 48 --document 20 --heads 4 2 --dim 8"


@pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")
def test_a_rank_alone(monkeypatch: pytest.MonkeyPatch, capsys: Any, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    for name, value in {
        "RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr(parallel_times, "LEAST_SECONDS", 1e-6)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    file = tmp_path / "times.json"
    parallel_times.main(f"--ranks 9 {SIZES} --rounds 1 --json {file}".split())
    rows = [json.loads(line) for line in file.read_text("utf-8").splitlines()]
    loads = [(row["load"], row["pass"], row["method"]) for row in rows]
    assert len(set(loads)) == len(loads) == 2 * 2 * 3
    assert all(row["ranks"] == 1 and row["difference"] < 1e-5 for row in rows)
    assert all(row["ratio"] == row["one_ms"] / row["ranks_ms"] for row in rows)
    assert sum(row["auto"] for row in rows) == 4  # one method of each load and pass
    printed = capsys.readouterr().out
    assert printed.count("\n| causal | 48 | ") == 6 and "1 ranks, CPU" in printed


def test_work_is_that_of_visible_pairs() -> None:
    options = parallel_times.parsed([str(word) for word in SIZES.split()])
    assert parallel_times.offsets_of(options).tolist() == [0, 20, 40, 48]
    assert parallel_times.flops("causal", options, "forward") == 4 * 48 * 49 / 2 * 4 * 8
    pairs = 210 + 210 + 36
    assert parallel_times.flops("documents", options, "backward") == 4 * pairs * 4 * 8 * 2.5
