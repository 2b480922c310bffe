"""The machine code is the wanted one: WGMMA, no spills in its loops, exponents under a product."""

import importlib.util

import pytest

from saccade.offline import findings, pool
from saccade.offline.calls import Call
from saccade.offline.pool import Job

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
# Of a thread: half a tile of keys, and two to rescale by. Three consumers cover each other's.
EXPONENTS = {64: 0, 128: 66, 256: 34}


def compiled(*calls):
    jobs = [Job("sm_90", call, "hopper", ("hopper_forward",)) for call in calls]
    return pool.compile_all(jobs, 1)


def test_all_widths_multiply_and_cover_their_exponents():
    calls = [Call(128, mask="causal"), Call(64), Call(256)]
    for result in compiled(*calls):
        assert not findings.fault(result) or findings.excuse(result), findings.fault(result)
        assert result.usage is not None
        assert result.usage.looped == 0
        assert result.usage.products >= 64
        assert result.usage.covered == EXPONENTS[result.job.call.head_dim]


def test_the_backward_pass_keeps_products_under_way():
    calls = [Call(dim, mask=mask) for dim in (64, 128) for mask in ("none", "causal")]
    jobs = [Job("sm_90", call, "hopper_shared", ("hopper_backward",)) for call in calls]
    jobs += [Job("sm_90", calls[-1], "hopper_ordered", ("hopper_backward, ordered",))]
    for result in pool.compile_all(jobs, 1):
        assert not findings.fault(result) or findings.excuse(result), findings.fault(result)
        assert result.usage is not None
        assert result.usage.looped == 0
        assert result.usage.products >= 96  # those of two consumers, and of a first tile
        # Were products waited for one by one, as ptxas has it when registers are short, there
        # would be no wait that lets one run on.
        assert result.usage.covered >= 28
