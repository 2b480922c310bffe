"""Signature: what a kernel is compiled for, read off its arguments.

A variant of a kernel is its code, its constants and options, the types of its arguments, and what
it relies on about them. Lengths, counts and offsets are numbers that are given when it starts, so
another one is no other variant. Kernels rely on three things only (on AMD's GPUs also on which
tensors have less than 2 GiB):

- addresses that are multiples of 16 bytes, tensor by tensor;
- of a `Stride`, whether it is 1 (a constant then, so that neighbours are loaded together) or a
  multiple of 16;
- of a `Length`, whether it is a multiple of 16: then 16 rows exist or lie in a block together, or
  none of them does. Without, forward passes by Triton took 1.06 (a causal mask) and 1.09 (blocks)
  of their time (benchmarks/results/h200/launch.txt).

Triton's own front door takes every number's value for a reason to compile again.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.language import Constant, Function, resolved

ALIGNMENT = 16  # bytes of an address, or elements of a stride

LARGEST_INT32 = 2**30
"""Larger numbers have 64 bits: kernels add a captured number and a row in as many as they have."""

FUSED = {"enable_fp_fusion": True}
"""Multiplies and additions are fused, said of every kernel: Triton's default is to change."""

FLOAT = "fp32"
ON_AMD = torch.version.hip is not None
TYPES = {  # Triton's names
    torch.bool: "u1", torch.int8: "i8", torch.int16: "i16", torch.int32: "i32", torch.int64: "i64",
    torch.uint8: "u8", torch.uint16: "u16", torch.uint32: "u32", torch.uint64: "u64",
    torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32", torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv", torch.float8_e5m2: "fp8e5", torch.float8_e4m3fnuz: "fp8e4b8",
    torch.float8_e5m2fnuz: "fp8e5b16",
}  # fmt: skip


UNKNOWN, FIXED = -2, -1  # sources


class Number(int):
    """A whole number that is handed to a kernel, and where it comes from.

    Attributes:
        source: its place among the numbers of a call; FIXED: it is the same in all calls that a
            kernel is prepared for together; UNKNOWN, which whatever is computed from others is.
    """

    source: int = UNKNOWN

    def __new__(cls, value: int, source: int | None = None) -> Number:
        """source: where it comes from; that of the value where None."""
        made = super().__new__(cls, value)
        made.source = getattr(value, "source", UNKNOWN) if source is None else source
        return made


class Stride(Number):
    """A number of elements from one row, head or batch entry to the next."""


class Length(Number):
    """A number of rows: of each sequence, of a block that a table has an entry for."""


def source_of(number: int) -> int:
    """Where a number comes from."""
    return getattr(number, "source", UNKNOWN)


def fixed(number: int) -> Number:
    """A number that is the same in all calls that a kernel is prepared for together."""
    return Number(number, FIXED)


def sourced(numbers: Sequence[int]) -> list[Number]:
    """The numbers of a call, each of which knows its place."""
    return [Number(number, place) for place, number in enumerate(numbers)]


class Described(NamedTuple):
    """A tensor that a kernel reads or writes by TMA (`hopper.pipeline`): a kernel argument."""

    tensor: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]  # of what moves at once
    layout: Any  # of that in shared memory
    dtype: torch.dtype

    @property
    def layout_text(self) -> str:
        """The layout as text: what is noted of Triton's makes its own only once."""
        return repr(self.layout)

    @property
    def type(self) -> str:
        """Triton's name of the type, which holds the layout."""
        return f"{DESCRIPTOR}<{TYPES[self.dtype]}{list(self.sides)},{resolved(self.layout)!r}>"


Parameter = tuple[str, Any]
"""What a kernel is handed, in the order of memory: Triton's name of a type, and a number, a Tensor
(whose address it is) or a Described, behind which its shape and strides follow."""

DESCRIPTOR = "tensordesc"


