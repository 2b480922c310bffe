"""Report: what the demo found, as tables and panels in the terminal, and as an image."""

from __future__ import annotations

import importlib.util
from itertools import groupby
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from saccade.demo.comparison import LayerErrors, Measured
from saccade.demo.training import TrainingStep

MIB = 2**20


def heading(console: Console, text: str) -> None:
    """The title of a part of the demo."""
    console.print()
    console.rule(f"[bold]{text}", align="left")


def training_progress(console: Console) -> Progress:
    """A bar that shows how training goes."""
    return Progress(
        TextColumn("step {task.fields[step]:>4}"),
        BarColumn(bar_width=None),
        TextColumn("[bold]{task.fields[bits]:.3f}[/] bits/byte"),
        TextColumn("{task.fields[speed]:,.0f} bytes/s"),
        TextColumn("{task.fields[left]:>4.0f} s left"),
        console=console,
    )


def shown(step: TrainingStep) -> dict:
    """The fields of the bar after a step."""
    left = step.seconds * (1 / step.progress - 1)
    speed = step.bytes_per_second
    return {"step": step.number, "bits": step.bits_per_byte, "speed": speed, "left": left}


def prediction_table(bits: dict[str, float], unseen: int) -> Table:
    """Bits per byte of each model on text that none of them has seen."""
    table = _table(
        f"Predicting {unseen:,} held-out bytes", ["model"], ["bits per byte", "size next to 8 bits"]
    )
    best = min(bits.values())
    for who, value in bits.items():
        style = "bold green" if value == best else ""
        table.add_row(who, f"{value:.3f}", f"{value / 8:.0%}", style=style)
    return table


SHORT = {"PyTorch SDPA": "SDPA", "plain PyTorch": "plain"}


def exactness_table(errors: list[LayerErrors]) -> Table:
    """Errors against the float64 reference, layer by layer."""
    table = _table(
        "Distance from the float64 reference",
        ["layer", "dtype", "who"],
        ["output\nmax", "\nRMS", "gradient\nmax", "\nRMS"],
    )
    for position, group in groupby(errors, lambda one: one[:2]):
        table.add_section()
        for number, one in enumerate(group):
            table.add_row(
                *(("", "") if number else position),
                SHORT.get(one.who, one.who),  # the table should fit 80 columns
                *(f"{value:.1e}" for value in (*one.output, *one.gradient)),
                style="bold" if one.who == "saccade" else "",
            )
    return table


def generated_panel(prompt: bytes, written: bytes, explanation: str) -> Panel:
    """The prompt, dimmed, and what the model wrote after it."""
    text = Text(readable(prompt), style="dim")
    text.append(readable(written), style="bold cyan")
    return Panel(text, title="what it writes", subtitle=explanation, border_style="cyan")


def readable(content: bytes) -> str:
    """Bytes as text; what is no UTF-8, or would move the cursor, is shown as �."""
    text = content.decode("utf-8", errors="replace").expandtabs(4)
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in text)


def comparison_table(measured: list[Measured], pattern: str) -> Table:
    """Time and memory of one pattern, length by length."""
    numbers = ["forward\nms", "backward\nms", "peak extra\nMiB"]
    table = _table(pattern.capitalize(), ["length", "who"], numbers)
    table.columns[0].justify = "right"
    of_pattern = [one for one in measured if one.pattern == pattern]
    for length, group in groupby(of_pattern, lambda one: one.length):
        table.add_section()
        for number, one in enumerate(group):
            label, style = "" if number else f"{length:,}", "bold" if one.who == "saccade" else ""
            table.add_row(label, one.who, *_cells(one), style=style)
    return table


def _cells(one: Measured) -> tuple[str, str, str]:
    if one.left_out:
        return "–", "–", one.left_out
    memory = "unknown" if one.peak_bytes is None else f"{one.peak_bytes / MIB:,.1f}"
    return f"{one.forward_ms:,.1f}", f"{one.backward_ms:,.1f}", memory


def _table(title: str, words: list[str], numbers: list[str]) -> Table:
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left", pad_edge=False
    )
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = {"saccade": "#0072B2", "PyTorch SDPA": "#E69F00", "plain PyTorch": "#555555"}
MARKERS = {"saccade": "o", "PyTorch SDPA": "s", "plain PyTorch": "^"}


def matplotlib_missing() -> bool:
    """Whether plots cannot be drawn here."""
    return importlib.util.find_spec("matplotlib") is None


def save_plot(measured: list[Measured], path: Path, device: str) -> None:
    """Draw the comparison into a PNG file."""
    # The object interface: it leaves alone whatever the caller does with pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(1, 2)
    shown = [one for one in measured if not one.left_out]
    for pattern, who in dict.fromkeys((one.pattern, one.who) for one in shown):
        series = [one for one in shown if (one.pattern, one.who) == (pattern, who)]
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
    _label_axes(time_axes, "Time, forward + backward", "milliseconds", measured)
    _label_axes(memory_axes, "Peak extra memory, forward + backward", "MiB", measured)
    handles, labels = time_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Attention on {device}")
    figure.savefig(path)


def _label_axes(axes: Any, title: str, unit: str, measured: list[Measured]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = sorted({one.length for one in measured})
    axes.set(title=title, xlabel="sequence length", ylabel=unit, xscale="log", yscale="log")
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.minorticks_off()
    # 1, 2 and 5 of each power of ten: a few lengths span less than one power.
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, alpha=0.3)
