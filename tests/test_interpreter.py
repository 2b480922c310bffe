"""Interpreter: what is left out of Triton's changes no result."""

from __future__ import annotations

import os
from itertools import product
from typing import Any

import numpy
import pytest
from interpreter_operators import operators
from interpreter_tiles import functions

core: Any = pytest.importorskip("triton.language.core")
language: Any = pytest.importorskip("triton.language")
interpreter: Any = pytest.importorskip("triton.runtime.interpreter")
OPERATORS = operators(interpreter, core)
FAST = OPERATORS | functions(interpreter, core)
# Taken here, as kernels that another test ends may leave the interpreter's own in their place.
OWN = {
    name: getattr(core.tensor if name == "to" or name.startswith("__") else core, name).__wrapped__
    for name in FAST
}
SHAPES = ((), (4,), (4, 1), (1, 8), (4, 8))
SCALARS = ("int1", "int32", "int64", "uint32", "float16", "float32", "float64")
NUMBERS = (0, 3, -2, 2**31, 0.5, -1.5, float("inf"))
MEMORY = numpy.arange(256, dtype="uint8") % 9  # what addresses point to


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


def places(shape: tuple[int, ...], scalar: str) -> Any:
    """Addresses of numbers in memory, in no order."""
    found = addresses(shape, getattr(core, scalar))
    size = max(1, getattr(core, scalar).primitive_bitwidth // 8)
    found.handle.data = MEMORY.ctypes.data + size * (found.handle.data // 64 * 5 % 32)
    return found


def compare(name: str, *arguments: Any, **keywords: Any) -> bool:
    """Call an operator both ways; whether the fast one answered by itself."""
    own = OWN[name]
    asked = []

    def call(*given: Any, **options: Any) -> Any:
        asked.append(name)
        return own(*given, **options, _semantic=interpreter.interpreter_semantic)

    try:
        wanted = call(*arguments, **keywords)
    except Exception as error:
        with pytest.raises(type(error)):
            FAST[name](call)(*arguments, **keywords)
        return False
    asked.clear()
    found = FAST[name](call)(*arguments, **keywords)
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
    for shape, pointee in product(SHAPES, (core.float16, core.int64)):
        for number in (*NUMBERS, core.constexpr(5), core.constexpr(-3)):
            served += compare("__add__", addresses(shape, pointee), number)
    assert served > 50


@pytest.mark.parametrize("name", ["cast", "to"])
def test_a_conversion_gives_what_the_interpreter_gives(name: str) -> None:
    served = 0
    more = ("int8", "uint64", "bfloat16")
    for source, target, shape in product((*SCALARS, "int8", "uint64"), (*SCALARS, *more), SHAPES):
        served += compare(name, tensor(source, shape, 1), getattr(core, target))
    assert served > 100
    real = tensor("float32", (4,), 1)
    real.handle.data = numpy.array([1e9, -1e9, 0.1, 2049.0], dtype="float32")
    assert compare(name, real, core.constexpr(core.float16))
    assert not compare(name, real, core.int32, bitcast=True)
    assert not compare(name, tensor("float32", (4,), 1), core.float16, fp_downcast_rounding="rtz")


def test_new_axes_are_those_of_the_interpreter() -> None:
    whole, served = slice(None), 0
    indices = ((whole, None), (None, whole), (None, whole, whole), (whole, None, whole), (None,))
    for scalar, shape in product(SCALARS, SHAPES):
        for index in (*indices, (whole, 0), (slice(1, 2), None), whole, None):
            served += compare("__getitem__", tensor(scalar, shape, 1), index)
        for axis in (0, 1, 2, -1, -2, 3, core.constexpr(0), (0, 1)):
            served += compare("expand_dims", tensor(scalar, shape, 1), axis)
    assert compare("__getitem__", addresses((4,), core.float16), (whole, None))
    assert served > 100


def test_a_filled_tile_is_that_of_the_interpreter() -> None:
    """What was made once is copied, also where -0.0 equals what was made before."""
    served = 0
    for _ in range(2):
        for scalar, shape in product(SCALARS, ([4], (4, core.constexpr(8)))):
            for number in (0, 0.0, -0.0, 1, 1.0, float("-inf"), core.constexpr(3)):
                served += compare("full", shape, number, getattr(core, scalar))
        for start, end in ((0, 8), (8, 16), (core.constexpr(0), core.constexpr(8)), (0, 3)):
            served += compare("arange", start, end)
    assert served > 80
    FAST["full"](None)([4], 0.0, core.float32).handle.data[:] = 1
    assert compare("full", [4], 0.0, core.float32)


def test_a_product_is_that_of_the_interpreter() -> None:
    served = 0
    for _, scalar, precision in product(range(2), SCALARS, ("ieee", "tf32", None)):
        left, right = tensor(scalar, (16, 32), 1), tensor(scalar, (32, 16), 2)
        for acc in (None, tensor("float32", (16, 16), 3), tensor("float16", (16, 16), 3)):
            served += compare("dot", left, right, acc, input_precision=precision)
    assert served > 12


def test_a_load_reads_what_the_interpreter_reads() -> None:
    served = 0
    for scalar, shape, of_mask in product((*SCALARS, "int8"), SHAPES, (None, *SHAPES)):
        mask = None if of_mask is None else tensor("int1", of_mask, 1)
        if mask is not None:
            mask.handle.data.flat[::3] = False
        for other in (None, 0.0, 7, core.constexpr(2), tensor(scalar, (), 3)):
            served += compare("load", places(shape, scalar), mask, other)
    assert served > 100
    pointer, mask = places((8,), "float32"), tensor("int1", (8,), 1)
    assert compare("load", pointer, mask=mask, other=1.5)
    assert not compare("load", pointer, mask, 1.5, volatile=True)
    assert not compare("load", pointer, mask, 1.5, cache_modifier=".none")


def test_a_store_writes_what_the_interpreter_writes() -> None:
    served = 0
    for scalar, shape, of_value in product((*SCALARS, "int8"), SHAPES, SHAPES):
        for of_mask in (None, of_value, SHAPES[-1]):
            mask = None if of_mask is None else tensor("int1", of_mask, 1)
            if mask is not None:
                mask.handle.data.flat[::3] = False
            served += _compare_stores(places(shape, scalar), tensor(scalar, of_value, 2), mask)
    assert served > 50
    assert not _compare_stores(places((8,), "float16"), tensor("float32", (8,), 2), None)
    assert not _compare_stores(places((8,), "float32"), 1.0, None)


def _compare_stores(pointer: Any, value: Any, mask: Any) -> bool:
    asked, before = [], MEMORY.copy()

    def call(*given: Any, **options: Any) -> Any:
        asked.append(given)
        return OWN["store"](*given, **options, _semantic=interpreter.interpreter_semantic)

    try:
        try:
            call(pointer, value, mask)
        except Exception as error:
            with pytest.raises(type(error)):
                FAST["store"](call)(pointer, value, mask)
            assert (before == MEMORY).all()
            return False
        wanted = MEMORY.copy()
        MEMORY[:] = before
        asked.clear()
        FAST["store"](call)(pointer, value, mask)
        assert (wanted == MEMORY).all()
    finally:
        MEMORY[:] = before
    return not asked


def names_of_the_language() -> dict[tuple[str, str], Any]:
    """All that kernels find in it, by owner and name, but what is made whenever it is looked at."""
    return {
        (each.__name__, name): getattr(each, name)
        for each in (language, language.math, core, core.tensor)
        for name in dir(each)
        if getattr(each, name) is getattr(each, name)
    }


def alike(one: dict[tuple[str, str], Any], other: dict[tuple[str, str], Any]) -> bool:
    return one.keys() == other.keys() and all(one[name] is other[name] for name in one)


@pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="kernels are not interpreted here"
)
def test_every_kernel_starts_with_what_the_first_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from saccade.ops.attention.triton import forward

    function: Any = forward.attention_forward
    kernel = function.jit
    before, starts = names_of_the_language(), []
    for _ in range(2):
        scope = interpreter._patch_lang(kernel.fn)
        starts.append(names_of_the_language())
        scope.restore()
        assert alike(names_of_the_language(), before)
    assert alike(*starts) and not alike(starts[0], before)

    monkeypatch.setattr(core, "load", core.store)  # which was not there before
    scope = interpreter._patch_lang(kernel.fn)
    assert core.load is not starts[0]["triton.language.core", "load"]
    scope.restore()
    assert core.load is core.store


def test_a_tensor_is_assigned_as_it_is() -> None:
    semantic = interpreter.interpreter_semantic
    for scalar, shape in (("float32", (4, 8)), ("int64", ())):
        made = tensor(scalar, shape, 1)
        assert semantic.to_tensor(made, False) is made
    assert semantic.to_tensor(3).dtype.name == "int32"
    assert semantic.to_tensor("text", False) == "text"
    with pytest.raises(TypeError):
        semantic.to_tensor("text")
