"""Language: Triton's names as kernels write them, without Triton until a kernel is compiled.

Importing Triton and handing it every kernel takes half a second, and a call whose machine code is
there already (`gpu/stored_code.py`) needs neither. So modules of kernels import Triton's names from
here:

    from saccade.gpu.language import tl, triton

What they do with a name while they are imported is noted and not done: `tl.constexpr(8)`,
`@triton.jit`, `@aggregate`. A kernel is a `Function`. Its `jit` is Triton's own object, made of the
same code when it is first asked for, in a copy of its module's names in which all that was noted is
done. So Triton sees nothing but its own objects, and the rest of the library none of them.
"""

from __future__ import annotations

import importlib
import inspect
import os
import threading
import types
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

__all__ = [
    "INTERPRETED", "Call", "Constant", "Deferred", "Function", "Name", "Value", "aggregate",
    "builtin_of_ours", "gdc_launch_dependents", "gdc_wait", "gl", "gluon",
    "is_hopper", "resolved", "tl", "triton",
]  # fmt: skip

INTERPRETED = os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "yes", "y")
"""Whether Triton's interpreter runs kernels on the CPU, as Triton itself reads it."""

_LOCK = threading.RLock()
_SHADOWS: dict[int, types.ModuleType] = {}  # by id of a module's names: where these are resolved


class Deferred:
    """Something of Triton's, noted."""

    def resolve(self) -> Any:
        """What was noted, done: Triton's own object. It imports Triton."""
        with _LOCK:
            if "_resolved" not in self.__dict__:
                made = self._resolve()  # meanwhile a class's methods may have resolved it
                self.__dict__.setdefault("_resolved", made)
            return self.__dict__["_resolved"]

    def _resolve(self) -> Any:
        raise NotImplementedError


class Name(Deferred):
    """A name in one of Triton's modules, as `tl.float32` is."""

    def __init__(self, path: str, *others: str) -> None:
        """others: what other versions of Triton call the same thing."""
        self._path, self._others = path, others

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = self.__dict__[name] = Name(f"{self._path}.{name}")
        return found

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The call, noted."""
        if self._path.endswith(".constexpr"):
            return Constant(*arguments)
        return _called(self, arguments, options)

    def __repr__(self) -> str:
        return self._path

    def _resolve(self) -> Any:
        for path in (self._path, *self._others):
            found = _find(path)
            if found is not None:
                return resolved(found)
        raise AttributeError(f"this version of Triton has no {self._path}")


def _find(path: str) -> Any:
    """What a path of modules and attributes names; None: nothing."""
    parts = path.split(".")
    found = importlib.import_module(parts[0])
    for number, part in enumerate(parts[1:], 2):
        if not hasattr(found, part) and isinstance(found, types.ModuleType):
            try:
                importlib.import_module(".".join(parts[:number]))
            except ModuleNotFoundError as error:
                if error.name != ".".join(parts[:number]):
                    raise
        found = getattr(found, part, None)
        if found is None:
            return None
    return found


class Value(Deferred):
    """What is the same wherever it is written the same; its text is made once."""

    text: str

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Value) and self.text == other.text)

    def __hash__(self) -> int:
        return hash(self.text)

    def __repr__(self) -> str:
        return self.text


class Constant(Value):
    """`tl.constexpr(value)`."""

    def __init__(self, value: Any) -> None:
        self.value = value

    @property
    def text(self) -> str:  # type: ignore[override]
        """The constant in code; made when asked for, as each call of a new length has some."""
        return f"constexpr({self.value!r})"

    def _resolve(self) -> Any:
        value = resolved(self.value)
        if isinstance(value, int) and not isinstance(value, bool):
            value = int(value)  # no subclass of it
        return _find("triton.language.constexpr")(value)


class Call(Value):
    """A call of something of Triton's, as of a layout's class."""

    def __init__(self, called: Deferred, arguments: tuple[Any, ...], options: dict[str, Any]):
        self.called, self.arguments, self.options = called, arguments, options
        given = [*map(repr, arguments), *(f"{name}={value!r}" for name, value in options.items())]
        self.text = f"{called!r}({', '.join(given)})"

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The call, noted."""
        return _called(self, arguments, options)

    def _resolve(self) -> Any:
        options = {name: resolved(value) for name, value in self.options.items()}
        return self.called.resolve()(*resolved(self.arguments), **options)


class Function(Deferred):
    """A function of device code, or a class of values there, under its decorator of Triton's."""

    def __init__(self, decorator: Deferred, fn: Any) -> None:
        self.decorator, self.fn = decorator, fn
        self.__name__, self.__doc__, self.__module__ = fn.__name__, fn.__doc__, fn.__module__
        self.__qualname__ = fn.__qualname__
        code: Any = getattr(fn, "__code__", None)
        if code is not None and code.co_filename.startswith("<"):  # generated: known by its text
            self.__qualname__ = f"{code.co_filename}.{fn.__qualname__}"

    @property
    def jit(self) -> Any:
        """Triton's own object for it."""
        return self.resolve()

    @property
    def arg_names(self) -> list[str]:
        """The names of its arguments."""
        code = self.fn.__code__
        return list(code.co_varnames[: code.co_argcount])

    @property
    def is_gluon(self) -> bool:
        """Whether it is written in Gluon."""
        return repr(self.decorator).startswith(repr(gluon))

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """The call, noted."""
        return Call(self, arguments, options)

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        """Start it by Triton's own front door."""

        def start(*arguments: Any, **options: Any) -> Any:
            options = {name: resolved(value) for name, value in options.items()}
            return self.jit[grid](*resolved(arguments), **options)

        return start

    def __repr__(self) -> str:
        return f"{self.__module__}.{self.__qualname__}"

    @property
    def is_ours(self) -> bool:
        """Whether this library has its code, or wrote it (`kernel_args.py`)."""
        return self.__module__.partition(".")[0] == "saccade"

    def _resolve(self) -> Any:
        if inspect.isclass(self.fn):
            return self.decorator.resolve()(_class_of(self.fn))
        names = vars(_shadow_of(self.fn.__globals__))
        # Known before the names that it reads are: functions of a module call one another.
        made = self.__dict__["_resolved"] = self.decorator.resolve()(_function_of(self.fn, names))
        _fill(names, self.fn.__globals__)
        return made


