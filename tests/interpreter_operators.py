"""Operators of Triton's interpreter on tensors: types are worked out once, not for every tile.

The interpreter adds two tiles in a microsecond, after ten in which it finds the type of the sum,
casts and broadcasts its terms. An operator here looks up what that came to when these types last
met. It serves terms of one type of numbers (or whole numbers of 32 and of 64 bits), for which
Triton's rules are numpy's; every other case, and every error, is left to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy

SIGNED = frozenset({"int32", "int64"})
WHOLE = SIGNED | {"uint32"}
NUMBERS = WHOLE | {"fp16", "fp32", "fp64"}
_NUMPY_NAMES = {
    "int1": "bool",
    "bf16": "uint16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
}
UNKNOWN: Any = object()  # types that have not met


class _Operator(NamedTuple):
    compute: Callable[..., Any]
    scalars: frozenset[str]  # the types that it serves
    compares: bool = False
    swapped: bool = False  # whether the tensor is the second term


class Result(NamedTuple):
    """What tensors of a type share, and the types of their handles and of numpy's data."""

    type: Any
    dtype: Any
    shape: Any
    numel: Any
    of_handle: Any
    of_numpy: Any


def _divide(left: Any, right: Any) -> Any:
    """Towards zero, as the interpreter does."""
    return (left - numpy.fmod(left, right)) // right


_OPERATORS = {
    "__add__": _Operator(numpy.add, NUMBERS),
    "__sub__": _Operator(numpy.subtract, NUMBERS),
    "__mul__": _Operator(numpy.multiply, NUMBERS),
    "__radd__": _Operator(numpy.add, NUMBERS, swapped=True),
    "__rsub__": _Operator(numpy.subtract, NUMBERS, swapped=True),
    "__rmul__": _Operator(numpy.multiply, NUMBERS, swapped=True),
    "__floordiv__": _Operator(_divide, SIGNED),
    "__mod__": _Operator(numpy.fmod, SIGNED),
    "__lt__": _Operator(numpy.less, NUMBERS, compares=True),
    "__le__": _Operator(numpy.less_equal, NUMBERS, compares=True),
    "__gt__": _Operator(numpy.greater, NUMBERS, compares=True),
    "__ge__": _Operator(numpy.greater_equal, NUMBERS, compares=True),
    "__eq__": _Operator(numpy.equal, NUMBERS, compares=True),
    "__ne__": _Operator(numpy.not_equal, NUMBERS, compares=True),
    "__and__": _Operator(numpy.bitwise_and, WHOLE | {"int1"}),
    "__or__": _Operator(numpy.bitwise_or, WHOLE | {"int1"}),
    "__xor__": _Operator(numpy.bitwise_xor, WHOLE | {"int1"}),
    # Of real numbers the smaller one depends on what is to become of NaN.
    "minimum": _Operator(numpy.minimum, WHOLE),
    "maximum": _Operator(numpy.maximum, WHOLE),
}


def operators(interpreter: Any, core: Any) -> dict[str, Callable[[Any], Any]]:
    """By the name of a tensor's method or of a function, what makes the fast one of the own one."""
    made: dict[str, Callable[[Any], Any]] = {
        name: _Types(operator, interpreter, core).operator_before
        for name, operator in _OPERATORS.items()
    }
    addition = _Types(_OPERATORS["__add__"], interpreter, core)
    made["__add__"] = addition.addition_before
    made |= {name: made[f"__{name}__"] for name in ("add", "sub", "mul")}
    made["where"] = _Types(_Operator(numpy.where, NUMBERS), interpreter, core).choice_before
    return made


