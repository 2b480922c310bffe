"""`saccade serve --nproc 2` from the command line; transformers loads such models by accelerate."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
import torch

import saccade
from saccade.demo.model import ByteModel, DemoModelShape, export
from saccade.serving import command

pytestmark = pytest.mark.training
SHAPE = DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96)


def test_two_processes_answer_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ByteModel(SHAPE).eval()
    with torch.no_grad():
        model.embedding.weight *= 40  # or all logits are much alike
    folder = export(model, tmp_path / "exported")
    loaded, tokenizer = command.load(folder, "cpu")
    wanted = saccade.Engine(loaded, tokenizer).generate(["def "], max_new_tokens=12)[0].text
    arguments = [sys.executable, "-m", "saccade", "serve", str(folder), "--nproc", "2"]
    with subprocess.Popen([*arguments, "--port", "0"], stderr=subprocess.PIPE, text=True) as served:
        assert served.stderr is not None
        said = ""
        try:
            while (found := re.search(r"running on http://127.0.0.1:(\d+)", said)) is None:
                line = served.stderr.readline()
                assert line, said
                said += line
            assert "2 ranks, each with 1 kv heads of every layer" in said
            body = json.dumps({"prompt": "def ", "max_tokens": 12, "temperature": 0}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{found[1]}/v1/completions", body,
                {"Content-Type": "application/json"},
            )  # fmt: skip
            with urllib.request.urlopen(request, timeout=120) as answer:
                assert json.loads(answer.read())["choices"][0]["text"] == wanted
        finally:
            served.send_signal(signal.SIGTERM)
            said += served.communicate(timeout=120)[1]
    assert served.returncode == 0, said
