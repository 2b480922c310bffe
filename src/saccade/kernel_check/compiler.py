"""Compiler: Triton's compiler without a GPU, and what it is given.

What differs between versions of Triton in compiling without a GPU stays in this file.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.language.core import constexpr
from triton.runtime import jit

from saccade.gpu.launcher import FUSED, Launch, opened
from saccade.kernel_check.compile_cache import code_text

DEVICE = 0  # the number that a pretended GPU goes by


def target(architecture: str) -> GPUTarget:
    """The architecture as Triton names it."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


class PretendDriver:
    """A driver for a GPU that is not there: enough to compile for it, nothing to run with."""

    def __init__(self, architecture: str) -> None:
        self.architecture = architecture

    def get_current_target(self) -> GPUTarget:
        """What to compile for."""
        return target(self.architecture)

    def get_current_device(self) -> int:
        """A device number, which Triton keeps compiled kernels by."""
        return DEVICE

    def get_current_stream(self, device: int) -> int:
        """A stream on which nothing will run."""
        return 0


def pretend(architecture: str) -> None:
    """From now on this process compiles for an architecture, whatever GPU there is."""
    driver: Any = PretendDriver(architecture)  # less than Triton's own base class asks for
    triton.runtime.driver.set_active(driver)


def given(started: Launch, arguments: tuple[Any, ...]) -> str:
    """All that Triton would be given to compile, but for itself and the architecture.

    Triton knows compiled kernels by the same: the text of a function and of all that it calls, with
    the values of their global constants; the types of arguments, and constants; the options. Here
    text is code alone: where it stands, comments and docstrings do not count.
    """
    kernel = started.kernel
    bind = kernel.device_caches[DEVICE][-1]
    chosen = {name: it for name, it in started.options.items() if FUSED.get(name) is not it}
    bound, types, options = bind(*opened(arguments), **started.passed, **chosen)
    asked = jit.compute_cache_key({}, types, options)
    for function in _functions(tuple(bound.values())):
        asked = asked.replace(function.cache_key, code_of(function))
    return f"{code_of(kernel)} {asked}"


def code_of(function: jit.JITCallable) -> str:
    """A hash of the code of a function and of all that it calls, with their global constants."""
    found: dict[int, str] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        one.cache_key  # noqa: B018 - Triton finds the global constants meanwhile
        reader = _Reader(one)
        constants = {  # a set: how many modules know a constant does not matter
            (name, str(value))
            for (name, _), (value, _) in one.used_global_vals.items()
            if isinstance(value, constexpr)
        }
        found[id(one)] = f"{code_text(one.src)} {sorted(constants)}"
        waiting += reader.called
    code = sorted(set(found.values()))
    return hashlib.sha256("\n".join([found[id(function)], *code]).encode()).hexdigest()


class _Reader(jit.DependenciesFinder):
    """Triton's search for what a function calls, which keeps what it finds."""

    def __init__(self, function: jit.JITCallable) -> None:
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        super().__init__(function.__name__, function.__globals__, nonlocals, function.src)
        self.called: list[jit.JITCallable] = []
        self.visit(function.parse())

    def _update_hash(self, func: jit.JITCallable) -> None:
        self.called.append(func)
        super()._update_hash(func)


def _functions(given: Any) -> Iterator[jit.JITCallable]:
    """The functions among arguments."""
    if isinstance(given, constexpr):
        given = given.value
    if isinstance(given, jit.JITCallable):
        yield given
    elif isinstance(given, tuple | list):
        for one in given:
            yield from _functions(one)
