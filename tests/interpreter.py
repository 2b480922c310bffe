"""Interpreter: Triton's, without work that changes no result and takes most of its time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any


def hasten() -> None:
    """Leave out what the interpreter does again and again for nothing.

    - It replaces all of `triton.language` when a kernel starts, and goes through all its names
      again before every call of a device function.
    - It computes whole-number sums and products a second time, in 64 bits, to compare them; but
      without `debug` it looks at no comparison.
    """
    from triton.runtime import interpreter

    whole: Any = interpreter
    builder = whole.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    whole._patch_lang = _once_a_kernel(whole._patch_lang)


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


def _once_a_kernel(patch: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`interpreter._patch_lang`, at work only where a kernel's start left something unreplaced."""
    from triton import language

    modules = {"triton.language": language, "triton.language.core": language.core}
    seen: dict[Any, frozenset[str]] = {}  # the modules that a function sees
    replaced: set[str] = set()  # in this kernel so far

    def patch_once(function: Any) -> Any:
        if function not in seen:
            values = [id(value) for value in function.__globals__.values()]
            seen[function] = frozenset(name for name, m in modules.items() if id(m) in values)
        if seen[function] <= replaced:
            return None  # to a device function, which has nothing to restore
        scope = patch(function)
        replaced.update(seen[function])
        restore = scope.restore

        def restore_all() -> None:
            replaced.clear()
            restore()

        scope.restore = restore_all
        return scope

    return patch_once
