"""`import saccade` is light: it adds little to `import torch`, and brings nothing that is heavy."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
import torch
before, begin = set(sys.modules), time.perf_counter()
import saccade
seconds = time.perf_counter() - begin
print(json.dumps([seconds, sorted(set(sys.modules) - before)]))
"""
HEAVY = {"torch._dynamo", "torch._inductor", "triton", "hypothesis", "matplotlib", "rich", "typer"}


def imported() -> tuple[float, list[str]]:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    return tuple(json.loads(done.stdout))


def test_import_brings_nothing_heavy() -> None:
    _, modules = imported()
    assert "saccade.reference.attention" in modules
    assert not {"saccade.cpu.attention", "saccade.portable.attention"} & set(modules)
    assert HEAVY.isdisjoint(modules)


def test_import_adds_at_most_a_fifth_of_a_second() -> None:
    assert min(imported()[0] for _ in range(3)) <= 0.2
