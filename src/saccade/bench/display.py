"""What the bench shows: a bar while cases are measured, tables in the terminal, and a plot.

In tables of results a row is a case and pass, a column is a peer, the best is in bold. The plot is
throughput by length, a panel for each dtype, head dimension and mask; of training steps it is
tokens a second, of all others operations. Of an engine under load it is what requests wait, by
their rate.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from saccade.bench.case import SHORT_DTYPES, BenchCase, one_or_both, short
from saccade.bench.peers import Peer
from saccade.bench.results import OURS, Absence, Result, latest
from saccade.bench.targets import Verdict, number_text


def console() -> Console:
    """Where tables go; wide enough for them even where the output is no terminal."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)


class Bar:
    """A bar in expected seconds, so that long cases count for more than short ones.

    How much slower the machine is than expected shows in the speed of the bar, from which the time
    left is worked out.
    """

    def __init__(
        self, terminal: Console, names: Sequence[str], seconds: Sequence[float],
        refreshes: float = 10,
    ) -> None:  # fmt: skip
        self.names, self.seconds, self.finished = names, seconds, 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[cases]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=terminal,
            transient=True,
            speed_estimate_period=600,
            refresh_per_second=refreshes,
        )
        self.task = self.bar.add_task("", total=sum(seconds), cases=self._cases())

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def now(self, text: str) -> None:
        """Show what is being done."""
        self.bar.update(self.task, description=text)

    def done(self, seconds: float) -> None:
        """Advance by expected seconds of work."""
        self.bar.advance(self.task, seconds)

    def case_done(self) -> None:
        """Advance to the end of a case, whatever of it was skipped."""
        self.finished += 1
        self.bar.update(
            self.task, completed=sum(self.seconds[: self.finished]), cases=self._cases()
        )

    def _cases(self) -> str:
        return f"case {min(self.finished + 1, len(self.names))} of {len(self.names)}"


def _table(caption: str, columns: Mapping[str, str], title: str = "") -> Table:
    """A table whose columns, by name, hold "text" that may wrap, "name"s or "number"s."""
    table = Table(
        title=title or None, title_justify="left", caption=caption, caption_justify="left"
    )
    for name, content in columns.items():
        justify = "right" if content == "number" else "left"
        table.add_column(name, justify=justify, no_wrap=content != "text")
    return table


SHORT_PASSES = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwd+bwd"}
YARDSTICK = "sdpa"
UNITS = {"ms": 1, "µs": 1000}  # of one millisecond


def results_table(results: Sequence[Result], unit: str = "ms", title: str = "") -> Table:
    """Medians in ms, or µs, and beside them the ratio to SDPA's time in the same run."""
    runs = latest(results)
    names = list(dict.fromkeys(result.who for result in results))
    beside = f" (× {YARDSTICK}'s time in the same run)" if YARDSTICK in names else ""
    columns = {"case": "name", "pass": "name", **dict.fromkeys(names, "number")}
    table = _table(f"median {unit}{beside}; the fastest in bold", columns, title)
    table.columns[0].overflow = "fold"
    before = ""
    for (case, which_pass), members in runs.items():
        label = "" if case == before else case
        cells = [_cell(members, who, unit) for who in names]
        table.add_row(label, SHORT_PASSES.get(which_pass, which_pass), *cells)
        before = case
    return table


def _cell(members: dict[str, Result], who: str, unit: str) -> str:
    if who not in members:
        return "[dim]–[/dim]"
    result = members[who]
    text = three_figures(result.median_ms * UNITS[unit])
    if result.median_ms == min(member.median_ms for member in members.values()):
        text = f"[bold green]{text}[/bold green]"
    if YARDSTICK in members and who != YARDSTICK:
        ratio = result.median_ms / members[YARDSTICK].median_ms
        text += f" [dim]×{ratio:.2f}[/dim]"
    return text if result.peak_mb is None else f"{text}\n{result.peak_mb:.0f} MB"


def three_figures(value: float) -> str:
    """A number with three figures, as 0.0123 or 1234."""
    if value >= 100:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 10 else f"{value:.3g}"


