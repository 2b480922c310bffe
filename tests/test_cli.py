"""The command line as a whole: its versions, and its commands."""

import subprocess
import sys
from importlib import import_module

import pytest
import torch
from typer.testing import CliRunner

import saccade
from saccade_cli import COMMANDS, app


def test_versions_are_those_that_run():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert f"saccade {saccade.__version__}" in lines and f"torch {torch.__version__}" in lines


def test_the_environment_stands_below_the_versions():
    lines = CliRunner().invoke(app, ["--version", "--environment"]).output.splitlines()
    assert lines[0] == f"saccade: {saccade.__version__}"
    named = {line.partition(":")[0] for line in lines}
    assert {"python", "torch", "platform", "driver", "compiler", "machine code, cache"} <= named
    alone = CliRunner().invoke(app, ["--environment"])
    assert alone.exit_code == 0 and alone.output.splitlines() == lines


def test_help_shows_how_commands_are_called():
    text = CliRunner().invoke(app, ["--help"]).output
    shown = [line.split() for line in text.splitlines() if line.strip().startswith("saccade ")]
    assert ["saccade", "--version", "--environment"] in [words[:3] for words in shown]
    assert {words[1] for words in shown} - {"--version"} <= set(COMMANDS)
    assert len(shown) >= 5


def test_help_names_every_command():
    text = CliRunner().invoke(app, ["--help"]).output
    assert all(name in text for name in ("demo", "bench", "generate", "kernels", "tune"))


@pytest.mark.parametrize("arguments", ["", "'--help'"])
def test_help_answers_without_pytorch(arguments):
    program = (
        f"import sys; sys.argv = ['saccade', {arguments}]\nfrom saccade_cli import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'saccade' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "Commands" in done.stdout


def test_the_module_runs_as_the_program() -> None:
    command = [sys.executable, "-m", "saccade_cli", "demos"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "No such command" in done.stderr


@pytest.mark.parametrize("name", COMMANDS)
def test_what_the_help_says_of_a_command_is_what_it_says_itself(name):
    known = COMMANDS[name]
    doc = getattr(import_module(known.module), name).__doc__
    assert " ".join(doc.split()).startswith(known.help)
    text = CliRunner().invoke(app, [name, "--help"]).output
    assert "--help" in text and known.help.split()[0] in text


def test_an_unknown_command_is_refused():
    done = CliRunner().invoke(app, ["demos"])
    assert done.exit_code == 2 and "No such command" in done.output
