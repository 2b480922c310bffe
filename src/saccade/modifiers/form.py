"""Form: a function's expression for captured values of known types and any value.

The form depends on no value, so torch.compile may take it for a constant and pass values through
its graph; and built-in masks and scores, whose values have names, are traced once for all calls.

A function that reaches tensors by itself is followed while the graph is made. A graph cannot run
`trace`: it holds no dictionaries of tensors by identity, and no errors that are looked at. But
torch.compile follows Python that does little. So rows are `Taped` meanwhile, which only write down
what is done with them, and the tensors that it is done with stay in the graph. What was written
down is text and numbers, constants to a graph; outside of it they are played once to the symbols
of `trace`, and give the same expression as ever.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from saccade.modifiers.expression import Captured, Expression, constant, key_of
from saccade.modifiers.symbol import OPERATORS, PLAIN
from saccade.modifiers.trace import ROWS, letter_of, name_of, trace

DTYPES = {"b": torch.bool, "i": torch.int32, "l": torch.int64, "f": torch.float32}


class Form(NamedTuple):
    """A key, and which of the values that a function is called with fill its slots.

    A slot of a number holds (index, value): an index among those values, or -1 and the number that
    the function itself brings.
    """

    key: str
    tensors: tuple[int, ...]
    ints: tuple[tuple[int, int], ...]
    floats: tuple[tuple[int, float], ...]

    def captured(self, values: Sequence[Any]) -> Captured:
        """What the expression captured of these values."""
        return Captured(
            tuple(values[index] for index in self.tensors),
            tuple(int(values[index]) if index >= 0 else number for index, number in self.ints),
            tuple(values[index] if index >= 0 else number for index, number in self.floats),
        )


def kind_of(value: object) -> str:
    """The kind of a value that a function may capture: its letter, and a tensor's dimensions."""
    if isinstance(value, Tensor):
        return f"{letter_of(value)}{value.dim()}"
    if isinstance(value, (int, torch.SymInt)):
        return "i"
    if isinstance(value, (float, torch.SymFloat)):
        return "f"
    raise TypeError(f"captured data must be tensors, ints or floats, got {type(value).__name__}")


@constant
def form_of(
    function: Callable[..., Any],
    align: str,
    kinds: tuple[str, ...],
    *,
    score: bool = False,
    built_in: bool = False,
) -> Form:
    """The form of a function that is called with values of these kinds.

    built_in: tensors keep the names of the function's parameters, whose sizes must be those of the
        call, and numbers in the function are written into the code.
    """
    if not built_in:
        _check_reach(function)
    unknowns = placeholders(kinds)
    form = form_from(
        *trace(function, align, unknowns, score=score, known=False, built_in=built_in), unknowns
    )
    if -1 in form.tensors:
        raise TypeError(
            f"{name_of(function)} reads tensors from outside; inside torch.compile give them to "
            "the function that masks.function or scores.function makes, or make the mask outside"
        )
    return form


@constant
def form_or_refusal(
    function: Callable[..., Any], align: str, kinds: tuple[str, ...], *, score: bool
) -> Form | str:
    """The form of a function, or why it has none: an error of a constant is Dynamo's own."""
    try:
        return form_of(function, align, kinds, score=score)
    except TypeError as error:
        return str(error)


def form_from(expression: Expression, found: Captured, unknowns: list[Any]) -> Form:
    """The form of an expression that was traced for such placeholders."""
    return Form(
        key_of(expression),
        tuple(_index(unknowns, tensor) for tensor in found.tensors),
        tuple((_index(unknowns, n), 0 if isinstance(n, Unknown) else n) for n in found.ints),
        tuple((_index(unknowns, n), 0.0 if isinstance(n, Unknown) else n) for n in found.floats),
    )


def _check_reach(function: Callable[..., Any]) -> None:
    """Refuse a function that reaches values from outside, whose changes a graph would not see."""
    problem = None if isinstance(function, types.FunctionType) else "is no plain function"
    if problem is None:
        reached = inspect.getclosurevars(function)
        for name, value in {**reached.globals, **reached.nonlocals}.items():
            if isinstance(value, types.FunctionType):
                _check_reach(value)
            elif not isinstance(value, (types.ModuleType, types.BuiltinFunctionType, type)):
                problem = f"reaches {name} from outside"
    if problem is not None:
        raise TypeError(
            f"{name_of(function)} {problem}, which a graph cannot follow; inside torch.compile "
            "give values to the function that masks.function or scores.function makes, or write "
            "mask = saccade.masks.function(the_function)() outside the compiled function"
        )


