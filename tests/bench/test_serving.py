"""The bench of the engine: real work on a tiny model, and tokens that differ are noticed."""

import pytest
import torch
from typer.testing import CliRunner

from saccade.bench import serving
from saccade.bench.results import read
from saccade.bench.timing import TimingPlan
from saccade.demo.model import ByteModel, DemoModelShape, export
from saccade_cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96))
    with torch.no_grad():
        model.embedding.weight *= 40  # or all logits are much alike
    return export(model, tmp_path_factory.mktemp("exported"))


def test_engine_and_generate_give_the_tokens_of_generation_without_a_cache(folder):
    served, alone = serving.load(folder), serving.load(folder)
    work = serving.Work(serving.prompts_of(serving.tokenizer_of(folder), 5), 7)
    wanted = serving.without_cache(alone, work)
    assert serving.serve(served, work) == serving.one_by_one(alone, work) == wanted
    assert [len(tokens) for tokens in wanted] == [7] * 5
    assert all(16 <= len(prompt) < 65 for prompt in work.prompts)


def test_other_tokens_are_refused():
    with pytest.raises(ValueError, match="request 1: new token 2 is 5, and 6 without a cache"):
        serving.check([[1, 2], [3, 4, 5]], [[1, 2], [3, 4, 6]])


def test_command_writes_results(folder, tmp_path, monkeypatch):
    def little(folder, say):
        return real(
            folder, requests=3, new_tokens=4, plan=TimingPlan(rounds=2, sample_seconds=0), say=say
        )

    real = serving.measure_serving
    monkeypatch.setattr(serving, "measure_serving", little)
    file = tmp_path / "serving.jsonl"
    done = CliRunner(env={"COLUMNS": "100"}).invoke(
        app, ["bench", "--serving", str(folder), "--json", str(file)]
    )
    assert done.exit_code == 0, done.output
    assert "12 tokens are those of greedy generation" in done.output
    assert "times as many (wanted: at least 5)" in done.output
    found = read(file)
    assert [result.who for result in found] == ["saccade/engine", "transformers/generate"]
    for result in found:
        assert result.which_pass == "generate" and result.rounds == 2
        assert (result.case["batch"], result.case["kv_heads"], result.threads) == (
            3,
            2,
            torch.get_num_threads(),
        )
        assert "transformers" in result.versions
