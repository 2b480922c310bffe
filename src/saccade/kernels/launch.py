"""Launch: kernels prepared once for a kind of call, then started past Triton's own front door.

Triton looks at every argument of every call to find the kernel that fits, which takes longer than
a small problem does. Here the caller's signature (shapes, strides, dtypes, …) names the kernel,
and only addresses change. What differs between versions of Triton stays in this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1)."""

Pointer = Callable[[Tensor], Any]


def itself(tensor: Tensor) -> Any:
    """A tensor as Triton's front door takes it."""
    return tensor


class Launch:
    """One kernel for one kind of call on one device.

    Calling it with a function that makes the arguments starts the kernel on the current stream.
    Alignment is part of what Triton compiles for, so addresses that are no multiple of 16 bytes
    take the front door.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, int]):
        self.kernel, self.constants, self.options = kernel, dict(constants), dict(options)
        self.run: Callable[..., None] | None = None
        self.rest: tuple[Any, ...] = ()
        self.values: tuple[Any, ...] = ()

    def __call__(
        self,
        programs: int,
        device: int | None,
        aligned: bool,
        arguments: Callable[[Pointer], tuple[Any, ...]],
    ) -> None:
        """Start so many programs, with arguments made from addresses (or from whole tensors)."""
        if programs == 0:
            return
        if INTERPRETED or not aligned or device is None:
            self.kernel[(programs,)](*arguments(itself), **self.constants, **self.options)
            return
        if self.run is None:
            self._prepare(arguments(itself))
            assert self.run is not None
        stream = torch._C._cuda_getCurrentRawStream(device)
        self.run(programs, 1, 1, stream, *self.rest, *arguments(Tensor.data_ptr), *self.values)

    def _prepare(self, arguments: tuple[Any, ...]) -> None:
        compiled = self.compile(arguments)
        run = compiled.run  # loads the binary, and only then knows the function
        self.rest = (compiled.function, compiled.packed_metadata, None, None, None)
        names = self.kernel.arg_names[len(arguments) :]
        self.values = tuple(self.constants[name] for name in names)
        self.run = run

    def compile(self, arguments: tuple[Any, ...]) -> Any:
        """The kernel compiled for such arguments, for the active device; nothing is started."""
        return self.kernel.warmup(*arguments, grid=(1,), **self.constants, **self.options)


def current_device(tensor: Tensor) -> int | None:
    """The index of a tensor's GPU; None for a CPU tensor under the interpreter."""
    return None if tensor.device.type == "cpu" else tensor.device.index


def next_width(dim: int) -> int:
    """The number of channels that a kernel computes with: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
