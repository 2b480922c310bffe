"""The machine code is the wanted one: WGMMA, no spills in its loops, exponents under a product.

What the compile table knows of kernels as they are is not compiled again.
"""

import functools
import importlib.metadata
import importlib.util
from pathlib import Path

import pytest

from saccade.kernel_check import catalogue, report, worker
from saccade.kernel_check.calls import Fp8KernelCall, KernelCall, LinearCall, PagedCall
from saccade.kernel_check.catalogue import Compiled, Job
from saccade.kernel_check.machine_code import Usage

TABLE = Path(__file__).parents[4] / "docs/kernels.json"

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)
# Of a thread: half a tile of keys, once in the straight path; where one loop serves partial tiles,
# too (256), in each of two branches, and four to rescale by. Three consumers cover each other's.
EXPONENTS = {64: 0, 128: 64, 256: 68}
# Kernels that newer compilers have spill in loops where 3.6's has none or few: (Triton, kernel,
# call) and the spills that were seen there. What is not here is compared with the oldest's.
SEEN = {
    ("3.7", "hopper_linear_backward_keys", "bf16 d128 causal"): 16,
    ("3.8", "hopper_backward", "bf16 d64 none"): 4,
    ("3.8", "hopper_backward", "bf16 d64 causal"): 2,
    ("3.8", "hopper_backward", "bf16 d128 none"): 2,
    ("3.8", "hopper_backward", "bf16 d128 causal"): 2,
    ("3.8", "hopper_backward, in key order", "bf16 d128 causal"): 2,
    ("3.8", "hopper_linear_backward_keys", "bf16 d128 causal"): 30,
    ("3.8", "hopper_linear_wide_grad_query", "bf16 d256 causal"): 14,
    ("3.9", "hopper_backward", "bf16 d64 none"): 6,
    ("3.9", "hopper_backward", "bf16 d64 causal"): 2,
    ("3.9", "hopper_linear_backward_keys", "bf16 d128 causal"): 26,
    ("3.9", "hopper_linear_wide_output", "bf16 d256 causal"): 17,
    ("3.9", "hopper_linear_wide_grad_query", "bf16 d256 causal"): 18,
    ("3.9", "hopper_linear_wide_grad_key", "bf16 d256 causal"): 20,
}


# The calls that these tests look at, by what is started and its kernel.
BOTH = (KernelCall(64), KernelCall(64, mask="causal"))
WIDTHS = (KernelCall(128, mask="causal", length=4096), KernelCall(64, length=4096), KernelCall(256))
LONG = (WIDTHS[1], KernelCall(64, mask="causal", length=8192))
SHARED = tuple(KernelCall(dim, mask=mask) for dim in (64, 128) for mask in ("none", "causal"))
WIDE = (
    KernelCall(256),
    KernelCall(256, mask="causal"),
    KernelCall(192, mask="causal", value_dim=128),
)
CHUNKS = tuple(PagedCall(128, "bf16", "causal", size, query_len=512) for size in (16, 64))
LINEAR, LONG_LINEAR = LinearCall(128), LinearCall(128, length=8192, batch=1, heads=2)
FP8 = (Fp8KernelCall(64, "fp8", "causal"), Fp8KernelCall(128, "fp8"), Fp8KernelCall(128))
WIDE_RESULTS = {
    "output": "hopper_linear",
    **dict.fromkeys(("grad_query", "grad_key", "grad_value"), "hopper_linear backward"),
}
CALLS = {
    ("hopper", "hopper_forward"): (*WIDTHS, *BOTH, LONG[1]),
    ("hopper_shared", "hopper_backward"): SHARED,
    ("hopper_ordered", "hopper_backward, ordered"): SHARED[-1:],
    ("hopper_in_order", "hopper_backward, in key order"): SHARED[-1:],
    ("hopper_split", "hopper_backward, split"): (catalogue.FEW_KV_HEADS,),
    ("hopper_apart", "hopper_backward_keys"): WIDE,
    ("hopper_apart", "hopper_backward_queries"): WIDE,
    ("hopper_paged", "hopper_pages_forward"): CHUNKS,
    ("hopper_fp8", "hopper_fp8_forward"): FP8,
    ("hopper_linear", "hopper_linear_forward"): (LinearCall(64), LONG_LINEAR),
    ("hopper_linear", "hopper_linear_collect"): (LONG_LINEAR,),
    ("hopper_linear backward", "hopper_linear_backward_queries"): (LINEAR,),
    ("hopper_linear backward", "hopper_linear_backward_keys"): (LINEAR,),
    **{
        (which, f"hopper_linear_wide_{result}"): (LinearCall(256),)
        for result, which in WIDE_RESULTS.items()
    },
}


@functools.cache
def all_compiled():
    """What is made of all of these calls by one process, which takes longer to start."""
    jobs = [
        Job("sm_90", call, which, (kernel,))
        for (which, kernel), calls in CALLS.items()
        for call in calls
    ]
    known = catalogue.read(TABLE, importlib.metadata.version("triton"))
    return worker.compile_all(jobs, 1, known=known)