class Unknown(NamedTuple):
    """Stands for a number that is not known yet."""

    kind: str


def placeholders(kinds: Sequence[str]) -> list[Any]:
    """The arguments with which a function is traced for values of these kinds."""
    return [_placeholder(kind) for kind in kinds]


def _placeholder(kind: str) -> Any:
    if len(kind) == 1:
        return Unknown(kind)
    return torch.empty((1,) * int(kind[1:]), dtype=DTYPES[kind[0]], device="cpu")


def _index(unknowns: list[Any], value: Any) -> int:
    return next((index for index, known in enumerate(unknowns) if known is value), -1)


# What an operand of an entry is: an earlier entry's result, a tensor or number that the graph
# passes on, several, or a constant with its type, as 1 and True are equal.
ENTRY, CAPTURED, SEVERAL, CONSTANT = "entry", "captured", "several", "constant"
GET, TAKE = "__getitem__", "take_from"


class Tape:
    """What was done with rows so far, and the tensors and numbers that it was done with."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.captured: list[Any] = []

    def write(self, name: str, args: Sequence[Any] = (), options: Any = None) -> Taped:
        """Note a call of a function or method by name.

        Raises:
            TypeError: for a truth that is no row's. torch.compile takes ``row == number`` for False
                where the number may change between runs, without asking the row.
        """
        for value in args:
            if isinstance(value, bool):
                raise TypeError(
                    f"{name} of {value}: inside of a graph masks and scores take no True or False, "
                    "which torch.compile makes of a row == number that may change"
                )
        named = tuple([(key, self.operand(value)) for key, value in (options or {}).items()])
        self.entries.append((name, tuple([self.operand(value) for value in args]), named))
        return Taped(self, len(self.entries) - 1)

    def operand(self, value: Any) -> tuple[Any, ...]:
        """A value as the tape notes it."""
        if isinstance(value, Taped):
            return ENTRY, value._entry
        if isinstance(value, Tensor):
            for index, known in enumerate(self.captured):
                if known is value:
                    return CAPTURED, index
            return self.passed(value)
        if isinstance(value, (list, tuple)):
            return SEVERAL, tuple([self.operand(each) for each in value])
        return CONSTANT, type(value).__name__, value

    def passed(self, value: Any) -> tuple[Any, ...]:
        """Note a value that may change between runs of the graph."""
        self.captured.append(value)
        return CAPTURED, len(self.captured) - 1


class Taped:
    """A number or truth of every pair, while torch.compile follows a mask function."""

    device = torch.device("cpu")
    requires_grad = False
    __hash__ = object.__hash__

    def __init__(self, tape: Tape, index: int):
        self._tape, self._entry = tape, index

    def take_from(self, table: Tensor, indices: Sequence[Any]) -> Taped:
        """What `saccade.masks.take` gives for rows."""
        return self._tape.write(TAKE, (table, *indices))

    def __bool__(self) -> bool:
        raise TypeError("a mask or score cannot branch on a row")

    def __getitem__(self, index: Any) -> Taped:
        return self._tape.write(GET, (self, index))

    def __getattr__(self, name: str) -> Any:
        """Methods of tensors."""
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **options: self._tape.write(name, (self, *args), options)

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """What PyTorch's functions do with rows."""
        for value in (*args, *(kwargs or {}).values()):
            if isinstance(value, Taped):
                return value._tape.write(function.__name__, args, kwargs)
        raise TypeError(f"{function.__name__} of a list of rows is not known to masks and scores")


def _define(method: str) -> None:
    def operate(self: Taped, *others: Any) -> Taped:
        return self._tape.write(method, (self, *others))

    setattr(Taped, method, operate)


for _name in (*OPERATORS, *PLAIN, "pow", "rpow", *(f"r{name}" for name in OPERATORS)):
    _define(f"__{_name}__")


