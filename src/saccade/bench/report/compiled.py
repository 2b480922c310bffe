"""Compiled: what `saccade kernels` found, as docs/kernels.md of a checkout keeps it."""

from __future__ import annotations

import re
from pathlib import Path

from saccade.bench.report import markup
from saccade.bench.report.markup import Cell, Table

PAGE = Path(__file__).parents[4] / "docs" / "kernels.md"  # of a checkout; a wheel has none
REGION = re.compile(r"<!-- kernels: begin -->(.*)<!-- kernels: end -->", re.DOTALL)


def section(page: Path = PAGE) -> str:
    """The tables between the page's marks, or where they are to be had."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    region = REGION.search(text)
    if region is None:
        return markup.paragraph(
            "`saccade kernels` compiles every kernel for every architecture and shows registers, "
            "spills and shared memory. A checkout keeps what it found in docs/kernels.md, which "
            "this page then shows; it was written without one."
        )
    parts, title, notes = [], "", []
    for block in re.split(r"\n{2,}", region[1].strip()):
        if block.startswith("#"):
            title = block.lstrip("# ")
        elif block.startswith("|"):
            parts.append(markup.folded(title, "".join(notes) + markup.table(_table(title, block))))
            notes = []
        else:
            notes.append(markup.paragraph(block.replace("**bold**", "! behind a number")))
    return "".join(parts)


def _table(title: str, block: str) -> Table:
    """A table of Markdown; what is bold in it has a mark, and a gap repeats what is above."""
    lines = [line.strip("|").split("|") for line in block.splitlines()]
    rows: list[list[Cell]] = []
    for line in lines[2:]:  # the head, and the line below it
        cells = [_cell(text.strip()) for text in line]
        if rows and not cells[0].text:
            cells[0] = rows[-1][0]
        rows.append(cells)
    return Table(title, [name.strip() for name in lines[0]], rows)


def _cell(text: str) -> Cell:
    plain = text.replace("**", "")
    number = re.match(r"\d+$|\d+ /", plain)
    return Cell(
        plain if plain == text else f"{plain} !",
        float(plain.split()[0]) if number else None,
        "" if plain == text else "bad",
    )
