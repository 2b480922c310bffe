"""The script that times the host goes through each kind of call, on a GPU that is not there."""

from __future__ import annotations

import json
from pathlib import Path

import host_times
import pytest
import torch


@pytest.mark.skipif(torch.cuda.is_available(), reason="none has to be pretended")
@pytest.mark.parametrize("kind", [kind.name for kind in host_times.KINDS])
def test_every_kind_is_timed(kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "times.jsonl"
    options = ["--kind", kind, "--lengths", "3", "--json", str(file)]
    with host_times.pretended():
        assert host_times.main(host_times.parser().parse_args(options)) == 0
    found = json.loads(file.read_text())
    assert found["kind"] == kind and set(host_times.PASSES) <= set(found)
    for passes in (found[name] for name in host_times.PASSES):
        assert passes[0] > 0 and all(seconds > 0 for seconds in passes[1:]) == (kind != "decode")
    assert kind in capsys.readouterr().out