def footnotes(absences: Iterable[Absence]) -> list[str]:
    """Why there are gaps: each reason once, with the cases that it holds for."""
    cases: dict[tuple[str, str], list[str]] = defaultdict(list)
    for absence in absences:
        cases[absence.who, absence.reason].append(absence.case)
    lines = []
    for (who, reason), names in cases.items():
        others = f" and {len(names) - 1} more" if len(names) > 1 else ""
        lines.append(f"[bold]{who}[/bold]: {escape(reason)} [dim]({names[0]}{others})[/dim]")
    return lines


def cases_table(cases: Sequence[BenchCase]) -> Table:
    """The named cases with their numbers."""
    table = Table(caption_justify="left", caption="heads and dim: query / key and value")
    for name in ("name", "batch", "heads", "length", "dim", "dtype", "mask", "GFLOP forward"):
        table.add_column(name, justify="left" if name in ("name", "mask") else "right")
    for case in cases:
        table.add_row(
            case.name,
            str(case.batch),
            one_or_both(case.query_heads, case.kv_heads),
            f"{case.query_len} × {case.kv_len}",
            one_or_both(case.head_dim, case.value_dim),
            case.dtype,
            case.mask,
            f"{case.flops('forward') / 1e9:.3g}",
        )
    return table


def peers_table(answers: Mapping[Peer, str | None]) -> Table:
    """Every peer, whether it can run here, and if not, why."""
    table = Table(caption="+ takes part when --who is not given", caption_justify="left")
    for name in ("who", "", "what", "here"):
        table.add_column(name)
    for peer, reason in answers.items():
        answer = "[green]yes[/green]" if reason is None else f"no: {escape(reason)}"
        answer = "if it compiles, which is tried when it runs" if peer.compiles else answer
        table.add_row(peer.who, "+" if peer.by_default else "", escape(peer.about), answer)
    return table


def is_training(result: Result) -> bool:
    """Whether a result is of training steps."""
    return result.tokens_per_second is not None


def speed_table(results: Sequence[Result], title: str = "") -> Table:
    """A row for each variant: its time, its tokens a second and its memory."""
    numbers = ("ms", f"× {YARDSTICK}", "tokens/s", "TFLOP/s", "GB", "first step, s")
    columns = {"case": "name", "batch": "number", "pass": "name", "who": "name"}
    caption = "median ms of a step: forward, backward, optimizer; GB: all that is allocated"
    table = _table(caption, columns | dict.fromkeys(numbers, "number"), title)
    for (case, which_pass), members in latest(results).items():
        yardstick = members.get(YARDSTICK)
        for number, (who, result) in enumerate(members.items()):
            ratio = result.median_ms / yardstick.median_ms if yardstick else None
            label = (case, str(result.case["batch"]), which_pass) if number == 0 else ("",) * 3
            table.add_row(
                *label, who, three_figures(result.median_ms), _or_dash(ratio, "{:.2f}"),
                _or_dash(result.tokens_per_second, "{:,.0f}"), _or_dash(result.tflops, "{:.3g}"),
                _or_dash(result.peak_mb and result.peak_mb / 1e3, "{:.1f}"),
                _or_dash(result.first_seconds, "{:.1f}"),
            )  # fmt: skip
    return table


def course_table(results: Sequence[Result]) -> Table:
    """Losses and gradient norms of the first steps, from the same weights on the same tokens."""
    caption = f"of the first steps from the same weights; Δ: the largest distance from {YARDSTICK}"
    table = Table(caption=caption, caption_justify="left")
    for name in ("case", "pass", "who", "losses", "Δ", "gradient norms", "Δ"):
        table.add_column(name, no_wrap=name not in ("losses", "gradient norms"))
    for (case, which_pass), members in latest(results).items():
        yardstick = members.get(YARDSTICK)
        for number, (who, result) in enumerate(members.items()):
            cells = []
            for field, form in (("losses", "{:.4f}"), ("gradient_norms", "{:.4g}")):
                values = getattr(result, field) or []
                beside = getattr(yardstick, field) if yardstick and who != YARDSTICK else None
                cells.append(" ".join(form.format(value) for value in values))
                cells.append(_or_dash(distance(values, beside) if beside else None, "{:.1e}"))
            table.add_row(*((case, which_pass) if number == 0 else ("", "")), who, *cells)
    return table


