"""Machine code: compiled for a named target without a GPU, a driver or a C compiler.

A process whose kernels are not interpreted compiles; what it finds is looked at here.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")
import triton
from triton.backends.compiler import GPUTarget

from saccade.gpu import machine_code, triton_compiler
from saccade.gpu.launcher import Launch
from saccade.gpu.machine_code import formats_of
from saccade.gpu.signature import Arguments
from saccade.kernel_check import worker
from saccade.kernel_check.calls import KernelCall
from saccade.kernel_check.calls.tensors import CPU

CALLS = {
    "forward": ("sm_80", KernelCall(64, mask="causal", packed=True)),
    "hopper": ("sm_90", KernelCall(128, mask="causal")),
}
CUOBJDUMP = Path(str(triton.__file__)).parent / "backends/nvidia/bin/cuobjdump"
PARAMETER = re.compile(r"Ordinal\s*:\s*0x(\w+)\s*Offset\s*:\s*0x\w+\s*Size\s*:\s*0x(\w+)")


@pytest.mark.skipif(not CUOBJDUMP.exists(), reason="this Triton brings no cuobjdump")
@pytest.mark.parametrize("which", list(CALLS))
def test_parameters_are_those_in_the_machine_code(which: str, tmp_path: Path) -> None:
    """And nothing is compiled by a C compiler, which is not to be found."""
    environment = {
        **os.environ, "TRITON_INTERPRET": "0", "PATH": "", "TRITON_CACHE_DIR": str(tmp_path / "c"),
    }  # fmt: skip
    environment.pop("CC", None)
    assert shutil.which("cc", path=environment["PATH"]) is None
    command = [sys.executable, __file__, which, str(tmp_path / "code")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    listing = subprocess.run(
        [CUOBJDUMP, "-elf", tmp_path / "code"], capture_output=True, text=True, check=True
    ).stdout
    found = {int(number, 16): int(size, 16) for number, size in PARAMETER.findall(listing)}
    assert json.loads(done.stdout.splitlines()[-1]) == [found[n] for n in range(len(found))]


UNLIKE: dict[str, dict[str, Any]] = {
    "": {},
    "it is no kernel for CUDA": {"target": GPUTarget("hip", "gfx942", 64)},
    "its programs are started in clusters": {"num_ctas": 2},
    "it wants scratch memory": {"global_scratch_size": 8},
}


@pytest.mark.parametrize("reason", list(UNLIKE))
def test_what_a_launch_of_ours_would_not_give(reason: str) -> None:
    metadata = {
        "target": GPUTarget("cuda", 90, 32), "num_ctas": 1, "launch_cooperative_grid": False,
        "global_scratch_size": 0, "profile_scratch_size": 0,
    }  # fmt: skip
    assert triton_compiler.needs_triton(SimpleNamespace(**{**metadata, **UNLIKE[reason]})) == reason


def test_explain_says_what_triton_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.runtime import backends

    [hopper] = [each for each in backends.candidates("attention") if each.name == "hopper"]
    problem: Any = SimpleNamespace(device="cuda")
    assert hopper.note(problem) is None
    loaded = SimpleNamespace(
        name="attention_forward", by_triton="it wants scratch memory", origin="the cache"
    )
    monkeypatch.setattr(machine_code, "_variants", {1: loaded})
    assert "of attention_forward, it wants scratch memory" in str(hopper.note(problem))
    problem.device = "cpu"
    assert hopper.note(problem) is None


def main(which: str, file: str) -> None:
    """Compile the kernel of a call; prints the sizes of its parameters."""
    architecture, call = CALLS[which]

    def compile_it(launch: Launch, make: Callable[[], Arguments]) -> None:
        arguments, target = make(), triton_compiler.target_of(architecture)
        code = triton_compiler.compiled(launch.kernel, arguments, launch.options, target)
        Path(file).write_bytes(code.asm["cubin"])
        print(json.dumps(list(map(struct.calcsize, formats_of(arguments)))))

    worker.intercept_launches(architecture, compile_it)
    call.prepared(CPU)(which, None)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
