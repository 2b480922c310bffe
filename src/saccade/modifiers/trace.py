"""Tracing: run a mask or score function once, on symbols, and keep what it computes.

Rows are symbols, whose operators note steps. While the function runs, a mode of PyTorch's sees what
is done with tensors that it reaches, wherever they are kept: in a closure, a global, an attribute.
Numbers that meet a symbol are captured by value. Nothing of the function itself is kept.
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from saccade.modifiers import symbol
from saccade.modifiers.expression import (
    FUNCTIONS,
    REAL,
    TRUTH,
    WHOLE,
    Captured,
    Expression,
    num_operands,
)
from saccade.modifiers.normal_form import Lengths, RowBuilder
from saccade.modifiers.symbol import (
    COMPOSED,
    OPERATIONS,
    OPERATORS,
    Partial,
    Symbol,
    Untraceable,
    symbols_in,
)

ROWS = ("batch", "head", "query_row", "kv_row")
RANDOM = (
    "rand", "randn", "randint", "randperm", "random", "normal", "log_normal", "uniform",
    "bernoulli", "multinomial", "exponential", "geometric", "cauchy", "poisson", "dropout",
)  # fmt: skip
KNOWN = {*OPERATIONS, *COMPOSED}
STAYS = ("&", "|", "^", ">>", "min", "max", "where", "%")  # in the range of their operands' dtype
MADE = ("ones", "zeros", "full", "tensor", "scalar_tensor", "new_ones", "new_zeros", "new_full")


class _Captures(TorchFunctionMode):
    """Sees what a traced function does to tensors, wherever it found them."""

    def __init__(self, trace: Trace):
        super().__init__()
        self.trace = trace

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name, options = getattr(function, "__name__", ""), kwargs or {}
        if name == "__getitem__":
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            if any(isinstance(i, Symbol) for i in index):
                return self.trace.reading("read", args[0], index)
        elif symbols_in((*args, *options.values())):
            if function is Tensor.where:  # whose condition comes second
                args = (args[1], args[0], *args[2:])
            return self.trace.called(name, args, options)
        elif name.rstrip("_").removesuffix("_like") in RANDOM:
            raise Untraceable(f"a mask or score cannot draw random numbers ({name})")
        elif name in KNOWN and any(map(_learns, args)):
            return self.trace.called(name, args, options)
        result = function(*args, **options)
        if isinstance(result, Tensor) and result.requires_grad:
            self.trace.note_computed(result, args)
        if name in MADE and isinstance(result, Tensor) and result.dim() == 0:
            self.trace.made[id(result)] = result
        return result


def _learns(value: Any) -> bool:
    """Whether a value is a number that learns: what is computed of it follows it to each call."""
    return isinstance(value, Tensor) and value.dim() == 0 and value.requires_grad


def _memory_of(tensor: Tensor) -> Tensor:
    """The tensor whose memory a view shows."""
    return tensor if tensor._base is None else tensor._base


class Trace(RowBuilder):
    """The steps of one function, with the tensors and numbers that it captured."""

    def __init__(self, lengths: Lengths | None = None, labels: dict[int, str] | None = None):
        """labels: names of tensors by identity, where numbers are written into the code."""
        super().__init__(lengths)
        self.labels = labels
        self.tensors: list[Tensor] = []
        self.ints: list[Any] = []
        self.floats: list[Any] = []
        self.made: dict[int, Tensor] = {}  # tensors that the function made itself, kept alive
        self.computed: dict[int, Tensor] = {}  # of tensors that learn
        self._reads: dict[tuple[Any, ...], int] = {}
        self._read: list[Tensor] = []  # kept alive, as reads are known by identity

    def symbol(self, number: int) -> Symbol:
        """A step as the traced function sees it."""
        return Symbol(self, number)

    def number(self, value: Any, known: bool = True) -> int:
        """A captured number: a slot of its own, so that the key does not depend on it.

        known: whether it stays what it is; not where torch.compile passes it in.
        """
        whole = isinstance(value, int) or getattr(value, "kind", "") == "i"
        if whole and known and not -(2**62) < value < 2**62:
            raise Untraceable(f"the number {value} has more than 62 bits")
        into = self.ints if whole else self.floats
        into.append(value)
        step = self.add("number", detail=f"{'i' if whole else 'f'}{len(into) - 1}")
        if known:
            self.values[step] = value
        return step

    def placeholder(self, value: Any) -> Any:
        """A captured number that may change from call to call; a tensor as it is."""
        return value if isinstance(value, Tensor) else self.symbol(self.number(value, known=False))

    def note_computed(self, result: Tensor, args: Sequence[Any]) -> None:
        """Remember what was computed of tensors that learn, unless it is a view of one."""
        memory = _memory_of(result)
        if all(memory is not _memory_of(arg) for arg in args if isinstance(arg, Tensor)):
            self.computed[id(memory)] = memory

    def constant(self, value: Any) -> int:
        """The step of a value that a symbol is combined with."""
        if isinstance(value, Symbol):
            if value._trace is not self:
                raise Untraceable("a row of another trace is used")
            return value._number
        if isinstance(value, Partial):
            return value.refuse()
        if isinstance(value, Tensor):
            if id(value) in self.made:
                return self.constant(value.item())
            if value.dim():
                shape = tuple(value.shape)
                raise Untraceable(f"a captured tensor of shape {shape} is used without an index")
            return self.reading("read", value, ())._number
        if isinstance(value, bool) or (self.labels is not None and type(value) in (int, float)):
            return self.literal(value)
        if isinstance(value, numbers.Integral):
            return self.number(int(value))
        if isinstance(value, numbers.Real):
            return self.number(float(value))
        if type(value).__module__ == "numpy" and getattr(value, "shape", None) == ():  # its bool
            return self.constant(value.item())
        raise Untraceable(f"a row meets {type(value).__name__}, takes numbers and tensors")

    def reading(self, op: str, table: Any, indices: Sequence[Any]) -> Any:
        """A read of a captured tensor, a partial one where dimensions are left."""
        if not isinstance(table, Tensor):
            raise Untraceable(f"take: reads {type(table).__name__}, takes a captured tensor")
        if id(_memory_of(table)) in self.computed:
            raise Untraceable(
                "a tensor that learns is read after something was computed of it inside of the "
                "function, which happens once; takes it read first, and computed after"
            )
        if len(indices) < table.dim() and op == "read":
            return Partial(self, table, tuple(indices))
        if len(indices) != table.dim():
            raise Untraceable(
                f"a captured tensor of {table.dim()} dimensions is read at {len(indices)} "
                "indices, takes one for each dimension"
            )
        for index in indices:
            whole = isinstance(index, (Symbol, numbers.Integral)) and not isinstance(index, bool)
            if not whole and not (isinstance(index, Tensor) and index.dim() == 0):
                raise Untraceable(
                    f"a captured tensor is read at {index!r}, takes whole numbers and rows"
                )
        try:
            letter = letter_of(table)
        except TypeError as error:
            raise Untraceable(str(error)) from None
        steps = [self.constant(index) for index in indices]
        kinds = {self.steps[step].kind for step in steps} - {WHOLE}
        if kinds:
            kind = "real number" if REAL in kinds else TRUTH
            raise Untraceable(
                f"a captured tensor is read at a {kind}, takes whole numbers and rows"
            )
        narrow = table.dtype if table.dtype in symbol.NARROW else None
        label = (self.labels or {}).get(id(table), "")
        key = (id(table), op, tuple(steps))
        if key not in self._reads:
            self._read.append(table)
            table, steps = self.without_offsets(table, steps)
            self.tensors.append(table)
            name = f"t{len(self.tensors) - 1}:{letter}{label and ':' + label}"
            self._reads[key] = self.add(op, *steps, detail=name)
        return Symbol(self, self._reads[key], narrow)

    def apply(self, op: str, *operands: Any) -> Symbol:
        """An operation on symbols, numbers and captured tensors."""
        found, dtype = self._applied(op, *operands), symbol.narrow_dtype(operands)
        if dtype is None or self.steps[found._number].kind != WHOLE:
            return found
        if op in STAYS:
            return Symbol(self, found._number, dtype)
        return symbol.wrapped(self, found, dtype)

    def _applied(self, op: str, *operands: Any) -> Symbol:
        if op.startswith("r") and op[1:] in OPERATORS.values():
            op, operands = op[1:], operands[::-1]
        if len(operands) != num_operands(op):
            raise Untraceable(f"{op} of {len(operands)} operands, takes {num_operands(op)}")
        steps = [self.constant(operand) for operand in operands]
        kinds = [self.steps[step].kind for step in steps]
        if op in ("&", "|", "^", "~", "<<", ">>"):
            shifts = op in ("<<", ">>")
            if REAL in kinds or (shifts and TRUTH in kinds) or len(set(kinds)) > 1:
                joined = " and ".join(kinds)
                raise Untraceable(f"{op} joins {joined}, takes two truths or two whole numbers")
        if op == "where" and kinds[0] != TRUTH:
            raise Untraceable("where: the condition is a number, takes a truth")
        if op in ("//", "%"):
            return self.symbol(self._divide(op, *steps))
        if op in FUNCTIONS and kinds[0] != REAL:
            steps = [self.add("real", *steps)]
        if op in ("<", "<=", ">", ">="):
            return self.symbol(self.compare(op, *steps))
        return self.symbol(self.add(op, *steps))

    def _divide(self, op: str, dividend: int, divisor: int) -> int:
        """// and %: a divisor that is a number is greater than 0."""
        if self.steps[divisor].op == "literal":
            if not self.steps[divisor].literal:
                raise Untraceable(f"{op} divides by 0")
            return self.add(op, dividend, divisor)
        if divisor not in self.values:
            known = self.labels is not None or self.steps[divisor].op != "number"
            return self.add(
                op, dividend, divisor if known else self.add("+", divisor, self.literal(0))
            )
        value = self.values[divisor]
        if value == 0:
            raise Untraceable(f"{op} divides by 0")
        if value > 0:
            return self.add(op, dividend, divisor)
        found = self.add(op, self.add("neg", dividend), self.number(-value))
        return found if op == "//" else self.add("neg", found)

    def called(self, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
        """A function or method of PyTorch's, by name."""
        return symbol.call(self, name, args, options)

    def finished(self, result: int) -> tuple[Expression, Captured]:
        """The expression of a result with what it captured."""
        expression, chosen = self.expression(result)
        everything = Captured(self.tensors, self.ints, self.floats)
        values = ([everything.value(slot) for slot in chosen if slot[0] == kind] for kind in "tif")
        return expression, Captured(*map(tuple, values))


def letter_of(table: Tensor) -> str:
    """The letter of a captured tensor's dtype in keys: b, i, l or f."""
    if table.dtype == torch.bool:
        return "b"
    if table.dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        return "f"
    if table.dtype in (torch.int8, torch.uint8, torch.int16, torch.int32):
        return "i"
    if table.dtype == torch.int64:
        return "l"
    raise TypeError(
        f"a captured tensor has dtype {table.dtype}, takes bool, int8, uint8, int16, int32, int64, "
        "float16, bfloat16, float32 or float64"
    )


def trace(
    function: Callable[..., Any],
    align: str = "top_left",
    captured: Sequence[Any] = (),
    *,
    offsets: tuple[int, int] = (0, 0),
    lengths: Lengths | None = None,
    score: bool = False,
    known: bool = True,
    built_in: bool = False,
) -> tuple[Expression, Captured]:
    """Run a function once on symbols.

    Args:
        function: of (batch, head, query_row, kv_row, *captured), with the score before them where
            `score` says so.
        align: "bottom_right" adds kv_len - query_len to query_row.
        captured: tensors and numbers that it takes besides.
        offsets: what is added to query_row and kv_row: the positions of the first rows.
        lengths: where the expression is to hold for these alone: what is always so falls away,
            and rows are aligned as they are numbered.
        score: whether it changes scores, and gives numbers, or is a mask, and gives truths.
        known: whether captured numbers stay what they are.
        built_in: whether tensors are named as the function's parameters are, and numbers in the
            function are written into the code.
    """
    what, labels = "score" if score else "mask", None
    if built_in:
        names = list(inspect.signature(function).parameters)[-len(captured) :] if captured else []
        labels = {id(value): name for name, value in zip(names, captured, strict=True)}
    found = Trace(lengths, labels)
    rows = [found.symbol(found.add(name)) for name in ROWS]
    if align == "bottom_right":
        rows[2] = found.apply("+", rows[2], found.symbol(found.add("shift")))
    for row, offset in zip((2, 3), offsets, strict=True):
        rows[row] = found.apply("+", rows[row], offset) if offset else rows[row]
    arguments = [*([found.symbol(found.add("score"))] if score else []), *rows]
    arguments += [value if known else found.placeholder(value) for value in captured]
    with _Captures(found):
        try:
            answer = function(*arguments)
        except TypeError as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:
                _check_parameters(function, arguments, what)  # it was not even entered
            raise
    result = _result(found, answer, what, function)
    kind = found.steps[result].kind
    if not score:
        if kind != TRUTH:
            raise TypeError(f"mask: {name_of(function)} gave {kind} numbers, takes a bool result")
        result = found.joined(result)
    elif kind != REAL:
        result = found.add("real", result)
    return found.finished(result)


def _result(found: Trace, answer: Any, what: str, function: Callable[..., Any]) -> int:
    """The step of what a function gave."""
    problem = "it gave nothing"
    try:
        if answer is not None:
            return found.constant(answer)
    except Untraceable as error:
        problem = error.problem
    wanted = "a number" if what == "score" else "a bool result"
    raise TypeError(f"{what}: {name_of(function)} gave no {what}: {problem}; takes {wanted}")


def _check_parameters(function: Callable[..., Any], arguments: list[Any], what: str) -> None:
    """Refuse a function of other parameters."""
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a callable that says nothing of itself
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        takes = ", ".join([*(["score"] if what == "score" else []), *ROWS])
        more = len(arguments) - len(takes.split())
        beside = f" and {more} that it captures" if more else ""
        advice = "" if more else f"; if it captures the others, call it with them: {what}=made(...)"
        raise TypeError(
            f"{what}: {name_of(function)} has the parameters {signature}, takes ({takes})"
            f"{beside}{advice}"
        ) from None


def name_of(function: Callable[..., Any]) -> str:
    """A function's module and name, with its file and line where it has them."""
    name, code = getattr(function, "__qualname__", None), getattr(function, "__code__", None)
    if name is None:
        return repr(function)
    line = f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code is not None else ""
    return f"{function.__module__}.{name}{line}"
