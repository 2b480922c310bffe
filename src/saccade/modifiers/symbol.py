"""Symbols: the values that a mask or score function computes with while it is traced.

Operators and functions of PyTorch's add a step each; some functions are composed of a few here.
"""

from __future__ import annotations

import functools
import math
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from saccade.modifiers.composed import OF_ANY, OF_REAL, divided_towards_0
from saccade.modifiers.expression import FUNCTIONS, REAL, TRUTH, WHOLE, never_negative

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


# Whole numbers of few bits, which wrap where they leave their range; from where they count.
NARROW = {torch.int8: -(2**7), torch.uint8: 0, torch.int16: -(2**15)}


class Untraceable(TypeError):
    """Says what a function does that cannot be known without its rows, and in which line."""

    def __init__(self, problem: str):
        super().__init__(f"{problem}{_line_of_user()}; {ADVICE}")
        self.problem = problem


def _line_of_user() -> str:
    """The name, file and line of the traced function that is running."""
    package, torch_itself = str(Path(__file__).parents[1]), str(Path(str(torch.__file__)).parent)
    for frame in reversed(traceback.extract_stack()):
        if not frame.filename.startswith((package, torch_itself)):
            place = f"{Path(frame.filename).name}:{frame.lineno}"
            return f", in {frame.name}, at {place}: {frame.line}"
    return ""


class Symbol:
    """A number or truth of every pair, while a function is traced."""

    device = torch.device("cpu")
    shape = torch.Size([])
    requires_grad = False
    __hash__ = object.__hash__

    def __init__(self, trace: Trace, number: int, narrow: torch.dtype | None = None):
        self._trace, self._number, self._narrow = trace, number, narrow

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that a row number of that kind has, or what was read of few bits."""
        if self._narrow is not None:
            return self._narrow
        kind = self._trace.steps[self._number].kind
        return {TRUTH: torch.bool, WHOLE: torch.int64, REAL: torch.float32}[kind]

    def dim(self) -> int:
        """A symbol is a number of one pair, without dimensions."""
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
        """This symbol where a condition holds, else another one."""
        return self._trace.called("where", (condition, self, other), {})

    def __pos__(self) -> Symbol:
        return self

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


OPERATIONS = {
    "add": "+", "sub": "-", "subtract": "-", "rsub": "r-", "mul": "*", "multiply": "*",
    "floor_divide": "//", "remainder": "%",
    "lt": "<", "less": "<", "le": "<=", "less_equal": "<=", "gt": ">", "greater": ">",
    "ge": ">=", "greater_equal": ">=", "eq": "==", "ne": "!=", "not_equal": "!=",
    "logical_and": "&", "bitwise_and": "&", "logical_or": "|", "bitwise_or": "|",
    "logical_xor": "^", "bitwise_xor": "^", "logical_not": "~", "bitwise_not": "~",
    "bitwise_left_shift": "<<", "bitwise_right_shift": ">>",
    "abs": "abs", "absolute": "abs", "neg": "neg", "negative": "neg",
    "minimum": "min", "maximum": "max", "where": "where",
    **{name: name for name in FUNCTIONS},
    **{f"__{name}__": op for name, op in (OPERATORS | PLAIN).items()},
    **{f"__r{name}__": f"r{op}" for name, op in OPERATORS.items()},
}  # fmt: skip
OF_TRUTHS = ("logical_and", "logical_or", "logical_xor", "logical_not")


def call(trace: Trace, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What a function or method of PyTorch's gives.

    Raises:
        TypeError: for one that masks and scores do not know.
    """
    name = name.partition(".")[0].removeprefix("special_")  # add.Tensor of torch.ops.aten
    name = ALIASES.get(name, name)
    if options.get("inplace") is False:  # functions of torch.nn.functional say so
        options = {key: value for key, value in options.items() if key != "inplace"}
    if name.endswith("_") and not name.endswith("__") and isinstance(args[0], Symbol):
        return _in_place(trace, name, args, options)
    if name in COMPOSED:
        return _composed(trace, name, args, options)
    op = OPERATIONS.get(name)
    if op in ("+", "-") and options.keys() == {"alpha"}:
        args, options = [args[0], trace.apply("*", options["alpha"], args[1])], {}
    if not op or options:
        with_options = f" with {', '.join(options)}" if op else ""
        raise Untraceable(f"{name}{with_options} is not known to masks and scores")
    if name in OF_TRUTHS:
        args = [as_kind(trace, arg, TRUTH) for arg in args]
    return trace.apply(op, *args)


def _composed(trace: Trace, name: str, args: Sequence[Any], options: dict[str, Any]) -> Any:
    """What a composed function gives.

    Raises:
        TypeError: for arguments that it does not take.
    """
    try:
        return COMPOSED[name](trace, *args, **options)
    except Untraceable:
        raise
    except (TypeError, ValueError) as error:
        problem = str(error).replace("<lambda>()", name)
        raise Untraceable(f"{name} in a mask or score: {problem}") from None


