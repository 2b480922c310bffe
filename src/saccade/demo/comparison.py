"""Compare Saccade with PyTorch on this machine: errors against float64, and time and memory.

The system's own figure of memory (the peak resident size) counts everything, what kernels allocate
inside included, but it only ever grows. So each measurement has a fresh process to itself.
"""

from __future__ import annotations

import importlib.util
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from rich import box
from rich.table import Table
from torch import Tensor

import saccade
from saccade.demo.model import AttentionCall, mask_of

Rows = Float[Tensor, "batch heads rows dim"]


def by_saccade(
    query: Rows,
    key: Rows,
    value: Rows,
    window: int | None,
    softcap: float | None = None,
    implementation: str | None = None,
) -> Rows:
    """`saccade.attention`, whose masks are never written out in full."""
    score = None if softcap is None else saccade.scores.softcap(softcap)
    options: Any = {"score": score, "implementation": implementation}
    return saccade.attention(query, key, value, mask=mask_of(window), **options)


def by_sdpa(query: Rows, key: Rows, value: Rows, window: int | None) -> Rows:
    """PyTorch's `scaled_dot_product_attention`, which takes a window only as a whole matrix."""
    if window is None:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    mask = visible(query.shape[2], window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)


def by_hand(
    query: Rows, key: Rows, value: Rows, window: int | None, softcap: float | None = None
) -> Rows:
    """softmax(QKᵀ)V as one writes it: every score lies in memory at once."""
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if softcap is not None:
        scores = softcap * (scores / softcap).tanh()
    hidden = ~visible(query.shape[2], window)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ value


def visible(length: int, window: int | None) -> Bool[Tensor, "length length"]:
    """The mask written out: causal, and at most `window` rows back."""
    mask = torch.ones(length, length, dtype=torch.bool).tril_()
    return mask if window is None else mask.triu_(-window)


CONTENDERS: dict[str, Callable[..., Rows]] = {
    "saccade": by_saccade,
    "PyTorch SDPA": by_sdpa,
    "plain PyTorch": by_hand,
}


# ---- errors --------------------------------------------------------------------------------------

DTYPES = (torch.float32, torch.bfloat16)
SOFTCAP = 30.0


class Distance(NamedTuple):
    """How far results are from the reference: the largest error, and the root mean square."""

    worst: float
    rms: float


class LayerErrors(NamedTuple):
    """One contender's errors on one layer in one dtype."""

    layer: str
    dtype: str
    who: str
    output: Distance
    gradient: Distance

    def plain(self) -> dict[str, Any]:
        """The errors as JSON holds them."""
        distances = {"output": self.output._asdict(), "gradient": self.gradient._asdict()}
        return {**self._asdict(), **distances}


def measure_errors(calls: Sequence[AttentionCall], seed: int) -> Iterator[LayerErrors]:
    """Errors of Saccade, SDPA and plain PyTorch on what trained layers attend with.

    All of them, the reference too, start from the same numbers, rounded to the dtype: the errors
    are those of the computation alone. The reference computes in float64. The last layer is
    compared once more with capped scores, which SDPA does not compute.
    """
    capped = calls[-1]._replace(layer=f"{len(calls)} (softcap)", softcap=SOFTCAP)
    for call in (*calls, capped):
        options: dict[str, Any] = {"window": call.window}
        options |= {} if call.softcap is None else {"softcap": call.softcap}
        exact_run = partial(by_saccade, **options, implementation="reference")
        for dtype in DTYPES:
            rows = [tensor.to(dtype) for tensor in (call.query, call.key, call.value)]
            generator = torch.Generator().manual_seed(seed)
            grad_output = torch.randn(call.query.shape, generator=generator).to(dtype)
            exact = results(exact_run, rows, grad_output, torch.float64)
            for who, run in CONTENDERS.items():
                if call.softcap is not None and run is by_sdpa:
                    continue
                got = results(partial(run, **options), rows, grad_output, dtype)
                distances = distance(got[:1], exact[:1]), distance(got[1:], exact[1:])
                yield LayerErrors(call.layer, str(dtype).removeprefix("torch."), who, *distances)


