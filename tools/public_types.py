"""Check that the types of all public names are known: python tools/public_types.py

pyright looks at the package as a program that uses it does (`--verifytypes`), which finds functions
without annotations, and attributes whose types another checker might infer otherwise. Counted are
the public names (`public_names.py`) with their public attributes, and the classes of ours that
these mention. Exits with 1 unless all are known.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from public_names import ROOT, definition, public_names


def verify() -> list[dict[str, Any]]:
    """What pyright says of each symbol of the package.

    Raises:
        RuntimeError: where it says nothing.
    """
    # pyright asks the first `python` for the packages that are installed, torch among them.
    folder = Path(sys.executable).parent
    environment = {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ.get('PATH', '')}",
        "PYTHONPATH": str(ROOT / "src"),
    }
    command = [str(folder / "pyright"), "--verifytypes", "saccade", "--ignoreexternal"]
    done = subprocess.run(
        [*command, "--outputjson"], env=environment, capture_output=True, text=True, check=False
    )
    try:
        return json.loads(done.stdout)["typeCompleteness"]["symbols"]
    except (ValueError, KeyError):
        raise RuntimeError(f"pyright said nothing: {done.stdout}{done.stderr}") from None


def is_public(symbol: str, roots: frozenset[str]) -> bool:
    """Whether a symbol is a public name, or an attribute of one without an underscore."""
    parts = symbol.split(".")
    for end in range(len(parts), 1, -1):
        if ".".join(parts[:end]) in roots:
            return not any(part.startswith("_") and part != "__init__" for part in parts[end:])
    return False


def faults(symbols: list[dict[str, Any]], roots: frozenset[str]) -> Iterator[str]:
    """Each public symbol whose type is not known, with what pyright says of it."""
    for symbol in symbols:
        known = symbol["isTypeKnown"] and not symbol["isTypeAmbiguous"]
        if known or not is_public(symbol["name"], roots):
            continue
        said = [one["message"].replace("\xa0", " ") for one in symbol["diagnostics"]]
        yield "\n    ".join([symbol["name"], *(said or ["it mentions one of the others"])])


def roots_of_public_names() -> frozenset[str]:
    """Public names as they are written, and as they are called where they are defined."""
    found = set[str]()
    for module, name in public_names():
        found |= {f"{module}.{name}", ".".join(definition(module, name))}
    return frozenset(found)


def main() -> int:
    """Print faults; the exit status says whether there are none."""
    roots = roots_of_public_names()
    symbols = verify()
    found = list(faults(symbols, roots))
    count = sum(is_public(symbol["name"], roots) for symbol in symbols)
    print(*found, sep="\n")
    print(f"{count - len(found)} of {count} public symbols have known types")
    return int(bool(found) or not count)


if __name__ == "__main__":
    sys.exit(main())