def _in_place(trace: Trace, name: str, args: Sequence[Any], options: dict[str, Any]) -> Symbol:
    """A method that writes to its symbol, which from then on is the result."""
    symbol = args[0]
    found = call(trace, name.removesuffix("_"), args, options)
    before, after = (trace.steps[each._number].kind for each in (symbol, found))
    if before != after:
        raise Untraceable(f"{name} would make a {after} number of a {before} one")
    symbol._number, symbol._narrow = found._number, found._narrow
    return symbol


def as_kind(trace: Trace, value: Any, kind: str) -> Symbol:
    """A value as a truth, a whole or a real number."""
    number = trace.constant(value)
    known = trace.steps[number].kind
    if known == kind:
        return trace.symbol(number)
    if kind == TRUTH:
        return trace.symbol(trace.add("~", trace.add("==", number, trace.literal(0))))
    if kind == REAL:
        return trace.symbol(trace.add("real", number))
    if known == TRUTH:
        return trace.symbol(trace.add("where", number, trace.literal(1), trace.literal(0)))
    return trace.symbol(trace.add("whole", number))


def _as_dtype(trace: Trace, value: Any, dtype: torch.dtype) -> Symbol:
    kind = TRUTH if dtype == torch.bool else REAL if dtype.is_floating_point else WHOLE
    found = as_kind(trace, value, kind)
    return wrapped(trace, found, dtype) if dtype in NARROW else found


def narrow_dtype(operands: Sequence[Any]) -> torch.dtype | None:
    """The dtype of few bits that PyTorch computes in; None: none. Python's numbers have no say."""
    dtypes = {each.dtype for each in operands if isinstance(each, (Symbol, Tensor))} - {torch.bool}
    if not dtypes or not dtypes <= NARROW.keys():
        return None
    return functools.reduce(torch.promote_types, dtypes)


def wrapped(trace: Trace, symbol: Symbol, dtype: torch.dtype) -> Symbol:
    """A whole number as a dtype of few bits has it."""
    least = NARROW[dtype]
    from_least = trace.add("-", symbol._number, trace.literal(least)) if least else symbol._number
    within = trace.add("%", from_least, trace.literal(2 ** torch.iinfo(dtype).bits))
    number = trace.add("+", within, trace.literal(least)) if least else within
    return Symbol(trace, number, dtype)


def _to(trace: Trace, value: Any, *args: Any, **options: Any) -> Symbol:
    """Devices are left alone: rows lie where the call is."""
    for wanted in (*args, *options.values()):
        if isinstance(wanted, (Symbol, Tensor)):
            wanted = wanted.dtype
        if isinstance(wanted, torch.dtype):
            return _as_dtype(trace, value, wanted)
    return value if isinstance(value, Symbol) else trace.symbol(trace.constant(value))


def _floor(trace: Trace, value: Any) -> Symbol:
    number = trace.constant(value)
    if trace.steps[number].kind != REAL:
        return trace.symbol(number)
    return trace.symbol(trace.add("//", number, trace.literal(1.0)))


def _ceil(trace: Trace, value: Any) -> Symbol:
    return trace.apply("neg", _floor(trace, trace.apply("neg", value)))


def _pow(trace: Trace, value: Any, exponent: Any) -> Symbol:
    if isinstance(exponent, (Symbol, Tensor)):
        return _power_of_number(trace, value, exponent)
    whole, half = divmod(exponent, 1) if isinstance(exponent, (int, float)) else (None, None)
    if isinstance(exponent, bool) or half not in (0, 0.5) or not -8 <= exponent <= 8:
        raise Untraceable(f"** {exponent!r}: takes a multiple of 0.5 from -8 to 8")
    real = isinstance(exponent, float) or trace.steps[trace.constant(value)].kind == REAL
    if exponent < 0 and not real:
        raise Untraceable(f"** {exponent}: takes a real number to it, as PyTorch does")
    if exponent < 0:
        return trace.apply("/", trace.symbol(trace.literal(1.0)), _pow(trace, value, -exponent))
    if isinstance(exponent, float):
        value = as_kind(trace, value, REAL)
    factors = [value] * int(whole or 0) + [trace.apply("sqrt", value)] * (half == 0.5)
    if not factors:
        return _filled(trace, trace.symbol(trace.constant(value)), 1, None)
    return functools.reduce(
        functools.partial(trace.apply, "*"), factors[1:], as_symbol(trace, factors[0])
    )


def _power_of_number(trace: Trace, base: Any, exponent: Any) -> Symbol:
    """A number to the power of a row or score."""
    real = isinstance(base, float) or trace.steps[trace.constant(exponent)].kind == REAL
    number = isinstance(base, (int, float)) and not isinstance(base, bool)
    if number and base == 2 and not real:
        step = trace.constant(exponent)
        if never_negative(tuple(trace.steps))[step]:
            return trace.apply("<<", trace.symbol(trace.literal(1)), exponent)
    if not (number and 0 < base < math.inf and real):
        raise Untraceable(
            "** a row: takes 2.0 ** x, any number above 0 to the power of a real one, and 1 << x"
        )
    if base != 2:
        exponent = trace.apply("*", exponent, math.log2(base))
    return trace.apply("exp2", exponent)