class _Reads(TorchFunctionMode):
    """Sees captured tensors that are read at rows, wherever a function found them."""

    def __init__(self, tape: Tape):
        super().__init__()
        self.tape = tape

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if getattr(function, "__name__", "") in (GET, "getitem"):
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            for each in index:
                if isinstance(each, Taped):
                    return self.tape.write(GET, args)
        return function(*args, **(kwargs or {}))


def traced_in_graph(
    function: Callable[..., Any], offsets: tuple[Any, Any] = (0, 0)
) -> tuple[str, Captured]:
    """The key of a mask function and what it captured, while torch.compile follows the call.

    Args:
        function: of (batch, head, query_row, kv_row); it may reach tensors from anywhere.
        offsets: what is added to query_row and kv_row, numbers or tensors.
    """
    tape = Tape()
    rows: list[Any] = [tape.write(name) for name in ROWS]
    for row, offset in zip((2, 3), offsets, strict=True):
        if isinstance(offset, Tensor):
            rows[row] = rows[row] + offset.reshape(())
        elif offset != 0:
            index = tape.passed(offset)
            tape.entries.append(("__add__", ((ENTRY, row), index), ()))
            rows[row] = Taped(tape, len(tape.entries) - 1)
    with _Reads(tape):
        answer = function(*rows)
    form = None
    if isinstance(answer, Taped):
        kinds = tuple([kind_of(value) for value in tape.captured])
        form = _form_of_tape(tuple(tape.entries), answer._entry, kinds)
    if form is None:
        raise TypeError("mask: got a function that does what masks do not know inside of a graph")
    return form.key, form.captured(tape.captured)


@constant
def _form_of_tape(
    entries: tuple[tuple[Any, ...], ...], answer: int, kinds: tuple[str, ...]
) -> Form | None:
    """The form of what was written down; None where masks do not know a function in it."""
    unknowns = placeholders(kinds)

    def played(*values: Any) -> Any:
        rows, captured = values[: len(ROWS)], values[len(ROWS) :]
        found = list(rows)
        for name, args, options in entries[len(ROWS) :]:
            named = {key: _value(operand, found, captured) for key, operand in options}
            found.append(_played(name, [_value(arg, found, captured) for arg in args], named))
        return found[answer]

    try:
        return form_from(*trace(played, captured=unknowns, known=False), unknowns)
    except TypeError:
        return None


def _value(operand: tuple[Any, ...], found: Sequence[Any], captured: Sequence[Any]) -> Any:
    """The value of an operand."""
    kind, value = operand[0], operand[-1]
    if kind == SEVERAL:
        return tuple(_value(each, found, captured) for each in value)
    return found[value] if kind == ENTRY else captured[value] if kind == CAPTURED else value


def _played(name: str, args: list[Any], options: dict[str, Any]) -> Any:
    """One entry, done to symbols."""
    if name == GET:
        return args[0][args[1]]
    symbol = next(arg for arg in (*args, *options.values()) if hasattr(arg, "_trace"))
    if name == TAKE:
        return symbol.take_from(args[0], args[1:])
    return symbol._trace.called(name, args, options)


# ---- masks and scores of functions --------------------------------------------------------------

Made = TypeVar("Made")  # a mask or a score


@dataclass(frozen=True)
class ModifierFunction(Generic[Made]):
    """A function of rows that, called with the values to capture, gives a mask or a score."""

    body: Callable[..., Any]
    align: str
    makes: ClassVar[Any]  # the class of what it gives
    of_scores: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not callable(self.body) or isinstance(self.body, type):
            raise TypeError(f"body: got {type(self.body).__name__}, takes a function")

    def __call__(self, *captured: Tensor | int | float) -> Made:
        """The mask or score, with these values."""
        kinds = tuple([kind_of(value) for value in captured])
        if torch.compiler.is_compiling():  # what follows is a constant to it, values are not
            form = form_or_refusal(self.body, self.align, kinds, score=self.of_scores)
            if isinstance(form, Form):
                return self.makes(form.key, form.captured(captured))
            if not torch.compiler.is_dynamo_compiling():
                raise TypeError(form)
            from saccade.modifiers.outside_graphs import called

            torch._dynamo.graph_break(msg=form)  # with fullgraph=True an error that says it
            return called(self, captured)
        found, values = trace(self.body, self.align, captured, score=self.of_scores)
        return self.makes(key_of(found), values)
