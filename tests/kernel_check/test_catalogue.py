"""The catalogue holds each kernel and default config; what is kept of compiled kernels is true."""

import json
import subprocess
import sys

import pytest

from saccade.kernel_check import catalogue, report, worker
from saccade.kernel_check.calls import KERNELS, PASSES, KernelCall, PagedCall
from saccade.kernel_check.catalogue import Compiled, Job
from saccade.kernel_check.machine_code import Usage
from saccade.ops.attention.triton import configs
from saccade.ops.attention_fp8.triton import configs as fp8_configs


@pytest.mark.parametrize("architecture", configs.ARCHITECTURES)
def test_every_kernel_and_every_row_of_the_tables_is_compiled(architecture):
    jobs = catalogue.jobs((architecture,))
    kernels = {
        kernel for kernel in KERNELS if architecture == "sm_90" or not kernel.startswith("hopper_")
    }
    if architecture not in fp8_configs.ARCHITECTURES:
        kernels -= set(PASSES["fp8"])
    assert {kernel for job in jobs for kernel in job.kernels} == kernels
    problems = {
        report.problem_of(architecture, kernel.split(",")[0], job.call)
        for job in jobs
        for kernel in job.kernels
        if kernel in configs.PASSES and isinstance(job.call, KernelCall)
    }
    half = {(p.which, p.width, p.masked) for p in problems if not p.wide and not p.dropout}
    widths = configs.WIDTHS[1:4] if architecture == "sm_75" else configs.WIDTHS[1:]
    for which in configs.PASSES[:4]:
        for width in widths if which == "forward" else widths[:4]:  # of gradients: up to 512
            assert {(which, width, False), (which, width, True)} <= half
    assert any(problem.dropout for problem in problems)
    assert any(problem.wide for problem in problems)
    rows = {
        (call.head_dim, call.query_len > 1)
        for call in (job.call for job in jobs)
        if isinstance(call, PagedCall)
    }
    assert {(width, chunks) for width in widths for chunks in (False, True)} <= rows
    assert sum(len(job.kernels) for job in jobs) <= (293 if architecture == "sm_90" else 193)


def test_a_job_asks_for_kernels_of_its_own_pass():
    for job in catalogue.jobs(("sm_80", "gfx942")):
        assert set(job.kernels) <= set(PASSES[job.which])
        assert job.call.dtype != "fp16"
    assert all(job.call.dtype != "bf16" for job in catalogue.jobs(("sm_75",)))


def test_kernels_are_chosen_by_glob():
    jobs = catalogue.jobs(("sm_90",), "backward_*")
    assert {job.which for job in jobs} == {"ordered", "shared", "bias"}
    with pytest.raises(ValueError, match="no kernel is named 'foward'; there are forward; "):
        catalogue.jobs(("sm_90",), "foward")


def test_one_width_can_be_asked_for():
    jobs = catalogue.jobs(("sm_90",), head_dim=64)
    assert {job.call.head_dim for job in jobs} == {64}
    with pytest.raises(ValueError, match="--head-dim: got 96, takes 64, 128, 256"):
        catalogue.jobs(("sm_80",), head_dim=96)
    assert {
        kernel for job in catalogue.jobs(("sm_90",), head_dim=96) for kernel in job.kernels
    } == {"hopper_forward"}


JOB = Job("sm_90", KernelCall(64), "forward", ("forward",))
KNOWN = {f"{number:024x}": [number, 0, 1024, 0, 0, 0, 0, 0, 0] for number in range(64)}


def compiled(key, usage):
    return Compiled(JOB, "forward", (64, 64, 4, 3), 1.0, usage, "", key)


RESULTS = [compiled(key, Usage(*entry)) for key, entry in KNOWN.items()]


def test_what_is_written_is_read_again_by_version(tmp_path):
    file = tmp_path / "kernels.json"
    assert catalogue.read(file, "3.6.0") == {}
    catalogue.write(file, RESULTS, "3.6.0", {})
    catalogue.write(file, RESULTS[:2], "3.9.0", {})
    assert catalogue.read(file, "3.6.0") == KNOWN
    assert len(catalogue.read(file, "3.9.0")) == 2
    assert catalogue.read(file, "4.0.0") == {}
    catalogue.write(file, RESULTS[:1], "3.6.0", {})  # what is no more is forgotten
    assert len(catalogue.read(file, "3.6.0")) == 1
    kept = catalogue.read(file, "3.6.0")
    catalogue.write(file, RESULTS[1:], "3.6.0", kept)
    assert catalogue.read(file, "3.6.0") == KNOWN
    assert set(json.loads(file.read_text())) == {"3.6.0", "3.9.0"}


def test_a_kernel_that_failed_is_not_known(tmp_path):
    file = tmp_path / "kernels.json"
    catalogue.write(file, [compiled("", None)], "3.6.0", {})
    assert catalogue.read(file, "3.6.0") == {}


@pytest.mark.parametrize(
    "text", ["[]", "nothing", '{"3.6.0": {"00": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]}}']
)
def test_another_file_is_refused_by_name(tmp_path, text):
    file = tmp_path / "kernels.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"kernels.json: .*Delete it"):
        catalogue.read(file, "3.6.0")


def test_a_sample_is_compiled_again_and_changes_with_the_kernels():
    again = KNOWN.keys() - catalogue.trusted(KNOWN).keys()
    assert len(again) == len(KNOWN) // catalogue.SAMPLE
    samples = set()
    for number in range(64):
        more = {**KNOWN, f"{1000 + number:024x}": [1, 0, 0]}
        samples.add(tuple(sorted(KNOWN.keys() - catalogue.trusted(more).keys())))
    assert len(samples) > catalogue.SAMPLE // 2
    assert catalogue.trusted({}) == {}


def test_what_is_new_is_counted_and_what_is_wrong_is_named(tmp_path):
    file, first = tmp_path / "kernels.json", RESULTS[0].key
    assert catalogue.faults(file, KNOWN, RESULTS) == []
    assert catalogue.unknown(KNOWN, RESULTS) == 0
    fewer = {key: entry for key, entry in KNOWN.items() if key != first}
    assert catalogue.unknown(fewer, RESULTS) == 1
    assert catalogue.faults(file, fewer, RESULTS) == []
    wrong = {**KNOWN, first: [99, *KNOWN[first][1:]]}
    (text,) = catalogue.faults(file, wrong, RESULTS)
    assert "registers=99" in text and "which takes Usage(registers=0" in text
    assert len(catalogue.faults(file, KNOWN, [compiled(first, None)])) == 1


def test_a_key_stands_for_all_that_it_is_made_of(monkeypatch, tmp_path):
    asked = ("3.6.0", "sm_90", "text"), ("3.9.0", "sm_90", "text"), ("3.6.0", "sm_80", "text")
    keys = {catalogue.key_of(*one) for one in (*asked, ("3.6.0", "sm_90", "other"))}
    assert len(keys) == 4 and catalogue.key_of(*asked[0]) in keys
    monkeypatch.setattr(catalogue, "READER", tmp_path / "compiler.py")
    catalogue.READER.write_text("otherwise = True")
    catalogue._reader.cache_clear()
    try:
        assert catalogue.key_of(*asked[0]) not in keys
    finally:
        catalogue._reader.cache_clear()


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
from saccade.kernel_check.catalogue import code_of
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
