"""Launcher: kernels prepared once for calls like one another, then started by CUDA's driver.

Triton's own front door looks at every argument of every call to find the kernel that fits, which
takes longer than a small problem does. Here a start of a kernel is a block of memory that holds its
parameters. Between calls like one another only addresses change, and are written into it; then the
driver is told to go. A call of another length fills such a block anew, for the same machine code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from saccade.gpu import driver, machine_code
from saccade.gpu.language import INTERPRETED, Constant, Deferred, resolved
from saccade.gpu.signature import (
    ALIGNMENT,
    FUSED,
    Arguments,
    Described,
    Length,
    Stride,
    identity,
    type_of,
)

MOST_MAPS = 512  # addresses of one tensor of calls like one another; each takes 128 bytes

MakeArguments = Callable[[], tuple[Any, ...]]
"""Makes a kernel's arguments, nested as it takes them; a Tensor stands for its address."""


class Form:
    """What launches share that differ in lengths alone: constants, in the order of the kernel."""

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], meta: type[tuple[Any, ...]] | None
    ):
        self.passed = dict(constants) if meta is None else bundled(constants, meta)
        first = len(kernel.arg_names) - len(self.passed)
        self.constants = [self.passed[name] for name in kernel.arg_names[first:]]
        self.key = identity(self.constants)


_forms: dict[Any, Form] = {}


def form_of(kernel: Any, constants: Mapping[str, Any], meta: type[tuple[Any, ...]] | None) -> Form:
    """The form of a launch; there are as many as kernels have constants, whatever the lengths."""
    key = kernel, meta, INTERPRETED, *constants, *constants.values(), *map(type, constants.values())
    found = _forms.get(key)
    if found is None:
        found = _forms[key] = Form(kernel, constants, meta)
    return found


