"""A wheel that holds machine code: built from a copy of the tree, and looked into."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from saccade.gpu.stored_code import Shipped

ROOT = Path(__file__).parents[2]
# Calls whose kernels are few and compile fast: one of Hopper's own by TMA, and two of Triton's.
CALLS = (
    "attention: bf16 d64 none 64 rows",
    "linear_attention_step: bf16 d64*",
    "write_kv_cache: bf16 d64 none decode p16",
)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_a_wheel_holds_what_its_own_sources_find(tmp_path: Path) -> None:
    from saccade.kernel_check.variants import SAMPLE

    tree, wheels, installed = (tmp_path / name for name in ("tree", "wheels", "installed"))
    tree.mkdir()
    for name in ("src", "tools"):
        leave = shutil.ignore_patterns("__pycache__", "compiled")
        shutil.copytree(ROOT / name, tree / name, ignore=leave)
    for name in ("pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tree)
    command = [sys.executable, "tools/compile_wheel.py", "--arch", "sm_90", "--sample"]
    command += ["--jobs", "1", *(part for call in CALLS for part in ("--call", call))]
    environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "TRITON_INTERPRET": "0"}
    done = subprocess.run(
        [*command, "--to", str(wheels)], cwd=tree, env=environment, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert not (tree / "src/saccade/compiled").exists()  # a checkout has none
    [wheel] = wheels.iterdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(installed)
    file = installed / "saccade/compiled/sm_90.index"
    shipped = Shipped(file.with_suffix(".code"), json.loads(file.read_text()))
    assert len(shipped.places) == SAMPLE and shipped.made_by.startswith("Triton ")
    names: set[str] = set()
    for address in shipped.places:
        found = shipped.find(address)
        assert found is not None and found.code[:4] == b"\x7fELF"
        assert b".debug_line" not in found.code and b".nv_debug" not in found.code
        names.add(found.name)
    assert names == {"attention_forward", "linear_step", "write_pages"}

    # The package that was installed serves them, and one whose kernels were edited does not.
    program = (
        "import warnings; warnings.simplefilter('ignore'); from saccade.gpu import stored_code;"
        "found = stored_code.shipped('sm_90'); print(found and len(found.places))"
    )

    def served() -> str:
        answer = subprocess.run(
            [sys.executable, "-c", program], env={**environment, "PYTHONPATH": str(installed)},
            capture_output=True, text=True, check=True,
        )  # fmt: skip
        return answer.stdout.strip()

    assert served() == str(len(shipped.places))
    kernel = installed / "saccade/ops/attention/hopper/forward.py"
    kernel.write_text(kernel.read_text() + "\n# edited\n")
    assert served() == "None"
