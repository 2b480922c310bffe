"""The script that makes first calls says what failed, and its kinds of calls are listed."""

from __future__ import annotations

import importlib.util
import json
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import first_calls
import pytest
import torch

from saccade.gpu import stored_code


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_its_kinds_of_calls_are_listed() -> None:
    from saccade.kernel_check import variants

    globs = [glob for kind in first_calls.KINDS for glob in kind.of]
    found = variants.variants_of("sm_90", "*", globs)
    for kind in first_calls.KINDS:
        of = [one.of for one in found if any(fnmatchcase(one.of, glob) for glob in kind.of)]
        passes = {name.split(":")[0] for name in of}
        assert any(name.endswith("backward") for name in passes) == kind.gradients


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would serve the calls")
def test_a_call_that_fails_is_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(first_calls, "KINDS", first_calls.KINDS[:1])
    assert first_calls.main(first_calls.parser().parse_args([str(tmp_path)])) == 1
    said = capsys.readouterr().out
    assert said.count("dense: FAILED") == 2
    assert "CUDA" in said or "NVIDIA" in said  # by builds of torch without and with it


def test_what_was_found_is_a_line_of_the_table_and_of_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def ask(kind: first_calls.Kind, folder: Path, *more: str) -> dict[str, Any] | str:
        if "--checks" in more:
            return {"kernels": 3}
        return {
            f"{name} {which}": 1e-4
            for name in ("first", "new", "known", "same") for which in ("forward", "both")
        }  # fmt: skip

    monkeypatch.setattr(first_calls, "ask", ask)
    file = tmp_path / "found.jsonl"
    read = first_calls.parser().parse_args([str(tmp_path), "--json", str(file)])
    assert first_calls.main(read) == 0
    said = capsys.readouterr().out
    assert "decode: as the reference, 3 kernels, none compiled" in said
    assert said.count("with gradients") == 3 and said.count(" 100") == 7 * 3
    kinds = [json.loads(line)["kind"] for line in file.read_text().splitlines()]
    assert kinds == ["dense", "varlen", "decode", "linear"]


def test_triton_is_hidden(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "triton", sys.modules.get("triton"))
    monkeypatch.setattr(stored_code, "COMPILED", stored_code.COMPILED)
    first_calls.without_triton(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="triton"):
        import triton  # noqa: F401
    assert tmp_path == stored_code.COMPILED
