"""Process: a module of the bench run in a fresh Python, where nothing has happened before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch


def fresh(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], limit_seconds: float
) -> dict[str, float] | str:
    """Run a module; the numbers that it prints last, as JSON, or the reason why there are none.

    Args:
        module: its dotted name.
        arguments: what follows on its command line.
        environment: variables beside those of this process.
        limit_seconds: how long it may take.
    """
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {
        **os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    command = [sys.executable, "-m", module, *arguments]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, env=given, timeout=limit_seconds
        )
    except subprocess.TimeoutExpired:
        return f"not finished within {limit_seconds:.0f} s"
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        return lines[-1][:160] if lines else f"exit {process.returncode}"
    return json.loads(process.stdout.splitlines()[-1])
