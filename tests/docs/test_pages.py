"""The pages quote the source as it is, in its order, and their programs run."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WALKED = {
    "docs/delta.md": [],
    "docs/forward.md": ["src/saccade/ops/attention/triton/forward.py"],
    "docs/linear.md": [
        "src/saccade/ops/linear_attention/reference.py",
        "src/saccade/ops/linear_attention/cpu/forward.py",
        "src/saccade/ops/linear_attention/cpu/backward.py",
    ],
}
TEXTS = {page: (ROOT / page).read_text(encoding="utf-8") for page in WALKED}
BLOCKS = {
    page: re.findall(r"^```python *(\S*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    for page, text in TEXTS.items()
}
QUOTES = [(page, file, text) for page, blocks in BLOCKS.items() for file, text in blocks if file]


def lines_of(text: str) -> list[str]:
    """Lines without their whitespace; empty ones are left out."""
    return [line for line in ("".join(line.split()) for line in text.splitlines()) if line]


def place_of(file: str, text: str) -> int:
    """Where a quote begins in a file, in lines; -1 where the file has no such lines."""
    quoted, source = lines_of(text), lines_of((ROOT / file).read_text(encoding="utf-8"))
    starts = range(len(source) - len(quoted) + 1)
    return next((at for at in starts if source[at : at + len(quoted)] == quoted), -1)


def programs_of(page: str) -> list[str]:
    """The blocks that are no quotes."""
    return [text for file, text in BLOCKS[page] if not file]


@pytest.mark.parametrize("page", WALKED)
def test_every_block_of_code_is_found(page):
    assert len(BLOCKS[page]) == TEXTS[page].count("```python")
    assert len(programs_of(page)) == 1


@pytest.mark.parametrize(("page", "file", "text"), QUOTES, ids=range(len(QUOTES)))
def test_quote_stands_in_the_source(page, file, text):
    assert place_of(file, text) >= 0, f"{file} has no such lines:\n{text}"


@pytest.mark.parametrize("page", WALKED)
def test_quotes_come_in_the_order_of_the_file(page):
    for walked in WALKED[page]:
        places = [place_of(file, text) for file, text in BLOCKS[page] if file == walked]
        assert places and places == sorted(places)


@pytest.mark.parametrize("page", WALKED)
def test_program_runs(page, tmp_path):
    pytest.importorskip("triton")
    program = tmp_path / "program.py"
    program.write_text(programs_of(page)[0], encoding="utf-8")
    subprocess.run([sys.executable, str(program)], check=True, timeout=300)
