"""Compiler: what Triton's compiler is given for a kernel, as text that names it in every process.

`gpu/machine_code.py` compiles.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping
from typing import Any

from triton.backends.compiler import GPUTarget
from triton.language.core import constexpr
from triton.runtime import jit

from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments, Signature
from saccade.kernel_check.compile_cache import code_text


def target(architecture: str) -> GPUTarget:
    """The architecture as Triton names it."""
    if architecture.startswith("gfx"):
        return GPUTarget("hip", architecture, 64)
    return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)


def given(started: Launch, arguments: Arguments, architecture: str) -> str:
    """All that Triton would be given to compile, but for itself and the architecture.

    The code of a kernel and of all that it calls, with the values of their global constants; the
    types of arguments, what is relied on about them, and constants; the options. Code is its text
    alone: where it stands, comments and docstrings do not count.
    """
    kernel = started.kernel
    on_amd = target(architecture).backend == "hip"
    types, constants, attributes = Signature.of(kernel.arg_names, arguments, on_amd)
    known = {path: _text(value) for path, value in constants.items()}
    options = sorted(started.options.items())
    return f"{code_of(kernel)} {types} {known} {_hints(attributes)} {options}"


def _hints(attributes: Mapping[tuple[int, ...], list[list[Any]]]) -> str:
    """What is relied on; that addresses and numbers are multiples of 16 goes without saying."""
    others = [(path, hints) for path, hints in sorted(attributes.items()) if len(hints) > 1]
    return f"{sorted(attributes)}{others or ''}"


def _text(value: Any) -> str:
    """A constant as text that is the same in every process."""
    if isinstance(value, constexpr):
        value = value.value
    if isinstance(value, jit.JITCallable):
        return code_of(value)
    if isinstance(value, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    return repr(value)


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
