"""Target: what device functions may know of the GPU that they are compiled for.

One source serves all GPUs. Where the same numbers can be had in two ways, and machine code shows
that one of them is better on some GPU and worse on another, the way may depend on this.
"""

from __future__ import annotations

from typing import Any

from saccade.gpu.language import builtin_of_ours, tl

HOPPER = "sm90"  # as Triton's options for a kernel name it


@builtin_of_ours
def is_hopper(_semantic: Any = None) -> Any:
    """Whether a kernel is compiled for Hopper; not under the interpreter.

    It asks the compilation that is under way, as Triton's own builtins do: Triton's function for it
    asks the GPU that is active, and starts a C compiler to find it.
    """
    if _semantic is None:
        return False
    return tl.constexpr(getattr(_semantic.builder.options, "arch", None) == HOPPER)
