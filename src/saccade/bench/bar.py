"""Bar: how far a run is, and how much longer it is likely to take."""

from __future__ import annotations

from types import TracebackType

from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from saccade.bench import measure


class Bar(measure.Progress):
    """A bar in units of expected seconds, so that long cases count for more than short ones.

    How much slower the machine is than expected shows in the speed of the bar, from which the time
    left is worked out.
    """

    def __init__(self, terminal: Console, names: list[str], shares: list[float]) -> None:
        self.names, self.shares = names, shares
        self.finished = 0
        self.bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TaskProgressColumn(),
            TextColumn("{task.fields[cases]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=terminal,
            transient=True,
            speed_estimate_period=600,
        )
        self.task = self.bar.add_task("", total=sum(shares), cases=self._cases())

    def __enter__(self) -> Bar:
        self.bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.bar.stop()

    def now(self, text: str) -> None:
        """What is being done now."""
        self.bar.update(self.task, description=text)

    def done(self, seconds: float) -> None:
        """So many expected seconds of work are over."""
        self.bar.advance(self.task, seconds)

    def case_done(self) -> None:
        """A case is over, with all that its peers did not take."""
        self.finished += 1
        self.bar.update(self.task, completed=sum(self.shares[: self.finished]), cases=self._cases())

    def _cases(self) -> str:
        return f"case {min(self.finished + 1, len(self.names))} of {len(self.names)}"
