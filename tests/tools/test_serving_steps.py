"""The tool that times decode steps: what its processes say is shown, and failures are told."""

import json
import subprocess
import sys
from typing import Any

import pytest
import serving_steps

from saccade.bench import results

ROW = {
    "batch": 1, "device": "a GPU", "median_ms": 2.5, "mean_ms": 2.25, "least_ms": 2.0,
    "worst_ms": 9.0, "floor_ms": 1.5, "over_floor": 1.5,
}  # fmt: skip


def runs(failing: str) -> Any:
    def run(command: list[str], **options: Any) -> Any:
        case = command[-1]
        if case == failing:
            raise subprocess.CalledProcessError(
                1, command, stderr="Traceback\nRuntimeError: broken"
            )
        named = case if case == "check" else f"serving-1b-{case.replace(':', '-')}"
        said = json.dumps({"case": named, **ROW})
        return subprocess.CompletedProcess(command, 0, f"some words\n{said}\n", "")

    return run


@pytest.mark.parametrize("failing", ["", "eager:1", "check"])
def test_cases_that_fail_are_told_and_others_shown(failing, monkeypatch, tmp_path, capsys):
    file = tmp_path / "rows.jsonl"
    monkeypatch.setattr(subprocess, "run", runs(failing))
    monkeypatch.setattr(
        sys, "argv", ["serving_steps.py", "graphs:1", "eager:1", "--json", str(file)]
    )
    assert serving_steps.main() == int(bool(failing))
    said = capsys.readouterr().out
    rows = results.read(file)
    wanted = [way for way in ("graphs", "eager") if way not in failing]
    assert [row.case["name"] for row in rows] == [f"serving-1b-{way}-1" for way in wanted]
    assert all((row.min_ms, row.median_ms, row.floor_ms) == (2.0, 2.5, 1.5) for row in rows)
    assert ("RuntimeError: broken" in said) == bool(failing)
    assert "2.25" in said.splitlines()[-1]


def test_without_time_nothing_is_begun(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serving_steps.py", "graphs:1", "--seconds", "0"])
    assert serving_steps.main() == 1
    assert "no time is left" in capsys.readouterr().out


def test_every_case_has_a_way():
    for case in serving_steps.CASES:
        way, _, batch = case.partition(":")
        assert way in serving_steps.WAYS and int(batch) > 0
