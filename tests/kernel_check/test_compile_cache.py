"""Known: what is kept of compiled kernels, what is compiled again, and what is found wrong."""

import json
import subprocess
import sys

import pytest

from saccade.kernel_check import compile_cache, worker
from saccade.kernel_check.calls import KernelCall
from saccade.kernel_check.catalogue import Job
from saccade.kernel_check.compile_cache import Compiled
from saccade.kernel_check.machine_code import Usage

JOB = Job("sm_90", KernelCall(64), "forward", ("forward",))
KNOWN = {f"{number:024x}": [number, 0, 1024, 0, 0, 0, 0, 0, 0] for number in range(64)}


def compiled(key, usage):
    return Compiled(JOB, "forward", (64, 64, 4, 3), 1.0, usage, "", key)


RESULTS = [compiled(key, Usage(*entry)) for key, entry in KNOWN.items()]


def test_what_is_written_is_read_again_by_version(tmp_path):
    file = tmp_path / "kernels.json"
    assert compile_cache.read(file, "3.6.0") == {}
    compile_cache.write(file, RESULTS, "3.6.0", {})
    compile_cache.write(file, RESULTS[:2], "3.9.0", {})
    assert compile_cache.read(file, "3.6.0") == KNOWN
    assert len(compile_cache.read(file, "3.9.0")) == 2
    assert compile_cache.read(file, "4.0.0") == {}
    compile_cache.write(file, RESULTS[:1], "3.6.0", {})  # what is no more is forgotten
    assert len(compile_cache.read(file, "3.6.0")) == 1
    kept = compile_cache.read(file, "3.6.0")
    compile_cache.write(file, RESULTS[1:], "3.6.0", kept)
    assert compile_cache.read(file, "3.6.0") == KNOWN
    assert set(json.loads(file.read_text())) == {"3.6.0", "3.9.0"}


def test_a_kernel_that_failed_is_not_known(tmp_path):
    file = tmp_path / "kernels.json"
    compile_cache.write(file, [compiled("", None)], "3.6.0", {})
    assert compile_cache.read(file, "3.6.0") == {}


@pytest.mark.parametrize(
    "text", ["[]", "nothing", '{"3.6.0": {"00": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}}']
)
def test_another_file_is_refused_by_name(tmp_path, text):
    file = tmp_path / "kernels.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"kernels.json: .*Delete it"):
        compile_cache.read(file, "3.6.0")


def test_a_sample_is_compiled_again_and_changes_with_the_kernels():
    again = KNOWN.keys() - compile_cache.trusted(KNOWN).keys()
    assert len(again) == len(KNOWN) // compile_cache.SAMPLE
    samples = set()
    for number in range(64):
        more = {**KNOWN, f"{1000 + number:024x}": [1, 0, 0]}
        samples.add(tuple(sorted(KNOWN.keys() - compile_cache.trusted(more).keys())))
    assert len(samples) > compile_cache.SAMPLE // 2
    assert compile_cache.trusted({}) == {}


def test_what_is_new_is_counted_and_what_is_wrong_is_named(tmp_path):
    file, first = tmp_path / "kernels.json", RESULTS[0].key
    assert compile_cache.faults(file, KNOWN, RESULTS) == []
    assert compile_cache.unknown(KNOWN, RESULTS) == 0
    fewer = {key: entry for key, entry in KNOWN.items() if key != first}
    assert compile_cache.unknown(fewer, RESULTS) == 1
    assert compile_cache.faults(file, fewer, RESULTS) == []
    wrong = {**KNOWN, first: [99, *KNOWN[first][1:]]}
    (text,) = compile_cache.faults(file, wrong, RESULTS)
    assert "registers=99" in text and "which takes Usage(registers=0" in text
    assert len(compile_cache.faults(file, KNOWN, [compiled(first, None)])) == 1


def test_a_key_stands_for_all_that_it_is_made_of(monkeypatch, tmp_path):
    asked = ("3.6.0", "sm_90", "text"), ("3.9.0", "sm_90", "text"), ("3.6.0", "sm_80", "text")
    keys = {compile_cache.key_of(*one) for one in (*asked, ("3.6.0", "sm_90", "other"))}
    assert len(keys) == 4 and compile_cache.key_of(*asked[0]) in keys
    monkeypatch.setattr(compile_cache, "READER", tmp_path / "compiler.py")
    compile_cache.READER.write_text("otherwise = True")
    compile_cache._reader.cache_clear()
    try:
        assert compile_cache.key_of(*asked[0]) not in keys
    finally:
        compile_cache._reader.cache_clear()


SOURCE = '''from saccade.gpu.language import tl, triton

FACTOR = tl.constexpr({factor})

@triton.jit
def inner(x):
    """{text}"""
    return x * FACTOR  # {text}

@triton.jit
def kernel(ptr):
    tl.store(ptr, inner(tl.load(ptr)))
'''
CODES = """
import first, second, third
from saccade.kernel_check.compile_cache import code_of
second.inner.jit.cache_key  # as if a kernel that calls it had been compiled before
print(*(code_of(module.kernel.jit) for module in (first, second, third)))
"""


def test_the_code_of_a_kernel_is_its_text_whatever_was_compiled_before(tmp_path):
    (tmp_path / "first.py").write_text(SOURCE.format(text="one", factor=2))
    (tmp_path / "second.py").write_text("# moved\n" * 9 + SOURCE.format(text="two", factor=2))
    (tmp_path / "third.py").write_text(SOURCE.format(text="one", factor=3))
    done = subprocess.run(  # a process that does not interpret kernels
        [sys.executable, "-c", CODES], env=worker.worker_environment(), cwd=tmp_path,
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    first, second, third = done.stdout.split()
    assert first == second != third
