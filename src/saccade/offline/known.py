"""Known: what compiled kernels took is a function of the source, the call and the compiler.

So it is kept in a file (docs/kernels.json), and what did not change is not compiled again, but for
one kernel in SAMPLE that says whether the file tells the truth. Which ones those are changes
whenever any kernel does. A key stands for all that a kernel is made of: the call, its constants and
options, the architecture, the version of Triton, and the text of every file that kernels come from
or that reads what came of them.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from saccade.offline.pool import Compiled, Usage

SAMPLE = 16
SOURCES = (
    "kernels/*.py", "portable/*.py", "hopper/*.py", "language.py", "expressions.py", "functions.py",
    "masks.py", "scores.py", "mask_functions.py", "offline/calls.py", "offline/paged_calls.py",
    "offline/linear_calls.py", "offline/dtypes.py",
    "offline/worker.py", "offline/compiler.py",
)  # fmt: skip

Known = Mapping[str, Sequence[Any]]  # key → the numbers of a Usage, and the binary's identity


@functools.cache
def source_digest() -> str:
    """What the text of all these files amounts to."""
    root = Path(__file__).parents[1]
    files = sorted(file for glob in SOURCES for file in root.glob(glob))
    text = "".join(f"{file.name}\n{file.read_text(encoding='utf-8')}" for file in files)
    return hashlib.sha256(text.encode()).hexdigest()


def read(file: Path, triton: str) -> dict[str, Sequence[Any]]:
    """What is known of kernels that this version of Triton compiled; nothing without a file.

    Raises:
        ValueError: naming the file, for one that holds something else.
    """
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get(triton, {})
        for entry in entries.values():
            Usage(*entry[:-1])
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}. Delete it, and write it anew with --known") from None
    return entries


def trusted(known: Known) -> dict[str, Sequence[Any]]:
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
    tables[triton] = {one.key: _entry(one) for one in results if one.usage is not None}
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{key}": {json.dumps(entry)}' for key, entry in sorted(table.items()))
        + "\n }"
        for version, table in sorted(tables.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def _entry(compiled: Compiled) -> list[Any]:
    return [*(compiled.usage or ()), compiled.identity]


def unknown(known: Known, results: Sequence[Compiled]) -> int:
    """How many kernels were compiled because the file does not know them."""
    return sum(one.key not in known for one in results)


def faults(file: Path, known: Known, results: Sequence[Compiled]) -> list[str]:
    """The kernels of which the file is wrong."""
    return [
        f"{file}: has {Usage(*known[one.key][:-1])} for {one.job.architecture} {one.kernel} "
        f"({one.job.call.name}), which takes {one.usage}"
        for one in results
        if one.key in known and list(known[one.key][:-1]) != list(one.usage or ())
    ]
