"""The table of what to open for which change: all that it names exists."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src/saccade"
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
TABLE = TEXT[TEXT.index("## I want to change X → open Y") :]
ROWS = dict(re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)[1:])
NAME = re.compile(r"[\w./]+(?:/|\.(?:py|js|html|md|yml))(?:: \w+)?")


def found(named: str, before: Path | None) -> Path | None:
    """The file or folder of a name: from the root, from the package, or beside the one before."""
    nearby = [] if before is None else [before.parent]
    return next((at / named for at in (ROOT, SOURCE, *nearby) if (at / named).exists()), None)


def defined(file: Path) -> set[str]:
    """The names that a module defines."""
    names = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def faults(row: str) -> list[str]:
    """What a row names and the tree lacks."""
    lacking, before = [], None
    for named in re.findall(r"`([^`]+)`", row):
        if not NAME.fullmatch(named):
            continue
        path, _, name = named.partition(": ")
        file = found(path, before)
        if file is None or (name and name not in defined(file)):
            lacking.append(named)
        before = file or before
    return lacking


def test_there_are_rows():
    assert len(ROWS) >= 30
    assert sum(bool(NAME.search(row)) for row in ROWS.values()) == len(ROWS)


@pytest.mark.parametrize("change", ROWS)
def test_what_a_row_names_exists(change):
    assert faults(ROWS[change]) == []


def test_what_is_not_there_is_noticed():
    assert faults("`masks.py`, `casks.py`") == ["casks.py"]
    assert faults("`gpu/language.py: is_hopper`, `signature.py: is_turing`") == [
        "signature.py: is_turing"
    ]
    assert faults("`ops/attention/cpu/`, `ops/attention/tpu/`") == ["ops/attention/tpu/"]