def compiled(which, kernel, *calls):
    triton = importlib.metadata.version("triton")
    calls = calls or CALLS[which, kernel]
    jobs = {Job("sm_90", call, which, (kernel,)) for call in calls}
    results = [result for result in all_compiled() if result.job in jobs]
    assert {result.job for result in results} == jobs
    usages = []
    for result in results:
        assert result.usage is not None, result.error
        result = without_seen(triton, result)
        assert not report.fault(result) or report.excuse(result), report.fault(result)
        usages.append((result.job.call.head_dim, result.usage))
    return usages


def without_seen(triton, result):
    """A compiled kernel as if it did not spill, where SEEN has its spills; there may be no more."""
    position = triton.rpartition(".")[0], result.kernel, result.job.call.name
    if position not in SEEN:
        return result
    looped = result.usage.looped
    assert looped <= SEEN[position], (
        f"{position}: {looped} spills in loops, {SEEN[position]} were seen"
    )
    assert looped, f"{position}: no spills in loops any more; remove it from SEEN"
    return result._replace(usage=result.usage._replace(spills=0, looped=0))


def test_no_more_spills_than_were_seen():
    call = KernelCall(64)
    job = Job("sm_90", call, "hopper_shared", ("hopper_backward",))
    seen = SEEN["3.8", "hopper_backward", call.name]

    def left_of(triton, count):
        usage = Usage(168, 9, 0, looped=count, products=96, covered=28)
        made = Compiled(job, "hopper_backward", (64, 64, 12, 2), 0.0, usage, "", "")
        usage = without_seen(triton, made).usage
        assert usage is not None
        return usage.looped

    assert left_of("3.8.0", seen) == 0
    with pytest.raises(AssertionError, match=f"{seen + 1} spills in loops, {seen} were seen"):
        left_of("3.8.0", seen + 1)
    with pytest.raises(AssertionError, match="remove it from SEEN"):
        left_of("3.8.0", 0)
    assert left_of("3.6.0", seen + 1) == seen + 1


def test_all_widths_multiply_and_cover_their_exponents():
    for head_dim, usage in compiled("hopper", "hopper_forward", *WIDTHS):
        assert usage.looped == 0
        assert usage.products >= 64
        assert usage.covered == EXPONENTS[head_dim]


def test_two_programs_share_a_multiprocessor():
    for _, usage in compiled("hopper", "hopper_forward", *BOTH):
        assert usage.looped <= report.FEW  # of 16 weights that a thread keeps for the next step
        assert usage.products == 32
        assert 2 * (usage.shared + 1024) <= 228 << 10
        assert usage.registers == 80


def test_three_consumers_have_no_mask_in_their_loop():
    for _, usage in compiled("hopper", "hopper_forward", *LONG):
        assert usage.looped == 0
        assert usage.products >= 72


def test_the_backward_pass_keeps_products_under_way():
    usages = compiled("hopper_shared", "hopper_backward")
    usages += compiled("hopper_ordered", "hopper_backward, ordered")
    usages += compiled("hopper_in_order", "hopper_backward, in key order")
    usages += compiled("hopper_split", "hopper_backward, split")
    for _, usage in usages:
        assert usage.looped == 0
        assert usage.products >= 96  # those of two consumers, and of a first tile
        # Were products waited for one by one, as ptxas has it when registers are short, there
        # would be no wait that lets one run on.
        assert usage.covered >= 28


def test_gradients_of_wide_heads_keep_products_under_way():
    for _, usage in compiled("hopper_apart", "hopper_backward_keys"):
        assert usage.looped == 0
        assert usage.products >= 64
    for _, usage in compiled("hopper_apart", "hopper_backward_queries"):
        assert usage.looped <= 16  # numbers of a tile range, of both consumers
        assert usage.products >= 112
        assert usage.covered >= 28


def test_chunks_over_pages_keep_products_under_way():
    for _, usage in compiled("hopper_paged", "hopper_pages_forward"):
        assert (usage.looped, usage.covered) == (0, 132)
        assert usage.products >= 64


def test_linear_attention_keeps_products_under_way():
    forwards = compiled("hopper_linear", "hopper_linear_forward")
    collects = compiled("hopper_linear", "hopper_linear_collect")
    for least, usages in ((32, forwards), (16, collects)):
        for _, usage in usages:
            assert usage.looped == 0
            assert usage.products >= least


def test_gradients_of_linear_attention_keep_products_under_way():
    of_queries = compiled("hopper_linear backward", "hopper_linear_backward_queries")
    of_keys = compiled("hopper_linear backward", "hopper_linear_backward_keys")
    for least, usages in ((64, of_queries), (104, of_keys)):
        for _, usage in usages:
            assert usage.products >= least
            assert usage.looped <= 12  # what keys' consumers and mappers keep elsewhere


def test_wide_heads_of_linear_attention_keep_products_under_way():
    for result, which in WIDE_RESULTS.items():
        for _, usage in compiled(which, f"hopper_linear_wide_{result}"):
            assert usage.products == 88  # those of two consumers
            assert usage.looped <= 12  # of what they keep elsewhere


def test_attention_in_fp8_multiplies_e4m3_numbers():
    for head_dim, usage in compiled("hopper_fp8", "hopper_fp8_forward"):
        assert usage.looped == 0
        # Of a first tile's keys, a step's values and keys, and a last tile's values, 32 numbers
        # of a row (or 32 keys) at once; of two consumers.
        assert usage.products == 2 * (2 * head_dim // 32 + 2 * 128 // 32)
