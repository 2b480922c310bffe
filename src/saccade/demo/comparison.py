"""Comparison: time and memory of attention on this machine, over sequence lengths."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.demo.contenders import CONTENDERS
from saccade.demo.memory import Call, Peak, available_bytes, make_inputs, measure_peak
from saccade.demo.settings import Settings

HEADS = 2
HEAD_DIM = 64
WINDOW = 256
# Plain attention keeps about this many matrices of all scores at its peak, in float32: the
# scores, the masked scores, the weights, and the gradients of two of them.
PLAIN_MATRICES = 5
PLAIN_LIMIT = 3 * 2**30  # of bytes; more would take laptops into their swap


class Measured(NamedTuple):
    """What one contender took at one length, or why that is not known.

    Attributes:
        pattern: "causal" or "window 256".
        length: of the sequence.
        who: the contender.
        forward_ms: the median of the rounds.
        backward_ms: the median of the rounds.
        peak: extra memory, None where it could not be measured.
        left_out: why nothing was measured, "" where it was.
    """

    pattern: str
    length: int
    who: str
    forward_ms: float = 0.0
    backward_ms: float = 0.0
    peak: Peak | None = None
    left_out: str = ""


def compare(settings: Settings) -> Iterator[list[Measured]]:
    """Measure all contenders, one pattern and length after the other, within the time given."""
    deadline = time.perf_counter() + settings.comparison_seconds
    measure_peak(Call("saccade", 64, HEADS, HEAD_DIM, None))  # starts the process that is copied
    for window, lengths in ((None, settings.lengths), (WINDOW, settings.window_lengths)):
        pattern = "causal" if window is None else f"window {window}"
        spent, previous = 0.0, 0
        for length in lengths:
            # The cost grows with the square of the length, for whoever is slowest.
            needed = spent * (length / previous) ** 2 if previous else 0.0
            if needed > deadline - time.perf_counter():
                why = f"no time ({needed:.0f} s)"
                yield [Measured(pattern, length, who, left_out=why) for who in CONTENDERS]
                continue
            begin = time.perf_counter()
            yield list(_at_length(pattern, length, window, settings.rounds))
            spent, previous = time.perf_counter() - begin, length


def _at_length(pattern: str, length: int, window: int | None, rounds: int) -> Iterator[Measured]:
    calls = {who: Call(who, length, HEADS, HEAD_DIM, window) for who in CONTENDERS}
    too_large = _too_large(length)
    if too_large:
        del calls["plain PyTorch"]
    times = _times(calls, rounds)
    for who in CONTENDERS:
        if who in calls:
            forward, backward = (1e3 * statistics.median(seconds) for seconds in times[who])
            yield Measured(pattern, length, who, forward, backward, measure_peak(calls[who]))
        else:
            yield Measured(pattern, length, who, left_out=too_large)


def _too_large(length: int) -> str:
    """Why plain attention is not run at a length; "" if it is."""
    needed = PLAIN_MATRICES * HEADS * 4 * length**2
    if needed <= min(PLAIN_LIMIT, available_bytes() // 2):
        return ""
    return f"too large: {needed / 2**30:.0f} GB"


def _times(calls: dict[str, Call], rounds: int) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of forward and backward passes; rounds are interleaved, so that all of them see
    the same moods of the machine."""
    inputs = make_inputs(next(iter(calls.values())))
    times: dict[str, tuple[list[float], list[float]]] = {who: ([], []) for who in calls}
    for round_number in range(-1, rounds):  # the first one warms up and is not counted
        for who, call in calls.items():
            taken = _time_once(call, inputs)
            if round_number >= 0:
                for seconds, each in zip(times[who], taken, strict=True):
                    seconds.append(each)
    return times


def _time_once(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor, Tensor]
) -> tuple[float, float]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs[:3]]
    begin = time.perf_counter()
    output = CONTENDERS[call.who](*leaves, call.window)
    middle = time.perf_counter()
    torch.autograd.grad(output, leaves, inputs[3])
    return middle - begin, time.perf_counter() - middle