LOAD_COLUMNS = (
    "first_token_median_ms", "first_token_p99_ms", "between_tokens_median_ms",
    "between_tokens_p99_ms",
)  # fmt: skip
COUNTS = ("arrived", "done", "running", "waiting")


def loads_of(results: Sequence[Result]) -> dict[tuple[str, str], list[dict[str, Any]]]:
    """(machine, case without its rate) -> the loads of the last run there, by rate."""
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if result.load is not None:
            groups[result.machine, result.case["name"].rpartition("-")[0]].append(result)
    return {
        group: sorted(
            (each.load for each in members if each.load and each.run == members[-1].run),
            key=lambda load: load["rate"],
        )
        for group, members in groups.items()
    }


def load_tables(results: Sequence[Result], title: str = "") -> list[Table]:
    """For each load a table with a row for each rate: what requests waited, what became of them."""
    times = ("first token,\nmedian", "first,\np99", "between,\nmedian", "between,\np99")
    names = ("requests/s", "of\ncapacity", *times, "tokens/s", *COUNTS)
    caption = (
        "ms from a request's arrival to its first token, and between tokens; capacity: of a closed "
        "loop; running and waiting: at the end, with a first token and without; of fewer than 100 "
        "the p99 is the largest"
    )
    tables = []
    for (_, case), loads in loads_of(results).items():
        table = _table(caption, dict.fromkeys(names, "number"), f"{title} {case}".strip())
        for load in loads:
            table.add_row(
                f"{load['rate']:g}", f"{load['rate'] / load['capacity']:.0%}",
                *(load_time(load, name) for name in LOAD_COLUMNS),
                f"{load['tokens_per_second']:,.0f}", *(str(load[name]) for name in COUNTS),
            )  # fmt: skip
        tables.append(table)
    return tables


def load_time(load: Mapping[str, Any], name: str) -> str:
    """A time of a load, which may be known to be at least that."""
    if name not in load:
        return "–"
    return ("≥ " if name in load.get("at_least", ()) else "") + three_figures(load[name])


def distance(values: Sequence[float], beside: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(one - other) / abs(other) for one, other in zip(values, beside, strict=True))


def _or_dash(value: float | None, form: str) -> str:
    return "–" if value is None else form.format(value)


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    """A row a target, and below it each case that misses it."""
    columns = {
        "target": "text", "worst": "number", "limit": "number", "cases": "number",
        "reached": "name",
    }  # fmt: skip
    table = _table("a ratio to another's time counts only within one interleaved run", columns)
    colors = {"yes": "green", "no": "red", "not measured": "yellow"}
    for verdict in verdicts:
        limit, count = verdict.target.limit, len(verdict.measured)
        worst = number_text(verdict, verdict.measured[0][0]) if verdict.measured else "–"
        good = count - len(verdict.misses)
        cases = f"{good} of {count + len(verdict.missing)}"
        answer = f"[{colors[verdict.answer]}]{verdict.answer}[/]"
        table.add_row(verdict.target.what, worst, number_text(verdict, limit), cases, answer)
        for value, case, which_pass in verdict.misses:
            where = f"{case}, {which_pass}" if which_pass else case
            table.add_row(f"[dim]  {where}[/dim]", number_text(verdict, value))
    return table


Series = dict[str, list[tuple[int, float]]]  # who -> (length, TFLOP/s or tokens/s)

# Saccade in shades of one colour, then colours that stay apart for most kinds of colour blindness
# (Okabe and Ito).
OUR_COLORS = ("#d55e00", "#8a3c00", "#f3a56b")
PEER_COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
MARKERS = "osD^vP*X"
# The peers beside which single cases are drawn: the first that took part.
BASES = ("sdpa", "sdpa/cudnn", "flex", "sdpa/flash", "fla", "read", "bmm", "saccade/triton")


def require_plotting(path: Path) -> None:
    """Refuse a plot before anything is measured for it, if it cannot be drawn."""
    try:
        from matplotlib.backend_bases import FigureCanvasBase
    except ModuleNotFoundError:
        message = "--plot needs matplotlib: pip install 'saccade[bench]'"
        raise ModuleNotFoundError(message) from None
    formats = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.lower().removeprefix(".") not in formats:
        raise ValueError(f"--plot: got {path}, takes a name that ends in .png, .svg or .pdf")


