"""The command line as a whole: its versions, and its commands."""

import torch
from typer.testing import CliRunner

import saccade
from saccade.cli import app


def test_versions_are_those_that_run():
    done = CliRunner().invoke(app, ["--version"])
    assert done.exit_code == 0
    lines = done.output.splitlines()
    assert f"saccade {saccade.__version__}" in lines and f"torch {torch.__version__}" in lines


def test_help_names_every_command():
    text = CliRunner().invoke(app, ["--help"]).output
    assert all(name in text for name in ("demo", "bench", "generate", "kernels", "tune"))
