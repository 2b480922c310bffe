"""The catalogue holds each kernel and each default config."""

import pytest

from saccade.kernel_check import catalogue, report
from saccade.kernel_check.calls import KERNELS, PASSES, KernelCall, PagedCall
from saccade.ops.attention.triton import configs


@pytest.mark.parametrize("architecture", configs.ARCHITECTURES)
def test_every_kernel_and_every_row_of_the_tables_is_compiled(architecture):
    jobs = catalogue.jobs((architecture,))
    kernels = {
        kernel for kernel in KERNELS if architecture == "sm_90" or not kernel.startswith("hopper_")
    }
    assert {kernel for job in jobs for kernel in job.kernels} == kernels
    problems = {
        report.problem_of(architecture, kernel.split(",")[0], job.call)
        for job in jobs
        for kernel in job.kernels
        if kernel in configs.PASSES and isinstance(job.call, KernelCall)
    }
    half = {(p.which, p.width, p.masked) for p in problems if not p.wide and not p.dropout}
    for which in configs.PASSES[:4]:
        for width in configs.WIDTHS[1:]:
            assert {(which, width, False), (which, width, True)} <= half
    assert any(problem.dropout for problem in problems)
    assert any(problem.wide for problem in problems)
    rows = {
        (call.head_dim, call.query_len > 1)
        for call in (job.call for job in jobs)
        if isinstance(call, PagedCall)
    }
    assert {(width, chunks) for width in configs.WIDTHS[1:] for chunks in (False, True)} <= rows
    assert sum(len(job.kernels) for job in jobs) <= (180 if architecture == "sm_90" else 117)


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
