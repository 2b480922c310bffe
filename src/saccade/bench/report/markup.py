"""Markup: tables as HTML that sorts by its headers and scrolls by itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple


class Cell(NamedTuple):
    """What a cell shows.

    Attributes:
        text: for people; `…` between backticks is set as code.
        number: what the column is sorted by; without one, the text.
        mark: a class of style.css, or nothing.
    """

    text: str
    number: float | None = None
    mark: str = ""


class Table(NamedTuple):
    """A table; in numeric columns some cell has a number."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]


def number(value: float | None, form: str = "{:.3g}", mark: str = "") -> Cell:
    """A cell for a number, or for none."""
    return Cell("–") if value is None else Cell(form.format(value), value, mark)


def milliseconds(value: float) -> Cell:
    """A time with three figures."""
    return Cell(f"{value:.0f}" if value >= 100 else f"{value:.3g}", value)


def percent(share: float | None) -> Cell:
    """A share of the whole, which is 1."""
    return number(share and 100 * share, "{:.0f} %")


def table(content: Table) -> str:
    """The table as HTML."""
    numeric = [
        any(row[column].number is not None for row in content.rows)
        for column in range(len(content.columns))
    ]
    head = "".join(
        f'<th scope="col"{_number_class(is_number)}><button type="button">{escape(name)}'
        "</button></th>"
        for name, is_number in zip(content.columns, numeric, strict=True)
    )
    rows = "".join(f"<tr>{''.join(map(_cell, row, numeric))}</tr>\n" for row in content.rows)
    caption = escape(content.caption)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(content.caption)}">'
        f'<table class="sortable"><caption><span>{caption}</span></caption>\n'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{rows}</tbody></table></div>\n"
    )


def folded(summary: str, inside: str) -> str:
    """Something that is shown when it is asked for."""
    return f"<details><summary>{escape(summary)}</summary>\n{inside}</details>\n"


def paragraph(text: str) -> str:
    """A paragraph of text, `code` between backticks."""
    return f"<p>{with_code(text)}</p>\n"


def with_code(text: str) -> str:
    """Escaped text, what stood between backticks set as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if odd % 2 else part for odd, part in enumerate(parts))


def _cell(cell: Cell, is_number: bool) -> str:
    marks = " ".join(filter(None, ("number" if is_number else "", cell.mark)))
    marked = f' class="{marks}"' if marks else ""
    value = "" if cell.number is None else f' data-number="{cell.number:.6g}"'
    return f"<td{marked}{value}>{with_code(cell.text)}</td>"


def _number_class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""
