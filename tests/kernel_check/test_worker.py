"""Jobs are split by architecture, and a pass launches the kernels that its name stands for."""

import pytest

from saccade.gpu.launcher import Launch
from saccade.kernel_check import worker
from saccade.kernel_check.calls import PASSES, KernelCall
from saccade.kernel_check.calls.tensors import CPU
from saccade.kernel_check.catalogue import Compiled, Job
from saccade.kernel_check.machine_code import Usage


def test_every_worker_has_one_architecture_and_something_to_do():
    jobs = [
        Job(name, KernelCall(64), "forward", ("forward",)) for name in ("sm_80",) * 5 + ("sm_90",)
    ]
    for processes in (1, 2, 3, 8):
        parts = worker._split(jobs, processes)
        assert sorted(number for part in parts for number in part) == list(range(6))
        assert all(len({jobs[number].architecture for number in part}) == 1 for part in parts)
        assert all(parts)
    assert len(worker._split(jobs, 1)) == 2
    assert worker._split([], 2) == []


def test_equal_binaries_count_once():
    def result(architecture, key):
        job = Job(architecture, KernelCall(64), "ordered", ("row_statistics",))
        return Compiled(job, "row_statistics", (64, 0, 4, 1), 0.1, Usage(1, 0, 0), "", key)

    given = [result("sm_80", "a"), result("sm_80", "a"), result("sm_90", "b"), result("sm_80", "")]
    assert worker._once([*given, given[3]]) == [given[0], given[2], given[3], given[3]]


@pytest.mark.parametrize("which", ["ordered", "shared"])
def test_a_pass_is_started_in_the_form_that_it_names(monkeypatch, which):
    started = []
    monkeypatch.setattr(
        Launch, "__call__", lambda one, *_: started.append(worker.kernel_name(one, which))
    )
    KernelCall(16, "fp32", "causal", length=16).prepared(CPU)(which, None)
    expected = {kernel for kernel in PASSES[which] if kernel != "row_statistics"}
    if which == "shared":  # under a mask the kernel for queries makes them
        expected.add("row_statistics")
    assert set(started) == expected
