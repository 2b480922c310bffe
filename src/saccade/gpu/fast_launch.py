"""Fast launch: what Triton's launcher hands to its function in C, and maps for TMA, by address.

Between the two Triton (3.6 to 3.9) does little: it looks whether a kernel wants scratch memory,
puts arguments in order, and encodes a map for each tensor that is moved by TMA, in every call anew.
That takes longer than all else in a launch. The forms that this relies on stand in
`triton_internals.py`.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

# ---- places --------------------------------------------------------------------------------------
# A call with symbols in the place of addresses, written out as a function of tensors.
#
# Between calls of one kind only addresses differ. So the call is put together once, as a tree of
# tuples with symbols in it, and becomes a few lines of Python that fill in the rest.

ALIGNMENT = 16  # bytes, which prepared kernels expect addresses to be multiples of

Start = Callable[..., bool]
"""Starts a kernel, given (programs, stream, *tensors); False if these tensors do not fit."""


class AddressSymbol(NamedTuple):
    """Stands in for what is known when a kernel starts: Python, in which {} is the value's name."""

    text: str
    value: Any = None


PROGRAMS, STREAM = AddressSymbol("programs"), AddressSymbol("stream")


class Addresses:
    """Gives each tensor of a call a symbol for its address."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.numbers = [id(tensor) for tensor in tensors]
        self.complete = True  # whether all tensors had a place

    def __call__(self, tensor: Tensor) -> Any:
        """The symbol of a tensor; of one that has no place, the address in this call."""
        if id(tensor) in self.numbers:
            return AddressSymbol(f"a{self.numbers.index(id(tensor))}")
        self.complete = False
        return tensor.data_ptr()

    def function(self, called: Any, arguments: tuple[Any, ...]) -> Start:
        """The function that makes a call for other programs, on another stream, of other tensors.

        Tensors that are one and the same now cannot be told apart, so they must be again.
        """
        values: dict[str, Any] = {"called": called}
        count = range(len(self.numbers))
        same = [(self.numbers.index(identity), n) for n, identity in enumerate(self.numbers)]
        wrong = [f"({' | '.join(f'a{n}' for n in count)}) % {ALIGNMENT}"]
        wrong += [f"a{first} != a{n}" for first, n in same if first != n]
        lines = [
            f"def start(programs, stream, {', '.join(f't{n}' for n in count)}):",
            *(f"    a{n} = t{n}.data_ptr()" for n in count),
            f"    if {' or '.join(wrong)}:",
            "        return False",
            f"    called{written(arguments, values)}",
            "    return True",
        ]
        exec("\n".join(lines), values)
        return values["start"]


def written(value: Any, values: dict[str, Any]) -> str:
    """A value as Python; what can only be named is put among `values`."""
    if isinstance(value, AddressSymbol):
        return value.text.format(written(value.value, values))
    if isinstance(value, tuple) and _holds_symbol(value):
        return f"({''.join(written(part, values) + ',' for part in value)})"
    if value is None or type(value) in (int, bool):
        return repr(value)
    values[name := f"c{len(values)}"] = value
    return name


def _holds_symbol(value: tuple[Any, ...]) -> bool:
    return isinstance(value, AddressSymbol) or any(
        _holds_symbol(part) for part in value if isinstance(part, tuple)
    )


MOST_MAPS = 512  # addresses of one tensor of calls like one another; each takes half a kilobyte


class Described(NamedTuple):
    """A tensor that a kernel reads or writes by TMA (`hopper.descriptors`): a kernel argument."""

    base: Any  # what a Pointer gives
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]  # of what moves at once
    layout: Any  # of that in shared memory
    dtype: torch.dtype

    def opened(self) -> Any:
        """As Triton's front door takes it."""
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

        shape, strides, sides = map(list, (self.shape, self.strides, self.sides))
        return TensorDescriptor(self.base, shape, strides, sides, self.layout)

    def maker(self) -> Callable[[int], Any]:
        """What makes the same for an address that is known to fit, without checking it again."""
        # From 3.7 on Triton compares the width of the tensor's numbers with the layout's.
        checked = self._replace(base=torch.empty(0, dtype=self.dtype)).opened()
        spec, known = type(checked), vars(checked)

        def make(address: int) -> Any:
            made = object.__new__(spec)
            vars(made).update(known, base=Memory(address))
            return made

        return make


