"""Compile threads: machine code that threads find before the call that starts it asks for it.

Triton compiles a kernel in two parts. What reads its source is Python; the passes behind it, LLVM
and the assembler let other threads run, and take three quarters of the time. So kernels are
compiled by a thread each, and take turns at the first part (`turn`): also because Triton's own
reader changes the filters of warnings meanwhile, which are the whole process's.

A call that waits for its kernels is `urgent`: it has its turn before those that are compiled ahead,
of the backward pass of a call whose forward pass has just begun. What fails is raised by the call
that needs it. Threads end with the process: what has not begun is dropped.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from typing import Any

FEWEST = 4  # threads at most, however few cores: they mostly wait for each other's turns


class Turn:
    """A turn at what one thread does at a time; it may be ended before its block ends."""

    def __init__(self, turns: Turns) -> None:
        self._turns, self._over = turns, False

    def end(self) -> None:
        """Let the next one begin."""
        if not self._over:
            self._over = True
            self._turns.give()


class Turns:
    """Who may read sources now: the most urgent first, then in the order in which they came."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[tuple[bool, int]] = []
        self._numbers = itertools.count()
        self._taken = False

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """Wait for a turn, and have it to the end of the block at most."""
        place = not is_urgent(), next(self._numbers)
        with self._changed:
            heapq.heappush(self._waiting, place)
            try:
                self._changed.wait_for(lambda: not self._taken and self._waiting[0] == place)
            finally:  # an interrupt too takes it out of the line
                self._waiting.remove(place)
                heapq.heapify(self._waiting)
                self._changed.notify_all()
            self._taken = True
        turn = Turn(self)
        try:
            yield turn
        finally:
            turn.end()

    def give(self) -> None:
        """End the turn that is taken."""
        with self._changed:
            self._taken = False
            self._changed.notify_all()


class Pool:
    """Threads that end when there is nothing left to do."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[tuple[bool, int, Future[Any], Callable[[], Any]]] = []
        self._numbers = itertools.count()
        self._threads: set[threading.Thread] = set()
        self._closed = False

    def submit(self, work: Callable[[], Any], urgent: bool) -> Future[Any]:
        """Have a thread do something; urgent: before what is not. Cancelled when Python ends."""
        future: Future[Any] = Future()
        with self._lock:
            if not self._closed:
                job = not urgent, next(self._numbers), future, work
                heapq.heappush(self._waiting, job)
                if len(self._threads) < max(FEWEST, os.cpu_count() or 1):
                    self._start()
            if self._closed:
                future.cancel()
        return future

    def _start(self) -> None:
        # Daemons, as Python waits for other threads before it calls `close`.
        thread = threading.Thread(target=self._run, name="saccade-compile", daemon=True)
        try:
            thread.start()
        except RuntimeError:  # Python ends, and starts none any more
            self._closed = not self._threads
            return
        self._threads.add(thread)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._waiting:
                    self._threads.discard(threading.current_thread())
                    return
                later, _, future, work = heapq.heappop(self._waiting)
            _doing.urgent = not later
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(work())
                except BaseException as error:  # the call's that asks for the result
                    future.set_exception(error)
            del future, work  # with the tensors that it was handed

    def close(self) -> None:
        """Begin nothing any more, and wait for what is under way."""
        with self._lock:
            self._closed = True
            for _, _, future, _ in self._waiting:
                future.cancel()
            self._waiting.clear()
            threads = list(self._threads)
        for thread in threads:
            thread.join()


class Doing(threading.local):
    """What a thread does: the caller's own work is urgent."""

    urgent = True


_doing = Doing()


def is_urgent() -> bool:
    """Whether a call waits for what this thread does."""
    return _doing.urgent


_turns, _pool = Turns(), Pool()


def turn() -> AbstractContextManager[Turn]:
    """A turn at reading sources: see `Turns`."""
    return _turns.turn()


def submit(work: Callable[[], Any], urgent: bool) -> Future[Any]:
    """Have a thread do something: see `Pool`."""
    return _pool.submit(work, urgent)


def _begin_anew() -> None:
    """In a child of fork: it has none of the threads, and locks are as they were held."""
    global _turns, _pool
    _turns, _pool = Turns(), Pool()


atexit.register(lambda: _pool.close())
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
