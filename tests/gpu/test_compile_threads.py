"""Threads that compile: who reads sources when, what fails, and how they end."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from saccade.gpu import compile_threads, machine_code
from saccade.gpu.compile_threads import Pool, Turns

SOON = 20.0  # seconds that a test waits for what comes at once


def wait_for(what: Any) -> None:
    end = time.perf_counter() + SOON
    while not what():
        assert time.perf_counter() < end
        time.sleep(1e-3)


def test_one_thread_reads_at_a_time_and_the_urgent_one_first() -> None:
    turns, order = Turns(), []

    def read(urgent: bool, name: str) -> None:
        compile_threads._doing.urgent = urgent
        with turns.turn():
            order.append(name)

    asked = [(False, "second"), (False, "third"), (True, "first")]
    with turns.turn():
        threads = [threading.Thread(target=read, args=one) for one in asked]
        for number, thread in enumerate(threads, 1):
            thread.start()
            wait_for(lambda number=number: len(turns._waiting) == number)
        assert not order
    for thread in threads:
        thread.join(SOON)
    assert order == ["first", "second", "third"]


def test_a_turn_ends_once_and_early() -> None:
    turns = Turns()
    with turns.turn() as first:
        first.end()
        with turns.turn():
            first.end()
            assert turns._taken
    assert not turns._taken


def test_a_failure_ends_a_turn_and_an_interrupt_leaves_the_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    turns = Turns()
    with pytest.raises(ZeroDivisionError), turns.turn():
        _ = 1 // 0

    def interrupted(condition: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(turns._changed, "wait_for", interrupted)
        with pytest.raises(KeyboardInterrupt), turns.turn():
            raise AssertionError("it has no turn")
    assert not turns._waiting
    with turns.turn():
        pass


def test_a_pool_gives_what_was_done_or_why_not_and_its_threads_end() -> None:
    pool = Pool()
    right, wrong = pool.submit(lambda: 3, True), pool.submit(lambda: 1 // 0, False)
    assert right.result(SOON) == 3
    with pytest.raises(ZeroDivisionError):
        wrong.result(SOON)
    wait_for(lambda: not pool._threads)
    assert pool.submit(lambda: 4, True).result(SOON) == 4


def test_what_is_urgent_is_done_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "FEWEST", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    pool, go, order = Pool(), threading.Event(), []

    def note(name: str) -> None:
        order.append((name, compile_threads.is_urgent()))

    first = pool.submit(lambda: go.wait(SOON), False)
    rest = [pool.submit(lambda: note("later"), False), pool.submit(lambda: note("urgent"), True)]
    go.set()
    for one in (first, *rest):
        one.result(SOON)
    assert order == [("urgent", True), ("later", False)]


def test_a_closed_pool_drops_what_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_threads, "FEWEST", 1)
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    pool, begun, go = Pool(), threading.Event(), threading.Event()

    def work() -> str:
        begun.set()
        go.wait(SOON)
        return "done"

    running, waiting = pool.submit(work, False), pool.submit(work, False)
    assert begun.wait(SOON)
    closer = threading.Thread(target=pool.close)
    closer.start()
    wait_for(lambda: waiting.cancelled())
    assert closer.is_alive()
    go.set()
    closer.join(SOON)
    assert running.result(SOON) == "done" and pool.submit(work, True).cancelled()


EXIT = """
import os, time
from saccade.gpu import compile_threads
compile_threads.FEWEST, os.cpu_count = 1, lambda: 1
compile_threads.submit(lambda: (time.sleep(0.2), print("ended")), False)
compile_threads.submit(lambda: print("never"), False)
time.sleep(0.05)
"""
FORK = """
import os, threading
from saccade.gpu import compile_threads, machine_code
go = threading.Event()
def hold():
    with compile_threads.turn():
        go.wait()
waits = compile_threads.submit(hold, False)
while not compile_threads._turns._taken:
    pass
machine_code._found["key"] = waits
if os.fork() == 0:
    with compile_threads.turn():
        print(compile_threads.submit(lambda: 5, True).result(20), machine_code._found, flush=True)
    os._exit(0)
os.wait()
go.set()
"""


@pytest.mark.parametrize(
    ("program", "said"),
    [
        (EXIT, "ended"),
        pytest.param(
            FORK, "5 {}",
            marks=pytest.mark.skipif(sys.platform == "win32", reason="it has no fork"),
        ),
    ],
    ids=["exit", "fork"],
)  # fmt: skip
def test_a_process_ends_and_forks_meanwhile(program: str, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program], capture_output=True, text=True,
        timeout=120, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stdout.strip()) == (0, said), done.stderr


# ---- what is found by threads -------------------------------------------------------------------


class Loaded:
    """A variant, and what was known of it."""

    def __init__(self, *given: Any) -> None:
        self.known = given[-1]


class Asked:
    """A kernel, and arguments of it."""

    __name__, key, is_gluon = "asked", (), False


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What looking for a kernel gives, or raises, in order; the last one again and again."""
    results: list[Any] = ["machine code"]

    def find(*given: Any) -> Any:
        result = results.pop(0) if len(results) > 1 else results[0]
        if isinstance(result, BaseException):
            raise result
        return result

    monkeypatch.setattr(machine_code, "find", find)
    monkeypatch.setattr(machine_code, "Variant", Loaded)
    monkeypatch.setattr(machine_code, "architecture_of", lambda device: "sm_90")
    for memory in ("_variants", "_found"):
        monkeypatch.setattr(machine_code, memory, {})
    return results


def known(kernel: Any) -> Any:
    """What is known of a kernel when a call loads it."""
    loaded: Any = machine_code.variant(kernel, kernel, {}, 0)
    return loaded.known


def test_what_fails_ahead_is_raised_by_the_call_that_needs_it_and_tried_again(
    found: list[Any],
) -> None:
    kernel: Any = Asked()
    found.insert(0, ValueError("it does not compile"))
    machine_code.begin_to_find([(kernel, kernel, {})], 0, urgent=False)
    with pytest.raises(ValueError, match="it does not compile"):
        known(kernel)
    assert known(kernel) == "machine code"
    assert not machine_code._found


def test_kernels_that_take_longest_are_begun_first(
    found: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[Any] = []

    def submit(work: Any, urgent: bool) -> Future[Any]:
        begun.append(work.args[0])
        return Future()

    monkeypatch.setattr(compile_threads, "submit", submit)
    kernels: list[Any] = [Asked() for _ in range(3)]
    kernels[2].is_gluon = True
    machine_code.begin_to_find([(kernel, kernel, {}) for kernel in kernels], 0, urgent=False)
    assert begun == [kernels[2], kernels[0], kernels[1]]


def test_an_interrupted_call_leaves_its_thread_at_work(
    found: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernel: Any = Asked()
    found.append(ValueError("it is looked for no second time"))

    def interrupted(self: Any, timeout: float | None = None) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(Future, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            known(kernel)
    assert known(kernel) == "machine code"


def test_a_call_at_the_end_of_python_finds_its_kernels_itself(
    found: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cancelled(work: Any, urgent: bool) -> Future[Any]:
        future: Future[Any] = Future()
        future.cancel()
        return future

    monkeypatch.setattr(compile_threads, "submit", cancelled)
    assert known(Asked()) is None  # `Variant` looks for it then
    assert not machine_code._found
    with pytest.raises(CancelledError):
        cancelled(None, True).result()
