"""Interpreter: what is left out of Triton's changes no result."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy
import pytest
from interpreter_operators import operators

core: Any = pytest.importorskip("triton.language.core")
interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
OPERATORS = operators(interpreter, core)
# Taken here, as kernels that another test ends may leave the interpreter's own in their place.
OWN = {
    name: getattr(core.tensor if name.startswith("__") else core, name).__wrapped__
    for name in OPERATORS
}
SHAPES = ((), (4,), (4, 1), (1, 8), (4, 8))
SCALARS = ("int1", "int32", "int64", "uint32", "float16", "float32", "float64")
NUMBERS = (0, 3, -2, 2**31, 0.5, -1.5, float("inf"))


def tensor(scalar: str, shape: tuple[int, ...], seed: int) -> Any:
    """A tensor of the interpreter that holds small numbers."""
    kind = getattr(core, scalar)
    numbers = numpy.random.default_rng(seed).integers(1, 9, shape or (1,))
    data = numbers.astype("bool" if scalar == "int1" else scalar)
    whole = core.block_type(kind, list(shape)) if shape else kind
    return core.tensor(interpreter.TensorHandle(data, kind), whole)


def addresses(shape: tuple[int, ...], pointee: Any) -> Any:
    """A tensor of addresses."""
    kind = core.pointer_type(pointee)
    data = numpy.arange(numpy.prod(shape, dtype=int)).reshape(shape or (1,)).astype("uint64") * 64
    whole = core.block_type(kind, list(shape)) if shape else kind
    return core.tensor(interpreter.TensorHandle(data, kind), whole)


def compare(name: str, *arguments: Any) -> bool:
    """Call an operator both ways; whether the fast one answered by itself."""
    own = OWN[name]
    asked = []

    def call(*given: Any, **options: Any) -> Any:
        asked.append(name)
        return own(*given, **options, _semantic=interpreter.interpreter_semantic)

    try:
        wanted = call(*arguments)
    except Exception as error:
        with pytest.raises(type(error)):
            OPERATORS[name](call)(*arguments)
        return False
    asked.clear()
    found = OPERATORS[name](call)(*arguments)
    assert found.type == wanted.type
    assert found.dtype == wanted.dtype
    assert [int(side) for side in found.shape] == [int(side) for side in wanted.shape]
    assert int(found.numel) == int(wanted.numel)
    assert found.handle.data.dtype == wanted.handle.data.dtype
    shape = wanted.handle.data.shape
    assert numpy.array_equal(numpy.broadcast_to(found.handle.data, shape), wanted.handle.data)
    return not asked


@pytest.fixture(autouse=True)
def _interpreted() -> Any:
    """Types as the interpreter makes them, whose whole numbers have signs."""
    scope = interpreter._LangPatchScope()
    interpreter._patch_lang_core(core, scope)
    yield
    scope.restore()


@pytest.mark.parametrize("name", sorted(set(OPERATORS) - {"where"}))
def test_an_operator_gives_what_the_interpreter_gives(name: str) -> None:
    served = 0
    cases = list(product(SCALARS, SCALARS, SHAPES, SHAPES))
    for left, right, one, other in cases[::3]:  # in step with neither 5 nor 7
        served += compare(name, tensor(left, one, 1), tensor(right, other, 2))
    for scalar, number in product(SCALARS, NUMBERS):
        if number or name not in ("__floordiv__", "__mod__"):
            for given in (number, core.constexpr(number)):
                served += compare(name, tensor(scalar, (4, 8), 3), given)
    assert served > 20


def test_a_choice_gives_what_the_interpreter_gives() -> None:
    served = 0
    for scalar, shape, other, choices in list(product(SCALARS, SHAPES, SHAPES, SHAPES))[::2]:
        condition = tensor("int1", choices, 1)
        served += compare("where", condition, tensor(scalar, shape, 2), tensor(scalar, other, 3))
        served += compare("where", condition, tensor(scalar, shape, 2), 0)
    assert served > 50


def test_an_address_and_an_offset_give_what_the_interpreter_gives() -> None:
    served = 0
    for one, other, scalar in product(SHAPES, SHAPES, SCALARS):
        for pointee in (core.float16, core.int1, core.int64):
            served += compare("__add__", addresses(one, pointee), tensor(scalar, other, 1))
    assert served > 50
