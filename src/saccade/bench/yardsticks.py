"""Yardsticks: what a target's time, or memory, is compared with in the runs of result files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

from saccade.bench.case import BenchCase
from saccade.bench.cases import CASES
from saccade.bench.peers.rates import COPY_BYTES
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


TILE = (128, 64)  # query rows, key rows
GOOD_RATE = 4300.0  # GB/s, of an H200's memory


class Yardstick(Protocol):
    """How to judge one pass of one case."""

    unit: ClassVar[str]

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """What the subject reached.

        Raises:
            Unmeasured: if something for it is missing.
        """
        ...


@dataclass(frozen=True)
class AgainstPeer:
    """Another one's time in the same run."""

    unit: ClassVar[str] = ""
    who: str

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of the two times."""
        ours, theirs = history.together(case, which_pass, subject, self.who)
        return ours.median_ms / theirs.median_ms


@dataclass(frozen=True)
class Sum:
    """The subject's own times in other cases, added up; `others` says in which, by case."""

    unit: ClassVar[str] = ""
    others: Mapping[str, tuple[str, ...]]

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of the case's time to the sum."""
        (result,) = history.together(case, which_pass, subject)
        others = [_alike(history, result, other, which_pass) for other in self.others[case]]
        return result.median_ms / sum(other.median_ms for other in others)


@dataclass(frozen=True)
class _Unit:
    """The subject's own time in another case for as much of something."""

    unit: ClassVar[str] = ""
    other: str

    def amount(self, case: BenchCase) -> int:
        """How much of it a case has."""
        raise NotImplementedError

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of the two times for one of it."""
        (result,) = history.together(case, which_pass, subject)
        other = _alike(history, result, self.other, which_pass)
        share = self.amount(CASES[case]) / self.amount(CASES[self.other])
        return result.median_ms / (other.median_ms * share)


class Tiles(_Unit):
    """Of tiles with something visible in them."""

    def amount(self, case: BenchCase) -> int:
        """Tiles of (query rows, key rows)."""
        return case.tiles(TILE)


class Tokens(_Unit):
    """Of tokens."""

    def amount(self, case: BenchCase) -> int:
        """Query rows."""
        return case.query_len


class Bytes(_Unit):
    """Of bytes."""

    def amount(self, case: BenchCase) -> int:
        """What a forward pass moves at least."""
        return case.bytes


@dataclass(frozen=True)
class Time:
    """Nothing but the time, in milliseconds."""

    unit: ClassVar[str] = " ms"

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The median."""
        return history.together(case, which_pass, subject)[0].median_ms


@dataclass(frozen=True)
class Published:
    """Times that others published, of a machine that copies at `rate`; scaled to this one's."""

    unit: ClassVar[str] = ""
    micros: Mapping[str, float]  # by case
    rate: float  # GB/s

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of our time to theirs."""
        ours, copy = history.together(case, which_pass, subject, "copy")
        rate = COPY_BYTES / copy.median_ms / 1e6
        return ours.median_ms * 1e3 / (self.micros[case] * self.rate / rate)


@dataclass(frozen=True)
class Reading:
    """A pure read of as many bytes in the same run, or a good rate if that is slower."""

    unit: ClassVar[str] = ""

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of our time to the longer of the two."""
        ours, read = history.together(case, which_pass, subject, "read")
        good = CASES[case].bytes / GOOD_RATE / 1e6
        return ours.median_ms / max(read.median_ms, good)


@dataclass(frozen=True)
class Copying:
    """A copy in the same run, had it as many bytes."""

    unit: ClassVar[str] = ""

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of our time to it."""
        ours, copy = history.together(case, which_pass, subject, "copy")
        return ours.median_ms / (copy.median_ms * CASES[case].bytes / COPY_BYTES)


@dataclass(frozen=True)
class Memory:
    """Nothing but the least memory of any implementation, in megabytes."""

    unit: ClassVar[str] = " MB"

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The memory at the worst moment beyond the inputs."""
        peaks = [result.peak_mb for result in history.ours(case, which_pass)]
        known = [peak for peak in peaks if peak is not None]
        if not known:
            raise Unmeasured("memory not measured")
        return min(known)


def _alike(history: History, result: Result, case: str, which_pass: str) -> Result:
    """The same implementation's result in another case, on the same device."""
    try:
        (other,) = history.together(case, which_pass, result.who)
    except Unmeasured as error:
        raise Unmeasured(f"{case}: {error}") from None
    if other.device != result.device:
        raise Unmeasured(f"{case}: measured on another device")
    return other