def _function_of(fn: Any, names: dict[str, Any]) -> Any:
    """A function of the same code, which reads its names there."""
    cells = tuple(types.CellType(resolved(cell.cell_contents)) for cell in fn.__closure__ or ())
    defaults = None if fn.__defaults__ is None else resolved(fn.__defaults__)
    copy = types.FunctionType(fn.__code__, names, fn.__name__, defaults, cells or None)
    copy.__dict__.update(fn.__dict__)
    copy.__annotations__ = {name: resolved(kind) for name, kind in fn.__annotations__.items()}
    copy.__kwdefaults__, copy.__doc__ = fn.__kwdefaults__, fn.__doc__
    copy.__module__, copy.__qualname__ = fn.__module__, fn.__qualname__
    return copy


def _class_of(cls: Any) -> Any:
    """A class like this one, whose members and annotations are what they resolve to."""
    left_out = {"__dict__", "__weakref__"}
    names = {name: value for name, value in vars(cls).items() if name not in left_out}
    if "__annotations__" in names:
        kinds = names["__annotations__"]
        names["__annotations__"] = {name: resolved(kind) for name, kind in kinds.items()}
    members = {name: resolved(value) for name, value in names.items()}
    return type(cls)(cls.__name__, cls.__bases__, members)


def _shadow_of(names: dict[str, Any]) -> types.ModuleType:
    """A module for what the names of another one resolve to."""
    if id(names) not in _SHADOWS:
        shadow = _SHADOWS[id(names)] = types.ModuleType(names["__name__"])
        vars(shadow)["_shadowed"] = names  # whose id is taken while they live
    return _SHADOWS[id(names)]


def _fill(into: dict[str, Any], names: dict[str, Any]) -> None:
    """Resolve a module's names, those that came since as well."""
    for name, value in list(names.items()):
        if name not in into:
            into[name] = value  # meanwhile, so that it is not begun again
            into[name] = resolved(value)


def resolved(value: Any) -> Any:
    """A value with all that was noted in it done, in tuples and modules of kernels too."""
    if isinstance(value, Deferred):
        return value.resolve()
    if isinstance(value, tuple):
        parts = tuple(map(resolved, value))
        if all(part is old for part, old in zip(parts, value, strict=True)):
            return value
        return type(value)(*parts) if hasattr(value, "_fields") else parts
    if _holds_kernels(value):
        shadow = _shadow_of(vars(value))
        _fill(vars(shadow), vars(value))
        return shadow
    return value


def _holds_kernels(value: Any) -> bool:
    if not isinstance(value, types.ModuleType) or not value.__name__.startswith("saccade."):
        return False
    return any(isinstance(one, Deferred) for one in vars(value).values())


def _called(called: Deferred, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """A call, noted: of a decorator, it gives a Function."""
    if len(arguments) == 1 and not options and isinstance(arguments[0], type | types.FunctionType):
        return Function(called, arguments[0])
    return Call(called, arguments, options)


def builtin_of_ours(fn: Any) -> Any:
    """Decorator of a Python function that runs while a kernel is compiled and is handed _semantic,
    under the interpreter too, which hands over none."""
    return Function(Name("saccade.gpu.language._as_builtin"), fn)


def _as_builtin(fn: Any) -> Any:
    fn.__triton_builtin__ = True
    return fn


if TYPE_CHECKING:
    import triton as triton
    import triton.language as tl
    from triton.experimental import gluon as gluon
    from triton.experimental.gluon import language as gl
    from triton.language.core import _aggregate as aggregate
    from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
else:
    triton = Name("triton")
    tl = Name("triton.language")
    gluon = Name("triton.experimental.gluon")
    gl = Name("triton.experimental.gluon.language")
    aggregate = Name("triton.language.core._aggregate")
    gdc_launch_dependents = Name("triton.language.extra.cuda.gdc_launch_dependents")
    gdc_wait = Name("triton.language.extra.cuda.gdc_wait")


HOPPER = "sm90"  # as Triton's options for a kernel name it


@builtin_of_ours
def is_hopper(_semantic: Any = None) -> Any:
    """Whether a kernel is compiled for Hopper; not under the interpreter.

    It asks the compilation that is under way, as Triton's own builtins do: Triton's function for it
    asks the GPU that is active, and starts a C compiler to find it.
    """
    if _semantic is None:
        return False
    return tl.constexpr(getattr(_semantic.builder.options, "arch", None) == HOPPER)
