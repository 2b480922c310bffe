"""Comparison: time and memory of attention on this machine, over sequence lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch

from saccade.demo.contenders import CONTENDERS
from saccade.demo.memory import Call, Inputs, available_bytes, make_inputs, measure_peak
from saccade.demo.settings import Settings

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


def compare(settings: Settings, deadline: float) -> Iterator[list[Measured]]:
    """Measure all contenders, one length after the other, causal and with a window.

    Whoever would not be done by the deadline (of `time.perf_counter`) at a length is left out of
    it; of the shortest one nobody is.
    """
    measure_peak(Call("saccade", 64, HEADS, HEAD_DIM, None))  # starts the process that is copied
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
        who: Call(who, length, HEADS, HEAD_DIM, window) for who in CONTENDERS if who not in left_out
    }
    times = _times(calls, rounds)
    for who in CONTENDERS:
        if who in left_out:
            yield Measured(pattern, length, who, left_out=left_out[who])
        else:
            forward, backward = (1e3 * statistics.median(seconds) for seconds in times[who])
            yield Measured(pattern, length, who, forward, backward, measure_peak(calls[who]))


def _times(calls: dict[str, Call], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
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


def _time_once(call: Call, inputs: Inputs) -> tuple[float, float]:
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    begin = time.perf_counter()
    output = CONTENDERS[call.who](query, key, value, call.window)
    middle = time.perf_counter()
    torch.autograd.grad(output, (query, key, value), inputs[3])
    return middle - begin, time.perf_counter() - middle
