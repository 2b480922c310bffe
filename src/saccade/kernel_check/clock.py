"""Clock: times one kernel inside a call, by device events around its start and nothing else."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from saccade.bench.timing import Runnable
from saccade.gpu.launcher import Launch
from saccade.kernel_check import calls
from saccade.kernel_check.tuning import PASS_OF, Task, whole_config
from saccade.kernel_check.worker import kernel_name
from saccade.ops.attention.triton.configs import PASSES
from saccade.runtime.spec import KernelConfig


class KernelClock:
    """A clock for bench.timing.rotate that sees the kernels of one name.

    A kernel is started many times in a row, so that the host's part is hidden behind the device's.
    Of the others, those that nothing timed needs do not run at all.
    """

    def __init__(self, which: str) -> None:
        self.which = which
        self.repeats = 1
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def ready(self, candidate: Runnable) -> Runnable:
        """Compile and load by calling."""
        self.seconds(candidate.run, 1)
        return candidate

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The device's time for the kernel in one call (with what repeats it NaN-safe)."""
        self.repeats, self.events = repeats, []
        run()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.events) / repeats / 1e3

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of every kernel that the library starts in this process."""
        start_one = Launch.__call__

        def start(started: Launch, *call: Any) -> None:
            name = kernel_name(started, PASS_OF[self.which]).removesuffix(", NaN-safe")
            if name == self.which:
                self._timed(lambda: start_one(started, *call))
            elif name not in PASSES or name == "backward_queries":
                # What is timed may read what these write: row statistics and plans.
                start_one(started, *call)

        Launch.__call__ = start  # type: ignore[method-assign]
        try:
            yield
        finally:
            Launch.__call__ = start_one  # type: ignore[method-assign]

    def _timed(self, start: Callable[[], None]) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(self.repeats):
            start()
        after.record()
        self.events.append((before, after))


def runnables(task: Task, configs: list[KernelConfig], device: torch.device) -> dict[str, Runnable]:
    """Calls that differ in one kernel's config, by the config's numbers as text."""
    which = task.problem.which
    inputs, variant = calls.make(task.call, device)
    results = calls.results_of(inputs)

    def runnable(config: KernelConfig) -> Runnable:
        given = whole_config(which, config)

        def run() -> None:
            with torch.no_grad():
                calls.start(inputs, variant, PASS_OF[which], given, results)

        return Runnable(run)

    return {str(config.numbers()): runnable(config) for config in configs}
