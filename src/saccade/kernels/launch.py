"""Launch: kernels prepared once for a kind of call, then started past Triton's own front door.

Triton looks at every argument of every call to find the kernel that fits, which takes longer than
a small problem does. Here the caller's signature (shapes, strides, dtypes, captured numbers, …)
names the kernel, and only addresses change. What differs between versions of Triton stays in this
file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

INTERPRETED = bool(knobs.runtime.interpret)
"""Whether Triton's interpreter runs kernels on the CPU (TRITON_INTERPRET=1)."""

ALIGNMENT = 16  # bytes, which prepared kernels expect addresses to be multiples of

Pointer = Callable[[Tensor], Any]
Arguments = Callable[[Pointer], tuple[Any, ...]]
Fill = Callable[..., "tuple[Any, ...] | None"]


def itself(tensor: Tensor) -> Any:
    """A tensor as Triton's front door takes it."""
    return tensor


class Described(NamedTuple):
    """A tensor that a kernel reads or writes by TMA (`hopper.descriptors`): a kernel argument."""

    base: Any  # what a Pointer gives
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]  # of what moves at once
    layout: Any  # of that in shared memory

    def opened(self) -> Any:
        """As Triton's front door takes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        return TensorDescriptor(self.base, *map(list, self[1:4]), self.layout)  # type: ignore[arg-type]

    def maker(self) -> Callable[[Tensor], Any]:
        """What makes the same of a tensor that is known to fit, without checking it again."""
        checked = self._replace(base=torch.empty(0, dtype=torch.bfloat16)).opened()
        kind, known = type(checked), vars(checked)

        def make(tensor: Tensor) -> Any:
            made = object.__new__(kind)
            vars(made).update(known, base=tensor)
            return made

        return make


class Launch:
    """One kernel for one kind of call on one device.

    Alignment is part of what Triton compiles for, so addresses that are no multiple of 16 bytes
    take the front door; so does everything under the interpreter.
    """

    def __init__(self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, int]):
        self.kernel, self.constants, self.options = kernel, dict(constants), dict(options)
        self.run: Callable[..., None] | None = None
        self.rest: tuple[Any, ...] = ()
        self.fill: Fill = nothing_fits

    def __call__(
        self, programs: int, device: int | None, tensors: Sequence[Tensor], arguments: Arguments
    ) -> None:
        """Start so many programs on the device's current stream.

        tensors: all whose addresses the arguments hold, in the same order every time.
        arguments: makes the arguments from addresses, or from whole tensors. Between calls of one
            Launch nothing but addresses may differ, so it is asked the first time only.
        """
        if programs == 0:
            return
        if INTERPRETED or device is None:
            self._through_the_front_door(programs, arguments)
            return
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(programs, device, tensors, arguments)
            return
        filled = self.fill(*tensors)
        if filled is None:
            if any(tensor.data_ptr() % ALIGNMENT for tensor in tensors):
                self._through_the_front_door(programs, arguments)
                return
            filled = self._prepare(tensors, arguments)(*tensors)
        assert filled is not None and self.run is not None
        stream = torch._C._cuda_getCurrentRawStream(device)
        self.run(programs, 1, 1, stream, *self.rest, *filled)

    def _through_the_front_door(self, programs: int, arguments: Arguments) -> None:
        self.kernel[(programs,)](*opened(arguments(itself)), **self.constants, **self.options)

    def _prepare(self, tensors: Sequence[Tensor], arguments: Arguments) -> Fill:
        """Compile and load, once; what gives the arguments of this call and of those like it."""
        if self.run is None:
            self._load(self.compile(arguments(itself)))
        places = Places(tensors)
        given = arguments(places)
        constants = [self.constants[name] for name in self.kernel.arg_names[len(given) :]]
        fill = places.fill((*given, *constants))
        self.fill = fill if places.complete else nothing_fits
        return fill

    def _load(self, compiled: Any) -> None:
        run = compiled.run  # loads the binary, and only then knows the function
        self.rest = (compiled.function, compiled.packed_metadata, None, None, None)
        self.run = run

    def compile(self, arguments: tuple[Any, ...]) -> Any:
        """The kernel compiled for such arguments, for the active device; nothing is started."""
        return self.kernel.warmup(*opened(arguments), grid=(1,), **self.constants, **self.options)


def opened(arguments: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments as Triton's front door takes them."""
    return tuple(
        argument.opened() if isinstance(argument, Described) else argument for argument in arguments
    )


def nothing_fits(*tensors: Tensor) -> None:
    """What fills in arguments before any are known."""


class Place(NamedTuple):
    """Stands in for the address of a call's tensor number so-and-so."""

    number: int


class Places:
    """Gives each tensor its place instead of its address, and turns arguments with places into a
    function of tensors, which Python runs fast."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.numbers = [id(tensor) for tensor in tensors]
        self.complete = True  # whether all tensors had a place

    def __call__(self, tensor: Tensor) -> Any:
        """The place of a tensor; of one that has none, the address in this call."""
        if id(tensor) in self.numbers:
            return Place(self.numbers.index(id(tensor)))
        self.complete = False
        return tensor.data_ptr()

    def fill(self, arguments: tuple[Any, ...]) -> Fill:
        """The function of as many tensors that gives the arguments, or None where they do not fit.

        Tensors that are one and the same now cannot be told apart, so they must be again.
        """
        values: dict[str, Any] = {}

        def text(value: Any) -> str:
            if isinstance(value, Place):
                return f"a{value.number}"
            if isinstance(value, Described):
                values[name := f"d{len(values)}"] = value.maker()
                return f"{name}(t{value.base.number})"
            if isinstance(value, tuple) and _holds_place(value):
                return f"({''.join(text(part) + ',' for part in value)})"
            name = f"c{len(values)}"
            values[name] = value
            return name

        count = range(len(self.numbers))
        same = [(self.numbers.index(identity), n) for n, identity in enumerate(self.numbers)]
        wrong = [f"({' | '.join(f'a{n}' for n in count)}) % {ALIGNMENT}"]
        wrong += [f"a{first} != a{n}" for first, n in same if first != n]
        lines = [
            f"def fill({', '.join(f't{n}' for n in count)}):",
            *(f"    a{n} = t{n}.data_ptr()" for n in count),
            f"    if {' or '.join(wrong)}:",
            "        return None",
            f"    return {text(arguments)}",
        ]
        exec("\n".join(lines), values)
        return values["fill"]


def _holds_place(value: tuple[Any, ...]) -> bool:
    return any(
        isinstance(part, Place) or (isinstance(part, tuple) and _holds_place(part))
        for part in value
    )


def current_device(tensor: Tensor) -> int | None:
    """The index of a tensor's GPU; None for a CPU tensor under the interpreter."""
    return None if tensor.device.type == "cpu" else tensor.device.index


def next_width(dim: int) -> int:
    """The number of channels that a kernel computes with: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