def as_symbol(trace: Trace, value: Any) -> Symbol:
    """A value as a symbol."""
    return trace.symbol(trace.constant(value))


def _div(trace: Trace, value: Any, other: Any, rounding_mode: str | None = None) -> Symbol:
    if rounding_mode == "trunc":
        return _by(divided_towards_0)(trace, value, other)
    if rounding_mode not in (None, "floor"):
        raise Untraceable(f"div: rounding_mode {rounding_mode!r}, takes 'floor', 'trunc' or none")
    return trace.apply("//" if rounding_mode else "/", value, other)


def _clamp(trace: Trace, value: Any, min: Any = None, max: Any = None) -> Symbol:
    found = value if min is None else trace.apply("max", value, min)
    return found if max is None else trace.apply("min", found, max)


def _extreme(trace: Trace, op: str, name: str, operands: Sequence[Any]) -> Symbol:
    """torch.min and torch.max of two; of one they would look at all rows."""
    if len(operands) != 2:
        raise Untraceable(f"{name} of one tensor looks at all rows, takes two operands")
    return trace.apply(op, *operands)


def _filled(trace: Trace, of: Any, value: Any, dtype: torch.dtype | None) -> Symbol:
    """A number that a function makes beside a row."""
    dtype = dtype or of.dtype
    assert dtype is not None
    if dtype == torch.bool:
        return trace.symbol(trace.literal(bool(value)))
    return trace.symbol(trace.constant(float(value) if dtype.is_floating_point else value))


def _by(function: Callable[..., Any], kind: str = "") -> Callable[..., Any]:
    """A function of `composed`, whose first operand is made a symbol, of a kind perhaps."""

    def composed(trace: Trace, operand: Any, /, *args: Any, **options: Any) -> Any:
        first = as_kind(trace, operand, kind) if kind else as_symbol(trace, operand)
        return function(lambda number: trace.symbol(trace.literal(number)), first, *args, **options)

    return composed


ALIASES = {
    "fix": "trunc", "expit": "sigmoid", "_threshold": "threshold",
}  # fmt: skip
COMPOSED = {
    **{name: _by(function, REAL) for name, function in OF_REAL.items()},
    **{name: _by(function) for name, function in OF_ANY.items()},
    "to": _to,
    "type": _to,
    "type_as": _to,
    "bool": lambda trace, value: as_kind(trace, value, TRUTH),
    "float": lambda trace, value: as_kind(trace, value, REAL),
    "double": lambda trace, value: as_kind(trace, value, REAL),
    "half": lambda trace, value: as_kind(trace, value, REAL),
    "bfloat16": lambda trace, value: as_kind(trace, value, REAL),
    "short": lambda trace, value: _as_dtype(trace, value, torch.int16),
    "int": lambda trace, value: as_kind(trace, value, WHOLE),
    "long": lambda trace, value: as_kind(trace, value, WHOLE),
    "trunc": lambda trace, value: as_kind(trace, value, WHOLE),
    "floor": _floor,
    "ceil": _ceil,
    "min": lambda trace, *operands: _extreme(trace, "min", "min", operands),
    "max": lambda trace, *operands: _extreme(trace, "max", "max", operands),
    "masked_fill": lambda trace, value, hidden, filler: trace.apply("where", hidden, filler, value),
    "relu": lambda trace, value: _clamp(trace, value, 0),
    "reciprocal": lambda trace, value: trace.apply("/", 1, value),
    "rsqrt": lambda trace, value: trace.apply("/", 1, trace.apply("sqrt", value)),
    "square": lambda trace, value: _pow(trace, value, 2),
    "pow": _pow,
    "__pow__": _pow,
    "div": _div,
    "divide": _div,
    "true_divide": _div,
    "clamp": _clamp,
    "clip": _clamp,
    "clamp_min": lambda trace, value, min: _clamp(trace, value, min),
    "clamp_max": lambda trace, value, max: _clamp(trace, value, None, max),
    "ones_like": lambda trace, of, dtype=None, **_: _filled(trace, of, 1, dtype),
    "zeros_like": lambda trace, of, dtype=None, **_: _filled(trace, of, 0, dtype),
    "full_like": lambda trace, of, fill_value, dtype=None, **_: _filled(
        trace, of, fill_value, dtype
    ),
    "new_ones": lambda trace, of, *_, dtype=None, **__: _filled(trace, of, 1, dtype),
    "new_zeros": lambda trace, of, *_, dtype=None, **__: _filled(trace, of, 0, dtype),
    "new_full": lambda trace, of, _, fill_value, dtype=None, **__: _filled(
        trace, of, fill_value, dtype
    ),
    "new_tensor": lambda trace, of, data, **_: trace.symbol(trace.constant(data)),
}