class _Types:
    """An operator, with the types that it has met."""

    def __init__(self, operator: _Operator, interpreter: Any, core: Any) -> None:
        self.operator, self.interpreter, self.core = operator, interpreter, core
        self.make = maker(core.tensor, interpreter.TensorHandle)
        self.results: dict[tuple[str, ...], Result | None] = {}
        self.constants: dict[tuple[str, type, float], Any] = {}

    def operator_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The operator, which leaves to the interpreter's own what it does not serve."""
        compute, swapped = self.operator.compute, self.operator.swapped
        tensor, results, make = self.core.tensor, self.results, self.make

        def operate(left: Any, right: Any, *more: Any, **options: Any) -> Any:
            if left.__class__ is not tensor:
                return own(left, right, *more, **options)
            if right.__class__ is tensor:
                types, terms = (left.type.name, right.type.name), right.handle.data
            else:
                types, terms = (left.type.name,), self.constant(left, right)
            result = results.get(types, UNKNOWN)
            if result is UNKNOWN:
                result = results[types] = self.result(left, right)
            if result is None or terms is None:
                return own(left, right, *more, **options)
            data = left.handle.data
            data = compute(terms, data) if swapped else compute(data, terms)
            if data.dtype is not result.of_numpy:
                return own(left, right, *more, **options)
            return make(data, result)

        return operate

    def addition_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The same of a sum, whose first term may be an address."""
        tensor, constexpr, make = self.core.tensor, self.core.constexpr, self.make
        add_numbers = self.operator_before(own)
        addresses: dict[tuple[str, str], Any] = {}

        def add(left: Any, right: Any, **options: Any) -> Any:
            if left.__class__ is not tensor or not left.type.scalar.is_ptr():
                return add_numbers(left, right, **options)
            number = right.value if right.__class__ is constexpr else right
            if number.__class__ is int and -(2**31) <= number < 2**31:
                types, offset = (left.type.name, ""), number
            elif number.__class__ is tensor:
                types, offset = (left.type.name, number.type.name), number.handle.data
            else:
                return own(left, right, **options)
            found = addresses.get(types, UNKNOWN)
            if found is UNKNOWN:
                terms = [each.type for each in (left, number) if each.__class__ is tensor]
                found = addresses[types] = self.address(*terms)
            if found is None:
                return own(left, right, **options)
            width, result = found
            data = left.handle.data + width * numpy.asarray(offset).astype(numpy.uint64)
            return make(data, result)

        return add

    def choice_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """The same of `where`, whose types are those of both alternatives and of the condition."""
        tensor, results, make = self.core.tensor, self.results, self.make

        def where(condition: Any, left: Any, right: Any, **options: Any) -> Any:
            if condition.__class__ is not tensor or left.__class__ is not tensor:
                return own(condition, left, right, **options)
            if right.__class__ is tensor:
                types, terms = (left.type.name, right.type.name), right.handle.data
            else:
                types, terms = (left.type.name, ""), self.constant(left, right)
            types = (*types, condition.type.name)
            result = results.get(types, UNKNOWN)
            if result is UNKNOWN:
                boolean = condition.dtype.name == "int1"
                result = self.result(left, right, condition) if boolean else None
                results[types] = result
            if result is None or terms is None:
                return own(condition, left, right, **options)
            data = numpy.where(condition.handle.data, left.handle.data, terms)
            if data.dtype is not result.of_numpy:
                return own(condition, left, right, **options)
            return make(data, result)

        return where

    def result(self, left: Any, right: Any, *conditions: Any) -> Result | None:
        """What terms of these types give, or None: the interpreter is to say."""
        tensors = [left, right] if right.__class__ is self.core.tensor else [left]
        scalars = {each.dtype.name: each.dtype for each in tensors}
        shape = broadcast([each.type for each in (*tensors, *conditions)])
        if shape is None or not scalars.keys() <= self.operator.scalars:
            return None
        if len(scalars) > 1 and not scalars.keys() <= SIGNED:
            return None
        scalar = scalars.get("int64", left.dtype)
        if self.operator.compares:
            # The interpreter marks what it compared, and not the truths, in their handles.
            return described(self.core, self.core.int1, shape)._replace(of_handle=scalar)
        return described(self.core, scalar, shape)

    def constant(self, left: Any, number: Any) -> Any:
        """A number in the type of a tensor's numbers, as the interpreter converts it, or None."""
        if number.__class__ is self.core.constexpr:
            number = number.value
        if number.__class__ not in (int, float):
            return None  # a tensor may be what the other one is not known beside
        key = left.dtype.name, number.__class__, number
        found = self.constants.get(key, UNKNOWN)
        if found is UNKNOWN:
            if len(self.constants) > 10_000:
                self.constants.clear()
            found = self.constants[key] = self.converted(left.dtype, number)
        return found

    def converted(self, scalar: Any, number: Any) -> Any:
        """The same, which is not known yet."""
        if scalar.name not in self.operator.scalars:
            return None
        semantic = self.interpreter.interpreter_semantic
        alone = semantic.to_tensor(number).dtype.name
        if scalar.name == "uint32":
            fits = alone in ("int32", "uint32") and number >= 0
        elif self.operator.compares or scalar.name in SIGNED:
            fits = alone == scalar.name or (alone, scalar.name) == ("int32", "int64")
        else:  # a real number takes every number's place
            fits = alone in ("int32", "fp32")
        fits = fits and scalar.name != "int1"
        return semantic.scalar_constant(number, scalar).handle.data if fits else None

    def address(self, left: Any, *offset: Any) -> tuple[int, Result] | None:
        """The bytes of what an address points to, and what address and offset give.

        offset: its type, if it is no number.
        """
        shape, pointee = broadcast([left, *offset]), left.scalar.element_ty
        if shape is None or pointee.is_block() or any(o.scalar.name not in SIGNED for o in offset):
            return None
        return max(1, pointee.primitive_bitwidth // 8), described(self.core, left.scalar, shape)


def described(core: Any, scalar: Any, shape: tuple[int, ...]) -> Result:
    """A type, and what its tensors share."""
    whole = core.block_type(scalar, list(shape)) if shape else scalar
    model = core.tensor(None, whole)
    name = "uint64" if scalar.is_ptr() else _NUMPY_NAMES.get(scalar.name, scalar.name)
    return Result(whole, scalar, model.shape, model.numel, scalar, numpy.dtype(name))


def broadcast(types: list[Any]) -> tuple[int, ...] | None:
    """The shape of what tensors give; (): a number; None: the interpreter is to say."""
    shapes = {tuple(each.shape) for each in types if each.is_block()}
    if len({len(shape) for shape in shapes}) > 1:
        return None
    sides = [{side for side in each if side != 1} for each in zip(*shapes, strict=True)]
    if any(len(lengths) > 1 for lengths in sides):
        return None
    return tuple(max(lengths, default=1) for lengths in sides)


def maker(tensor: Any, handle_type: Any) -> Callable[[Any, Result], Any]:
    """What puts a tensor around numpy's data, without looking at it again."""

    def make(data: Any, result: Result) -> Any:
        handle = handle_type.__new__(handle_type)
        made = tensor.__new__(tensor)
        made.type, made.dtype, made.shape, made.numel, handle.dtype, _ = result
        handle.data, handle.attr, made.handle = data, {}, handle
        return made

    return make