class Memory(NamedTuple):
    """Memory of which Triton asks no more than where it is."""

    address: int

    def data_ptr(self) -> int:
        """As a tensor's."""
        return self.address


class Maps(dict[int, Any]):
    """The maps by which TMA finds a tensor of one kind, by its address.

    A map says where a tensor lies and how, and not which one it is; a launch, or a graph that is
    captured, copies it. So it serves whatever tensor of this kind comes to lie there.
    """

    def __init__(self, encode: Callable[[int], Any]):
        super().__init__()
        self.encode = encode

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_MAPS:
            self.clear()
        found = self[address] = self.encode(address)
        return found


def call_of(compiled: Any, arguments: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """What to call, and with what, to start so many programs of a kernel on a stream."""
    run = compiled.run  # loads the binary, and only then knows the function
    outer = (PROGRAMS, 1, 1, STREAM, compiled.function, compiled.packed_metadata, None, None, None)
    behind = _behind(compiled, outer, arguments) if _adds_nothing(run) else None
    return behind or (run, (*outer, *_expanded(arguments, _made_anew)))


def _behind(
    compiled: Any, outer: tuple[Any, ...], arguments: tuple[Any, ...]
) -> tuple[Any, tuple[Any, ...]] | None:
    """The function in C behind Triton's launcher and what it is handed; None if it is not found.

    In which order that is, the launcher itself says: it is called with symbols, and a function
    that takes note in the place of the one in C.
    """
    called = compiled.run.launch
    if any(isinstance(argument, Described) for argument in arguments):
        called, encoders = _beneath(called), _encoders(compiled)
        if called is None or encoders is None:
            return None
        arguments = _expanded(arguments, lambda described: next(encoders)(described))
    handed: list[tuple[Any, ...]] = []
    asked = copy.copy(compiled.run)
    asked.launch = lambda *given: handed.append(given)
    try:
        asked(*outer, *arguments)
    except TypeError:  # it computes with what it is given, so it has to be called every time
        return None
    return (called, handed[0]) if handed else None


def _adds_nothing(run: Any) -> bool:
    """Whether Triton's launcher hands on the same in every call, addresses apart."""
    if not hasattr(run, "launch") or getattr(run, "gsan_enabled", False):
        return False
    return not any(size for name, size in vars(run).items() if name.endswith("scratch_size"))


def _beneath(launch: Any) -> Any:
    """The function in C under the one that encodes maps; None where there is none."""
    return inspect.getclosurevars(launch).nonlocals.get("launcher")


def _encoders(compiled: Any) -> Any:
    """For each tensor that is moved by TMA, in order: what gives its parts of the arguments."""
    from triton.backends.nvidia import driver

    metadata = getattr(compiled.metadata, "tensordesc_meta", None)
    expand = getattr(driver, "make_tensordesc_arg", None)
    if not metadata or None in metadata or expand is None:
        return None
    unread = (None,) * (len(inspect.signature(expand).parameters) - 2)

    def encoder(of: Any) -> Callable[[Described], tuple[Any, ...]]:
        def encode(described: Described) -> tuple[Any, ...]:
            make = described.maker()
            maps = Maps(lambda address: expand(make(address), of, *unread)[0])
            found = AddressSymbol(f"{{}}[{described.base.text}]", maps)
            return (found, *described.shape, *described.strides)

        return encode

    return map(encoder, metadata)


def _made_anew(described: Described) -> tuple[Any, ...]:
    """A descriptor that Triton encodes, in every call."""
    return (AddressSymbol(f"{{}}({described.base.text})", described.maker()),)


def _expanded(
    arguments: tuple[Any, ...], parts: Callable[[Described], tuple[Any, ...]]
) -> tuple[Any, ...]:
    """The arguments, with parts in the place of each tensor that is moved by TMA."""
    found: list[Any] = []
    for argument in arguments:
        found += parts(argument) if isinstance(argument, Described) else (argument,)
    return tuple(found)
