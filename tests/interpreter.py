"""Interpreter: Triton's, without work that changes no result and takes most of its time."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from interpreter_operators import operators
from interpreter_tiles import functions


def hasten() -> None:
    """Leave out what the interpreter does again and again for nothing.

    - It goes through all names of `triton.language` when a kernel starts, to replace them, and
      again before every call of a device function.
    - It computes whole-number sums and products a second time, in 64 bits, to compare them; but
      without `debug` it looks at no comparison.
    - It makes a table of all dtypes to look one of them up.
    - It describes the type of every tuple, and of what lies in it, as text that few ask for; and
      that of a tile, and its shape, anew for every tile.
    - It finds out what type the sum of two tiles has, and fills a tile with the number that is
      added to another one, for every sum (interpreter_operators.py); likewise for conversions,
      new axes, products, loads and stores (interpreter_tiles.py).
    """
    from triton.language import core
    from triton.runtime import interpreter

    whole: Any = interpreter
    builder = whole.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    fast = operators(whole, core) | functions(whole, core)
    whole._patch_attr = _called_directly(whole, core, fast)
    whole._patch_lang = _once_a_kernel(whole)
    semantic = whole.interpreter_semantic
    semantic.to_tensor = _tensors_as_they_are(semantic)
    whole._get_np_dtype = _once_a_name(whole._get_np_dtype)
    if hasattr(core, "_type_for_tuple_values"):
        _describe_tuples_late(core)
    _describe_blocks_once(core)
    _describe_tensors_by_type(core)


def mend() -> None:
    """Let a truth about scalars stay one when it is spread over a tile.

    A comparison of real numbers gives truths that are marked as float32, and a tile of them is
    filled with float32, which no & takes.
    """
    from triton.runtime import interpreter

    whole: Any = interpreter
    spread = whole.InterpreterBuilder.create_splat

    def create_splat(self: Any, shape: Any, scalar: Any) -> Any:
        tile = spread(self, shape, scalar)
        tile.data = tile.data.astype(scalar.data.dtype)
        return tile

    whole.InterpreterBuilder.create_splat = create_splat


def _called_directly(
    interpreter: Any, core: Any, fast: dict[str, Callable[..., Any]]
) -> Callable[..., None]:
    """`interpreter._patch_attr`, whose functions reach what they call without two others between.

    fast: makes a faster one of a tensor's operator, or of a function.
    """

    def patch(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        inner = getattr(member, "__wrapped__", member)

        def called(*arguments: Any, **options: Any) -> Any:
            options["_semantic"] = interpreter.interpreter_semantic
            return inner(*arguments, **options)

        if name in fast and (owner is core.tensor) == (name == "to" or name.startswith("__")):
            called = fast[name](called)
        scope.set_attr(owner, name, called)

    return patch


def _once_a_kernel(interpreter: Any) -> Callable[[Any], Any]:
    """`interpreter._patch_lang`, at work only where a kernel's start left something unreplaced.

    What it replaces follows from the modules that a kernel sees. It is found once, and put there
    again at the start of other kernels that see the same, unless something else was replaced since.
    """
    from triton import language

    patch = interpreter._patch_lang
    modules = {"triton.language": language, "triton.language.core": language.core}
    seen: dict[Any, frozenset[str]] = {}  # the modules that a function sees
    known: dict[frozenset[str], _Replacement] = {}
    replaced: set[str] = set()  # in this kernel so far

    def patch_once(function: Any) -> Any:
        if function not in seen:
            values = [id(value) for value in function.__globals__.values()]
            seen[function] = frozenset(name for name, m in modules.items() if id(m) in values)
        sees = seen[function]
        if sees <= replaced:
            return None  # to a device function, which has nothing to restore
        scope = known[sees].again(interpreter) if sees in known and not replaced else None
        if scope is None:
            scope = patch(function)
            if not replaced:
                known[sees] = _Replacement.of(scope)
        replaced.update(sees)
        restore = scope.restore

        def restore_all() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_once


class _Replacement(NamedTuple):
    """What a kernel's start replaced: owners and names, what was there, and what is there now."""

    places: list[tuple[Any, str]]
    before: list[Any]
    after: list[Any]

    @staticmethod
    def of(scope: Any) -> _Replacement:
        before: dict[tuple[Any, str], Any] = {}
        for owner, name, original in scope._changes:
            before.setdefault((owner, name), original)  # some names are replaced twice
        places = list(before)
        return _Replacement(places, list(before.values()), [getattr(*place) for place in places])

    def again(self, interpreter: Any) -> Any:
        """A scope in which it is replaced, or None: something else was there before."""
        missing = interpreter._MISSING
        found = [getattr(owner, name, missing) for owner, name in self.places]
        if any(map(operator.is_not, found, self.before)):
            return None
        scope = interpreter._LangPatchScope()
        for (owner, name), value in zip(self.places, self.after, strict=True):
            setattr(owner, name, value)
        scope._changes = [
            (*place, original) for place, original in zip(self.places, found, strict=True)
        ]
        return scope


def _tensors_as_they_are(semantic: Any) -> Callable[..., Any]:
    """`to_tensor` of the interpreter, by which every assignment in a kernel goes."""
    convert, tensor = semantic.to_tensor, semantic.tensor

    def to_tensor(value: Any, check_type: bool = True) -> Any:
        return value if value.__class__ is tensor else convert(value, check_type)

    return to_tensor


def _once_a_name(get: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`interpreter._get_np_dtype`, which asks once for what has the name of a scalar type."""
    found: dict[str, Any] = {}

    def dtype_of(type_of_triton: Any) -> Any:
        scalar = type_of_triton.scalar
        known = found.get(scalar.name)
        if known is None:
            known = found[scalar.name] = get(scalar)
        return known

    return dtype_of


class _Asked(NamedTuple):
    """What the type of a tuple is made of, once it is asked for."""

    values: Any
    fields: Any


def _describe_tuples_late(core: Any) -> None:
    """Have `core.tuple` make its type when it is looked at."""
    describe = core._type_for_tuple_values
    core._type_for_tuple_values = lambda values, fields=None: _Asked(values, fields)

    def type_of(made: Any) -> Any:
        found = made.__dict__["type"]
        if type(found) is _Asked:
            found = made.__dict__["type"] = describe(*found)
        return found

    def set_type(made: Any, found: Any) -> None:
        made.__dict__["type"] = found

    core.tuple.type = property(type_of, set_type)


def _describe_blocks_once(core: Any) -> None:
    """Have a `core.block_type` take over what one of the same scalars and shape worked out."""
    make, scalar = core.block_type.__init__, core.dtype
    known: dict[Any, dict[str, Any]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        if type(element_ty) is not scalar:  # a pointer, whose name does not tell all
            make(self, element_ty, shape)
            return
        sides = [side.value if type(side) is core.constexpr else side for side in shape]
        key = element_ty.name, *sides
        attributes = known.get(key)
        if attributes is None:
            make(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        else:
            self.__dict__.update(attributes)

    core.block_type.__init__ = init


def _describe_tensors_by_type(core: Any) -> None:
    """Have a `core.tensor` take its shape from its type, for which it was made once."""
    make = core.tensor.__init__
    known: dict[str, tuple[Any, Any]] = {}  # number of elements and shape, by a type's name

    def init(self: Any, handle: Any, type: Any) -> None:
        described = known.get(type.name)
        if described is None:
            make(self, handle, type)
            known[type.name] = self.numel, self.shape
            return
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.numel, self.shape = described

    core.tensor.__init__ = init
