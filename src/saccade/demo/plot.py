"""Plot: the comparison as two panels, time and memory over the length."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from saccade.demo.comparison import Measured

# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = {"saccade": "#0072B2", "PyTorch SDPA": "#E69F00", "plain PyTorch": "#555555"}
MARKERS = {"saccade": "o", "PyTorch SDPA": "s", "plain PyTorch": "^"}
MIB = 2**20


def matplotlib_missing() -> bool:
    """Whether plots cannot be drawn here."""
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        return True
    return False


def save_plot(measured: list[Measured], path: Path, device: str) -> None:
    """Draw the comparison into a PNG file."""
    # The object interface: it leaves alone whatever the caller does with pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(1, 2)
    for (pattern, who), series in _series(measured).items():
        style = {
            "label": f"{who}, {pattern}",
            "color": COLOURS[who],
            "marker": MARKERS[who],
            "linestyle": "-" if pattern == "causal" else "--",
        }
        lengths = [one.length for one in series]
        total_ms = [one.forward_ms + one.backward_ms for one in series]
        time_axes.plot(lengths, total_ms, **style)
        known = [(one.length, one.peak_bytes / MIB) for one in series if one.peak_bytes]
        memory_axes.plot([length for length, _ in known], [peak for _, peak in known], **style)
    _label(time_axes, "Time, forward + backward", "milliseconds", measured)
    _label(memory_axes, "Peak extra memory, forward + backward", "MiB", measured)
    handles, labels = time_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Attention on {device}")
    figure.savefig(path)


def _series(measured: list[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """What was measured, by pattern and contender, in order of length."""
    series: dict[tuple[str, str], list[Measured]] = {}
    for one in measured:
        if not one.left_out:
            series.setdefault((one.pattern, one.who), []).append(one)
    return series


def _label(axes: Any, title: str, unit: str, measured: list[Measured]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = sorted({one.length for one in measured})
    axes.set(title=title, xlabel="sequence length", ylabel=unit, xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.minorticks_off()
    # 1, 2 and 5 of each power of ten: a few lengths span less than one power.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, alpha=0.3)
