"""Interrupts: KeyboardInterrupt at the n-th line or instruction that some files run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import saccade

SOURCE = Path(str(saccade.__file__)).parent


class Interrupt:
    """Raises KeyboardInterrupt before the line-th line (from 0) that code of these folders runs.

    It is raised once, in the thread that is `armed`, wherever that is: between any two lines, and
    where a block is left as well.

    Args:
        folders: of Saccade's, or whole paths; files as well.
        instructions: whether Python's instructions are counted, of which a line has several.
    """

    def __init__(self, line: int, *folders: str, instructions: bool = False):
        self.came = False
        self._left = line
        self._inside = tuple(str(SOURCE / folder) for folder in folders)
        self._instructions = instructions

    @contextmanager
    def armed(self) -> Iterator[None]:
        """Lines count, and the interrupt may come, in this block."""
        before = sys.gettrace()
        sys.settrace(None if self.came else self._of_call)
        try:
            yield
        finally:
            sys.settrace(before)

    def _of_call(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self._inside):
            return None
        frame.f_trace_opcodes = self._instructions
        return self._of_line

    def _of_line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == ("opcode" if self._instructions else "line") and not self.came:
            self._left -= 1
            if self._left < 0:
                self.came = True
                del frame  # no interrupt by a signal keeps it alive
                raise KeyboardInterrupt
        return self._of_line


@contextmanager
def ends_within(seconds: float) -> Iterator[None]:
    """End the whole test run if the block has not ended by then: what spins never would."""
    import faulthandler

    assert threading.current_thread() is threading.main_thread()
    faulthandler.dump_traceback_later(seconds, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
