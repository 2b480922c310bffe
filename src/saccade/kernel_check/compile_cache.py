"""Compile cache: what compiled kernels took is a function of their source and the compiler.

So it is kept in a file (docs/kernels.json), and what did not change is not compiled again, but for
one kernel in SAMPLE that shows whether the file tells the truth. Which ones those are changes
whenever any kernel does. A key stands for all that a kernel is made of: what Triton is given
(`compiler.given`), its version, the architecture, and the text of what reads the binary.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from saccade.kernel_check.pool import Compiled, Usage

SAMPLE = 16
READER = Path(__file__).with_name("machine_code.py")

Known = Mapping[str, Sequence[int]]  # key → the numbers of a Usage


def key_of(triton: str, architecture: str, given: str) -> str:
    """The key of a kernel that a version of Triton is given to compile."""
    asked = f"{triton} {architecture} {_reader()} {given}"
    return hashlib.sha256(asked.encode()).hexdigest()[:24]


@functools.cache
def _reader() -> str:
    return hashlib.sha256(code_text(READER.read_text(encoding="utf-8")).encode()).hexdigest()


def code_text(source: str) -> str:
    """Python without what it does not run: comments, docstrings, and where names come from."""
    return ast.unparse(_Bare().visit(ast.parse(source)))


class _Bare(ast.NodeTransformer):
    """Takes imports and statements away that are only a text."""

    def visit_Expr(self, node: ast.Expr) -> ast.Expr | None:
        """A docstring, or what stands for itself."""
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_Import(self, node: ast.Import) -> None:
        """Where a module comes from."""

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        """Where a name comes from."""


#


def read(file: Path, triton: str) -> dict[str, Sequence[int]]:
    """What is known of kernels that this version of Triton compiled; nothing without a file.

    Raises:
        ValueError: naming the file, for one that holds something else.
    """
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get(triton, {})
        for entry in entries.values():
            Usage(*entry)
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}. Delete it, and write it anew with --known") from None
    return entries


def trusted(known: Known) -> dict[str, Sequence[int]]:
    """What need not be compiled again: all but the sample."""
    everything = hashlib.sha256("".join(sorted(known)).encode()).digest()
    return {
        key: entry
        for key, entry in known.items()
        if int(key[-8:], 16) % SAMPLE != everything[0] % SAMPLE
    }


def write(file: Path, results: Iterable[Compiled], triton: str) -> None:
    """Keep what was found; other versions of Triton keep what they have."""
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    tables[triton] = {one.key: list(one.usage) for one in results if one.usage is not None}
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(entry)}' for key, entry in sorted(table.items()))
        + "\n }"
        for version, table in sorted(tables.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def unknown(known: Known, results: Sequence[Compiled]) -> int:
    """How many kernels were compiled because the file does not know them."""
    return sum(one.key not in known for one in results)


def faults(file: Path, known: Known, results: Sequence[Compiled]) -> list[str]:
    """The kernels of which the file is wrong."""
    return [
        f"{file}: has {Usage(*known[one.key])} for {one.job.architecture} {one.kernel} "
        f"({one.job.call.name}), which takes {one.usage}"
        for one in results
        if one.key in known and list(known[one.key]) != list(one.usage or ())
    ]
