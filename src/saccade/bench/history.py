"""History: what result files know of a case, asked as targets ask it."""

from __future__ import annotations

from collections.abc import Sequence

from saccade.bench.results import Result, runs_of

FASTEST = "saccade"
"""Stands for the fastest of saccade's implementations in a run; the reference is none of them."""


class Unmeasured(Exception):
    """What a target asks for is not there; the message says what is missing."""


class History:
    """All runs of a file of results."""

    def __init__(self, results: Sequence[Result]) -> None:
        self.runs = runs_of(results)

    def together(self, case: str, which_pass: str, *names: str) -> list[Result]:
        """Results of all who are named, from the last run in which they took turns.

        Raises:
            Unmeasured: if there is no such run.
        """
        runs = self.runs.get((case, which_pass), [])
        for members in reversed(runs):
            found = [_member(members, name) for name in names]
            results = [result for result in found if result is not None]
            if len(results) == len(names):
                return results
        present = {name for members in runs for name in names if _member(members, name)}
        missing = [name for name in names if name not in present]
        if not runs:
            raise Unmeasured("not measured")
        if missing:
            raise Unmeasured(f"without {' and '.join(missing)}")
        raise Unmeasured(f"{' and '.join(names)} never took turns in one run")

    def ours(self, case: str, which_pass: str) -> list[Result]:
        """All of saccade's implementations in the last run that has any of them.

        Raises:
            Unmeasured: if there is no such run.
        """
        for members in reversed(self.runs.get((case, which_pass), [])):
            if found := _ours(members):
                return found
        raise Unmeasured("not measured")


def _member(members: dict[str, Result], name: str) -> Result | None:
    if name != FASTEST:
        return members.get(name)
    return min(_ours(members), key=lambda result: result.median_ms, default=None)


def _ours(members: dict[str, Result]) -> list[Result]:
    return [
        result
        for who, result in members.items()
        if who.startswith("saccade/") and who != "saccade/reference"
    ]
