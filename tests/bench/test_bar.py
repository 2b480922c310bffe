"""The bar tells how far a run is and how much longer it takes."""

import io
import time

from rich.console import Console

from saccade.bench.terminal import Bar


def test_the_time_left_follows_from_what_is_done():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    with Bar(console, ["short", "long"], [1.0, 3.0]) as progress:
        progress.now("short: forward")
        for _ in range(2):
            progress.done(0.25)
            time.sleep(0.01)
        progress.case_done()  # whatever of it was skipped is over as well
        (task,) = progress.bar.tasks
        assert task.percentage == 25
        assert task.time_remaining is not None and task.time_remaining > 0
        progress.bar.refresh()
    shown = file.getvalue()
    assert "short: forward" in shown
    assert "case 2 of 2" in shown
    assert "left" in shown
