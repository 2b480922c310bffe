"""Launcher: kernels prepared once for calls like one another, then started past Triton's own front
door.

Triton looks at every argument of every call to find the kernel that fits, which takes longer than
a small problem does. Here the caller's signature (shapes, strides, dtypes, captured numbers, …)
names the kernel, and only addresses change: `fast_launch.py` writes out a function of them, which
calls what it finds behind Triton's launcher.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import triton.language as tl
from torch import Tensor
from triton import knobs

from saccade.gpu import compiler_workarounds, triton_internals
from saccade.gpu.fast_launch import ALIGNMENT, Addresses, Described, Start, call_of

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1)."""

FUSED = {"enable_fp_fusion": True}
"""Multiplies and additions are fused, said of every kernel: Triton's default is to change."""

Pointer = Callable[[Tensor], Any]
Arguments = Callable[[Pointer], tuple[Any, ...]]


def itself(tensor: Tensor) -> Any:
    """A tensor as Triton's front door takes it."""
    return tensor


class Launch:
    """One kernel for calls like one another on one device.

    Alignment is part of what Triton compiles for, so addresses that are no multiple of 16 bytes
    take the front door; so does everything under the interpreter, and by a Triton whose inside is
    not the known one.
    """

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, int],
        meta: type[tuple[Any, ...]] | None = None,
    ):  # fmt: skip
        """constants: the kernel's constexprs by name. meta: the NamedTuple that it takes those of
        its fields in, as one argument META."""
        self.kernel, self.constants, self.own_options = kernel, dict(constants), dict(options)
        self.passed = self.constants if meta is None else bundled(self.constants, meta)
        self.compiled: Any = None
        self.start: Start | None = None

    @functools.cached_property
    def options(self) -> dict[str, Any]:
        """What Triton is told: the kernel's own options, and those that every kernel has."""
        return {**FUSED, **compiler_workarounds.options(), **self.own_options}

    def __call__(
        self, programs: int, device: int | None, tensors: Sequence[Tensor], arguments: Arguments
    ) -> None:
        """Start so many programs on the device's current stream.

        tensors: all whose addresses the arguments hold, in the same order every time.
        arguments: makes the arguments from addresses, or from whole tensors. Between calls of one
            Launch nothing but addresses may differ, so it is asked the first time only.
        """
        if programs == 0 or self.relaunch(programs, device, tensors):
            return
        if INTERPRETED or device is None:
            self._through_the_front_door(programs, arguments)
        elif torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(programs, device, tensors, arguments)
        elif triton_internals.unknown() or any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
            self._through_the_front_door(programs, arguments)
        else:
            start = self._prepare(tensors, arguments)
            started = start(programs, torch._C._cuda_getCurrentRawStream(device), *tensors)
            assert started, "tensors do not fit what was prepared for them"

    def relaunch(self, programs: int, device: int | None, tensors: Sequence[Tensor]) -> bool:
        """Start it as before; False, and nothing is started, where that does not fit."""
        if self.start is None or device is None or torch._C._cuda_getDevice() != device:
            return False
        return self.start(programs, torch._C._cuda_getCurrentRawStream(device), *tensors)

    def _through_the_front_door(self, programs: int, arguments: Arguments) -> None:
        with compiler_workarounds.applied():
            self.kernel[(programs,)](*opened(arguments(itself)), **self.passed, **self.options)

    def _prepare(self, tensors: Sequence[Tensor], arguments: Arguments) -> Start:
        """Compile and load, once; what starts this call and those like it."""
        if self.compiled is None:
            self.compiled = self.compile(arguments(itself))
        addresses = Addresses(tensors)
        given = arguments(addresses)
        constants = [self.passed[name] for name in self.kernel.arg_names[len(given) :]]
        start = addresses.function(*call_of(self.compiled, (*given, *constants)))
        self.start = start if addresses.complete else None
        return start

    def compile(self, arguments: tuple[Any, ...]) -> Any:
        """The kernel compiled for such arguments, for the active device; nothing is started."""
        with compiler_workarounds.applied():
            return self.kernel.warmup(*opened(arguments), grid=(1,), **self.passed, **self.options)


def bundled(constants: Mapping[str, Any], meta: type[tuple[Any, ...]]) -> dict[str, Any]:
    """Constants as a kernel takes them whose argument META holds those that `meta` names."""
    fields: tuple[str, ...] = meta._fields  # type: ignore[attr-defined]
    rest = {name: value for name, value in constants.items() if name not in fields}
    known = {name: constants[name] for name in fields if name in constants}
    if not INTERPRETED:  # Triton reads off a tuple what lies in it; its interpreter is plain Python
        known = {name: tl.constexpr(value) for name, value in known.items()}
    return {**rest, "META": meta(**known)}


def opened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as Triton's front door takes them."""
    return tuple(
        argument.opened() if isinstance(argument, Described) else argument for argument in arguments
    )


def current_device(tensor: Tensor) -> int | None:
    """The index of a tensor's GPU; None for a CPU tensor under the interpreter."""
    return None if tensor.device.type == "cpu" else tensor.device.index


def next_width(dim: int) -> int:
    """The number of channels that a kernel computes with: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
