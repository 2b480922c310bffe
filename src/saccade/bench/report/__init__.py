"""Report: results as one HTML page that needs nothing else: no network, no font, no other file."""

from __future__ import annotations

import datetime
import json
import re
from collections import defaultdict
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template

import saccade
from saccade.bench.report import sections
from saccade.bench.report.sections import Cell, Point, Table
from saccade.bench.report.sections import Source as Source
from saccade.bench.report.sections import gather as gather
from saccade.bench.results import Result
from saccade.bench.targets import Verdict, compare_with_targets

PAGE = Path(__file__).parents[4] / "docs" / "kernels.md"  # of a checkout; a wheel has none
REGION = re.compile(r"<!-- kernels: begin -->(.*)<!-- kernels: end -->", re.DOTALL)


def compiled_kernels(page: Path = PAGE) -> str:
    """The tables between the page's marks, or where they are to be had."""
    text = page.read_text(encoding="utf-8") if page.is_file() else ""
    region = REGION.search(text)
    if region is None:
        return sections.paragraph(
            "`saccade kernels` compiles every kernel for every architecture and shows registers, "
            "spills and shared memory. A checkout keeps what it found in docs/kernels.md, which "
            "this page then shows; it was written without one."
        )
    parts, title, notes = [], "", []
    for block in re.split(r"\n{2,}", region[1].strip()):
        if block.startswith("#"):
            title = block.lstrip("# ")
        elif block.startswith("|"):
            parts.append(
                sections.folded(title, "".join(notes) + sections.table(_kernel_table(title, block)))
            )
            notes = []
        else:
            notes.append(sections.paragraph(block.replace("**bold**", "! behind a number")))
    return "".join(parts)


def _kernel_table(title: str, block: str) -> Table:
    """A table of Markdown; what is bold in it has a mark, and a gap repeats what is above."""
    lines = [line.strip("|").split("|") for line in block.splitlines()]
    rows: list[list[Cell]] = []
    for line in lines[2:]:  # the head, and the line below it
        cells = [_kernel_cell(text.strip()) for text in line]
        if rows and not cells[0].text:
            cells[0] = rows[-1][0]
        rows.append(cells)
    return Table(title, [name.strip() for name in lines[0]], rows)


def _kernel_cell(text: str) -> Cell:
    plain = text.replace("**", "")
    number = re.match(r"\d+$|\d+ /", plain)
    return Cell(
        plain if plain == text else f"{plain} !",
        float(plain.split()[0]) if number else None,
        "" if plain == text else "bad",
    )


SCRIPTS = ("theme.js", "sorting.js", "drawing.js", "charts.js")


def write(sources: Sequence[Source], path: Path) -> int:
    """Write the page, in folders that are made where there are none; its size in bytes."""
    text = page(sources)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return len(text.encode("utf-8"))


def page(sources: Sequence[Source]) -> str:
    """The page as text."""
    found = sections.points(sources)
    verdicts = _verdicts(sources)
    values = {
        "summary": sections.paragraph(_summary(sources)),
        "tiles": sections.tiles(found, verdicts),
        "beside": sections.table(sections.beside_peers(sources)),
        "targets": _targets(verdicts),
        "limits": _limits(found),
        "errors": _errors(found),
        "memory": _section(
            sections.memory(found), otherwise="Memory was not measured: `--memory` does."
        ),
        "calls": _section(
            sections.calls(found),
            otherwise="Not measured: `--host`, `--first-call` and `--serving` measure them.",
        ),
        "loads": _section(
            sections.loads(found), otherwise="No load was measured: `--serving --rates` does."
        ),
        "machines": sections.table(sections.machines(sources)),
        "kernels": compiled_kernels(),
        "everything": sections.folded(
            "Every measurement", sections.table(sections.everything(found))
        ),
        "style": _file("style.css"),
        "script": "\n".join(map(_file, SCRIPTS)),
        # No text in it can end the element that holds it.
        "data": json.dumps(
            sections.chart_data(sources, found), ensure_ascii=False, separators=(",", ":")
        ).replace("<", "\\u003c"),
    }
    return Template(_file("page.html")).substitute(values)


def _verdicts(sources: Sequence[Source]) -> dict[str, list[Verdict]]:
    """A verdict on each target for each device, by all that was measured there."""
    by_device: dict[str, list[Result]] = defaultdict(list)
    for source in sources:
        for result in source.results:
            by_device[result.device].append(result)
    return {device: compare_with_targets(results) for device, results in by_device.items()}


def _summary(sources: Sequence[Source]) -> str:
    results = [result for source in sources for result in source.results]
    dates = sorted(result.date[:10] for result in results)
    days = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
    machines = len({result.device for result in results})
    origin = f"`{sources[0].label}`" if len(sources) == 1 else f"{len(sources)} files"
    written = datetime.datetime.now(datetime.timezone.utc)
    return (
        f"{_count(len(results), 'result')} of {_count(machines, 'machine')}, measured {days}. "
        f"Written {written:%Y-%m-%d} by saccade {saccade.__version__} from {origin}."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _targets(verdicts: dict[str, list[Verdict]]) -> str:
    parts = []
    for device, of_device in verdicts.items():
        answered = [verdict for verdict in of_device if verdict.answer != "not measured"]
        still = [verdict for verdict in of_device if verdict.answer == "not measured"]
        if answered:
            parts.append(sections.table(sections.targets(answered, device)))
        if still:
            inside = sections.table(sections.targets(still, device)) + sections.unmeasured(
                of_device
            )
            title = f"Not measured on {device}: {_count(len(still), 'target')}"
            parts.append(sections.folded(title, inside))
    return "".join(parts)


def _limits(found: Sequence[Point]) -> str:
    unknown = dict.fromkeys(point.result.machine for point in found if point.limit is None)
    note = f"No limit is known for {'; '.join(unknown)}." if unknown else ""
    return _section(sections.limits(found), note)


def _errors(found: Sequence[Point]) -> str:
    lacking = dict.fromkeys(
        point.result.machine
        for point in found
        if point.result.error is None
        and point.result.which_pass in ("forward", "decode")
        and point.result.ours
    )
    note = (
        f"Some forward passes ({'; '.join(lacking)}) have no error: their files were written "
        "before errors were kept. All of them were checked against float64 before they were timed."
    )
    return _section(sections.errors(found), note if lacking else "")


def _section(content: Table, note: str = "", otherwise: str = "") -> str:
    """A table and a note below it; without rows, what is said otherwise."""
    shown = sections.table(content) if content.rows else sections.paragraph(otherwise)
    return shown + sections.paragraph(note)


def _file(name: str) -> str:
    return (resources.files("saccade.bench.report") / name).read_text(encoding="utf-8")
