"""Places: a call with symbols in the place of addresses, written out as a function of tensors.

Between calls of one kind only addresses differ. So the call is put together once, as a tree of
tuples with symbols in it, and becomes a few lines of Python that fill in the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor

ALIGNMENT = 16  # bytes, which prepared kernels expect addresses to be multiples of

Start = Callable[..., bool]
"""Starts a kernel, given (programs, stream, *tensors); False if these tensors do not fit."""


class Symbol(NamedTuple):
    """Stands in for what is known when a kernel starts: Python, in which {} is the value's name."""

    text: str
    value: Any = None


PROGRAMS, STREAM = Symbol("programs"), Symbol("stream")


class Places:
    """Gives each tensor of a call a symbol for its address."""

    def __init__(self, tensors: Sequence[Tensor]):
        self.numbers = [id(tensor) for tensor in tensors]
        self.complete = True  # whether all tensors had a place

    def __call__(self, tensor: Tensor) -> Any:
        """The symbol of a tensor; of one that has no place, the address in this call."""
        if id(tensor) in self.numbers:
            return Symbol(f"a{self.numbers.index(id(tensor))}")
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
    if isinstance(value, Symbol):
        return value.text.format(written(value.value, values))
    if isinstance(value, tuple) and _holds_symbol(value):
        return f"({''.join(written(part, values) + ',' for part in value)})"
    if value is None or type(value) in (int, bool):
        return repr(value)
    values[name := f"c{len(values)}"] = value
    return name


def _holds_symbol(value: tuple[Any, ...]) -> bool:
    return isinstance(value, Symbol) or any(
        _holds_symbol(part) for part in value if isinstance(part, tuple)
    )
