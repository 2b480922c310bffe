"""Lesson: what every chapter needs beside its subject: options, a clock, a table, a picture."""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

# Colours that stay apart for most kinds of colour blindness (Okabe and Ito), ours first, and a
# grey that can be read on white and on black.
COLORS = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
GREY = "#808080"


class Lesson:
    """How a chapter was started, and what it shows.

    Attributes:
        quick: whether sizes are to be tiny.
        device: where tensors go: a GPU if there is one, else the CPU.
    """

    def __init__(self, chapter: str, interpret: bool = True) -> None:
        """Read the command line.

        Args:
            chapter: the file.
            interpret: whether Triton, without a GPU, is to interpret kernels or to compile them.
        """
        parser = argparse.ArgumentParser(prog=Path(chapter).name)
        parser.add_argument("--quick", action="store_true", help="tiny sizes, a few seconds")
        parser.add_argument(
            "--out", type=Path, default=Path("out/chapters"), help="for the picture"
        )
        parser.add_argument("--page", action="store_true", help="print tables as Markdown")
        given = parser.parse_args()
        self.quick: bool = given.quick
        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._out: Path = given.out
        self._page: bool = given.page
        self._stem = Path(chapter).stem
        if not interpret:  # Triton reads it when it is imported
            os.environ.pop("TRITON_INTERPRET", None)
        elif self.device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"
        # PyTorch's profiler would tell of each start and stop, between the lines of the chapter.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        torch.manual_seed(0)

    def race(
        self, candidates: Mapping[str, Callable[[], object]], rounds: int = 5
    ) -> dict[str, float]:
        """Median milliseconds of each; they take turns, in another order every round."""
        for run in candidates.values():
            run()
        samples: dict[str, list[float]] = {name: [] for name in candidates}
        order, shuffle = list(candidates), random.Random(0).shuffle
        for _ in range(2 if self.quick else rounds):
            shuffle(order)
            for name in order:
                samples[name].append(self._seconds(candidates[name]))
        return {name: statistics.median(taken) * 1e3 for name, taken in samples.items()}

    def _seconds(self, run: Callable[[], object]) -> float:
        self._wait()
        start = time.perf_counter()
        run()
        self._wait()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def peak_bytes(self, run: Callable[[], object]) -> int:
        """How much memory a call holds at its worst moment, beyond what was there before."""
        if self.device.type == "cuda":
            run()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            run()
            return torch.cuda.max_memory_allocated() - before
        with torch.profiler.profile(profile_memory=True, acc_events=True) as profile:
            run()
        events: Any = profile.profiler.kineto_results  # type: ignore[union-attr]
        held = most = 0
        for event in events.events():
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        return most

    def table(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
        """Print a table; the first column is text, the others are numbers."""
        cells = [[_text(cell) for cell in row] for row in rows]
        if self._page:
            lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *cells]
            print(f"\n**{title}**\n")
            print("\n".join(f"| {' | '.join(line)} |" for line in lines))
            return
        from rich.console import Console
        from rich.table import Table

        shown = Table(title=title, title_justify="left", title_style="bold")
        for number, column in enumerate(columns):
            shown.add_column(column, justify="right" if number else "left")
        for line in cells:
            shown.add_row(*line)
        Console().print(shown)

    @contextlib.contextmanager
    def picture(
        self, says: str, panels: int = 1, size: tuple[float, float] = (7.0, 3.6)
    ) -> Iterator[Any]:
        """Axes to draw on (a list of them for several panels); the picture is saved at the end.

        Args:
            says: what it shows, for whoever cannot see it.
            panels: how many axes, side by side.
            size: inches.
        """
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot

        with pyplot.rc_context(_style()):
            figure, axes = pyplot.subplots(1, panels, figsize=size, layout="constrained")
            yield axes
            self._out.mkdir(parents=True, exist_ok=True)
            path = self._out / f"{self._stem}.png"
            figure.savefig(path, dpi=160, transparent=True)
            pyplot.close(figure)
        print(f"\n![{says}]({path.name})\n" if self._page else f"picture: {path}")


def _text(cell: object) -> str:
    """A number as it is legible: three figures, thousands with commas."""
    if isinstance(cell, int) and not isinstance(cell, bool):
        return f"{cell:,}"
    if not isinstance(cell, float):
        return str(cell)
    if cell == 0 or not 1e-3 <= abs(cell) < 1e6:
        return f"{cell:.1e}" if cell and abs(cell) != float("inf") else f"{cell:g}"
    return f"{cell:,.0f}" if abs(cell) >= 100 else f"{cell:.3g}"


def _style() -> Any:
    """Lines and letters that can be read on a light page and on a dark one."""
    from cycler import cycler  # comes with matplotlib

    grey = ("axes.edgecolor", "axes.labelcolor", "axes.titlecolor", "text.color",
            "xtick.color", "ytick.color", "grid.color")  # fmt: skip
    return {
        **dict.fromkeys(grey, GREY),
        "axes.prop_cycle": cycler(color=COLORS),
        "axes.spines.top": False, "axes.spines.right": False,
        "axes.grid": True, "grid.alpha": 0.25, "axes.axisbelow": True,
        "axes.formatter.min_exponent": 5,  # 1, 10, 100 on a logarithmic axis, and no powers
        "axes.titlesize": 10, "axes.labelsize": 9, "xtick.labelsize": 8, "ytick.labelsize": 8,
        "legend.fontsize": 8, "legend.frameon": False, "lines.linewidth": 2.0,
    }  # fmt: skip
