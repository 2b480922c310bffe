"""Sections: what the page says in tables, each from the results alone."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from statistics import median

from saccade.bench.report import collect, markup
from saccade.bench.report.collect import Point, Source
from saccade.bench.report.markup import Cell, Table, milliseconds, number, percent
from saccade.bench.results import Result, runs_of
from saccade.bench.targets import Verdict, number_text, still_missing


def tiles(found: Sequence[Point], verdicts: dict[str, list[Verdict]]) -> str:
    """The first look at each machine: saccade's best rates, and how many targets it reached."""
    parts = []
    open_devices = dict(verdicts)
    for machine, points in _by_machine(found).items():
        facts = []
        for unit in ("TFLOP/s", "GB/s"):
            best = max(_ours_with_rate(points, unit), key=_rate, default=None)
            if best is not None:
                of = f", {100 * best.share:.0f} % of the limit" if best.share is not None else ""
                facts.append((_rate_text(best), f"`{best.result.case['name']}`{of}"))
        # Of a device that is two machines, with other threads, the targets are judged as one.
        of_device = open_devices.pop(points[0].result.device, [])
        answers = [verdict.answer for verdict in of_device]
        if measured := [answer for answer in answers if answer != "not measured"]:
            count = f"{measured.count('yes')} of {len(measured)}"
            facts.append((count, "measured targets are reached"))
        items = "".join(
            f"<div><dt>{markup.with_code(text)}</dt><dd>{value}</dd></div>" for value, text in facts
        )
        parts.append(f"<article><h3>{markup.with_code(machine)}</h3><dl>{items}</dl></article>")
    return f'<div class="tiles">{"".join(parts)}</div>\n'


def beside_peers(sources: Sequence[Source]) -> Table:
    """Saccade's time over each peer's, from the last run in which both took turns."""
    ratios: dict[tuple[str, str, str], list[float]] = defaultdict(list)
    for machine, results in collect.by_machine(sources).items():
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
    """How targets stand, the marks in words as well as in colours."""
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
    lines = [f"<li>{markup.with_code(line)}</li>" for line in still_missing(verdicts)]
    return f"<p>What is still to be measured:</p><ul>{''.join(lines)}</ul>\n"


def errors(found: Sequence[Point]) -> Table:
    """Each one's distance from float64, beside the least in the run."""
    rows = []
    for point in found:
        error = point.result.error
        if error is None:
            continue
        known = [item.error for item in point.members.values() if item.error]
        of_least = error / min(known) if known else None
        rows.append((*_place(point), number(error, "{:.1e}"), number(of_least, "{:.2f}")))
    columns = ("machine", "case", "pass", "who", "error", "× the least of its run")
    return Table(
        "Error against float64: the largest ‖result − exact‖ / ‖exact‖ of the compared rows, or of "
        "a head's gradients",
        columns, rows,
    )  # fmt: skip


def memory(found: Sequence[Point]) -> Table:
    """Peaks, where they were measured."""
    rows = [
        (*_place(point), number(point.result.peak_mb, "{:.1f}"))
        for point in found
        if point.result.peak_mb is not None
    ]
    columns = ("machine", "case", "pass", "who", "MB")
    return Table(
        "Memory at the worst moment beyond the inputs; of training steps, all that is allocated",
        columns, rows,
    )  # fmt: skip


def calls(found: Sequence[Point]) -> Table:
    """What has a time and no rate: the host's part of a call, and first calls."""
    rows = [
        (*_place(point), milliseconds(point.result.median_ms))
        for point in found
        if collect.rate_of(point.result) is None
    ]
    return Table("Times without a rate", ("machine", "case", "what", "who", "ms"), rows)


def limits(found: Sequence[Point]) -> Table:
    """The limit that shares refer to, and the most that each of saccade's passes reached of it."""
    best: dict[tuple[str, str, str], Point] = {}
    for point in found:
        if point.share is not None and collect.is_ours(point.result.who):
            place = (point.machine, point.result.case["dtype"], point.result.which_pass)
            if place not in best or point.share > (best[place].share or 0):
                best[place] = point
    rows = []
    for (machine, dtype, which_pass), point in best.items():
        assert point.limit is not None  # a share is of something
        most, unit = point.limit.most(point.result), (collect.rate_of(point.result) or (0, ""))[1]
        rows.append(
            (
                Cell(machine), Cell(dtype), Cell(which_pass), number(most, f"{{:.4g}} {unit}"),
                Cell(point.limit.source), percent(point.share),
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
            groups[collect.machine_of(result), versions].append((result, source.label))
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
    """All that the page knows, a row a result."""
    rows = []
    for point in found:
        result, rate = point.result, collect.rate_of(point.result)
        spread = f"{milliseconds(result.min_ms).text} – {milliseconds(result.max_ms).text}"
        rows.append(
            (
                *_place(point), milliseconds(result.median_ms), Cell(spread),
                number(result.rounds, "{:.0f}"), number(point.against_fastest, "{:.2f}"),
                number(rate and rate[0], f"{{:.3g}} {rate[1]}" if rate else ""),
                percent(point.share), number(result.error, "{:.1e}"),
                number(result.peak_mb, "{:.1f}"), Cell(result.date[:10]),
            )
        )  # fmt: skip
    columns = (
        "machine", "case", "pass", "who", "median ms", "min – max", "rounds",
        "× fastest of its run", "rate", "of the limit", "error", "MB", "date",
    )  # fmt: skip
    return Table("The last run of each case and pass in each file", columns, rows)


def _place(point: Point) -> tuple[Cell, Cell, Cell, Cell]:
    name = point.result.case["name"]
    ours = "ours" if collect.is_ours(point.result.who) else ""
    return (
        Cell(point.machine), Cell(f"`{name}`"), Cell(point.result.which_pass),
        Cell(point.result.who, mark=ours),
    )  # fmt: skip


def _ratios(members: dict[str, Result]) -> Iterator[tuple[str, float]]:
    """The time of saccade's fastest over each peer's in a run."""
    ours = [item.median_ms for who, item in members.items() if collect.is_ours(who)]
    idle = collect.yardsticks()
    for who, peer in members.items():
        timed = collect.rate_of(peer) is not None and who not in idle
        if ours and timed and not who.startswith(collect.OURS):
            yield who, min(ours) / peer.median_ms


def _by_machine(found: Sequence[Point]) -> dict[str, list[Point]]:
    groups: dict[str, list[Point]] = defaultdict(list)
    for point in found:
        groups[point.machine].append(point)
    return groups


def _ours_with_rate(points: Sequence[Point], unit: str) -> list[Point]:
    rates = [(point, collect.rate_of(point.result)) for point in points]
    return [
        point
        for point, rate in rates
        if rate and rate[1] == unit and collect.is_ours(point.result.who)
    ]


def _rate_text(point: Point) -> str:
    """The rate, in a unit in which it has no thousands, and no zero before the point."""
    rate, unit = collect.rate_of(point.result) or (0.0, "")
    if unit == "TFLOP/s" and rate < 1:
        return f"{1000 * rate:.3g} GFLOP/s"
    if unit == "GB/s" and rate >= 1000:
        return f"{rate / 1000:.3g} TB/s"
    return f"{rate:.3g} {unit}"


def _rate(point: Point) -> float:
    rate = collect.rate_of(point.result)
    return rate[0] if rate else 0.0
