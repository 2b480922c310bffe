"""Calls of the library, described by plain numbers, whose kernels are compiled and timed.

A description makes its tensors on a device and starts one pass of the library at a time, so that
what looks at launches sees the same kernels and arguments as in a user's call.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from saccade.kernel_check.calls.attention import ATTENTION_PASSES, KernelCall
from saccade.kernel_check.calls.delta import DELTA_PASSES, DeltaCall
from saccade.kernel_check.calls.fp8 import FP8_PASSES, Fp8KernelCall
from saccade.kernel_check.calls.linear import LINEAR_PASSES, LinearCall
from saccade.kernel_check.calls.paged import PAGED_PASSES, PagedCall

__all__ = [
    "KERNELS", "PASSES", "Call", "DeltaCall", "Fp8KernelCall", "KernelCall", "LinearCall",
    "PagedCall", "call_of",
]  # fmt: skip

# The kernels, by the pass in which the library starts them. Names that begin with hopper are
# kernels for sm_90 alone.
PASSES = {**ATTENTION_PASSES, **PAGED_PASSES, **LINEAR_PASSES, **DELTA_PASSES, **FP8_PASSES}
KERNELS = tuple(kernel for kernels in PASSES.values() for kernel in kernels)

Call = KernelCall | PagedCall | LinearCall | DeltaCall | Fp8KernelCall


def call_of(which: str, fields: Iterable[Any]) -> Call:
    """The description of a call that starts a pass, from its fields."""
    if which in ATTENTION_PASSES:
        return KernelCall(*fields)
    if which in DELTA_PASSES:
        return DeltaCall(*fields)
    if which in FP8_PASSES:
        return Fp8KernelCall(*fields)
    return PagedCall(*fields) if which in PAGED_PASSES else LinearCall(*fields)
