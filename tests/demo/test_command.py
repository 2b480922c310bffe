import json
from dataclasses import replace

import pytest
import torch
import typer
from typer.testing import CliRunner

from saccade.demo import command
from saccade.demo.command import QUICK
from saccade.demo.model import DemoModelShape, load_model

app = typer.Typer()
app.command()(command.demo)

TINY = replace(
    QUICK, batch=4, learning_rate=1e-2, held_out_bytes=1_000, lengths=(128,), window_lengths=(128,),
    rounds=1, new_bytes=20, shape=DemoModelShape(32, 4, 2, 48, windows=(8, None), context=64),
)  # fmt: skip


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.setattr(command, "QUICK", TINY)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # threads of a model this small only wait for one another
    text = tmp_path / "text.txt"
    text.write_text("the cat that sat at the mat was fat. " * 600)

    def run(*arguments, text=text):
        given = ["--quick", "--text", str(text), "--output", str(tmp_path / "out"), *arguments]
        return CliRunner(env={"COLUMNS": "100"}).invoke(app, given)

    yield run
    torch.set_num_threads(threads)


def test_the_whole_demo(run, tmp_path):
    pytest.importorskip("matplotlib")
    result = run("--steps", "100", "--prompt", "the cat")
    assert result.exit_code == 0, result.output
    for expected in (
        "this model", "counting pairs", "Distance from the float64 reference", "2 (causal)",
        "2 (softcap)", "the cat", "Causal", "Window 256", "plain PyTorch",
        "comparison.png", "saccade generate", "--temperature 0.7",
    ):  # fmt: skip
        assert expected in result.output
    folder = tmp_path / "out"
    assert (folder / "comparison.png").read_bytes().startswith(b"\x89PNG")
    results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
    bits = results["bits_per_byte"]
    assert bits["this model"] < bits["counting pairs (bigram)"] < bits["counting bytes (unigram)"]
    assert results["steps"] == 100
    assert len(results["exactness"]) == 16
    assert len(results["comparison"]["measured"]) == 6
    exported = {path.name for path in (folder / "huggingface").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= exported
    assert load_model(folder)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 256)


def test_a_model_that_learned_nothing_is_called_so(run, monkeypatch):
    monkeypatch.setattr("saccade.demo.comparison.matplotlib_missing", lambda: True)
    monkeypatch.setattr("saccade.demo.comparison.measure_peak", lambda call: None)
    result = run("--steps", "1")
    assert result.exit_code == 1
    assert "predicts no better than counting" in result.output
    assert "unknown" in result.output  # where the system tells no memory
    assert "No plot: matplotlib is missing" in result.output


def test_a_text_that_is_not_there_is_named(run, tmp_path):
    result = run(text=tmp_path / "nowhere.txt")
    assert result.exit_code == 2
    assert f"--text {tmp_path / 'nowhere.txt'}: no such file or folder" in result.output


def test_help_tells_what_happens():
    result = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["--help"])
    assert result.exit_code == 0
    for expected in ("--text", "--quick", "float64 reference", "held-out"):
        assert expected in result.output
