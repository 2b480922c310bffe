"""The bench of whole models: training steps are right, and an engine does real work."""

import builtins
import functools
import io
import json
import sys

import pytest
import torch
import typer
from rich.console import Console
from typer.testing import CliRunner

import saccade_cli
from saccade.bench import display, models, timing
from saccade.bench.command import bench
from saccade.bench.models import SHAPES, Models, ModelShape, Workload
from saccade.bench.results import read
from saccade.bench.timing import TimingPlan
from saccade.demo.model import ByteModel, DemoModelShape, export

# Every result of training has losses.
# pyright: reportArgumentType=false


CPU = torch.device("cpu")
ONCE = TimingPlan(rounds=3, sample_seconds=0.0, limit_seconds=0.0)
TINY = ModelShape(32, 48, 2, 4, 2, 61, "float32", 64, (32, 64, 128))

app = typer.Typer()
app.command()(bench)


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(SHAPES, "cpu", TINY)
    monkeypatch.setattr(models, "LEARNING_RATE", 3e-3)  # so narrow a model needs more


def run(*arguments):
    return CliRunner().invoke(app, ["--training", *arguments, "--device", "cpu"])


def measured(*lengths, modes=("eager",), attentions=models.ATTENTIONS):
    works = models.workloads("cpu", lengths)
    return list(models.measure_training(works, attentions, modes, CPU, ONCE))