class Arguments:
    """The arguments of one start of a kernel: its key among variants, and its parameters."""

    def __init__(
        self,
        values: Sequence[Any],
        constants: Sequence[Any],
        key_of_constants: tuple[Any, ...] | None = None,
    ):
        """values: what the kernel takes first, nested as it takes them; then its constants.

        key_of_constants: `identity` of the constants, where it is known already.
        """
        self.values, self.constants = values, constants
        self.kinds: list[str] = []  # of parameters
        self.numbers: list[Any] = []  # that they are; a tensor or Described at its place
        self.addressed: list[int] = []  # where these are
        self.classed: list[Number] = []  # numbers of which it counts what they are multiples of
        self.compiled_in: list[int] = []  # numbers that are constants of the kernel
        found: list[Any] = []
        self._read(values, found.append)
        self.key = (
            *found,
            *(identity(constants) if key_of_constants is None else key_of_constants),
        )

    @property
    def parameters(self) -> list[Parameter]:
        """What the kernel is handed."""
        return list(zip(self.kinds, self.numbers, strict=True))

    def _read(self, values: Sequence[Any], note: Callable[[Any], None]) -> None:
        # In the way of every call of a new length: what is frequent comes first.
        note(type(values))
        note(len(values))
        kinds, numbers = self.kinds, self.numbers
        for value in values:
            kind = type(value)
            if kind is Function:
                note(value)
            elif kind is int or kind is Number:
                name = "i32" if -LARGEST_INT32 <= value <= LARGEST_INT32 else "i64"
                note(name)
                kinds.append(name)
                numbers.append(value)
            elif kind is Length or kind is Stride:
                self.classed.append(value)
                if kind is Stride and value == 1:
                    note(kind)
                    note(value)
                    continue
                name = "i32" if -LARGEST_INT32 <= value <= LARGEST_INT32 else "i64"
                note(name)
                note(value % ALIGNMENT == 0)
                kinds.append(name)
                numbers.append(value)
            elif kind is Constant and type(value.value) in (int, Number):
                self.compiled_in.append(value.value)
                note(int)
                note(int(value.value))
            elif value is None:
                note(None)
            elif isinstance(value, Tensor):
                name = _pointer_type(value.dtype)
                note(name)
                note(value.data_ptr() % ALIGNMENT == 0)
                if ON_AMD:
                    note(_is_small(value))
                self.addressed.append(len(numbers))
                kinds.append(name)
                numbers.append(value)
            elif kind is Described:
                note(value.dtype)
                note(value.sides)
                note(value.layout_text)
                self.addressed.append(len(numbers))
                kinds += DESCRIPTOR, *("i32" for _ in value.shape), *("i64" for _ in value.strides)
                numbers += value, *value.shape, *value.strides
            elif kind is float:
                note(FLOAT)
                kinds.append(FLOAT)
                numbers.append(value)
            elif isinstance(value, tuple):
                self._read(value, note)
            else:
                _identify((value,), note)

    @property
    def text(self) -> str:
        """The key as text that is the same in every process."""
        return " ".join(map(_text_of, self.key))


def identity(constants: Sequence[Any]) -> tuple[Any, ...]:
    """What tells constants from others."""
    found: list[Any] = []
    _identify(constants, found.append)
    return tuple(found)


def _identify(constants: Sequence[Any], note: Callable[[Any], None]) -> None:
    """Note what tells constants from others: a function is known by itself."""
    for value in constants:
        if type(value) is Constant:
            value = value.value
        note(type(value))  # 1, 1.0 and True are equal, and not the same
        if isinstance(value, tuple):
            _identify(value, note)
        else:
            note(value)


def _text_of(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)


class Signature(NamedTuple):
    """What Triton's compiler is told of a kernel's arguments."""

    types: dict[str, Any]  # by argument, nested as arguments are
    constants: dict[tuple[int, ...], Any]  # by path
    attributes: dict[tuple[int, ...], list[list[Any]]]

    @staticmethod
    def of(names: Sequence[str], arguments: Arguments, on_amd: bool = ON_AMD) -> Signature:
        """The signature of a kernel whose arguments have these names."""
        values = (*arguments.values, *arguments.constants)
        first = len(arguments.values)
        types = [
            _types(value) if number < first else "constexpr" for number, value in enumerate(values)
        ]
        constants: dict[tuple[int, ...], Any] = {}
        attributes: dict[tuple[int, ...], list[list[Any]]] = {}
        for number, value in enumerate(values):
            if number >= first:
                constants[(number,)] = resolved(value)
                continue
            for path, leaf in _leaves(value, (number,)):
                if type_of(leaf) == "constexpr":
                    constants[path] = resolved(leaf)
                    continue
                hints: list[list[Any]] = [["tt.divisibility", ALIGNMENT]] if aligned(leaf) else []
                if on_amd and isinstance(leaf, Tensor) and _is_small(leaf):
                    hints.append(["tt.pointer_range", 32])
                if hints:
                    attributes[path] = hints
        return Signature(dict(zip(names, types, strict=True)), constants, attributes)


def type_of(value: Any) -> str | None:
    """Triton's name of the type of an argument; "constexpr": it is compiled in; None: a tuple."""
    kind = type(value)
    if kind in (int, Number, Length, Stride):
        return "constexpr" if kind is Stride and value == 1 else _whole_type(value)
    if kind is Described:
        return value.type
    if isinstance(value, tuple):
        return None
    if isinstance(value, Tensor):
        return _pointer_type(value.dtype)
    if kind is float:
        return FLOAT
    return "constexpr"  # None, a function, a constant


def _whole_type(number: int) -> str:
    return "i32" if -LARGEST_INT32 <= number <= LARGEST_INT32 else "i64"


def aligned(value: Any) -> bool:
    """Whether the kernel may rely on a value's being a multiple of 16."""
    if isinstance(value, Tensor):
        return value.data_ptr() % ALIGNMENT == 0
    return type(value) in (Stride, Length) and value % ALIGNMENT == 0


def _is_small(tensor: Tensor) -> bool:
    """Whether 31 bits count its memory: AMD's GPUs then read it with bounds of their own."""
    return tensor.untyped_storage().nbytes() < 2**31


@functools.cache
def _pointer_type(dtype: torch.dtype) -> str:
    return f"*{TYPES[dtype]}"


def _types(value: Any) -> Any:
    kind = type_of(value)
    if kind is not None:
        return kind
    parts = [_types(part) for part in value]
    return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)


def _leaves(value: Any, path: tuple[int, ...]) -> Iterator[tuple[tuple[int, ...], Any]]:
    if type_of(value) is None:
        for number, part in enumerate(value):
            yield from _leaves(part, (*path, number))
    else:
        yield path, value
