"""`import saccade` is light: it adds little to `import torch`, and brings nothing that is heavy."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
start = time.process_time()
import torch
before, begin = set(sys.modules), time.process_time()
import saccade
end = time.process_time()
print(json.dumps([end - begin, begin - start, sorted(set(sys.modules) - before)]))
"""
HEAVY = {"torch._dynamo", "torch._inductor", "triton", "hypothesis", "matplotlib", "rich", "typer"}


def imported() -> tuple[float, float, list[str]]:
    """Processor seconds for saccade, those for torch before it, and the modules it brings."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    return tuple(json.loads(done.stdout))


def test_import_brings_nothing_heavy() -> None:
    _, _, modules = imported()
    assert "saccade.ops.attention.reference" in modules
    assert not {"saccade.ops.attention.cpu.host", "saccade.ops.attention.triton.host"} & set(
        modules
    )
    assert HEAVY.isdisjoint(modules)


def test_the_engine_is_loaded_when_it_is_asked_for() -> None:
    program = (
        "import saccade, sys; before = {'saccade.serving', 'transformers'} & set(sys.modules);"
        "saccade.Engine; after = {'saccade.serving', 'transformers'} & set(sys.modules);"
        "print(sorted(before), sorted(after))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert done.stdout.decode().strip() == "[] ['saccade.serving']"


def test_import_adds_at_most_a_fifth_of_a_second() -> None:
    """Or, where a slow or busy machine takes long for torch too, a fifth of what that takes."""
    ours, torchs, _ = min(imported() for _ in range(3))
    assert ours <= max(0.2, torchs / 5)
