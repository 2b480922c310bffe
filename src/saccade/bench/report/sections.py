"""The page's sections: from result files to points, and from these to tables that sort by headers.

Points stand beside the most that a machine can do. Tables are HTML, complete without JavaScript.
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from saccade.bench.case import one_or_both
from saccade.bench.display import COUNTS, LOAD_COLUMNS, load_time
from saccade.bench.peers import all_peers
from saccade.bench.results import OURS, Result, files_of, read, runs_of
from saccade.bench.targets import Verdict, number_text, still_missing


class Cell(NamedTuple):
    """A cell of a table.

    Attributes:
        text: what it shows; `…` between backticks is set as code.
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


def percent(fraction: float | None) -> Cell:
    """A fraction in percent."""
    return number(fraction and 100 * fraction, "{:.0f} %")


def table(content: Table) -> str:
    """The table as HTML."""
    numeric = [
        any(row[column].number is not None for row in content.rows)
        for column in range(len(content.columns))
    ]
    number_class = ' class="number"'
    head = "".join(
        f'<th scope="col"{number_class * is_number}><button type="button">{escape(name)}'
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
    """A part of the page that opens by a click on its summary."""
    return f"<details><summary>{escape(summary)}</summary>\n{inside}</details>\n"


def paragraph(text: str) -> str:
    """A paragraph of text, `code` between backticks; nothing for no text."""
    return f"<p>{with_code(text)}</p>\n" if text else ""


def with_code(text: str) -> str:
    """Escaped text, what stood between backticks set as code."""
    parts = escape(text).split("`")
    return "".join(f"<code>{part}</code>" if odd % 2 else part for odd, part in enumerate(parts))


def _cell(cell: Cell, is_number: bool) -> str:
    number = "" if cell.number is None else f"{cell.number:.6g}"
    begins = re.match(r"\d+(?= /|$)", cell.text, re.ASCII)  # as sorting.js reads it
    value = "" if number == (begins[0] if begins else "") else f' data-number="{number}"'
    # A cell that says its number is a number to the style sheet, too: pages have thousands.
    marks = " ".join(filter(None, ("number" if is_number and not value else "", cell.mark)))
    marked = f' class="{marks}"' if marks else ""
    return f"<td{marked}{value}>{with_code(cell.text)}</td>"


def tiles(found: Sequence[Point], verdicts: dict[str, list[Verdict]]) -> str:
    """For each machine saccade's best rates, and how many targets it reached."""
    parts = []
    open_devices = dict(verdicts)
    for machine, points in _by_machine(found).items():
        facts = []
        for unit in ("TFLOP/s", "GB/s"):
            ours = [point for point in points if point.result.ours and point.result.unit == unit]
            if best := max(ours, key=lambda point: point.result.rate, default=None):
                part = best.of_limit
                of = "" if part is None else f", {100 * part:.0f} % of the limit"
                facts.append((_rate_text(best), f"`{best.result.case['name']}`{of}"))
        # A device with other threads is two machines, and its targets have one verdict.
        of_device = open_devices.pop(points[0].result.device, [])
        answers = [verdict.answer for verdict in of_device]
        if measured := [answer for answer in answers if answer != "not measured"]:
            count = f"{measured.count('yes')} of {len(measured)}"
            facts.append((count, "measured targets are reached"))
        entries = "".join(
            f"<div><dt>{with_code(text)}</dt><dd>{value}</dd></div>" for value, text in facts
        )
        parts.append(f"<article><h3>{with_code(machine)}</h3><dl>{entries}</dl></article>")
    return f'<div class="tiles">{"".join(parts)}</div>\n'


def beside_peers(sources: Sequence[Source]) -> Table:
    """Saccade's time over each peer's, from the last run in which both took turns."""
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for machine, results in by_machine(sources).items():
        for (_, which_pass), runs in runs_of(results).items():
            last = {who: ratio for members in runs for who, ratio in _ratios(members)}
            for who, ratio in last.items():
                ratios[machine, who, which_pass].append(ratio)
    rows = [
        (
            Cell(who), Cell(which_pass), number(median(values), "{:.2f}"),
            Cell(f"{sum(value < 1 for value in values)} of {len(values)}",
                 sum(value < 1 for value in values) / len(values)),
            number(min(values), "{:.2f}"), number(max(values), "{:.2f}"), Cell(machine),
        )
        for (machine, who, which_pass), values in ratios.items()
    ]  # fmt: skip
    columns = ("peer", "pass", "median", "saccade is faster in", "best", "worst", "machine")
    return Table(
        "The time of saccade's fastest implementation over the peer's, in the same run; "
        "below 1 saccade is faster", columns, rows,
    )  # fmt: skip


def targets(verdicts: Sequence[Verdict], device: str) -> Table:
    """Which targets are reached, in words as well as in colours."""
    marks = {"yes": "good", "no": "bad", "not measured": "open"}
    rows = []
    for verdict in verdicts:
        count = len(verdict.measured)
        worst = verdict.measured[0] if verdict.measured else None
        where = " ".join(worst[1:]) if worst else ""
        rows.append(
            (
                Cell(verdict.target.what), Cell(verdict.answer, mark=marks[verdict.answer]),
                Cell(number_text(verdict, worst[0]), worst[0]) if worst else Cell("–"),
                Cell(number_text(verdict, verdict.target.limit), verdict.target.limit),
                Cell(f"{count - len(verdict.misses)} of {count + len(verdict.missing)}"),
                Cell(f"`{where}`" if where else "–"),
            )
        )  # fmt: skip
    columns = ("target", "reached", "worst", "limit", "cases that hold", "the worst is")
    return Table(f"Targets on {device}; each ratio is one within a run", columns, rows)


def unmeasured(verdicts: Sequence[Verdict]) -> str:
    """What must still be measured before every target has an answer."""
    lines = [f"<li>{with_code(line)}</li>" for line in still_missing(verdicts)]
    return f"<p>What is still to be measured:</p><ul>{''.join(lines)}</ul>\n"


def errors(found: Sequence[Point]) -> Table:
    """Each one's distance from float64, beside the least in the run."""
    rows = []
    for point in found:
        error = point.result.error
        if error is None:
            continue
        known = [result.error for result in point.members.values() if result.error]
        of_least = error / min(known) if known else None
        rows.append((*_case_cells(point), number(error, "{:.1e}"), number(of_least, "{:.2f}")))
    columns = ("machine", "case", "pass", "who", "error", "× the least of its run")
    return Table(
        "Error against float64: the largest ‖result − exact‖ / ‖exact‖ of the compared rows, or of "
        "a head's gradients",
        columns, rows,
    )  # fmt: skip


def memory(found: Sequence[Point]) -> Table:
    """Peaks, where they were measured."""
    rows = [
        (*_case_cells(point), number(point.result.peak_mb, "{:.1f}"))
        for point in found
        if point.result.peak_mb is not None
    ]
    columns = ("machine", "case", "pass", "who", "MB")
    return Table(
        "Memory at the worst moment beyond the inputs; of training steps, all that is allocated",
        columns, rows,
    )  # fmt: skip


def calls(found: Sequence[Point]) -> Table:
    """Times without a rate: the host's part of a call, first calls, serving."""
    rows = [
        (*_case_cells(point), milliseconds(point.result.median_ms))
        for point in found
        if not point.result.unit and point.result.load is None
    ]
    return Table("Times without a rate", ("machine", "case", "what", "who", "ms"), rows)


def loads(found: Sequence[Point]) -> Table:
    """What requests that arrive by themselves wait, by their rate."""
    rows = []
    for point in found:
        load = point.result.load
        if load is not None:
            times = [load.get(name) for name in LOAD_COLUMNS]
            cells = [
                Cell("–") if value is None else Cell(load_time(load, name), value)
                for name, value in zip(LOAD_COLUMNS, times, strict=True)
            ]
            counts = [number(load[name], "{:.0f}") for name in COUNTS]
            rate, speed = number(load["rate"]), number(load["tokens_per_second"], "{:,.0f}")
            of_capacity = percent(load["rate"] / load["capacity"])
            machine, case, _, _ = _case_cells(point)
            rows.append((machine, case, rate, of_capacity, *cells, speed, *counts))
    columns = (
        "machine", "case", "requests a second", "of capacity", "first token ms, median", "p99",
        "between tokens ms, median", "p99", "tokens a second", *COUNTS,
    )  # fmt: skip
    return Table(
        "An engine under load; running and waiting: at the end, with a first token and without",
        columns, rows,
    )  # fmt: skip


def limits(found: Sequence[Point]) -> Table:
    """The limit that shares refer to, and the most that each of saccade's passes reached of it."""
    best: dict[tuple[str, str, str], Point] = {}
    for point in found:
        if point.of_limit is not None and point.result.ours:
            key = (point.result.machine, point.result.case["dtype"], point.result.which_pass)
            if key not in best or point.of_limit > (best[key].of_limit or 0):
                best[key] = point
    rows = []
    for (machine, dtype, which_pass), point in best.items():
        assert point.limit is not None  # the part is of something
        most = number(point.limit.most(point.result), f"{{:.4g}} {point.result.unit}")
        rows.append(
            (
                Cell(machine), Cell(dtype), Cell(which_pass), most,
                Cell(point.limit.source), percent(point.of_limit),
                Cell(f"`{point.result.case['name']}`"), Cell(point.result.who),
            )
        )  # fmt: skip
    columns = ("machine", "dtype", "pass", "limit", "it comes from", "reached", "case", "who")
    return Table("The machine's limit, and the most that saccade reached of it", columns, rows)


def machines(sources: Sequence[Source]) -> Table:
    """Where and with what was measured: a row for each machine and set of versions."""
    groups: dict[tuple[str, str], list[tuple[Result, str]]] = defaultdict(list)
    for source in sources:
        for result in source.results:
            versions = ", ".join(f"{name} {which}" for name, which in result.versions.items())
            groups[result.machine, versions].append((result, source.label))
    rows = []
    for (machine, versions), members in groups.items():
        dates = sorted(result.date[:10] for result, _ in members)
        commits = dict.fromkeys(result.commit or "unknown" for result, _ in members)
        files = dict.fromkeys(label for _, label in members)
        days = " – ".join(dict.fromkeys((dates[0], dates[-1])))
        rows.append(
            (
                Cell(machine), Cell(versions), Cell(days),
                Cell(", ".join(f"`{commit}`" for commit in commits)),
                Cell(", ".join(f"`{file}`" for file in files)), number(len(members), "{:.0f}"),
            )
        )  # fmt: skip
    columns = ("machine", "versions", "measured", "commits", "from", "results")
    return Table("A commit with a + had changes on top of it", columns, rows)


def everything(found: Sequence[Point]) -> Table:
    """Every result, a row each."""
    rows = []
    for point in found:
        result = point.result
        spread = f"{milliseconds(result.min_ms).text} – {milliseconds(result.max_ms).text}"
        rows.append(
            (
                *_case_cells(point), milliseconds(result.median_ms), Cell(spread),
                number(result.rounds, "{:.0f}"), number(point.against_fastest, "{:.2f}"),
                number(result.rate if result.unit else None, f"{{:.3g}} {result.unit}"),
                percent(point.of_limit), number(result.error, "{:.1e}"),
                number(result.peak_mb, "{:.1f}"), Cell(result.date[:10]),
            )
        )  # fmt: skip
    columns = (
        "machine", "case", "pass", "who", "median ms", "min – max", "rounds",
        "× fastest of its run", "rate", "of the limit", "error", "MB", "date",
    )  # fmt: skip
    return Table("The last run of each case and pass in each file", columns, rows)


def _case_cells(point: Point) -> tuple[Cell, Cell, Cell, Cell]:
    name = point.result.case["name"]
    who = Cell(point.result.who, mark="ours" if point.result.ours else "")
    return Cell(point.result.machine), Cell(f"`{name}`"), Cell(point.result.which_pass), who


def _ratios(members: dict[str, Result]) -> Iterator[tuple[str, float]]:
    """The time of saccade's fastest over each peer's in a run."""
    ours = [result.median_ms for result in members.values() if result.ours]
    for who, peer in members.items():
        timed = peer.unit and who not in yardsticks()
        if ours and timed and not who.startswith(OURS):
            yield who, min(ours) / peer.median_ms


def _by_machine(found: Sequence[Point]) -> dict[str, list[Point]]:
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in found:
        groups[point.result.machine].append(point)
    return groups


def _rate_text(point: Point) -> str:
    """The rate, in a unit in which it has no thousands, and no zero before the point."""
    rate, unit = point.result.rate, point.result.unit
    if unit == "TFLOP/s" and rate < 1:
        return f"{1000 * rate:.3g} GFLOP/s"
    if unit == "GB/s" and rate >= 1000:
        return f"{rate / 1000:.3g} TB/s"
    return f"{rate:.3g} {unit}"


@dataclass(frozen=True)
class Limit:
    """The highest rates of a device.

    Attributes:
        device: its name, as PyTorch gives it.
        tflops: by dtype. Of half precision: tensor cores, without sparsity. Of float32: without
            tensor cores, whose tf32 has too few bits to be float32.
        gbps: of its memory.
        source: where the numbers come from.
    """

    device: str
    tflops: Mapping[str, float]
    gbps: float
    source: str = "NVIDIA's data sheet"

    def most(self, result: Result) -> float | None:
        """The most that a result's rate can be, in its own unit; None where that is unknown."""
        return self.gbps if result.gbps is not None else self.tflops.get(result.case["dtype"])


HOPPER = {"bfloat16": 989.5, "float16": 989.5, "float32": 67.0}
AMPERE = {"bfloat16": 312.0, "float16": 312.0, "float32": 19.5}
LIMITS = (
    Limit("NVIDIA H200", HOPPER, 4800.0),
    Limit("NVIDIA H100 80GB HBM3", HOPPER, 3350.0),
    Limit("NVIDIA A100-SXM4-80GB", AMPERE, 2039.0),
    Limit("NVIDIA A100-SXM4-40GB", AMPERE, 1555.0),
)


def limit_of(device: str) -> Limit | None:
    """The limit of a device; None of one that is not in the table."""
    return next((limit for limit in LIMITS if limit.device == device), None)


class Source(NamedTuple):
    """Results, and the name of where they come from."""

    label: str
    results: list[Result]


class Point(NamedTuple):
    """A peer's last result in a case and pass of a source, beside what it is compared with.

    Attributes:
        source: the number of its source.
        limit: of the machine; None where it is unknown.
        of_limit: the part of that limit, 0 to 1; None where it is unknown, and of what has no rate.
        against_fastest: the time over that of the fastest in its run.
        members: the results of all peers in its run.
    """

    source: int
    result: Result
    limit: Limit | None
    of_limit: float | None
    against_fastest: float
    members: dict[str, Result]


def gather(path: Path) -> list[Source]:
    """The results of a file, or of every file of a folder and the folders in it.

    Raises:
        ValueError: for a line that is no result, and where there are no results at all.
    """
    root = path if path.is_dir() else path.parent
    sources = [Source(file.relative_to(root).as_posix(), read(file)) for file in files_of(path)]
    kept = [source for source in sources if source.results]
    if not kept:
        raise ValueError(f"{path} holds no results; --json writes some")
    return kept


def points(sources: Sequence[Source]) -> list[Point]:
    """The last result of each peer in each case and pass, source by source, machine by machine."""
    return [
        _point(index, members[who], members)
        for index, source in enumerate(sources)
        for results in by_machine([source]).values()
        for runs in runs_of(results).values()
        # A peer that is not in the last run has its last result, and its company, in an older one.
        for who, members in {who: members for members in runs for who in members}.items()
    ]


def _point(source: int, result: Result, members: dict[str, Result]) -> Point:
    times = [member.median_ms for who, member in members.items() if who not in yardsticks()]
    fastest = min(times or [member.median_ms for member in members.values()])
    limit = limit_of(result.device)
    most = limit.most(result) if limit and result.unit else None
    of_limit = result.rate / most if most else None
    return Point(source, result, limit, of_limit, result.median_ms / fastest, members)


def by_machine(sources: Sequence[Source]) -> dict[str, list[Result]]:
    """The results of all sources, machine by machine."""
    groups: dict[str, list[Result]] = defaultdict(list)
    for source in sources:
        for result in source.results:
            groups[result.machine].append(result)
    return groups


@functools.cache
def yardsticks() -> frozenset[str]:
    """Peers that are timed to compare with, and compute no attention."""
    return frozenset(peer.who for peer in all_peers() if not peer.computes_attention)


def chart_data(sources: Sequence[Source], found: Sequence[Point]) -> dict[str, Any]:
    """What the page's charts draw, as JSON; charts.js reads these names."""
    runs: dict[str, int] = {}
    rows = []
    for point in found:
        result, case, limit = point.result, point.result.case, point.limit
        if not result.unit:
            continue
        rows.append(
            {
                "machine": result.machine,
                "kind": result.kind,
                "dtype": case["dtype"],
                "dim": one_or_both(case["head_dim"], case["value_dim"]),
                "pass": result.which_pass,
                "source": point.source,
                "run": runs.setdefault(result.run, len(runs)),
                "date": result.date,
                "case": case["name"],
                "who": result.who,
                "ours": result.who.startswith(OURS),
                "length": case["kv_len"],
                "heads": f"{case['batch']} × {one_or_both(case['query_heads'], case['kv_heads'])}",
                "ms": result.median_ms,
                "rate": result.rate,
                "unit": result.unit,
                "share": point.of_limit,
                "limit": limit.most(result) if limit else None,
                "limitSource": limit.source if limit else None,
                "error": result.error,
                "mb": result.peak_mb,
                "ratio": point.against_fastest,
            }
        )
    return {"sources": [source.label for source in sources], "points": rows}
