"""The plot of results: throughput by length, a panel for each dtype, head dimension and mask.

Of training steps that is tokens a second, of all others operations.
"""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from saccade.bench.case import SHORT_DTYPES, short
from saccade.bench.results import OURS, Result, latest

Series = dict[str, list[tuple[int, float]]]  # who -> (length, TFLOP/s or tokens/s)

# Saccade in shades of one colour, then colours that stay apart for most kinds of colour blindness
# (Okabe and Ito).
OUR_COLORS = ("#d55e00", "#8a3c00", "#f3a56b")
PEER_COLORS = ("#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000", "#999999")
MARKERS = "osD^vP*X"
# The peers beside which single cases are drawn: the first that took part.
BASES = ("sdpa", "sdpa/cudnn", "flex", "sdpa/flash", "fla", "read", "bmm", "saccade/triton")


def require(path: Path) -> None:
    """Refuse a plot before anything is measured for it, if it cannot be drawn.

    Raises:
        ModuleNotFoundError: without matplotlib, saying how to get it.
        ValueError: for a format that matplotlib does not write.
    """
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
    require(path)
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D

    curves, singles = curves_of(results), _singles(results)
    if not curves and not singles:
        raise ValueError("no results to plot")
    rows = sorted({row for row, _ in curves})
    columns = list(dict.fromkeys(column for _, column in curves))
    num_rows = len(rows) + bool(singles)
    heights = [3.0] * len(rows) + ([0.6 + 0.36 * len(singles)] if singles else [])
    width = max(3.4 * len(columns), 9.0)
    figure = pyplot.figure(figsize=(width, sum(heights) + 1.0), layout="constrained")
    grid = figure.add_gridspec(num_rows, max(1, len(columns)), height_ratios=heights)
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
    if singles:
        _draw_singles(figure.add_subplot(grid[-1, :]), singles, styles)
    what = "throughput by length" if curves else "attention beside peers"
    drawn_results = [result for run in latest(results).values() for result in run.values()]
    machines = "; ".join(dict.fromkeys(result.machine for result in drawn_results))
    figure.suptitle(f"{machines}: {what}", fontsize=11)
    drawn = {who for members in (*curves.values(), *dict(singles).values()) for who in members}
    handles = [
        Line2D([], [], color=color, marker=marker, label=who)
        for who, (color, marker) in styles.items()
        if who in drawn
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=min(len(handles), int(width / 2))
    )
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
            color=color, marker=marker, markersize=4,
            linewidth=2.2 if ours else 1.4, zorder=3 if ours else 2,
        )  # fmt: skip
    lengths = sorted({length for points in series.values() for length, _ in points})
    axes.set_xscale("log", base=2)
    axes.set_xticks(lengths, [short(length) for length in lengths])
    axes.tick_params(labelsize=8)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.25)


def _draw_singles(
    axes: Any, singles: list[tuple[str, dict[str, float]]], styles: dict[str, tuple[str, str]]
) -> None:
    axes.axvline(1, color="#888888", linewidth=1)
    for row, (_, ratios) in enumerate(singles):
        for who, ratio in ratios.items():
            color, marker = styles[who]
            axes.plot(ratio, row, color=color, marker=marker, linestyle="none", markersize=7)
    axes.set_yticks(range(len(singles)), [label for label, _ in singles], fontsize=8)
    axes.set_ylim(len(singles) - 0.5, -0.5)
    axes.set_xscale("log")
    ticks = (0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2, 4, 10, 25, 50, 100)
    ratios = [ratio for _, members in singles for ratio in members.values()]
    shown = [tick for tick in ticks if min(ratios) / 2.5 <= tick <= max(ratios) * 2.5]
    axes.set_xticks(shown, [f"{tick:g}" for tick in shown])
    axes.minorticks_off()
    axes.set_xlabel("time over a peer's in the same run (left of 1 is faster)", fontsize=9)
    axes.grid(alpha=0.25)
