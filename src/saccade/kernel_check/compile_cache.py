"""A file (docs/kernels.json) that keeps the registers and memory of every kernel by its key.

What a kernel takes follows from its source and the compiler. So a kernel that did not change is not
compiled again, but for one in SAMPLE, which shows whether the file tells the truth; which ones
those are changes whenever any kernel does. A key stands for all that a kernel is made of: Triton's
version, the architecture, the code of the kernel and of all that it calls, the types and constants
of its arguments, its options, and the text of what reads the binary (`machine_code.py`).
"""

from __future__ import annotations

import ast
import functools
import hashlib
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triton.language.core import constexpr
from triton.runtime import jit

from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments, Signature
from saccade.gpu.triton_compiler import target_of
from saccade.kernel_check.catalogue import Job
from saccade.kernel_check.machine_code import Usage

SAMPLE = 16
READER = Path(__file__).with_name("machine_code.py")

Known = Mapping[str, Sequence[int]]
"""The numbers of a Usage, by key."""


class Compiled(NamedTuple):
    """One compiled kernel, or why there is none."""

    job: Job
    kernel: str
    config: tuple[int, int, int, int]  # tiles (0 where it has none), warps, stages
    seconds: float
    usage: Usage | None
    error: str
    key: str  # of all that the compiler was told: equal for equal binaries


# ---- the file ------------------------------------------------------------------------------------


def read(file: Path, triton: str, must_exist: bool = False) -> dict[str, Sequence[int]]:
    """The entries of a version of Triton; none where there is no file, unless it must exist.

    Raises:
        ValueError: naming the file, for one that holds something else, or is not there.
    """
    if not file.exists():
        if must_exist:
            raise ValueError(f"--known: {file} does not exist, so nothing can be compared with it")
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get(triton, {})
        for entry in entries.values():
            Usage(*entry)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}. Delete it, and write it anew with --known") from None
    return entries


def trusted(known: Known) -> dict[str, Sequence[int]]:
    """The entries whose kernels are not compiled again: all but the sample."""
    everything = hashlib.sha256("".join(sorted(known)).encode()).digest()
    return {
        key: entry
        for key, entry in known.items()
        if int(key[-8:], 16) % SAMPLE != everything[0] % SAMPLE
    }


def write(file: Path, results: Iterable[Compiled], triton: str, others: Known) -> None:
    """Keep what was found; other versions of Triton keep what they have.

    others: entries of this version that stay beside it, where not all kernels were asked for.
    """
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    found = {one.key: list(one.usage) for one in results if one.usage is not None}
    tables[triton] = {key: list(entry) for key, entry in others.items()} | found
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(entry)}' for key, entry in sorted(table.items()))
        + "\n }"
        for version, table in sorted(tables.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def unknown(known: Known, results: Sequence[Compiled]) -> int:
    """How many kernels were compiled because the file has no entry for them."""
    return sum(one.key not in known for one in results)


def faults(file: Path, known: Known, results: Sequence[Compiled]) -> list[str]:
    """A line for each kernel whose entry differs from what was compiled."""
    return [
        f"{file}: has {Usage(*known[one.key])} for {one.job.architecture} {one.kernel} "
        f"({one.job.call.name}), which takes {one.usage}"
        for one in results
        if one.key in known and list(known[one.key]) != list(one.usage or ())
    ]


# ---- keys ----------------------------------------------------------------------------------------


def key_of(triton: str, architecture: str, inputs: str) -> str:
    """The key of what a version of Triton compiles from some inputs (`compiler_inputs`)."""
    everything = f"{triton} {architecture} {_reader()} {inputs}"
    return hashlib.sha256(everything.encode()).hexdigest()[:24]


@functools.cache
def _reader() -> str:
    return hashlib.sha256(code_text(READER.read_text(encoding="utf-8")).encode()).hexdigest()


def compiler_inputs(launch: Launch, arguments: Arguments, architecture: str) -> str:
    """All that Triton is told to compile, as text that is the same in every process.

    The code of the kernel and of all that it calls, with the values of their global constants; the
    types of arguments, what is relied on about them, and constants; the options.
    """
    kernel = launch.kernel
    on_amd = target_of(architecture).backend == "hip"
    types, constants, attributes = Signature.of(kernel.arg_names, arguments, on_amd)
    values = {path: _text(value) for path, value in constants.items()}
    options = sorted(launch.options.items())
    return f"{code_of(kernel.jit)} {types} {values} {_hints(attributes)} {options}"


def _hints(attributes: Mapping[tuple[int, ...], list[list[Any]]]) -> str:
    """The hints that Triton gets about arguments; of those that are only multiples of 16, where."""
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
    """A hash of the code of a function and of all that it calls, with their global constants.

    Code is its text alone: where it stands, comments and docstrings do not count.
    """
    found: dict[int, str] = {}
    waiting = [function]
    while waiting:
        one = waiting.pop()
        if id(one) in found:
            continue
        reader = _Dependencies(one)
        constants = {  # a set: how many modules know a constant does not matter
            (name, str(value))
            for (name, _), (value, _) in reader.used_global_vals.items()
            if isinstance(value, constexpr)
        }
        found[id(one)] = f"{code_text(one.src)} {sorted(constants)}"
        waiting += reader.called
    code = sorted(set(found.values()))
    return hashlib.sha256("\n".join([found[id(function)], *code]).encode()).hexdigest()


class _Dependencies(jit.DependenciesFinder):
    """Triton's search for the functions and constants that one function uses.

    Triton adds the constants of those called functions that were hashed before: which ones these
    are depends on what else the process has compiled.
    """

    def __init__(self, function: jit.JITCallable) -> None:
        nonlocals = inspect.getclosurevars(function.fn).nonlocals
        super().__init__(function.__name__, function.__globals__, nonlocals, function.src)
        self.called: list[jit.JITCallable] = []
        self.visit(function.parse())

    def _update_hash(self, func: jit.JITCallable) -> None:
        self.called.append(func)


def code_text(source: str) -> str:
    """Python without what it does not run: comments, docstrings, and where names come from."""
    return ast.unparse(_Bare().visit(ast.parse(source)))


class _Bare(ast.NodeTransformer):
    """Removes imports, and statements that are only a text."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """A docstring, or what stands for itself."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_Import(self, node: ast.Import) -> None:
        """Where a module comes from."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Where a name comes from."""
