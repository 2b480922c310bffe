"""Target: a bound on what is measured."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from saccade.bench.cases import CASES
from saccade.bench.history import FASTEST
from saccade.bench.selection import passes_of
from saccade.bench.yardsticks import Yardstick


@dataclass(frozen=True)
class Target:
    """A bound that must hold in every case and pass it names, or for their geometric mean.

    Attributes:
        what: the bound in words.
        cases: globs of case names; they begin with the machine.
        yardstick: what is compared with.
        limit: the largest value that the yardstick may give.
        passes: which passes.
        subject: whose times are judged; by default the fastest of saccade's implementations.
        mean: whether the mean is bounded instead of each.
    """

    what: str
    cases: tuple[str, ...]
    yardstick: Yardstick
    limit: float
    passes: tuple[str, ...]
    subject: str = FASTEST
    mean: bool = False

    @property
    def machine(self) -> str:
        """The first word of its cases' names."""
        return self.cases[0].split("-")[0]

    def expected(self) -> list[tuple[str, str]]:
        """Every case and pass that must be measured."""
        names = [name for name in CASES if any(fnmatchcase(name, glob) for glob in self.cases)]
        return [(name, which) for name in names for which in passes_of(CASES[name], self.passes)]
