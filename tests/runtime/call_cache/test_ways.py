"""However a call is used, the first of its kind, the next and one after plain calls are alike.

Each operation has a process of its own, whose very first call is one under activation
checkpointing: what was computed before in this process hides how a first call differs.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from runtime.call_cache.ways import OPERATIONS, WAYS

ROOT = Path(__file__).parents[3]
FAR = 1e-5  # float32 and some sums in another order
FAR_IN_HALF = 2.0**-6  # which round a float16 gradient of up to 32 to its neighbour

REFUSED = {  # pages are not cast; the reference reads lengths
    ("paged", "func.grad"): "a gradient of attention over pages",
    ("paged", "autocast"): "key_pages: got torch.float32",
    ("paged reference", "autocast"): "key_pages: got torch.float32",
    ("paged reference", "FakeTensor"): "DataDependentOutputException",
    ("paged reference", "make_fx"): "get value out of a tracing tensor",
    ("paged reference", "export"): "GuardOnDataDependentSymNode",
}


@functools.cache
def reports() -> dict[str, Any]:
    """What the program saw of each operation."""
    paths = os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests")))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "runtime.call_cache.ways"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return dict(zip(OPERATIONS, lines, strict=True))


@pytest.mark.parametrize("name", list(WAYS))
@pytest.mark.parametrize("operation", list(OPERATIONS))
def test_first_and_later_calls_are_alike(operation: str, name: str) -> None:
    found = reports()[operation][name]
    cold, again, after = found["runs"].values()
    refused = REFUSED.get((operation, name))
    if refused is None:
        assert "failed" not in cold, cold["failed"]
    else:
        assert refused in cold["failed"]
    assert again == cold
    assert after == cold
    assert found["far"] <= (FAR_IN_HALF if operation == "float16" else FAR)
