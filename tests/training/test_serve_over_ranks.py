"""`saccade serve --nproc 2` from the command line; transformers loads such models by accelerate."""

from __future__ import annotations

import json
import signal
import sys
import urllib.request
from pathlib import Path

import programs
import pytest
import torch

import saccade
from saccade.demo.model import ByteModel, DemoModelShape, export
from saccade.serving import command

pytestmark = pytest.mark.training
SECONDS = 120  # that starting, answering and ending may take
SHAPE = DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96)


def test_two_processes_answer_as_one_does(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ByteModel(SHAPE).eval()
    with torch.no_grad():
        model.embedding.weight *= 40  # or all logits are much alike
    folder = export(model, tmp_path / "exported")
    loaded, tokenizer = command.load(folder, "cpu")
    wanted = saccade.Engine(loaded, tokenizer).generate(["def "], max_new_tokens=12)[0].text
    arguments = ["serve", str(folder), "--nproc", "2", "--port", "0"]
    with programs.Program([sys.executable, "-m", "saccade", *arguments]) as served:
        found = served.until(r"running on http://127.0.0.1:(\d+)", SECONDS)
        assert "2 ranks, each with 1 kv heads of every layer" in served.said
        body = json.dumps({"prompt": "def ", "max_tokens": 12, "temperature": 0}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{found[1]}/v1/completions",
            body,
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=SECONDS) as answer:
            assert json.loads(answer.read())["choices"][0]["text"] == wanted
        served.process.send_signal(signal.SIGTERM)
        served.succeed(SECONDS)
