"""Known: what compiled kernels took is a function of their source and the compiler.

So it is kept in a file (docs/kernels.json), and what did not change is not compiled again, but for
one kernel in SAMPLE that shows whether the file tells the truth. Which ones those are changes
whenever any kernel does. A key stands for all that a kernel is made of: what Triton is given
(`compiler.given`), its version, the architecture, and the text of what reads the binary.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from saccade.offline.pool import Compiled, Usage

SAMPLE = 16
READER = Path(__file__).with_name("machine_code.py")

Known = Mapping[str, Sequence[int]]  # key → the numbers of a Usage


def key_of(triton: str, architecture: str, given: str) -> str:
    """The key of a kernel that a version of Triton is given to compile."""
    asked = f"{triton} {architecture} {_reader()} {given}"
    return hashlib.sha256(asked.encode()).hexdigest()[:24]


@functools.cache
def _reader() -> str:
    lines = READER.read_text(encoding="utf-8").splitlines()
    code = "\n".join(line for line in lines if "import " not in line)
    return hashlib.sha256(code.encode()).hexdigest()


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
