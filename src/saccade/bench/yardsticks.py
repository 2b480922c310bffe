"""Yardsticks: what a target's time, or memory, is compared with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol

from saccade.bench.cases import CASES
from saccade.bench.history import History, Unmeasured
from saccade.bench.peers.traffic import COPY_BYTES
from saccade.bench.results import Result

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
class Peer:
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
class Tiles:
    """The subject's own time in another case for as many tiles with something visible in them."""

    unit: ClassVar[str] = ""
    other: str

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of the two times a tile."""
        (result,) = history.together(case, which_pass, subject)
        other = _alike(history, result, self.other, which_pass)
        share = CASES[case].tiles(TILE) / CASES[self.other].tiles(TILE)
        return result.median_ms / (other.median_ms * share)


@dataclass(frozen=True)
class Tokens:
    """The subject's own time in another case for as many tokens."""

    unit: ClassVar[str] = ""
    other: str

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of the two times a token."""
        (result,) = history.together(case, which_pass, subject)
        other = _alike(history, result, self.other, which_pass)
        share = CASES[case].query_len / CASES[self.other].query_len
        return result.median_ms / (other.median_ms * share)


@dataclass(frozen=True)
class Bytes:
    """The subject's own time in another case for as many bytes."""

    unit: ClassVar[str] = ""
    other: str

    def value(self, history: History, subject: str, case: str, which_pass: str) -> float:
        """The ratio of the two times a byte."""
        (result,) = history.together(case, which_pass, subject)
        other = _alike(history, result, self.other, which_pass)
        share = CASES[case].bytes / CASES[self.other].bytes
        return result.median_ms / (other.median_ms * share)


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
