"""The command measures, tells, and answers mistakes with what there is."""

import subprocess
import sys

import pytest
import torch
import typer
from typer.testing import CliRunner

from saccade.bench import command, processes, results
from saccade.bench.cases import CASES
from saccade.bench.command import bench
from saccade.bench.peers import ours, pytorch
from saccade.bench.results import read

app = typer.Typer()
app.command()(bench)


def run(*arguments):
    return CliRunner().invoke(app, [*arguments, "--device", "cpu"])


def test_a_tiny_run_from_end_to_end(tmp_path):
    file, image = tmp_path / "results.jsonl", tmp_path / "image.png"
    done = run(
        "--cases", "tiny-causal-fp32-*,tiny-decode-*", "--who", "saccade/cpu", "--who", "sdpa*",
        "--pass", "forward,backward", "--pass", "forward+backward", "--quick",
        "--json", str(file), "--plot", str(image),
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    results = read(file)
    passes = {(result.case["name"], result.which_pass) for result in results}
    causal = "tiny-causal-fp32-d16-48"
    assert passes == {
        (causal, "forward"), (causal, "backward"), (causal, "forward+backward"),
        ("tiny-decode-fp32-d16-64", "decode"),
    }  # fmt: skip
    assert len({result.run for result in results}) == len(passes)
    assert {"saccade/cpu", "sdpa", "sdpa/math"} <= {result.who for result in results}
    assert all(0 < result.min_ms <= result.median_ms <= result.max_ms for result in results)
    assert all(result.threads == torch.get_num_threads() for result in results)
    checked = {"forward", "backward", "decode"}
    assert all((result.error is not None) == (result.which_pass in checked) for result in results)
    assert "sdpa/cudnn" in done.output  # in the footnotes, with its reason
    assert image.exists()
    again = run("--read", str(file))
    assert causal in again.output
    judged = run("--targets", str(file))
    assert "not measured" in judged.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--cases", "cpu-ful-fp32-d64-1k"], "Did you mean cpu-full-fp32-d64-1k"),
        (["--cases", "tiny-full-*", "--who", "spda"], "Did you mean sdpa"),
        (["--cases", "tiny-full-*", "--pass", "up"], "no pass is named 'up'"),
        (["--cases", "tiny-full-*", "--dtype", "int"], "no dtype is named 'int'"),
        (["--cases", "tiny-full-*", "--who", "flash_attn"], "nothing was measured"),
        (["--cases", "tiny-full-*", "--graph"], "--graph: got cpu, takes a GPU"),
        (["--cases", "tiny-full-*", "--plot", "image.txt"], "--plot: got image.txt, takes a name"),
        (["--host", "--plot", "image.png"], "--host leaves --plot unused"),
        (["--targets", ".", "--cases", "tiny-*"], "--targets leaves --cases unused"),
        (["--read", ".", "--who", "sdpa"], "--read leaves --who unused"),
        (["--read", "nowhere.jsonl"], "'--read': path 'nowhere.jsonl' does not exist"),
        (["--targets", "nowhere"], "'--targets': path 'nowhere' does not exist"),
        (["--serving", "nowhere"], "'--serving': dir 'nowhere' does not exist"),
    ],
)
def test_mistakes_are_answered(arguments, message):
    done = run(*arguments)
    assert done.exit_code == 2
    assert message in done.output


def test_a_device_that_is_not_there():
    done = CliRunner().invoke(app, ["--device", "abacus"])
    assert done.exit_code == 2
    assert "there are cpu, cuda" in done.output


def test_lists_and_help():
    assert "cpu-full-fp32-d64-1k" in run("--list").output
    assert "tiny" not in run("--list").output
    assert "Examples" in run("--help").output


def test_peers_over_pages_are_asked_by_a_case_that_they_serve():
    peers = {
        peer.who: command.reason_against(peer, torch.device("cpu"))
        for peer in ours.paged_peers()[:2]
    }
    assert peers == {"saccade/paged-16": None, "saccade/scattered-16": None}


def test_listing_peers_compiles_nothing(monkeypatch):
    monkeypatch.setattr(pytorch, "why_not", lambda device: pytest.fail("a compiler was started"))
    output = run("--list-peers").output
    assert "if it compiles" in output and "saccade/cpu" in output


def test_importing_the_command_imports_nothing_heavy():
    code = (
        "import sys, saccade.bench.command;"
        "heavy = {'matplotlib', 'transformers', 'triton', 'torch._inductor'};"
        "print(heavy & set(sys.modules))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "set()"


def test_memory_in_a_fresh_process():
    case = CASES["tiny-full-fp32-d16-48"]
    peak = processes.peak_on_cpu(case, "plain", "forward+backward")
    assert isinstance(peak, float)
    assert 0 <= peak < 50
    assert "not installed" in str(processes.peak_on_cpu(case, "flash_attn_3", "forward"))


def test_the_environment_is_named():
    assert results.device_name(torch.device("cpu"))
    assert {"saccade", "python", "torch"} <= set(results.versions())
    commit = results.commit()
    assert commit is None or len(commit) in (12, 13)
