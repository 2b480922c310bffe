"""Known: what compiled kernels took is a function of their source, arguments and compiler.

So it is kept in a file (docs/kernels.json), and what did not change is not compiled again, but for
one kernel in SAMPLE that says whether the file tells the truth. Which ones those are changes
whenever any kernel does.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from saccade.offline.pool import Compiled, Usage

SAMPLE = 16

Known = Mapping[str, Usage]


def read(file: Path, triton: str) -> dict[str, Usage]:
    """What is known of kernels that this version of Triton compiled; nothing without a file.

    Raises:
        ValueError: naming the file, for one that holds something else.
    """
    if not file.exists():
        return {}
    try:
        entries = json.loads(file.read_text(encoding="utf-8")).get(triton, {})
        return {identity: Usage(*numbers) for identity, numbers in entries.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(f"{file}: {error}. Delete it, and write it anew with --known") from None


def trusted(known: Known) -> dict[str, Usage]:
    """What need not be compiled again: all but the sample."""
    everything = hashlib.sha256("".join(sorted(known)).encode()).digest()
    return {
        identity: usage
        for identity, usage in known.items()
        if int(identity[-8:], 16) % SAMPLE != everything[0] % SAMPLE
    }


def write(file: Path, results: Iterable[Compiled], triton: str) -> None:
    """Keep what was found; other versions of Triton keep what they have."""
    tables = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    tables[triton] = {one.identity: list(one.usage) for one in results if one.usage is not None}
    lines = [
        f' "{version}": {{\n'
        + ",\n".join(f'  "{name}": {json.dumps(found)}' for name, found in sorted(table.items()))
        + "\n }"
        for version, table in sorted(tables.items())
    ]
    file.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


def faults(file: Path, known: Known, results: Sequence[Compiled]) -> list[str]:
    """What speaks against the file: kernels that it lacks, and those of which it is wrong."""
    lacking = [one for one in results if one.usage is not None and one.identity not in known]
    wrong = [
        one
        for one in results
        if one.usage is not None and known.get(one.identity, one.usage) != one.usage
    ]
    found = [
        f"{file}: has {known[one.identity]} for {one.job.architecture} {one.kernel} "
        f"({one.job.call.name}), which takes {one.usage}"
        for one in wrong
    ]
    if lacking:
        first = lacking[0]
        found.append(
            f"{file}: lacks {len(lacking)} of {len(results)} kernels, such as "
            f"{first.job.architecture} {first.kernel} ({first.job.call.name}); write it anew with "
            f"saccade kernels --arch all --known {file}"
        )
    return found
