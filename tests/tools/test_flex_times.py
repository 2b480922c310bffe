"""Which calls are timed, that both libraries compute the same in them, and what a run leaves."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("flex_times", ROOT / "tools/flex_times.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flex_times"] = module
    spec.loader.exec_module(module)
    return module


def test_globs_choose_cells_and_the_cheapest_come_first(tool: Any) -> None:
    every = tool.cells(["*"], ["*"], ["*"])
    assert len(every) == len(tool.CASES) * 4 and every[0] == ("causal", 4096, 64)
    some = tool.cells(["dil*", "alibi"], ["4096"], ["1*"])
    assert some == [("alibi", 4096, 128), ("dilated", 4096, 128)]
    with pytest.raises(ValueError, match="--length: got 77, takes 4096, 16384"):
        tool.cells(["*"], ["77"], ["*"])


def test_a_process_of_ours_compiles_all_lengths(tool: Any) -> None:
    units = tool.units(tool.cells(["causal"], ["*"], ["*"]))
    assert [(unit.library, len(unit.cells)) for unit in units] == [
        ("ours", 2), ("theirs", 1), ("theirs", 1), ("ours", 2), ("theirs", 1), ("theirs", 1),
    ]  # fmt: skip


@pytest.mark.filterwarnings("ignore:flex_attention called without")
@pytest.mark.parametrize("name", ["window", "documents", "dilated", "natten", "alibi", "relative"])
def test_both_libraries_compute_the_same(
    tool: Any, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """FlexAttention runs eagerly on a CPU, without gradients."""
    monkeypatch.setattr(tool, "DEVICE", "cpu")
    inside = torch.compile  # eager FlexAttention compiles itself with another backend

    def compile_nothing(call: Any, **options: Any) -> Any:
        return call if options == {"dynamic": False} else inside(call, **options)

    monkeypatch.setattr(torch, "compile", compile_nothing)
    monkeypatch.setattr(tool, "TOKENS", 1)
    cell, number = tool.Cell(name, 256, 16), tool.CASES[name].number
    rows = [each.detach().float() for each in tool.rows_of(cell)]
    found = [tool.made(cell, number, library, rows).run() for library in tool.LIBRARIES]
    torch.testing.assert_close(*found)


def test_a_run_goes_on_where_another_ended(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: Any
) -> None:
    done: list[Any] = []

    def compiled(asked: Any, jobs: int, until: float) -> Any:
        return {cell: {"first_ours_s": [1.0, 2.0], "first_theirs_s": [3.0, 4.0]} for cell in asked}

    def timed(cell: Any, known: Any) -> dict[str, Any]:
        done.append(cell)
        row = {**known, "case": cell.case, "length": cell.length, "head_dim": cell.dim}
        if cell.case == "relative":
            return {**row, "forward_ours_ms": 2.5, "error_theirs": "RuntimeError: no config"}
        times = {f"{which}_ratio": 1.5 for which in ("forward", "backward")}
        times |= {
            f"{which}_{one}_ms": 3.0 for which in ("forward", "backward") for one in tool.LIBRARIES
        }
        return {**row, **times, "device": "a GPU"}

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(tool, "compiled", compiled)
    monkeypatch.setattr(tool, "timed", timed)
    file, picture = tmp_path / "times.json", tmp_path / "times.png"
    options = ["--json", str(file), "--dim", "64", "--length", "4096"]
    assert tool.main([*options, "--case", "relative"]) == 1
    shown = capsys.readouterr().out
    assert "2.500 / -" in shown and "    theirs failed: RuntimeError: no config" in shown
    assert tool.main([*options, "--case", "alibi", "--case", "relative"]) == 1
    assert "forward 1.50 of 1, backward 1.50 of 1" in capsys.readouterr().out
    assert [cell.case for cell in done] == ["relative", "alibi"]
    kept = [json.loads(line)["case"] for line in file.read_text().splitlines()]
    assert kept == ["alibi", "relative"]
    assert tool.main([*options, "--case", "alibi", "--again", "--plot", str(picture)]) == 0
    assert done[-1].case == "alibi" and picture.read_bytes().startswith(b"\x89PNG")
    assert tool.main([*options, "--case", "causal", "--seconds", "-1"]) == 1
    assert "time ended before: causal 4096 d64" in capsys.readouterr().out
