"""Symbols: what rows, scores and all that follows from them are while a function is traced."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.modifiers.expression import REAL, TRUTH, WHOLE

if TYPE_CHECKING:
    from saccade.modifiers.trace import Trace

ADVICE = (
    "write & | ~ for and, or, not; torch.where for if; torch.minimum for min; "
    "saccade.masks.take or table[row] to read a captured tensor"
)
# What Python and PyTorch call an operation, and what it is called here; "r" has operands swapped.
OPERATORS = {
    "add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%",
    "and": "&", "or": "|", "xor": "^", "lshift": "<<", "rshift": ">>",
}  # fmt: skip
PLAIN = {
    "lt": "<", "le": "<=", "gt": ">", "ge": ">=", "eq": "==", "ne": "!=",
    "neg": "neg", "abs": "abs", "invert": "~",
}  # fmt: skip


class Untraceable(TypeError):
    """Says what a function does that cannot be known without its rows, and in which line."""

    def __init__(self, problem: str):
        super().__init__(f"{problem}{_line_of_user()}; {ADVICE}")
        self.problem = problem


def _line_of_user() -> str:
    """Where the traced function stands in its file."""
    own, torch_itself = str(Path(__file__).parents[1]), str(Path(str(torch.__file__)).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((own, torch_itself)):
            return f", at {Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""


class Symbol:
    """A number or truth of every pair, while a function is traced."""

    device = torch.device("cpu")
    shape = torch.Size([])
    requires_grad = False
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, number: int):
        self._trace, self._number = trace, number

    @property
    def dtype(self) -> torch.dtype:
        """As a row number of that kind has it."""
        kind = self._trace.steps[self._number].kind
        return {TRUTH: torch.bool, WHOLE: torch.int64, REAL: torch.float32}[kind]

    def dim(self) -> int:
        """No dimensions: a symbol stands for one pair."""
        return 0

    ndim = property(dim)

    def take_from(self, table: Tensor, indices: Sequence[Any]) -> Symbol:
        """What `saccade.masks.take` gives for symbols."""
        return self._trace.reading("take", table, indices)

    def __bool__(self) -> bool:
        raise Untraceable("a mask or score cannot branch on a row")

    def _has_no_value(self, *_: Any) -> Any:
        raise Untraceable("a row has no value of its own while a mask or score is traced")

    __array_ufunc__ = None  # numpy's arrays leave operators with rows to rows
    __int__ = __float__ = __index__ = __len__ = __iter__ = __matmul__ = __rmatmul__ = _has_no_value
    __getitem__ = __setitem__ = __contains__ = __round__ = __trunc__ = __floor__ = __ceil__ = (
        _has_no_value
    )

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors, which go the way of PyTorch's functions."""
        if name.startswith("__") or name.startswith("_ipython"):
            raise AttributeError(name)
        return lambda *args, **options: self._trace.called(name, (self, *args), options)

    def where(self, condition: Any, other: Any) -> Symbol:
        """As a method, `where` takes its condition second."""
        return self._trace.called("where", (condition, self, other), {})

    def __pow__(self, exponent: Any) -> Symbol:
        return self._trace.called("pow", (self, exponent), {})

    def __rpow__(self, base: Any) -> Symbol:
        return self._trace.called("pow", (base, self), {})

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What PyTorch's functions do with symbols."""
        name = getattr(function, "__name__", str(function))
        symbols = symbols_in((*args, *(kwargs or {}).values()))
        return symbols[0]._trace.called(name, args, kwargs or {})


def _define(method: str, op: str) -> None:
    def operate(self: Symbol, *others: Any) -> Symbol:
        return self._trace.apply(op, self, *others)

    setattr(Symbol, method, operate)


for _name, _op in (OPERATORS | PLAIN).items():
    _define(f"__{_name}__", _op)
for _name, _op in OPERATORS.items():
    _define(f"__r{_name}__", f"r{_op}")


class Partial:
    """A captured tensor that was read along its first dimensions only; read on, it is a number."""

    def __init__(self, trace: Trace, table: Tensor, indices: tuple[Any, ...]):
        self._trace, self._table, self._indices = trace, table, indices

    def __getitem__(self, index: Any) -> Any:
        further = index if isinstance(index, tuple) else (index,)
        return self._trace.reading("read", self._table, (*self._indices, *further))

    def refuse(self, *_: Any) -> Any:
        """Say that indices are missing."""
        raise Untraceable(
            f"a captured tensor of {self._table.dim()} dimensions is read at "
            f"{len(self._indices)} indices, takes one for each dimension"
        )

    __hash__ = None  # type: ignore[assignment]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.refuse()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """PyTorch's functions take no part of a tensor."""
        return symbols_in((*args, *(kwargs or {}).values()), cls)[0].refuse()


for _name in ("bool", "len", "iter", "contains", *OPERATORS, *PLAIN):
    setattr(Partial, f"__{_name}__", Partial.refuse)  # of == Python would compare identities
for _name in OPERATORS:
    setattr(Partial, f"__r{_name}__", Partial.refuse)


def symbols_in(values: Any, kind: Any = (Symbol, Partial)) -> list[Any]:
    """The symbols among arguments, those in lists and tuples too."""
    found = []
    for value in values:
        if isinstance(value, (list, tuple)):
            found += symbols_in(value, kind)
        elif isinstance(value, kind):
            found.append(value)
    return found
