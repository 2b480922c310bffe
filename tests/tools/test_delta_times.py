"""The tool that times the gated delta rule: its cases, what it calls, and what it tells."""

from __future__ import annotations

import dataclasses
import json

import delta_times
import pytest
import torch
from delta_times import DeltaTask

SMALL = DeltaTask("small", 1, 2, (40, 24), packed=True, dim=16, dtype="float32")


def test_a_glob_that_fits_no_case_is_refused_by_name() -> None:
    some = delta_times.chosen(["qwen*"], delta_times.CASES)
    assert [task.name for task in some] == ["qwen", "qwen-step", "qwen-packed"]
    with pytest.raises(ValueError, match="CASE: got nothing, takes qwen, "):
        delta_times.chosen(["nothing"], delta_times.CASES)


@pytest.mark.parametrize("decay", ["heads", "channels"])
def test_errors_are_those_of_the_first_sequence(decay: str) -> None:
    """Packed or alone, of the same rows; a library that gives something else is far off."""
    task = SMALL._replace(decay=decay)
    found = delta_times.errors_of(task, "ours", "cpu")
    assert set(found) == {"output", "last 1024 rows", *delta_times.NAMES}
    assert max(found.values()) < 2e-6
    rows = delta_times.rows_of(task, "cpu")
    alone = rows._replace(**{
        name: each[:, :40] for name, each in rows._asdict().items() if each is not None
        and name not in ("state", "offsets")
    }, offsets=None)  # fmt: skip
    packed, dense = (delta_times.ours(each)(*each.leaves()) for each in (rows, alone))
    torch.testing.assert_close(packed[:, :40], dense)


def test_results_of_a_cpu_are_kept_as_they_come(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.setattr(delta_times, "CPU_CASES", {"small": SMALL._replace(lengths=(8,))})
    monkeypatch.setattr(
        delta_times, "PLAN", dataclasses.replace(delta_times.PLAN, rounds=1, warm_seconds=0)
    )
    file = tmp_path / "delta.jsonl"
    delta_times.main(["--device", "cpu", "--no-errors", "--json", str(file)])
    row = json.loads(file.read_text(encoding="utf-8"))
    assert row["case"] == "small" and 0 < row["forward_ms"] < row["both_ms"]
    assert "small" in capsys.readouterr().out
