"""`import saccade` is light: it adds little to `import torch`, and brings nothing that is heavy."""

import functools
import json
import subprocess
import sys

PROGRAM = """
import gc, json, sys, time
gc.disable()
start = time.process_time()
import torch
before, begin = set(sys.modules), time.process_time()
import saccade
end = time.process_time()
print(json.dumps([end - begin, begin - start, sorted(set(sys.modules) - before)]))
"""
HEAVY = {"torch._dynamo", "torch._inductor", "triton", "hypothesis", "matplotlib", "rich", "typer"}


@functools.cache
def imported(number: int) -> tuple[float, float, list[str]]:
    """Processor seconds for saccade, those for torch before it, and the modules it brings.

    number: of a process.
    """
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, check=True)
    return tuple(json.loads(done.stdout))


def test_import_brings_nothing_heavy() -> None:
    _, _, modules = imported(0)
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


def test_import_adds_at_most_a_fifth_of_what_torch_takes() -> None:
    """Of processor time, both in one process: a slow or busy machine takes longer for either.

    What else runs makes some processes slower than others, and none faster: so of several
    processes the least counts, of one part as of the other. A collection of garbage looks at all
    of torch's objects, and falls into one part or the other by chance: there is none.
    """
    ours, torchs, _ = zip(*map(imported, range(4)), strict=True)
    assert min(ours) <= min(torchs) / 5