class Launch:
    """One kernel for calls like one another on one device."""

    def __init__(
        self, kernel: Any, constants: Mapping[str, Any], options: Mapping[str, int],
        meta: type[tuple[Any, ...]] | None = None,
    ):  # fmt: skip
        """constants: the kernel's constexprs by name. meta: the NamedTuple that it takes those of
        its fields in, as one argument META."""
        self.kernel, self.constants, self.options = kernel, constants, options
        self.form = form_of(kernel, constants, meta)
        self.start: AnyStart | None = None  # of the last call
        self.starts: dict[Any, AnyStart] = {}  # by what else tells calls of one Launch apart

    def __call__(
        self, programs: int, device: int | None, tensors: Sequence[Tensor], arguments: MakeArguments
    ) -> None:
        """Start so many programs on the device's current stream.

        tensors: all whose addresses the arguments hold, in the same order every time.
        arguments: makes the arguments. Between calls of one Launch nothing but addresses may
            differ, so it is asked the first time only.
        """
        if programs == 0 or self.relaunch(programs, device, tensors):
            return
        if INTERPRETED or device is None:
            self._interpret(programs, arguments)
        elif torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self(programs, device, tensors, arguments)
        else:
            start = self._prepare(device, tensors, arguments)
            started = start(programs, torch._C._cuda_getCurrentRawStream(device), tensors)
            assert started, "tensors do not fit what was prepared for them"
            self.start = start if start.first else None

    def relaunch(self, programs: int, device: int | None, tensors: Sequence[Tensor]) -> bool:
        """Start it as before; False, and nothing is started, where that does not fit."""
        if self.start is None or device is None or torch._C._cuda_getDevice() != device:
            return False
        return self.start(programs, torch._C._cuda_getCurrentRawStream(device), tensors)

    def _interpret(self, programs: int, arguments: MakeArguments) -> None:
        values = map(plain, arguments())
        options = {**FUSED, **self.options}
        self.kernel[(programs,)](*values, **self.form.passed, **options)

    def _prepare(
        self, device: int, tensors: Sequence[Tensor], arguments: MakeArguments
    ) -> AnyStart:
        numbers = [id(tensor) for tensor in tensors]
        firsts = tuple(map(numbers.index, numbers))
        alignments = tuple(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
        found = self.starts.get((firsts, alignments))
        if found is None:
            given = self.arguments(arguments())
            variant = machine_code.variant(self.kernel, given, self.options, device)
            form = TritonStart if variant.by_triton else Start
            found = form(variant, given, tensors)
            if found.complete:
                self.starts[firsts, alignments] = found
        return found

    def arguments(self, values: tuple[Any, ...]) -> Arguments:
        """All that the kernel takes: what `MakeArguments` gave, then its constants."""
        return Arguments(values, self.form.constants, self.form.key)


def bundled(constants: Mapping[str, Any], meta: type[tuple[Any, ...]]) -> dict[str, Any]:
    """Constants as a kernel takes them whose argument META holds those that `meta` names."""
    fields: tuple[str, ...] = meta._fields  # type: ignore[attr-defined]
    rest = {name: value for name, value in constants.items() if name not in fields}
    known = {name: constants[name] for name in fields if name in constants}
    if not INTERPRETED:  # Triton reads off a tuple what lies in it; its interpreter is plain Python
        known = {name: Constant(value) for name, value in known.items()}
    return {**rest, "META": meta(**known)}


class Start:
    """A kernel's parameters, for calls like one another: all but addresses are known."""

    def __init__(
        self, variant: machine_code.Variant, arguments: Arguments, tensors: Sequence[Tensor]
    ):
        self.variant = variant
        numbers = {id(tensor): number for number, tensor in reversed([*enumerate(tensors)])}
        self.same = [  # tensors that are one and the same cannot be told apart, so must be again
            (numbers[id(tensor)], number)
            for number, tensor in enumerate(tensors)
            if numbers[id(tensor)] != number
        ]
        self.complete = True  # whether all addresses are those of `tensors`
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in tensors)
        self.aligned: list[int] = []  # tensors whose addresses the kernel takes for aligned
        self.pointers: list[tuple[int, int]] = []  # tensor, word of memory
        self.maps: list[tuple[int, int, Maps]] = []  # tensor, byte of memory, descriptors
        values, kinds = list(arguments.numbers), iter(variant.maps)
        for place in arguments.addressed:
            value, offset = values[place], variant.offsets[place]
            if type(value) is Described:
                address, number = value.tensor.data_ptr(), numbers.get(id(value.tensor))
                maps = Maps(next(kinds), value.shape, value.strides)
                values[place] = maps[address]
                if number is not None:
                    self.maps.append((number, offset, maps))
            else:
                address, number = value.data_ptr(), numbers.get(id(value))
                values[place] = address
                if number is not None:
                    self.pointers.append((number, offset // machine_code.ADDRESS_SIZE))
            if number is None:
                self.complete = False
            elif address % ALIGNMENT == 0 and number not in self.aligned:
                self.aligned.append(number)
        self.parameters = variant.format.pack(*values, *machine_code.NO_SCRATCH)
        # Whether later calls try it first. What was made for tensors that are not aligned would fit
        # aligned ones as well, and is slower.
        self.first = self.complete and aligned

    def __call__(self, programs: int, stream: int, tensors: Sequence[Tensor]) -> bool:
        """Start so many programs for other tensors; False, and nothing, if these do not fit."""
        addresses = [tensor.data_ptr() for tensor in tensors]
        bits = 0
        for number in self.aligned:
            bits |= addresses[number]
        if bits % ALIGNMENT:
            return False
        for first, number in self.same:
            if addresses[first] != addresses[number]:
                return False
        variant = self.variant
        memory, words = variant.memory, variant.words
        with variant.lock:  # another thread may start it meanwhile, and the driver lets it
            memory[:] = self.parameters
            for number, word in self.pointers:
                words[word] = addresses[number]
            for number, offset, maps in self.maps:
                memory[offset : offset + driver.TENSOR_MAP_SIZE] = maps[addresses[number]]
            variant.launch(programs, stream)
        return True


class TritonStart:
    """A kernel that Triton's own launcher starts: its arguments are put together in each call."""

    complete = first = False

    def __init__(
        self, variant: machine_code.Variant, arguments: Arguments, tensors: Sequence[Tensor]
    ):
        self.compiled = variant.compiled
        self.values = *map(plain, arguments.values), *map(plain, arguments.constants)

    def __call__(self, programs: int, stream: int, tensors: Sequence[Tensor]) -> bool:
        """Start so many programs for the tensors that it was made with."""
        self.compiled[(programs, 1, 1)](*self.values, stream=stream)
        return True


AnyStart = Start | TritonStart


class Maps(dict[int, bytes]):
    """The descriptors by which TMA finds a tensor of one kind, by its address.

    One says where a tensor lies and how, and not which one it is; a launch, or a graph that is
    captured, copies it. So it serves whatever tensor of this kind comes to lie there.
    """

    def __init__(
        self, kind: driver.TensorMapKind, shape: Sequence[int], strides: Sequence[int]
    ) -> None:
        super().__init__()
        self.kind, self.shape, self.strides = kind, shape, strides

    def __missing__(self, address: int) -> bytes:
        if len(self) >= MOST_MAPS:
            self.clear()
        found = driver.tensor_map(self.kind, address, self.shape, self.strides)
        self[address] = found
        return found


def plain(value: Any) -> Any:
    """An argument as Triton itself takes it."""
    if isinstance(value, Described):
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        shape, strides, sides = map(list, (value.shape, value.strides, value.sides))
        return TensorDescriptor(value.tensor, shape, strides, sides, resolved(value.layout))
    if isinstance(value, tuple):
        parts = map(plain, value)
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if isinstance(value, Deferred):
        return value.resolve()
    if type(value) not in (int, Stride, Length):
        return value
    wide = INTERPRETED and type_of(int(value)) == "i64"
    return _of_64_bits(value) if wide else int(value)


def _of_64_bits(number: int) -> Any:
    """A number for the interpreter, which would take one of 31 bits for one of 32."""
    import numpy as np
    import triton.language as tl
    from triton.runtime.interpreter import TensorHandle

    return tl.tensor(TensorHandle(np.array([number], dtype=np.int64), tl.int64), tl.int64)


def current_device(tensor: Tensor) -> int | None:
    """The index of a tensor's GPU; None for a CPU tensor under the interpreter."""
    return None if tensor.device.type == "cpu" else tensor.device.index


def next_width(dim: int) -> int:
    """The number of channels that a kernel computes with: a power of two of at least 16."""
    return max(16, 1 << (dim - 1).bit_length())
