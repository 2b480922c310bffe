"""docs/forward.md quotes the source as it is, in its order, and its program runs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/forward.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python *(\S*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
QUOTES = [(file, text) for file, text in BLOCKS if file]
PROGRAMS = [text for file, text in BLOCKS if not file]
WALKED = "src/saccade/portable/forward.py"


def lines_of(text: str) -> list[str]:
    """Lines without their whitespace; empty ones are left out."""
    return [line for line in ("".join(line.split()) for line in text.splitlines()) if line]


def place_of(file: str, text: str) -> int:
    """Where a quote begins in a file, in lines; -1 where the file has no such lines."""
    quoted, source = lines_of(text), lines_of((ROOT / file).read_text(encoding="utf-8"))
    starts = range(len(source) - len(quoted) + 1)
    return next((at for at in starts if source[at : at + len(quoted)] == quoted), -1)


def test_every_block_of_code_is_found():
    assert len(BLOCKS) == PAGE.count("```python")
    assert len(PROGRAMS) == 1


@pytest.mark.parametrize(("file", "text"), QUOTES, ids=range(len(QUOTES)))
def test_quote_stands_in_the_source(file, text):
    assert place_of(file, text) >= 0, f"{file} has no such lines:\n{text}"


def test_quotes_come_in_the_order_of_the_file():
    places = [place_of(file, text) for file, text in QUOTES if file == WALKED]
    assert places == sorted(places)


def test_program_runs(tmp_path):
    pytest.importorskip("triton")
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[0], encoding="utf-8")
    subprocess.run([sys.executable, str(program)], check=True, timeout=300)
