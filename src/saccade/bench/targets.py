"""Targets: what saccade is meant to reach on a CPU, read off result files.

Each is a ratio to SDPA's time within one interleaved run, or an amount of memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import NamedTuple

from rich.table import Table

from saccade.bench.cases import CASES
from saccade.bench.results import Result, latest
from saccade.bench.selection import passes_of

PASSES = ("forward", "forward+backward")


@dataclass(frozen=True)
class Target:
    """A bound that must hold in every case and pass it names.

    Attributes:
        what: the bound in words.
        cases: globs of case names.
        passes: which passes.
        limit: the largest ratio to SDPA's time; of memory, megabytes.
        of_memory: whether memory is meant.
    """

    what: str
    cases: tuple[str, ...]
    limit: float
    passes: tuple[str, ...] = PASSES
    of_memory: bool = False

    def expected(self) -> list[tuple[str, str]]:
        """Every case and pass that must be measured."""
        names = [name for name in CASES if any(fnmatchcase(name, glob) for glob in self.cases)]
        return [(name, which) for name in names for which in passes_of(CASES[name], self.passes)]


def _dense(dtype: str) -> tuple[str, ...]:
    return f"cpu-full-{dtype}-*", f"cpu-causal-{dtype}-*"


TARGETS = (
    Target("dense fp32: at most 1.05 of SDPA's time", _dense("fp32"), 1.05),
    Target("dense bf16: at most 1.05 of SDPA's time", _dense("bf16"), 1.05),
    Target("window of 256 in 4k: at most 0.25 of SDPA with that mask", ("cpu-window256-*",), 0.25),
    Target("packed 8 × 512: at most 0.25 of SDPA with the block mask", ("cpu-packed-*",), 0.25),
    Target("decode 32/8 heads, 16k keys: at most 0.50 of SDPA's time", ("cpu-decode-*",), 0.5),
    Target(
        "32k, one head: under 200 MB beyond the inputs",
        ("cpu-memory-*",), 200.0, ("forward+backward",), of_memory=True,
    ),
)  # fmt: skip


class Verdict(NamedTuple):
    """How a target stands: what was measured of it, worst first, and what is missing."""

    target: Target
    measured: list[tuple[float, str, str]]  # value, case, pass
    missing: list[tuple[str, str]]

    @property
    def misses(self) -> list[tuple[float, str, str]]:
        """What lies beyond the limit."""
        return [item for item in self.measured if item[0] > self.target.limit]

    @property
    def answer(self) -> str:
        """Yes only if all of it was measured and holds."""
        if self.misses:
            return "no"
        return "not measured" if self.missing else "yes"


def judge(results: Sequence[Result]) -> list[Verdict]:
    """How every target stands in the last run of each case and pass."""
    runs = latest(results)
    verdicts = []
    for target in TARGETS:
        measured, missing = [], []
        for place in target.expected():
            value = _value(target, runs.get(place, {}))
            if value is None:
                missing.append(place)
            else:
                measured.append((value, *place))
        verdicts.append(Verdict(target, sorted(measured, reverse=True), missing))
    return verdicts


def _value(target: Target, members: dict[str, Result]) -> float | None:
    """What saccade's default (the fastest that is not the reference) reached in a run."""
    ours = [
        result
        for who, result in members.items()
        if who.startswith("saccade/") and who != "saccade/reference"
    ]
    if target.of_memory:
        peaks = [result.peak_mb for result in ours if result.peak_mb is not None]
        return min(peaks, default=None)
    if not ours or "sdpa" not in members:
        return None
    return min(result.median_ms for result in ours) / members["sdpa"].median_ms


def targets_table(verdicts: Sequence[Verdict]) -> Table:
    """A row a target, and below it each case that misses it."""
    table = Table(caption="a ratio counts only within one interleaved run", caption_justify="left")
    table.add_column("target")
    table.add_column("worst", justify="right", no_wrap=True)
    table.add_column("limit", justify="right")
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("reached", no_wrap=True)
    colors = {"yes": "green", "no": "red", "not measured": "yellow"}
    for verdict in verdicts:
        limit, count = verdict.target.limit, len(verdict.measured)
        worst = _number(verdict, verdict.measured[0][0]) if verdict.measured else "–"
        good = count - len(verdict.misses)
        cases = f"{good} of {count + len(verdict.missing)}"
        answer = f"[{colors[verdict.answer]}]{verdict.answer}[/]"
        table.add_row(verdict.target.what, worst, _number(verdict, limit), cases, answer)
        for value, case, which_pass in verdict.misses:
            table.add_row(f"[dim]  {case}, {which_pass}[/dim]", _number(verdict, value))
    return table


def _number(verdict: Verdict, value: float) -> str:
    return f"{value:.0f} MB" if verdict.target.of_memory else f"{value:.2f}"