def test_the_model_of_a_gpu_has_1_2_billion_weights_and_the_asked_batches():
    shape = SHAPES["gpu"]
    attention = 2 * shape.hidden * (shape.hidden + shape.hidden // shape.heads * shape.kv_heads)
    layer = attention + 3 * shape.hidden * shape.intermediate
    weights = shape.layers * layer + 2 * shape.vocabulary * shape.hidden
    assert 1.15e9 < weights < 1.25e9
    works = models.workloads("gpu", [])
    assert [(work.length, work.batch, work.checkpointing) for work in works] == [
        (2048, 8, False), (8192, 2, False), (32768, 1, True),
    ]  # fmt: skip
    assert works[0].case().name == "gpu-training-bf16-d128-2k"


def test_operations_of_products_are_those_that_pytorch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    work = Workload("cpu", TINY, 32)
    made = Models(work, ["sdpa"], CPU)
    (tokens,) = models.batches(work, 1, CPU)
    with FlopCounterMode(display=False) as counter:
        models._differentiated(made.by_attention["sdpa"], tokens)
    attention = work.shape.layers * work.case().flops("forward+backward")
    products = work.flops(made.num_parameters) - attention
    norms = sum(weights.numel() for weights in made.weights if weights.dim() == 1)
    found = counter.get_flop_counts()["Global"]
    counted = sum(n for op, n in found.items() if "attention" not in str(op))
    assert counted == products - 6 * norms * work.num_tokens


def test_models_share_their_weights_and_start_alike():
    made = Models(Workload("cpu", TINY, 32), ["sdpa", "saccade"], CPU)
    ours, theirs = (list(model.parameters()) for model in made.by_attention.values())
    assert all(one is other for one, other in zip(ours, theirs, strict=True))
    made.start()
    first = [weights.clone() for weights in made.weights]
    for weights in made.weights:
        weights.grad = torch.ones_like(weights)
    made.update()
    assert not torch.equal(first[0], made.weights[0])
    made.start()
    assert all(map(torch.equal, first, made.weights))
    assert not made.optimizer.state


@pytest.mark.parametrize("length", ["32", "128"])  # the latter with activation checkpointing
def test_losses_and_gradient_norms_are_those_of_sdpa(length):
    ((results, absences),) = measured(length)
    assert not absences
    theirs, ours = results
    assert (theirs.who, ours.who) == ("sdpa", "saccade/cpu")
    assert theirs.case["checkpointing"] == (length == "128")
    for field in ("losses", "gradient_norms"):
        assert display.distance(getattr(ours, field), getattr(theirs, field)) < 1e-5
        assert len(getattr(ours, field)) == models.COMPARED_STEPS
    assert ours.losses and ours.losses[-1] < ours.losses[0]
    assert ours.run == theirs.run
    assert ours.tokens_per_second == pytest.approx(max(64, int(length)) / ours.median_ms * 1e3)


def test_another_attention_shows_in_the_losses(monkeypatch):
    """What is compared must tell a wrong mask from a right one."""
    ((right, _),) = measured("64", attentions=["sdpa"])
    attend = torch.nn.functional.scaled_dot_product_attention

    def uncausal(*arguments, is_causal=False, **options):
        return attend(*arguments, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", uncausal)
    ((wrong, _),) = measured("64", attentions=["sdpa"])
    assert display.distance(wrong[0].losses, right[0].losses) > 1e-4
    assert display.distance(wrong[0].gradient_norms, right[0].gradient_norms) > 1e-3


def test_one_that_fails_loses_no_other(monkeypatch):
    first_steps = models._first_steps

    def failing(models, attention, mode, tokens):
        model = models.by_attention[attention]
        if attention == "sdpa" and models.work.length == 32:

            def forward(**options):
                model(**options).loss.backward()  # gradients that nobody may find later
                raise torch.OutOfMemoryError("CUDA out of memory.\nmore")

            models.by_attention[attention] = forward
        return first_steps(models, attention, mode, tokens)

    ((sound, _),) = measured("32", attentions=["saccade"])
    monkeypatch.setattr(models, "_first_steps", failing)
    (results, absences), (others, none) = measured("32", "64")
    assert [result.who for result in results] == ["saccade/cpu"]
    assert results[0].losses == sound[0].losses
    assert results[0].gradient_norms == sound[0].gradient_norms
    assert absences == [("cpu-training-fp32-d8-32", "sdpa", "eager: CUDA out of memory.")]
    assert len(others) == 2 and not none


def test_memory_that_ends_while_timing_loses_no_other_length(monkeypatch):
    rotate, calls = timing.rotate, []

    def exhausted(*arguments):
        calls.append(1)
        if len(calls) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return rotate(*arguments)

    monkeypatch.setattr(models, "rotate", exhausted)
    (results, absences), (others, none) = measured("32", "64")
    assert not results and {absence.who for absence in absences} == set(models.ATTENTIONS)
    assert len(others) == 2 and not none


def test_an_interrupt_keeps_what_was_measured(tmp_path, monkeypatch):
    rotate, calls = timing.rotate, []

    def interrupted(*arguments):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return rotate(*arguments)

    monkeypatch.setattr(models, "rotate", interrupted)
    file = tmp_path / "training.jsonl"
    done = run("--lengths", "32,64", "--modes", "eager", "--quick", "--json", str(file))
    assert done.exit_code != 0
    assert len(read(file)) == 2
    assert "tokens/s" in done.output


def test_the_table_of_losses_shows_all_of_them():
    ((results, _),) = measured("32")
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(display.course_table(results))
    text = console.export_text()
    assert "…" not in text
    for result in results:
        assert all(f"{loss:.4f}" in text for loss in result.losses or [])


def test_losses_that_are_not_finite_are_no_result(monkeypatch):
    monkeypatch.setattr(models, "LEARNING_RATE", float("inf"))
    ((results, absences),) = measured("32", attentions=["sdpa"])
    assert not results
    assert "not finite" in absences[0].reason


def test_the_command_from_end_to_end(tmp_path):
    file, image, page = (tmp_path / name for name in ("a.jsonl", "a.png", "a.html"))
    done = run(
        "--lengths", "32,64", "--modes", "eager", "--quick", "--json", str(file),
        "--plot", str(image), "--report", str(page),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    results = read(file)
    assert [(result.case["query_len"], result.who) for result in results] == [
        (32, "sdpa"), (32, "saccade/cpu"), (64, "sdpa"), (64, "saccade/cpu"),
    ]  # fmt: skip
    assert {result.which_pass for result in results} == {"training step"}
    assert "tokens/s" in done.output and "gradient norms" in done.output
    assert image.read_bytes()[:4] == b"\x89PNG"
    assert "cpu-training-fp32-d8-64" in page.read_text(encoding="utf-8")
    shown = CliRunner().invoke(app, ["--read", str(file)])
    assert "tokens/s" in shown.output and "training step" in shown.output
    line = json.loads(file.read_text(encoding="utf-8").splitlines()[0])
    line["losses"][0] = "low"
    file.write_text(json.dumps(line) + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match="losses"):
        read(file)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # of Dynamo's
def test_compiled_steps_take_part(monkeypatch):
    # Of a minute, Inductor and its C++ compiler took all but some seconds; others test them.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    ((results, absences),) = measured("32", modes=("compiled",))
    assert not absences
    theirs, ours = results
    assert ours.which_pass == "training step, compiled"
    assert display.distance(ours.losses, theirs.losses) < 1e-5
    assert display.distance(ours.gradient_norms, theirs.gradient_norms) < 1e-4


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--lengths", "long"], "--lengths: got 'long', takes lengths such as 2k,8k or 1536"),
        (["--lengths", "0"], "--lengths: got '0'"),
        (["--modes", "lazy"], "--modes: got 'lazy', takes eager, compiled"),
        (["--who", "flex"], "--who: got 'flex', takes sdpa, saccade"),
        (["--cases", "tiny-*"], "--training leaves --cases unused"),
    ],
)
def test_mistakes_are_answered(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_lengths_without_training_are_refused():
    done = CliRunner().invoke(app, ["--lengths", "2k"])
    assert done.exit_code == 2
    assert "a run without --training leaves --lengths unused" in done.output


def test_without_transformers_it_says_what_to_install(monkeypatch):
    imported = builtins.__import__

    def missing(name, *arguments, **options):
        if name == "saccade.integrations.transformers":
            raise ImportError("found no transformers")
        return imported(name, *arguments, **options)

    monkeypatch.delitem(sys.modules, "saccade.integrations.transformers", raising=False)
    monkeypatch.setattr(builtins, "__import__", missing)
    done = run("--lengths", "32")
    assert done.exit_code == 2
    assert "pip install 'saccade[transformers]'" in done.output


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.manual_seed(0)
    model = ByteModel(DemoModelShape(32, 4, 2, 48, windows=(8, None), context=96))
    with torch.no_grad():
        model.embedding.weight *= 40  # or all logits are much alike
    return export(model, tmp_path_factory.mktemp("exported"))


def test_engine_and_generate_give_the_tokens_of_generation_without_a_cache(folder):
    served, alone = models.load(folder), models.load(folder)
    work = models.Work(models.prompts_of(models.tokenizer_of(folder), 5), 7)
    wanted = models.without_cache(alone, work)
    assert models.serve(served, work) == models.one_by_one(alone, work) == wanted
    assert [len(tokens) for tokens in wanted] == [7] * 5
    assert all(16 <= len(prompt) < 65 for prompt in work.prompts)


def test_other_tokens_are_refused():
    with pytest.raises(ValueError, match="request 1: new token 2 is 5, and 6 without a cache"):
        models.check([[1, 2], [3, 4, 5]], [[1, 2], [3, 4, 6]])


def test_command_writes_results(folder, tmp_path, monkeypatch):
    def little(folder, say):
        return real(
            folder, requests=3, new_tokens=4, plan=TimingPlan(rounds=2, sample_seconds=0), say=say
        )

    real = models.measure_serving
    monkeypatch.setattr(models, "measure_serving", little)
    file = tmp_path / "serving.jsonl"
    done = CliRunner(env={"COLUMNS": "100"}).invoke(
        saccade_cli.app, ["bench", "--serving", str(folder), "--json", str(file)]
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
