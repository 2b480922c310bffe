"""Functions of Triton's interpreter on tiles: types are worked out once, not for every tile.

As interpreter_operators.py does it for operators: a conversion, a new axis, a range, a product of
matrices, a load and a store look up what came of these types before. Every other case, and every
error, is left to the interpreter.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy
from interpreter_operators import NUMBERS, UNKNOWN, WHOLE, Result, broadcast, described, maker

_WHOLE = WHOLE | {"int8", "uint8", "uint64"}
_LOADED = NUMBERS | _WHOLE
_OF_REALS = {("fp16", "fp32"), ("fp32", "fp16"), ("fp32", "fp64"), ("fp64", "fp32")}
_MULTIPLIED = frozenset({"fp16", "fp32", "fp64"})
_ALL = slice(None)


class _Load(NamedTuple):
    """What a load of addresses of a type gives, and numbers of the shape of its addresses."""

    result: Result
    sides: tuple[int, ...]
    everywhere: Any  # a mask that hides nothing


def functions(interpreter: Any, core: Any) -> dict[str, Callable[[Any], Any]]:
    """By the name of a tensor's method or of a function, what makes the fast one of the own one."""
    tiles = _Tiles(interpreter, core)
    return {
        "cast": tiles.conversion_before,
        "to": tiles.conversion_before,
        "__getitem__": tiles.index_before,
        "expand_dims": tiles.axis_before,
        "arange": tiles.range_before,
        "full": tiles.fill_before,
        "dot": tiles.product_before,
        "load": tiles.load_before,
        "store": tiles.store_before,
    }


