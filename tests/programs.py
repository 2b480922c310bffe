"""Programs: what tests start, with all processes that it starts in turn.

None is waited for longer than is said, and none stays. Of a program that takes too long each
process says where it stands, whichever started it: it prints the stacks of its threads, and ends.
Ranks wait for minutes for one that was killed, by the system for want of memory above all.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import NoReturn

MARK = "SACCADE_TEST_PROGRAM"  # in the environment of all processes of a program
GRACE_SECONDS = 5.0  # that a process has to say where it stands, and others to end by themselves
MOST_CHARACTERS = 20_000  # of what a program said, in the message of an error: the last ones


class Program:
    """A program that runs; at the end of a `with` none of its processes does."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path | None = None
    ) -> None:
        """env: of all variables; None: this process's own."""
        self.command, self._mark = list(command), uuid.uuid4().hex
        own = {MARK: self._mark, "PYTHONFAULTHANDLER": "1"}  # stacks are printed by SIGABRT
        # A file, not a pipe: nobody waits for a process that still holds it.
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - closed at the end
        self.process = subprocess.Popen(
            self.command, env={**(os.environ if env is None else env), **own}, cwd=cwd,
            stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said,
        )  # fmt: skip

    def __enter__(self) -> Program:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:  # fmt: skip
        self._end(GRACE_SECONDS if error is None else 0.0)
        self._said.close()

    @property
    def said(self) -> str:
        """All that its processes have printed."""
        size = os.fstat(self._said.fileno()).st_size
        return os.pread(self._said.fileno(), size, 0).decode(errors="replace")

    def until(self, pattern: str, seconds: float) -> re.Match[str]:
        """The first match of a pattern in what it says.

        Raises:
            AssertionError: it has ended, or did not say so in time.
        """
        deadline = time.monotonic() + seconds
        while True:
            ended = self.process.poll() is not None
            found = re.search(pattern, self.said)
            if found is not None:
                return found
            assert not ended, self._message(f"ended by {self.process.returncode}")
            if time.monotonic() > deadline:
                self._stuck(f"did not say {pattern!r} in {seconds:g} seconds")
            time.sleep(0.05)

    def end(self, seconds: float) -> int:
        """Its exit status, once it has ended by itself.

        Raises:
            AssertionError: it did not end in time; each of its processes says where it stood.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            return self.process.wait(seconds)
        self._stuck(f"did not end in {seconds:g} seconds")

    def succeed(self, seconds: float) -> str:
        """What it said, once it has ended well."""
        status = self.end(seconds)
        assert status == 0, self._message(f"ended by {status}")
        return self.said

    def processes(self) -> list[int]:
        """Those that run, the first one first; on systems without /proc that alone."""
        wanted = f"{MARK}={self._mark}".encode()
        found = [] if self.process.poll() is not None else [self.process.pid]
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                number = int(folder.name)
                if wanted in (folder / "environ").read_bytes().split(b"\0"):
                    found += [] if number in found else [number]
        return found

    def _stuck(self, what: str) -> NoReturn:
        """Let each process say where it stands, and raise."""
        stuck = self.processes()
        _send(stuck, signal.SIGSTOP)  # or those that go on would see how others end
        for number in stuck:
            self._write(f"\n---- process {number} stood here: {_command_of(number)}\n")
            _send([number], signal.SIGABRT, signal.SIGCONT)
            deadline = time.monotonic() + GRACE_SECONDS
            while number in self.processes() and time.monotonic() < deadline:
                time.sleep(0.02)
            _send([number], signal.SIGKILL)
        raise AssertionError(self._message(what))

    def _write(self, text: str) -> None:
        os.write(self._said.fileno(), text.encode())

    def _message(self, what: str) -> str:
        said = self.said
        left = f"({len(said) - MOST_CHARACTERS} characters left out) "
        said = said if len(said) <= MOST_CHARACTERS else left + said[-MOST_CHARACTERS:]
        return f"{' '.join(self.command)}\n{what}; {_machine()}; it said:\n{said}"

    def _end(self, grace: float) -> None:
        deadline = time.monotonic() + grace
        while (left := self.processes()) and time.monotonic() < deadline:
            time.sleep(0.02)
        while left:
            _send(left, signal.SIGKILL)
            left = self.processes()
        self.process.wait()


def run(
    command: Sequence[str], seconds: float, env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> str:  # fmt: skip
    """Run a program to its end; what it said.

    Raises:
        AssertionError: it failed, or did not end in time.
    """
    with Program(command, env, cwd) as program:
        return program.succeed(seconds)


def _send(numbers: Iterable[int], *signals: signal.Signals) -> None:
    for number in numbers:
        for each in signals:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, each)


def _command_of(number: int) -> str:
    """How a process was started, and as which rank."""
    with contextlib.suppress(OSError):
        folder = Path("/proc") / str(number)
        variables = (folder / "environ").read_bytes().decode(errors="replace").split("\0")
        ranks = [each for each in variables if re.match(r"(LOCAL_)?RANK=", each)]
        command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        return " ".join([*ranks, *command])[:500]
    return "gone"


def _machine() -> str:
    """How busy the machine is, and how much memory it has left."""
    load = "load " + " ".join(f"{each:.1f}" for each in os.getloadavg())
    with contextlib.suppress(OSError, AttributeError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found = [line for line in lines if line.startswith(("MemTotal", "MemAvailable"))]
        return ", ".join([load, *(" ".join(line.split()) for line in found)])
    return load
