"""Training table: tokens a second and memory of steps, and beside them what the steps computed."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table

from saccade.bench.results import Result, latest
from saccade.bench.table import YARDSTICK, three_figures


def is_training(result: Result) -> bool:
    """Whether a result is of training steps."""
    return result.tokens_per_second is not None


def speed_table(results: Sequence[Result], title: str = "") -> Table:
    """A row for each variant: its time, its tokens a second and its memory."""
    caption = "median ms of a step: forward, backward, optimizer; GB: all that is allocated"
    table = Table(
        title=title or None, title_justify="left", caption=caption, caption_justify="left"
    )
    for name in ("case", "batch", "pass", "who"):
        table.add_column(name, no_wrap=True, justify="right" if name == "batch" else "left")
    for name in ("ms", f"× {YARDSTICK}", "tokens/s", "TFLOP/s", "GB", "first step, s"):
        table.add_column(name, no_wrap=True, justify="right")
    for (case, which_pass), members in latest(results).items():
        yardstick = members.get(YARDSTICK)
        for number, (who, result) in enumerate(members.items()):
            ratio = result.median_ms / yardstick.median_ms if yardstick else None
            place = (case, str(result.case["batch"]), which_pass) if number == 0 else ("",) * 3
            table.add_row(
                *place, who, three_figures(result.median_ms), _or_dash(ratio, "{:.2f}"),
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
