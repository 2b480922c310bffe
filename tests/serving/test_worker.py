"""Waiting for a device that may never finish."""

import pytest

from saccade.serving.worker import wait_for


class Event:
    """One that comes when it was asked for a number of times; None: never."""

    def __init__(self, after: int | None) -> None:
        self.left, self.waited = after, False

    def query(self) -> bool:
        if self.left is not None:
            self.left -= 1
        return self.left == 0

    def synchronize(self) -> None:
        self.waited = True


def test_an_event_that_comes_is_waited_for() -> None:
    event = Event(5)
    wait_for(event, 30.0)
    assert event.left == 0 and not event.waited


def test_an_event_that_never_comes_is_an_error() -> None:
    with pytest.raises(RuntimeError, match=r"the device has not finished a step in 0\.05 s"):
        wait_for(Event(None), 0.05)


def test_one_process_waits_without_end() -> None:
    event = Event(None)
    wait_for(event, None)
    assert event.waited
