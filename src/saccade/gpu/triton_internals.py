"""Triton's internals: what is known of Triton's own code, and in which of its versions it was seen.

`fast_launch.py` goes past Triton's front door, which takes longer than a small problem does, and
relies on the forms that are named here. Where a Triton has another form, calls take the front door:
slower, and right. `saccade.explain` then says so.

What compilation relies on is used where it is named: `knobs.runtime.interpret` (`launcher.py`),
`JITFunction.warmup` (`launcher.py`), `device_caches`, `compute_cache_key` and `DependenciesFinder`
(`kernel_check/compiler.py`), all of them in 3.6 to 3.9; and what `compiler_workarounds.py` undoes,
in the versions that it names.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import triton

Form = tuple[str, ...]  # names of parameters or fields


class Internal(NamedTuple):
    """Something inside Triton: what it is, what form it has here, in which versions it had one."""

    name: str
    look: Callable[[], Form]
    seen: Mapping[Form, str]


def _parameters(function: Callable[..., Any]) -> Form:
    return tuple(inspect.signature(function).parameters)


def _launcher() -> Form:
    from triton.backends.nvidia.driver import CudaLauncher

    return _parameters(CudaLauncher.__call__)


def _descriptor_arguments() -> Form:
    from triton.backends.nvidia import driver

    return _parameters(driver.make_tensordesc_arg)


def _wrapper() -> Form:
    from triton.backends.nvidia import driver

    return _parameters(driver.wrap_handle_tensordesc)


def _descriptor() -> Form:
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    return tuple(field.name for field in dataclasses.fields(TensorDescriptor))


OUTER = ("self", "gridX", "gridY", "gridZ", "stream", "function")
HOOKS = ("kernel_metadata", "launch_metadata", "launch_enter_hook", "launch_exit_hook")
FIELDS = ("base", "shape", "strides", "block_shape", "layout", "padding")

PARTS = (
    Internal(
        "CudaLauncher.__call__", _launcher,
        {(*OUTER, "args"): "3.6", (*OUTER, *HOOKS, "args"): "3.7 to 3.9"},
    ),
    Internal(
        "make_tensordesc_arg", _descriptor_arguments,
        {("arg", "metadata"): "3.6, 3.7", ("arg", "metadata", "_"): "3.8, 3.9"},
    ),
    Internal(
        "wrap_handle_tensordesc", _wrapper,
        {("launcher", "signature", "tensordesc_meta"): "3.6 to 3.9"},
    ),
    Internal(
        "TensorDescriptor", _descriptor,
        {FIELDS: "3.6", (*FIELDS, "round_f32_to_tf32"): "3.7 to 3.9"},
    ),
)  # fmt: skip


@functools.cache
def unknown() -> str | None:
    """What this Triton has in a form that was never seen; None: nothing."""
    return unknown_of(PARTS)


def unknown_of(parts: tuple[Internal, ...]) -> str | None:
    """The same of some parts."""
    for part in parts:
        try:
            form = part.look()
        except (ImportError, AttributeError, TypeError, ValueError):
            return f"{part.name}, which Triton {triton.__version__} lacks"
        if form not in part.seen:
            return f"{part.name}{form}, which Triton {triton.__version__} brings"
    return None


def remark() -> str | None:
    """What is to be said of launches by this Triton."""
    found = unknown()
    return found and f"but launched by Triton's own front door, slower: nothing is known of {found}"
