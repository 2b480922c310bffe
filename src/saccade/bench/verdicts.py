"""Verdicts: how the targets stand in a file of results, and what is missing for an answer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import geometric_mean
from typing import NamedTuple

from saccade.bench.results import Result
from saccade.bench.selection import folded
from saccade.bench.targets import TARGETS, Target
from saccade.bench.yardsticks import History, Unmeasured


class Verdict(NamedTuple):
    """How a target stands: what was measured of it, worst first, and what is missing."""

    target: Target
    measured: list[tuple[float, str, str]]  # value, case, pass
    missing: list[tuple[str, str, str]]  # case, pass, what is missing of it

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


def compare_with_targets(results: Sequence[Result]) -> list[Verdict]:
    """How the targets stand of the machines that the results' cases are meant for.

    Results of no such machine leave all targets open.
    """
    history = History(results)
    machines = {result.case["name"].split("-")[0] for result in results}
    asked = [target for target in TARGETS if target.machine in machines]
    return [_verdict(target, history) for target in asked or TARGETS]


def _verdict(target: Target, history: History) -> Verdict:
    verdict = Verdict(target, [], [])
    for case, which_pass in target.expected():
        try:
            value = target.yardstick.value(history, target.subject, case, which_pass)
            verdict.measured.append((value, case, which_pass))
        except Unmeasured as error:
            verdict.missing.append((case, which_pass, str(error)))
    verdict.measured.sort(reverse=True)
    if target.mean and verdict.measured:
        mean = geometric_mean([value for value, _, _ in verdict.measured])
        verdict.measured[:] = [(mean, f"mean of {len(verdict.measured)}", "")]
    return verdict


def still_missing(verdicts: Sequence[Verdict]) -> list[str]:
    """What must still be measured, each thing once, cases of one kind folded together."""
    cases: dict[tuple[str, str], dict[str, None]] = defaultdict(dict)
    for verdict in verdicts:
        for case, which_pass, reason in verdict.missing:
            cases[reason, which_pass][case] = None
    return [
        f"{reason}: {which_pass} of {', '.join(folded(list(names)))}"
        for (reason, which_pass), names in cases.items()
    ]


def number_text(verdict: Verdict, value: float) -> str:
    """A value of a target's yardstick, in its unit; with digits that tell a miss from the limit."""
    unit, limit = verdict.target.yardstick.unit, verdict.target.limit
    if unit:
        return f"{value:.3g}{unit}"
    near = any(f"{miss[0]:.2f}" == f"{limit:.2f}" for miss in verdict.misses)
    return f"{value:.3f}" if near else f"{value:.2f}"
