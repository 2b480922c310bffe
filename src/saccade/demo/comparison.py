"""Comparison: time and memory of attention on this machine, over sequence lengths.

The system's own figure of memory (the peak resident size) counts everything, what kernels allocate
inside included, but it only ever grows. So each measurement has a fresh process to itself.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.demo.exactness import CONTENDERS
from saccade.demo.settings import DemoSettings

MEASURABLE = sys.platform != "win32"  # Windows has no getrusage
WARM_UP_LENGTH = 64
TIMEOUT_SECONDS = 120

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class TimedCall(NamedTuple):
    """One attention call: who computes it, on what; `window` None is causal."""

    who: str
    length: int
    heads: int
    head_dim: int
    window: int | None


def measure_peak(call: TimedCall) -> int | None:
    """Bytes beyond the inputs that a forward and a backward pass take at their peak.

    None where the system does not tell, or the process ran out of memory.
    """
    if not MEASURABLE:
        return None
    context = multiprocessing.get_context("forkserver" if sys.platform == "linux" else "spawn")
    if sys.platform == "linux":
        # One process imports PyTorch and computes nothing; the fresh ones are copies of it.
        context.set_forkserver_preload(["torch", "saccade"])
    receiver, sender = context.Pipe(duplex=False)
    # Daemonic: it ends with this process, also when the user interrupts.
    process = context.Process(
        target=_measure, args=(sender, call, torch.get_num_threads()), daemon=True
    )
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(TIMEOUT_SECONDS) else None
    except EOFError:  # it died, most likely for lack of memory
        return None
    finally:
        process.kill()
        process.join()
        process.close()
        receiver.close()


def _measure(sender: Any, call: TimedCall, num_threads: int) -> None:
    torch.set_num_threads(num_threads)
    # A first call loads libraries and starts threads; that memory is nobody's in particular.
    small = call._replace(length=WARM_UP_LENGTH)
    _forward_and_backward(small, make_inputs(small))
    inputs = make_inputs(call)
    before = peak_bytes()
    _forward_and_backward(call, inputs)
    sender.send(peak_bytes() - before)


def _forward_and_backward(call: TimedCall, inputs: Inputs) -> None:
    query, key, value, grad_output = inputs
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    output = CONTENDERS[call.who](query, key, value, call.window)
    torch.autograd.grad(output, leaves, grad_output)


def make_inputs(call: TimedCall) -> Inputs:
    """Query, key, value and the gradient of the output: random, alike on every run."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, call.heads, call.length, call.head_dim)
    query, key, value, grad_output = (torch.randn(shape, generator=generator) for _ in range(4))
    return query, key, value, grad_output


def peak_bytes() -> int:
    """The largest resident size that this process has had."""
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # macOS counts bytes, Linux KiB


def available_bytes() -> int:
    """The memory that is free for new work, or half of all where only that is known."""
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (ValueError, OSError, AttributeError):
        pass
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
    except (ValueError, OSError, AttributeError):
        return 4 * 2**30  # Windows has no sysconf; most laptops have twice this


HEADS = 2
HEAD_DIM = 64
WINDOW = 256
# Plain attention keeps about this many matrices of all scores at its peak, in float32.
PLAIN_MATRICES = 3
PLAIN_LIMIT = 3 * 2**30  # of bytes; more would take laptops into their swap


class Measured(NamedTuple):
    """What one contender took at one length, or why that is not known.

    Attributes:
        pattern: "causal" or "window 256".
        length: of the sequence.
        who: the contender.
        forward_ms: the median of the rounds.
        backward_ms: the median of the rounds.
        peak_bytes: extra memory of both passes together, None where it could not be measured.
        left_out: why nothing was measured, "" where it was.
    """

    pattern: str
    length: int
    who: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    peak_bytes: int | None = None
    left_out: str = ""


def compare(settings: DemoSettings, deadline: float) -> Iterator[list[Measured]]:
    """Measure all contenders, one length after the other, causal and with a window.

    Whoever would not be done by the deadline (of `time.perf_counter`) at a length is left out of
    it; of the shortest one nobody is.
    """
    measure_peak(
        TimedCall("saccade", 64, HEADS, HEAD_DIM, None)
    )  # starts the process that is copied
    shorter: dict[int | None, list[Measured]] = {None: [], WINDOW: []}
    for length in settings.lengths:
        for window in (None, WINDOW) if length in settings.window_lengths else (None,):
            seconds_left = deadline - time.perf_counter()
            left_out = _left_out(shorter[window], length, settings.rounds, seconds_left)
            measured = list(_at_length(length, window, settings.rounds, left_out))
            shorter[window] = measured
            yield measured


def _left_out(
    shorter: list[Measured], length: int, rounds: int, seconds_left: float
) -> dict[str, str]:
    """Who is not measured at a length, and why, judged by a shorter one."""
    reasons = {one.who: one.left_out for one in shorter if one.left_out}
    runs = rounds + 3  # one to warm up, and about two for the process that measures memory
    for one in shorter:
        if one.left_out:
            continue
        growth = (length / one.length) ** 2  # the work grows with the square of the length
        needed = runs * growth * (one.forward_ms + one.backward_ms) / 1e3
        # Plain attention is the slowest and must not take the time that others need.
        allowed = seconds_left / 4 if one.who == "plain PyTorch" else seconds_left
        if needed > allowed:
            reasons[one.who] = f"skipped: {needed:.0f} s"
        else:
            seconds_left -= needed
    needed_bytes = PLAIN_MATRICES * HEADS * 4 * length**2
    if needed_bytes > min(PLAIN_LIMIT, available_bytes() // 2):
        reasons["plain PyTorch"] = f"too large: {needed_bytes / 2**30:.0f} GB"
    return reasons


def _at_length(
    length: int, window: int | None, rounds: int, left_out: dict[str, str]
) -> Iterator[Measured]:
    pattern = "causal" if window is None else f"window {window}"
    calls = {
        who: TimedCall(who, length, HEADS, HEAD_DIM, window)
        for who in CONTENDERS
        if who not in left_out
    }
    times = _times(calls, rounds)
    for who in CONTENDERS:
        if who in left_out:
            yield Measured(pattern, length, who, left_out=left_out[who])
        else:
            forward, backward = (1e3 * statistics.median(seconds) for seconds in times[who])
            yield Measured(pattern, length, who, forward, backward, measure_peak(calls[who]))


def _times(calls: dict[str, TimedCall], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of forward and backward passes; rounds are interleaved, so that all of them see
    the same moods of the machine."""
    times: dict[str, tuple[list[float], list[float]]] = {who: ([], []) for who in calls}
    if not calls:
        return times
    inputs = make_inputs(next(iter(calls.values())))
    for round_number in range(-1, rounds):  # the first one warms up and is not counted
        for who, call in calls.items():
            taken = _time_once(call, inputs)
            if round_number >= 0:
                for seconds, each in zip(times[who], taken, strict=True):
                    seconds.append(each)
    return times


def _time_once(call: TimedCall, inputs: Inputs) -> tuple[float, float]:
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    begin = time.perf_counter()
    output = CONTENDERS[call.who](query, key, value, call.window)
    middle = time.perf_counter()
    torch.autograd.grad(output, (query, key, value), inputs[3])
    return middle - begin, time.perf_counter() - middle