def plot(results: Sequence[Result], path: Path) -> None:
    """Draw result files' throughput and write it as an image.

    Raises:
        ValueError: if there is nothing to draw, or for an unknown format.
        ModuleNotFoundError: without matplotlib.
    """
    require_plotting(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curves, singles, loads = curves_of(results), _singles(results), loads_of(results)
    if not curves and not singles and not loads:
        raise ValueError("no results to plot")
    rows = sorted({row for row, _ in curves})
    columns = list(dict.fromkeys(column for _, column in curves))
    heights = [3.0] * (len(rows) + bool(loads))
    heights += [0.6 + 0.36 * len(singles)] if singles else []
    width = max(3.4 * len(columns), 9.0)
    figure = pyplot.figure(figsize=(width, sum(heights) + 1.0), layout="constrained")
    grid = figure.add_gridspec(len(heights), max(1, len(columns)), height_ratios=heights)
    styles = _styles(results)
    unit = "T" if max((result.tflops or 0.0) for result in results) >= 1 else "G"
    trained = {_panel(result, result.which_pass) for result in results if result.tokens_per_second}
    for row_index, row in enumerate(rows):
        for column_index, column in enumerate(columns):
            if (row, column) in curves:
                axes = figure.add_subplot(grid[row_index, column_index])
                of_steps = (row, column) in trained
                _draw_curves(axes, curves[row, column], styles, "" if of_steps else unit)
                axes.set_title(textwrap.fill(f"{row}, {column}", 40), fontsize=9)
                if column_index == 0 or of_steps:
                    axes.set_ylabel("tokens/s" if of_steps else f"{unit}FLOP/s")
    if loads:
        _draw_loads(figure, grid[len(rows), :].subgridspec(1, 3), loads)
    if singles:
        _draw_singles(figure.add_subplot(grid[-1, :]), singles, styles)
    of_loads = "an engine under load" if loads else ""
    what = "throughput by length" if curves else "attention beside peers" if singles else of_loads
    drawn_results = [result for run in latest(results).values() for result in run.values()]
    machines = "; ".join(dict.fromkeys(result.machine for result in drawn_results))
    figure.suptitle(f"{machines}: {what}", fontsize=11)
    drawn = {
        label: handle
        for axes in figure.axes
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    columns = min(len(drawn), int(width / (4 if len(loads) > 1 else 2)))
    figure.legend(drawn.values(), drawn.keys(), loc="outside lower center", ncols=columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def curves_of(results: Sequence[Result]) -> dict[tuple[str, str], Series]:
    """(dtype and dim, kind and pass) -> throughput by length; only where there are two lengths."""
    panels: dict[tuple[str, str], Series] = defaultdict(lambda: defaultdict(list))
    for (_, which_pass), members in latest(results).items():
        for who, result in members.items():
            rate = result.tokens_per_second or result.tflops
            if rate is not None:
                panel = panels[_panel(result, which_pass)]
                panel[who].append((result.case["kv_len"], rate))
    return {
        panel: {who: sorted(points) for who, points in series.items()}
        for panel, series in panels.items()
        if len({length for points in series.values() for length, _ in points}) > 1
    }


def _singles(results: Sequence[Result]) -> list[tuple[str, dict[str, float]]]:
    """For each case of one length, hence without a curve: who -> time over a peer's."""
    curves = curves_of(results)
    singles = []
    for (name, which_pass), members in latest(results).items():
        some = next(iter(members.values()))
        base = next((who for who in BASES if who in members), None)
        if _panel(some, which_pass) in curves or base is None:
            continue
        ratios = {
            who: result.median_ms / members[base].median_ms
            for who, result in members.items()
            if who != "copy"  # of so many bytes as it likes
        }
        singles.append((f"{name}, {which_pass}, over {base}", ratios))
    return singles


def _panel(result: Result, which_pass: str) -> tuple[str, str]:
    case = result.case
    dtype = SHORT_DTYPES.get(case["dtype"], case["dtype"])
    return f"{dtype} d{case['head_dim']}", f"{result.kind}, {which_pass}"


def _styles(results: Sequence[Result]) -> dict[str, tuple[str, str]]:
    """A color and a marker for each peer, the same in every panel."""
    names = list(dict.fromkeys(result.who for result in results))
    ours = sorted(who for who in names if who.startswith(OURS))  # of one colour in all files
    peers = [who for who in names if who not in ours]
    styles = {
        who: (OUR_COLORS[index % len(OUR_COLORS)], MARKERS[index % 8])
        for index, who in enumerate(ours)
    }
    for index, who in enumerate(peers):
        styles[who] = (PEER_COLORS[index % len(PEER_COLORS)], MARKERS[(index + 1) % 8])
    return styles


def _draw_curves(axes: Any, series: Series, styles: dict[str, tuple[str, str]], unit: str) -> None:
    factor = 1000 if unit == "G" else 1
    for who, points in series.items():
        color, marker = styles[who]
        ours = who.startswith(OURS)
        axes.plot(
            [length for length, _ in points], [rate * factor for _, rate in points],
            color=color, marker=marker, markersize=4, label=who,
            linewidth=2.2 if ours else 1.4, zorder=3 if ours else 2,
        )  # fmt: skip
    lengths = sorted({length for points in series.values() for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.tick_params(labelsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _draw_loads(figure: Any, grid: Any, loads: Mapping[tuple[str, str], list[Any]]) -> None:
    """By the rate of requests: the time to the first token and between tokens, tokens a second."""
    first, between, speed = (figure.add_subplot(grid[0, column]) for column in range(3))
    panels = (first, "time to first token, ms"), (between, "time between tokens, ms")
    colors = (*OUR_COLORS, *PEER_COLORS)
    for index, ((_, case), of_case) in enumerate(loads.items()):
        color = colors[index % len(colors)]
        prefix = f"{case}, " if len(loads) > 1 else ""
        rates = [load["rate"] for load in of_case]
        for axes, names in ((first, LOAD_COLUMNS[:2]), (between, LOAD_COLUMNS[2:])):
            for name, line, marker, what in zip(names, "-:", "os", ("median", "p99"), strict=True):
                times = [load.get(name, float("nan")) for load in of_case]
                label = f"{prefix}{what}"
                axes.plot(rates, times, line, color=color, marker=marker, label=label)
        speeds = [load["tokens_per_second"] for load in of_case]
        speed.plot(rates, speeds, color=color, marker="o")
        offered = [load["rate"] * load.get("new_tokens", float("nan")) for load in of_case]
        speed.plot(rates, offered, "--", color="#888888", label="tokens asked for")
        for axes in (first, between, speed):
            label = f"{prefix}capacity"
            axes.axvline(of_case[0]["capacity"], color=color, linewidth=1, alpha=0.4, label=label)
    for axes, title in (*panels, (speed, "tokens a second")):
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("requests a second", fontsize=9)
        axes.tick_params(labelsize=8)
        axes.grid(alpha=0.25)
    first.set_yscale("log")
    _label_log_scale(first, first.yaxis)
    between.set_ylim(bottom=0)
    speed.set_ylim(bottom=0)


def _draw_singles(
    axes: Any, singles: list[tuple[str, dict[str, float]]], styles: dict[str, tuple[str, str]]
) -> None:
    axes.axvline(1, color="#888888", linewidth=1)
    for row, (_, ratios) in enumerate(singles):
        for who, ratio in ratios.items():
            color, marker = styles[who]
            axes.plot(
                ratio, row, color=color, marker=marker, linestyle="none", markersize=7, label=who
            )
    axes.set_yticks(range(len(singles)), [label for label, _ in singles], fontsize=8)
    axes.set_ylim(len(singles) - 0.5, -0.5)
    axes.set_xscale("log")
    _label_log_scale(axes, axes.xaxis)
    axes.set_xlabel("time over a peer's in the same run (left of 1 is faster)", fontsize=9)
    axes.grid(alpha=0.25)


def _label_log_scale(axes: Any, axis: Any) -> None:
    """Ticks at 1, 2, 5, 10 ..., as plain numbers."""
    from matplotlib.ticker import LogLocator

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter("{x:g}")
    axes.minorticks_off()