def results(
    run: Callable[..., Tensor], rows: list[Tensor], grad_output: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Output and the gradients of query, key and value, computed in a dtype."""
    leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in rows]
    output = run(*leaves)
    gradients = torch.autograd.grad(output, leaves, grad_output.to(dtype))
    return output.detach(), *gradients


def distance(got: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> Distance:
    """How far results are from the exact ones, over all their numbers."""
    pairs = zip(got, exact, strict=True)
    off = torch.cat([(one.double() - other).flatten() for one, other in pairs])
    return Distance(float(off.abs().max()), float(off.square().mean().sqrt()))


def ratios_to_plain(errors: list[LayerErrors], dtype: str) -> dict[str, float]:
    """For each contender, its largest RMS error as a multiple of plain PyTorch's on that layer."""
    chosen = [one for one in errors if one.dtype == dtype]
    plain = {one.layer: one for one in chosen if one.who == "plain PyTorch"}
    ratios: dict[str, float] = {}
    for one in chosen:
        if one.who != "plain PyTorch":
            base = plain[one.layer]
            ratio = max(one.output.rms / base.output.rms, one.gradient.rms / base.gradient.rms)
            ratios[one.who] = max(ratio, ratios.get(one.who, 0.0))
    return ratios


# ---- time and memory -----------------------------------------------------------------------------

MEASURABLE = sys.platform != "win32"  # Windows has no getrusage
WARM_UP_LENGTH = 64
TIMEOUT_SECONDS = 120

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


class TimedCall(NamedTuple):
    """One attention call of a contender; `window` None is causal."""

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
    # A first call loads libraries and starts threads; that memory does not count.
    small = call._replace(length=WARM_UP_LENGTH)
    _seconds(small, make_inputs(small))
    inputs = make_inputs(call)
    before = peak_bytes()
    _seconds(call, inputs)
    sender.send(peak_bytes() - before)


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
    for pages, divisor in (("SC_AVPHYS_PAGES", 1), ("SC_PHYS_PAGES", 2)):
        with suppress(ValueError, OSError, AttributeError):
            return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE") // divisor
    return 4 * 2**30  # Windows has no sysconf; most laptops have twice this


HEADS = 2
HEAD_DIM = 64
WINDOW = 256
# Plain attention keeps about this many matrices of all scores at its peak, in float32.
PLAIN_MATRICES = 3
PLAIN_LIMIT = 3 * 2**30  # of bytes; more would take laptops into their swap


class Measured(NamedTuple):
    """What one contender took at one length, or why that is not known."""

    pattern: str  # "causal" or "window 256"
    length: int  # of the sequence
    who: str  # the contender
    forward_ms: float = 0.0  # the median of the rounds
    backward_ms: float = 0.0
    peak_bytes: int | None = None  # extra memory of both passes; None: it could not be measured
    left_out: str = ""  # why nothing was measured


def measure_lengths(
    lengths: Sequence[int], window_lengths: Sequence[int], rounds: int, deadline: float
) -> Iterator[list[Measured]]:
    """Measure all contenders, one length after the other, causal and with a window.

    A contender that would not be done by the deadline (of `time.perf_counter`) at a length is left
    out of it; at the shortest one all are measured.
    """
    measure_peak(TimedCall("saccade", 64, HEADS, HEAD_DIM, None))  # starts what others are forks of
    shorter: dict[int | None, list[Measured]] = {None: [], WINDOW: []}
    for length in lengths:
        for window in (None, WINDOW) if length in window_lengths else (None,):
            seconds_left = deadline - time.perf_counter()
            left_out = _left_out(shorter[window], length, rounds, seconds_left)
            measured = list(_at_length(length, window, rounds, left_out))
            shorter[window] = measured
            yield measured


def _left_out(
    shorter: list[Measured], length: int, rounds: int, seconds_left: float
) -> dict[str, str]:
    """Which contenders are not measured at a length, and why, judged by a shorter one."""
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
    times = _median_ms(calls, rounds)
    for who in CONTENDERS:
        if who in left_out:
            yield Measured(pattern, length, who, left_out=left_out[who])
        else:
            yield Measured(pattern, length, who, *times[who], measure_peak(calls[who]))


def _median_ms(calls: dict[str, TimedCall], rounds: int) -> dict[str, tuple[float, float]]:
    """Milliseconds of forward and backward passes; in each round every contender has its turn, so
    that what else the machine does meets all of them."""
    inputs = [make_inputs(call) for call in list(calls.values())[:1]]
    samples: dict[str, list[tuple[float, float]]] = {who: [] for who in calls}
    for _ in range(1 + rounds):  # the first one warms up and is not counted
        for who, call in calls.items():
            samples[who].append(_seconds(call, *inputs))
    return {
        who: (
            1e3 * statistics.median(forward for forward, _ in taken[1:]),
            1e3 * statistics.median(backward for _, backward in taken[1:]),
        )
        for who, taken in samples.items()
    }


def _seconds(call: TimedCall, inputs: Inputs) -> tuple[float, float]:
    """How long a forward and a backward pass take."""
    query, key, value = (tensor.detach().requires_grad_() for tensor in inputs[:3])
    begin = time.perf_counter()
    output = CONTENDERS[call.who](query, key, value, call.window)
    middle = time.perf_counter()
    torch.autograd.grad(output, (query, key, value), inputs[3])
    return middle - begin, time.perf_counter() - middle


# ---- tables and a plot ---------------------------------------------------------------------------

MIB = 2**20
SHORT = {"PyTorch SDPA": "SDPA", "plain PyTorch": "plain"}
# Colours that stay apart for colour-blind readers (Okabe and Ito).
COLOURS = {"saccade": "#0072B2", "PyTorch SDPA": "#E69F00", "plain PyTorch": "#555555"}
MARKERS = {"saccade": "o", "PyTorch SDPA": "s", "plain PyTorch": "^"}


def exactness_table(errors: list[LayerErrors]) -> Table:
    """Errors against the float64 reference, layer by layer."""
    table = table_of(
        "Distance from the float64 reference",
        ["layer", "dtype", "who"],
        ["output\nmax", "\nRMS", "gradient\nmax", "\nRMS"],
    )
    for position, group in groupby(errors, lambda one: one[:2]):
        table.add_section()
        for number, one in enumerate(group):
            table.add_row(
                *(("", "") if number else position),
                SHORT.get(one.who, one.who),  # the table should fit 80 columns
                *(f"{value:.1e}" for value in (*one.output, *one.gradient)),
                style="bold" if one.who == "saccade" else "",
            )
    return table


def comparison_table(measured: list[Measured], pattern: str) -> Table:
    """Time and memory of one pattern, length by length."""
    numbers = ["forward\nms", "backward\nms", "peak extra\nMiB"]
    table = table_of(pattern.capitalize(), ["length", "who"], numbers)
    table.columns[0].justify = "right"
    of_pattern = [one for one in measured if one.pattern == pattern]
    for length, group in groupby(of_pattern, lambda one: one.length):
        table.add_section()
        for number, one in enumerate(group):
            label, style = "" if number else f"{length:,}", "bold" if one.who == "saccade" else ""
            table.add_row(label, one.who, *_cells(one), style=style)
    return table


def _cells(one: Measured) -> tuple[str, str, str]:
    if one.left_out:
        return "–", "–", one.left_out
    memory = "unknown" if one.peak_bytes is None else f"{one.peak_bytes / MIB:,.1f}"
    return f"{one.forward_ms:,.1f}", f"{one.backward_ms:,.1f}", memory


def table_of(title: str, words: list[str], numbers: list[str]) -> Table:
    """An empty table: columns of words, then columns of numbers."""
    table = Table(
        title=title, box=box.SIMPLE_HEAD, title_style="bold", title_justify="left", pad_edge=False
    )
    for name in words:
        table.add_column(name, no_wrap=True)
    for name in numbers:
        table.add_column(name, justify="right", no_wrap=True)
    return table


def matplotlib_missing() -> bool:
    """Whether plots cannot be drawn here."""
    return importlib.util.find_spec("matplotlib") is None


def save_plot(measured: list[Measured], path: Path, device: str) -> None:
    """Draw the comparison into a PNG file."""
    # The object interface: it leaves alone whatever the caller does with pyplot.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    time_axes, memory_axes = figure.subplots(1, 2)
    shown = [one for one in measured if not one.left_out]
    for pattern, who in dict.fromkeys((one.pattern, one.who) for one in shown):
        series = [one for one in shown if (one.pattern, one.who) == (pattern, who)]
        style = {
            "label": f"{who}, {pattern}",
            "color": COLOURS[who],
            "marker": MARKERS[who],
            "linestyle": "-" if pattern == "causal" else "--",
        }
        lengths = [one.length for one in series]
        total_ms = [one.forward_ms + one.backward_ms for one in series]
        time_axes.plot(lengths, total_ms, **style)
        known = [(one.length, one.peak_bytes / MIB) for one in series if one.peak_bytes]
        memory_axes.plot([length for length, _ in known], [peak for _, peak in known], **style)
    _label_axes(time_axes, "Time, forward + backward", "milliseconds", measured)
    _label_axes(memory_axes, "Peak extra memory, forward + backward", "MiB", measured)
    handles, labels = time_axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, frameon=False)
    figure.suptitle(f"Attention on {device}")
    figure.savefig(path)


def _label_axes(axes: Any, title: str, unit: str, measured: list[Measured]) -> None:
    from matplotlib.ticker import LogLocator

    lengths = sorted({one.length for one in measured})
    # A logarithmic axis takes no axes without a point: of memory there is none where no call grew.
    scale = "log" if any(len(line.get_xdata()) for line in axes.lines) else "linear"
    axes.set(title=title, xlabel="sequence length", ylabel=unit, xscale=scale, yscale=scale)
    axes.set_xticks(lengths, [f"{length // 1024}k" for length in lengths])
    axes.minorticks_off()
    if scale == "log":  # 1, 2 and 5 of each power of ten: a few lengths span less than one power
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.grid(True, alpha=0.3)
