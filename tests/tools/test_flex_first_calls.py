"""First calls of both libraries: each in a process of its own, and what is printed of them."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[2]
OURS = {"made_s": 0.0, "forward_s": 3.0, "backward_s": 1.0, "processor_s": 9.0}
OURS_THEIRS = ("ours", "theirs")
THEIRS = {"made_s": 1.0, "forward_s": 4.0, "backward_s": 3.0, "processor_s": 9.0}


@pytest.fixture(scope="module")
def tool() -> Any:
    file = ROOT / "tools/flex_first_calls.py"
    spec = importlib.util.spec_from_file_location("flex_first_calls", file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["flex_first_calls"] = module
    spec.loader.exec_module(module)
    return module


def test_each_library_is_called_by_a_process_of_its_own(
    tool: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[tuple[str, str, list[int]]] = []

    def alone(cell: Any, library: str, cores: list[int]) -> dict[str, Any]:
        asked.append((str(cell), library, cores))
        return OURS if library == "ours" else THEIRS

    monkeypatch.setattr(tool, "alone", alone)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tool.os, "sched_getaffinity", lambda process: {4, 5, 6, 7, 8})
    rows = tmp_path / "rows.jsonl"
    given = ["--case", "causal", "--dim", "*", "--jobs", "2", "--json", str(rows)]
    assert tool.main(given) == 0
    names = {"causal 4096 d64", "causal 4096 d128"}
    assert sorted(one[:2] for one in asked) == sorted((n, by) for n in names for by in OURS_THEIRS)
    assert all(cores in ([4, 5], [6, 7]) for *_, cores in asked)
    said = capsys.readouterr().out
    assert "ours 0.00 + 3.00 + 1.00 = 4.00  theirs 1.00 + 4.00 + 3.00 = 8.00" in said
    assert "ratio 2.00, 1.75 of the calls" in said
    read = [json.loads(line) for line in rows.read_text().splitlines()]
    assert len(read) == 2 and read[0]["ours"] == OURS and read[0]["cores"] == 2


def test_a_call_that_fails_says_why(tool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here there is no GPU for it."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    cell = tool.flex_times.Cell("causal", 4096, 64)
    found = tool.alone(cell, "ours", sorted(tool.os.sched_getaffinity(0)))
    assert list(found) == ["error"]
    assert re.search("(?i)cuda|nvidia", found["error"])  # by builds of torch without and with it
    assert found["error"] in tool.line_of(cell, {"ours": found, "theirs": THEIRS})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert tool.main(["--case", "causal"]) == 2
