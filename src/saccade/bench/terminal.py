"""What the terminal shows: a bar while cases are measured, then tables.

In tables of results a row is a case and pass, a column is a peer, the best is in bold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from saccade.bench.case import BenchCase, one_or_both
from saccade.bench.peers import Peer
from saccade.bench.results import Absence, Result, latest
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

    def __init__(self, terminal: Console, names: Sequence[str], seconds: Sequence[float]) -> None:
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
        lines.append(f"[bold]{who}[/bold]: {_escaped(reason)} [dim]({names[0]}{others})[/dim]")
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
        answer = "[green]yes[/green]" if reason is None else f"no: {_escaped(reason)}"
        answer = "if it compiles, which is tried when it runs" if peer.compiles else answer
        table.add_row(peer.who, "+" if peer.by_default else "", _escaped(peer.about), answer)
    return table


def _escaped(text: str) -> str:
    """Text whose square brackets are no markup."""
    return text.replace("[", r"\[")


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
