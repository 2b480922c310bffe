"""The commands compile without a GPU, tell, and answer mistakes with what there is."""

import importlib
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

from saccade.kernel_check import report
from saccade_cli import app

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)


def run(*arguments):
    return CliRunner().invoke(app, arguments)


def test_help_teaches_and_imports_nothing_heavy():
    program = (
        "import sys; from saccade_cli import app; from typer.testing import CliRunner;"
        "print(CliRunner().invoke(app, ['kernels', '--help']).output);"
        "print(CliRunner().invoke(app, ['tune', '--help']).output);"
        "heavy = {'triton', 'saccade.ops.attention.triton.host'};"
        "print('heavy:', sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert "saccade kernels --arch sm_75" in done.stdout
    assert "saccade tune -d 64 --mask causal --save" in done.stdout
    assert "heavy: []" in done.stdout, done.stdout + done.stderr


@needs_triton
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--arch", "sm_70"], "--arch: got 'sm_70', takes sm_75, sm_80"),
        (["--arch", "sm_90", "--kernel", "foward"], "no kernel is named 'foward'"),
        (["--check", "--known", "nowhere.json"], "--known: nowhere.json does not exist"),
        (["--markdown", "nowhere.md"], "'--markdown': file 'nowhere.md' does not exist"),
    ],
)
def test_mistakes_are_answered_with_what_there_is(arguments, message):
    done = run("kernels", *arguments)
    assert done.exit_code == 2
    assert message in done.output


@pytest.mark.parametrize("name", ["kernels", "tune"])
def test_without_triton_they_say_so(monkeypatch, name):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    done = run(name)
    assert done.exit_code == 2
    assert f"saccade {name}: Triton is not installed" in done.output


@needs_triton
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune for")
def test_tune_needs_a_gpu_and_says_so():
    done = run("tune")
    assert done.exit_code == 2
    assert "there is no GPU here" in done.output


@needs_triton
def test_a_kernel_is_compiled_without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.setenv("SACCADE_CONFIGS", str(tmp_path / "configs.json"))
    file = tmp_path / "kernels.json"
    done = run("kernels", "-a", "sm_90", "-k", "row_statistics", "--jobs", "1", "--json", str(file))
    assert done.exit_code == 0, done.output
    assert "row_statistics" in done.output
    assert str(tmp_path / "configs.json") in done.output.replace("\n", "")
    rows = json.loads(file.read_text())["kernels"]
    assert [row["kernel"] for row in rows] == ["row_statistics"] * 2  # dense and packed
    assert all(0 < row["usage"]["registers"] <= 255 for row in rows)
    assert all(row["usage"]["spills"] == 0 for row in rows)


# ---- what is known -------------------------------------------------------------------------------

USAGE = [64, 0, 1024, 0, 0, 0, 0, 0, 0]
OF_OTHERS = {"9.9": {"a": USAGE}}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Arguments of a command that has compiled a kernel, and the files that it wrote: a table, and
    what is known, where it found something of other kernels and of another Triton."""
    pytest.importorskip("triton")
    table, known = (tmp_path_factory.mktemp("known") / name for name in ("k.md", "known.json"))
    table.write_text(f"{report.BEGIN}{report.END}\n")
    version = importlib.import_module("triton").__version__
    known.write_text(json.dumps({version: {"0" * 24: USAGE}, **OF_OTHERS}))
    arguments = "kernels", "-a", "sm_80", "-k", "list_tiles", "--jobs", "1", "--known", str(known)
    arguments = *arguments, "--markdown", str(table)
    assert run(*arguments).exit_code == 0
    return arguments, table, known


def test_check_is_short_and_compares_a_table(compiled):
    arguments, table, _ = compiled
    done = run(*arguments, "--check")
    assert done.exit_code == 0, done.output
    assert "No default config spills" in done.output
    assert "list_tiles" not in done.output
    table.write_text(table.read_text().replace("list_tiles", "list_tales"))
    done = run(*arguments, "--check")
    assert done.exit_code == 2
    assert "list_tales" in done.output
    assert "saccade kernels --arch all --markdown" in done.output.replace("\n", " ")


def test_what_is_known_of_other_kernels_stays(compiled):
    *_, known = compiled
    version = importlib.import_module("triton").__version__
    tables = json.loads(known.read_text())
    assert len(tables[version]) > 1 and tables[version]["0" * 24] == USAGE
    assert {name: tables[name] for name in OF_OTHERS} == OF_OTHERS
