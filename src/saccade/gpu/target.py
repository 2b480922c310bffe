"""Target: what device functions may know of the GPU that they are compiled for.

One source serves all GPUs. Where the same numbers can be had in two ways, and machine code shows
that one of them is better on some GPU and worse on another, the way may depend on this.
"""

from __future__ import annotations

import triton
from triton.language.target_info import current_target

HOPPER = 90  # as Triton numbers it


@triton.constexpr_function
def is_hopper() -> bool:
    """Whether it is Hopper; not under the interpreter, which compiles for nothing."""
    target = current_target()
    return target is not None and target.backend == "cuda" and target.arch == HOPPER