class _Tiles:
    """The functions, with the types that they have met."""

    def __init__(self, interpreter: Any, core: Any) -> None:
        self.interpreter, self.core = interpreter, core
        self.make = maker(core.tensor, interpreter.TensorHandle)
        self.conversions: dict[tuple[str, str], Result | None] = {}
        self.indices: dict[tuple[Any, ...], Result | None] = {}
        self.made: dict[tuple[Any, ...], tuple[Any, Result]] = {}
        self.products: dict[tuple[Any, ...], Result] = {}
        self.loads: dict[tuple[str, str], _Load | None] = {}
        self.others: dict[tuple[Any, ...], Any] = {}
        self.stores: dict[tuple[str, str, str], _Load | None] = {}

    def conversion_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`cast`, and a tensor's `to`, of one type of numbers into another one."""
        tensor, scalar, constexpr = self.core.tensor, self.core.dtype, self.core.constexpr
        known, make = self.conversions, self.make

        def convert(tile: Any, dtype: Any, *more: Any, **options: Any) -> Any:
            if dtype.__class__ is constexpr:
                dtype = dtype.value
            if more or options or tile.__class__ is not tensor or dtype.__class__ is not scalar:
                return own(tile, dtype, *more, **options)
            if tile.dtype.name == dtype.name:
                return tile
            key = tile.type.name, dtype.name
            result = known.get(key, UNKNOWN)
            if result is UNKNOWN:
                result = known[key] = self.converted(tile.type, dtype)
            if result is None:
                return own(tile, dtype)
            return make(tile.handle.data.astype(result.of_numpy), result)

        return convert

    def converted(self, source: Any, scalar: Any) -> Result | None:
        """What a conversion gives that numpy makes as the interpreter does, or None."""
        before, after = source.scalar.name, scalar.name
        whole = before in _WHOLE | {"int1"} and after in _WHOLE | {"fp32"}
        if not whole and (before, after) not in _OF_REALS:
            return None
        return described(self.core, scalar, tuple(source.shape) if source.is_block() else ())

    def index_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """An index of whole axes and new ones."""
        known, make = self.indices, self.make

        def index(tile: Any, places: Any, *more: Any, **options: Any) -> Any:
            if more or options or places.__class__ is not tuple:
                return own(tile, places, *more, **options)
            new = tuple([place is None for place in places])
            for place in places:
                if place is not None and (place.__class__ is not slice or place != _ALL):
                    return own(tile, places)
            key = tile.type.name, new
            result = known.get(key, UNKNOWN)
            if result is UNKNOWN:
                result = known[key] = self.indexed(tile.type, new)
            if result is None:
                return own(tile, places)
            made = make(tile.handle.data[places], result)
            made.handle.dtype = tile.handle.dtype
            return made

        return index

    def indexed(self, source: Any, new: tuple[bool, ...]) -> Result | None:
        """What an index gives that names each axis of a tile, or None."""
        if not source.is_block() or new.count(False) != len(source.shape):
            return None
        sides = iter(source.shape)
        shape = tuple(1 if is_new else next(sides) for is_new in new)
        return described(self.core, source.scalar, shape)

    def axis_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`expand_dims` by one axis, which is an index."""
        tensor, constexpr, index = self.core.tensor, self.core.constexpr, self.index_before

        def expand(tile: Any, axis: Any, **options: Any) -> Any:
            at = axis.value if axis.__class__ is constexpr else axis
            if options or tile.__class__ is not tensor or at.__class__ is not int:
                return own(tile, axis, **options)
            rank = len(tile.shape) if tile.type.is_block() else 0
            if not -rank - 1 <= at <= rank:
                return own(tile, axis)
            before = at % (rank + 1)
            return by_index(tile, (_ALL,) * before + (None,) + (_ALL,) * (rank - before))

        by_index = index(lambda tile, places: own(tile, places.index(None)))
        return expand

    def range_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`arange`, whose numbers are copied."""
        constexpr, make = self.core.constexpr, self.make

        def arange(start: Any, end: Any, **options: Any) -> Any:
            start = start.value if start.__class__ is constexpr else start
            end = end.value if end.__class__ is constexpr else end
            if options or start.__class__ is not int or end.__class__ is not int:
                return own(start, end, **options)
            numbers, result = self.first((start, end), lambda: own(start, end))
            return make(numbers.copy(), result)

        return arange

    def fill_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`full`, whose numbers are copied."""
        constexpr, scalar, sequence = self.core.constexpr, self.core.dtype, self.core.tuple
        make = self.make

        def full(shape: Any, value: Any, dtype: Any, **options: Any) -> Any:
            number = value.value if value.__class__ is constexpr else value
            kind = dtype.value if dtype.__class__ is constexpr else dtype
            known = number.__class__ in (int, float) and kind.__class__ is scalar
            if options or not known or shape.__class__ not in (list, tuple, sequence):
                return own(shape, value, dtype, **options)
            sides = [side.value if side.__class__ is constexpr else side for side in shape]
            key = kind.name, number.__class__, number, *sides
            numbers, result = self.first(key, lambda: own(shape, value, dtype))
            return make(numbers.copy(), result)

        return full

    def first(self, key: tuple[Any, ...], make: Callable[[], Any]) -> tuple[Any, Result]:
        """The numbers of the first tensor that was made by this key, and what it is."""
        found = self.made.get(key)
        if found is None:
            found = self.made[key] = _taken_apart(make())
        return found

    def product_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`dot` of real numbers; what a product gives is seen from the first of its types."""
        tensor, constexpr = self.core.tensor, self.core.constexpr
        known, make = self.products, self.make

        def dot(left: Any, right: Any, acc: Any = None, **options: Any) -> Any:
            plain = left.__class__ is tensor and right.__class__ is tensor
            if not plain or options.keys() > {"input_precision"}:
                return own(left, right, acc, **options)
            if acc is not None and acc.__class__ is not tensor:
                return own(left, right, acc, **options)
            precision: Any = options.get("input_precision")
            precision = precision.value if precision.__class__ is constexpr else precision
            key = left.type.name, right.type.name, "" if acc is None else acc.type.name, precision
            result = known.get(key)
            if result is None:
                first = own(left, right, acc, **options)
                if left.dtype.name in _MULTIPLIED:
                    known[key] = _taken_apart(first)[1]
                return first
            product = numpy.matmul(left.handle.data, right.handle.data, dtype=result.of_numpy)
            return make(product + (0 if acc is None else acc.handle.data), result)

        return dot

    def load_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`load`, at addresses of numbers, where a number is what hidden places give."""
        tensor, known, make = self.core.tensor, self.loads, self.make
        read = self.interpreter._interpreter.load

        def load(pointer: Any, mask: Any = None, other: Any = None, **options: Any) -> Any:
            plain = pointer.__class__ is tensor and not options
            if not plain or (mask is not None and mask.__class__ is not tensor):
                return own(pointer, mask, other, **options)
            key = pointer.type.name, "" if mask is None else mask.type.name
            found = known.get(key, UNKNOWN)
            if found is UNKNOWN:
                found = known[key] = self.loaded(pointer.type, mask)
            hidden = None if found is None else self.hidden(key, found, mask, other)
            if found is None or hidden is None:
                return own(pointer, mask, other, **options)
            places = pointer.handle.data
            seen = found.everywhere if mask is None else mask.handle.data
            if places.shape != found.sides:
                places = numpy.broadcast_to(places, found.sides)
            if seen.shape != found.sides:
                seen = numpy.broadcast_to(seen, found.sides)
            return make(read(places, seen, hidden, found.result.of_numpy), found.result)

        return load

    def store_before(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """`store`, of numbers of the type that lies there."""
        tensor, known = self.core.tensor, self.stores
        write = self.interpreter._interpreter.store

        def store(pointer: Any, value: Any, mask: Any = None, **options: Any) -> Any:
            plain = pointer.__class__ is tensor and value.__class__ is tensor
            if options or not plain:
                return own(pointer, value, mask, **options)
            if mask is not None and mask.__class__ is not tensor:
                return own(pointer, value, mask, **options)
            of_mask = "" if mask is None else mask.type.name
            key = pointer.type.name, value.type.name, of_mask
            found = known.get(key, UNKNOWN)
            if found is UNKNOWN:
                found = known[key] = self.stored(pointer.type, value, mask)
            if found is None:
                return own(pointer, value, mask, **options)
            seen = found.everywhere if mask is None else mask.handle.data
            numbers = value.handle.data
            if numbers.shape != found.sides:
                numbers = numpy.broadcast_to(numbers, found.sides)
            if seen.shape != found.sides:
                seen = numpy.broadcast_to(seen, found.sides)
            write(pointer.handle.data, numbers, seen)
            return None

        return store

    def stored(self, addresses: Any, value: Any, mask: Any) -> _Load | None:
        """Where a store writes, or None: the interpreter is to say."""
        found = self.loaded(addresses, mask)
        if found is None or value.dtype.name != found.result.dtype.name:
            return None
        sides = tuple(addresses.shape) if addresses.is_block() else ()
        types = [each.type for each in (value, mask) if each is not None]
        return found if broadcast([addresses, *types]) == sides else None

    def loaded(self, addresses: Any, mask: Any) -> _Load | None:
        """What a load gives, or None: the interpreter is to say."""
        pointer = addresses.scalar
        if not pointer.is_ptr() or pointer.element_ty.name not in _LOADED:
            return None
        types = [addresses] if mask is None else [addresses, mask.type]
        if mask is not None and mask.dtype.name != "int1":
            return None
        if not addresses.is_block() and any(each.is_block() for each in types):
            return None
        shape = broadcast(types)
        if shape is None:
            return None
        sides = shape or (1,)
        everywhere = numpy.ones(sides, dtype=bool)
        return _Load(described(self.core, pointer.element_ty, shape), sides, everywhere)

    def hidden(self, key: tuple[str, str], load: _Load, mask: Any, other: Any) -> Any:
        """A tile of what hidden places give, as the interpreter converts it, or None."""
        if other.__class__ is self.core.constexpr:
            other = other.value
        if other is None:
            other = 0
        elif mask is None or other.__class__ not in (int, float):
            return None
        place = (*key, other.__class__, other)
        found = self.others.get(place)
        if found is None:
            semantic, scalar = self.interpreter.interpreter_semantic, load.result.dtype
            number = semantic.cast(semantic.to_tensor(other), scalar).handle.data
            found = numpy.broadcast_to(number, load.sides).astype(load.result.of_numpy)
            self.others[place] = found
        return found


def _taken_apart(tile: Any) -> tuple[Any, Result]:
    """The numbers of a tensor, and what it shares with others of its type."""
    kind, numbers = tile.type, tile.handle.data
    result = Result(kind, tile.dtype, tile.shape, tile.numel, tile.handle.dtype, numbers.dtype)
    return numbers, result
