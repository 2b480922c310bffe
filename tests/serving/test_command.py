"""`saccade generate` on a model in a folder, as transformers saves one."""

import json

import pytest
import served
import torch
from rich.console import Console
from typer.testing import CliRunner

from saccade.demo.model import ByteModel, DemoModelShape, export
from saccade.serving import command, launch
from saccade_cli import app

SHAPE = DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = ByteModel(SHAPE).eval()
    with torch.no_grad():
        model.embedding.weight *= 40  # or all logits are much alike
    return export(model, tmp_path_factory.mktemp("exported"))


def run(folder, *arguments, columns="100"):
    return CliRunner(env={"COLUMNS": columns}).invoke(app, ["generate", str(folder), *arguments])


def test_texts_go_on_as_without_a_cache(folder, tmp_path):
    file = tmp_path / "texts.jsonl"
    prompts = ["def ", "the cat", "x"]
    done = run(folder, *prompts, "--max-new-tokens", "12", "--json", str(file))
    assert done.exit_code == 0, done.output
    model, tokenizer = command.load(folder, "cpu")
    model.set_attn_implementation("eager")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    assert [line["prompt"] for line in lines] == prompts
    for line in lines:
        tokens = tokenizer.encode(line["prompt"])
        for token in line["tokens"]:
            with torch.inference_mode():
                logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            assert int(logits.argmax()) == token
            tokens.append(token)
        assert len(line["tokens"]) == 12 and line["reason"] == "length"
        assert line["statistics"]["new_tokens"] == 12
    assert "3 requests: 12 prompt tokens" in done.output
    assert "36 new ones" in done.output


def test_quiet_prints_the_new_texts_only(folder):
    options = ("--max-new-tokens", "8", "--temperature", "1", "--top-k", "40", "--top-p", "0.9")
    done = run(folder, "def ", "--samples", "3", "--seed", "5", "--quiet", *options)
    model, tokenizer = command.load(folder, "cpu")
    engine = served.saccade.Engine(model, tokenizer)
    sampling = {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "max_new_tokens": 8}
    wanted = [engine.submit("def ", seed=5 + n, **sampling).result().text for n in range(3)]
    assert done.stdout == "".join(f"{text}\n" for text in wanted)


def test_prompts_come_from_a_file_too(folder, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one\n\ntwo\n", encoding="utf-8")
    output = tmp_path / "texts.jsonl"
    options = ("--file", str(file), "--json", str(output), "--max-new-tokens", "5", "--quiet")
    assert run(folder, "zero", *options).exit_code == 0
    found = [json.loads(line)["prompt"] for line in output.read_text().splitlines()]
    assert found == ["zero", "one", "two"]


def test_few_pages_make_requests_take_turns(folder):
    options = ("--max-new-tokens", "60", "--num-pages", "6", "--max-sequences", "4")  # of two kinds
    done = run(folder, *("some text " + c for c in "abcd"), *options)
    assert done.exit_code == 0, done.output
    assert "12 pages" in done.output and " 0 preemptions" not in done.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "give a PROMPT, or --file"),
        (("x", "--max-new-tokens", "96"), "max_new_tokens: got 96"),
        (("x", "--top-p", "0"), "top_p: got 0.0"),
        (("",), "prompt: got no token"),
        (("x", "--json", "no/folder/x.jsonl"), "--json: got no/folder/x.jsonl, takes a file in"),
        (("x", "--device", "abacus"), "--device: got 'abacus', takes cpu, cuda"),
        (("x", "--device", "cuda:64"), "--device: got 'cuda:64', and PyTorch sees"),
    ],
)
def test_mistakes_are_answered_in_a_line(folder, arguments, message):
    done = run(folder, *arguments)
    assert done.exit_code == 2
    assert f"saccade generate: {message}" in done.stderr


def test_a_folder_without_a_model_is_answered(tmp_path):
    done = run(tmp_path, "x")
    assert done.exit_code == 2 and "holds no config.json" in done.stderr


def test_help_teaches():
    done = CliRunner(env={"COLUMNS": "100"}).invoke(app, ["generate", "--help"])
    assert done.exit_code == 0
    for expected in ("save_pretrained", "--temperature", "--file", "--samples", "Try:"):
        assert expected in done.output


def test_tables_fit_a_narrow_terminal(folder, tmp_path):
    done = run(folder, "abc", "--max-new-tokens", "5", columns="80")
    assert all(len(line) <= 80 for line in done.output.splitlines())
    for name in ("ended by", "cached", "queued", "gave"):
        assert name in done.output
    assert "…" not in done.output.split("╯")[-1]


def test_the_live_table_shows_who_writes(folder):
    model, tokenizer = command.load(folder, "cpu")
    engine = served.saccade.Engine(model, tokenizer, max_sequences=2)
    completions = [engine.submit(text, max_new_tokens=6) for text in ("ab", "cd", "ef")]
    terminal = Console(width=100, record=True, force_terminal=True)
    watch = command.Watch(terminal, completions, 18)
    for _ in range(3):
        engine.step()
    watch.update(engine.statistics())
    terminal.print(watch.live.renderable)
    shown = terminal.export_text()
    assert shown.count("running") == 2 and shown.count("waiting") == 1
    assert "0 of 3 done" in shown and "6/18" in shown


def test_ranks_are_not_started_without_accelerate(folder, monkeypatch):
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    started = []
    monkeypatch.setattr(launch, "run_ranks", lambda *given: started.append(given) or 0)
    done = CliRunner().invoke(app, ["serve", str(folder), "--nproc", "2"])
    assert done.exit_code == 2 and not started
    assert "--nproc: models over ranks need accelerate" in done.output
    assert "pip install 'saccade[serve]'" in done.output
