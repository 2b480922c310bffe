"""Table: results for people: a row a case and pass, a column a peer, the best in bold."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

from rich.table import Table

from saccade.bench.cases import Case
from saccade.bench.measure import Absence
from saccade.bench.peers import Peer
from saccade.bench.results import Result, latest

SHORT_PASSES = {"forward": "fwd", "backward": "bwd", "forward+backward": "fwd+bwd"}
YARDSTICK = "sdpa"
UNITS = {"ms": 1, "µs": 1000}  # of one millisecond


def results_table(results: Sequence[Result], unit: str = "ms", title: str = "") -> Table:
    """Medians in ms, or µs, and beside them the ratio to SDPA's time in the same run."""
    runs = latest(results)
    names = list(dict.fromkeys(result.who for result in results))
    beside = f" (× {YARDSTICK}'s time in the same run)" if YARDSTICK in names else ""
    table = Table(
        title=title or None,
        title_justify="left",
        caption=f"median {unit}{beside}; the fastest in bold",
        caption_justify="left",
    )
    table.add_column("case", no_wrap=True, overflow="fold")
    table.add_column("pass", no_wrap=True)
    for who in names:
        table.add_column(who, justify="right", no_wrap=True)
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
    """Three figures, so that 0.0123 and 1234 are equally legible."""
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


def cases_table(cases: Sequence[Case]) -> Table:
    """The named cases with their numbers."""
    table = Table(caption_justify="left", caption="heads and dim: query / key and value")
    for name in ("name", "batch", "heads", "length", "dim", "dtype", "mask", "GFLOP forward"):
        table.add_column(name, justify="left" if name in ("name", "mask") else "right")
    for case in cases:
        lengths = f"{case.query_len} × {case.kv_len}"
        dims = _pair(case.head_dim, case.value_dim)
        heads = _pair(case.query_heads, case.kv_heads)
        gflop = f"{case.flops('forward') / 1e9:.3g}"
        table.add_row(
            case.name, str(case.batch), heads, lengths, dims, case.dtype, case.mask, gflop
        )
    return table


def peers_table(answers: Iterable[tuple[Peer, str | None]]) -> Table:
    """Everybody who is known, whether they can run here, and if not, why."""
    table = Table(caption="+ takes part when --who is not given", caption_justify="left")
    for name in ("who", "", "what", "here"):
        table.add_column(name)
    for peer, reason in answers:
        answer = "[green]yes[/green]" if reason is None else f"no: {_escaped(reason)}"
        table.add_row(peer.who, "+" if peer.by_default else "", _escaped(peer.about), answer)
    return table


def _pair(query_size: int, kv_size: int) -> str:
    return str(query_size) if query_size == kv_size else f"{query_size}/{kv_size}"


def _escaped(text: str) -> str:
    """Text whose square brackets are no markup."""
    return text.replace("[", r"\[")
