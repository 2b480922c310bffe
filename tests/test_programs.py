"""Programs that tests start: what is said of those that do not end, and that none stays."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import programs
import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="there is no /proc")

# One starts another in a session of its own, as torchrun does, and waits for it.
STARTS = """
import subprocess, sys, time
def waits_for_another():
    subprocess.run([sys.executable, "-c", sys.argv[1]], start_new_session=True)
    LAST
print("begins", flush=True)
waits_for_another()
"""
SLEEPS = (
    "import time\ndef sleeps_on():\n    time.sleep(600)\nprint('asleep', flush=True)\nsleeps_on()"
)


def started(inner: str, last: str = "pass") -> list[str]:
    return [sys.executable, "-c", STARTS.replace("LAST", last), inner]


def gone(numbers: list[int]) -> bool:
    """Whether none of some processes runs; one that its parent has not asked for does not."""
    states = [Path(f"/proc/{number}/stat") for number in numbers]
    return all(not s.exists() or s.read_text().rpartition(")")[2].split()[0] == "Z" for s in states)


def test_each_process_says_where_it_stood() -> None:
    begin = time.monotonic()
    with programs.Program(started(SLEEPS)) as program:
        program.until("asleep", 60)
        numbers = program.processes()
        assert len(numbers) == 2 and numbers[0] == program.process.pid
        with pytest.raises(AssertionError, match=r"did not end in 0.5 seconds; load ") as error:
            program.end(0.5)
    said = str(error.value)
    for number, where in zip(numbers, ("in waits_for_another", "in sleeps_on"), strict=True):
        said = said.partition(f"---- process {number} stood here: ")[2]
        assert where in said.partition("\n---- process")[0]
    assert gone(numbers)
    assert time.monotonic() - begin < 60


def test_a_process_that_was_stopped_says_so_too() -> None:
    with programs.Program(started(SLEEPS)) as program:
        program.until("asleep", 60)
        os.kill(program.processes()[1], signal.SIGSTOP)
        with pytest.raises(AssertionError, match="in sleeps_on"):
            program.until("never said", 0.2)


def test_what_outlives_the_first_process_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(programs, "GRACE_SECONDS", 0.1)
    leaves = f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SLEEPS!r}])"
    begin = time.monotonic()
    with programs.Program([sys.executable, "-c", leaves]) as program:
        assert program.end(60) == 0  # and nobody waits for the other one
        left = program.processes()
        assert len(left) == 1
    assert gone(left)
    assert time.monotonic() - begin < 60


def test_errors_say_what_was_said() -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended by 3; .* it said:\nbegins\nfails\n"):
        programs.run(started("print('fails', flush=True)", last="sys.exit(3)"), 60)
    ends = pytest.raises(AssertionError, match="ended by 0")
    with programs.Program(started("pass")) as program, ends:
        program.until("never said", 60)
    assert programs.run(started("print('works')"), 60) == "begins\nworks\n"
