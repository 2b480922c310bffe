"""Time saccade.integrations.flex_attention beside PyTorch's compiled FlexAttention, on a GPU.

Usage: python tools/flex_times.py [CASE ...] [--lengths 4096,16384] [--dims 64,128] [--json FILE]
       python tools/flex_times.py --compile [CASE ...]      (fill both caches, time nothing)

--help says more.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs

from saccade.integrations import flex_attention as ours

HELP = """\
The same mask_mod and score_mod, block masks made by each library's own function, bf16, 16 heads, as
many tokens in all as the longest length has. FlexAttention under torch.compile(dynamic=False), as
its documents say. Each pass is timed by CUDA events, ours and theirs in turns whose order changes,
after a sleeping kernel so that the host does not show; a ratio is their median over ours.
"""
EPILOG = """\
Before that a first call is timed, forward and backward, of either; and one with another number in
the same functions. They take what is in the caches: for empty ones give fresh folders by
TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and SACCADE_CACHE.

--compile fills the caches, so that several processes may do that at once and one then time.
"""
HEADS, ROUNDS, REPEATS = 16, 7, 4
SLEEP = 20_000_000  # cycles: 10 ms, in which the host puts all calls of a turn into the queue
Function = Callable[..., Any]


class FlexCase(NamedTuple):
    """A mask and a score function of one call, made for a length and a number; or None."""

    mask: Callable[[int, int], Function] | None
    score: Callable[[int, int], Function] | None = None
    number: int = 0
    other: int = 0  # another number for the same functions; 0: they have none


def causal(b: Any, h: Any, q: Any, k: Any) -> Any:
    """Rows see themselves and what comes before."""
    return q >= k


def window(length: int, size: int) -> Function:
    """And no more than so many before."""
    return lambda b, h, q, k: (q >= k) & (q - k <= size)


def documents(length: int, count: int) -> Function:
    """As many documents of random lengths, causal."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.randperm(length - 1, generator=generator)[: count - 1] + 1
    ids = torch.searchsorted(ends.sort().values, torch.arange(length), right=True).to("cuda")
    return lambda b, h, q, k: (ids[q] == ids[k]) & (q >= k)


def prefix(length: int, size: int) -> Function:
    """The first rows are seen by all."""
    return lambda b, h, q, k: (q >= k) | (k < size)


def dilated(length: int, step: int) -> Function:
    """Every so many-th row of a window."""
    return lambda b, h, q, k: (q >= k) & (q - k < 2048) & ((q - k) % step == 0)


def natten(length: int, kernel: int) -> Function:
    """Neighbourhood attention on a square picture."""
    width = math.isqrt(length)

    def mask_mod(b: Any, h: Any, q: Any, k: Any) -> Any:
        row = (q // width).clamp(kernel // 2, width - 1 - kernel // 2)
        column = (q % width).clamp(kernel // 2, width - 1 - kernel // 2)
        near = (row - k // width).abs() <= kernel // 2
        return near & ((column - k % width).abs() <= kernel // 2)

    return mask_mod


def alibi(length: int, number: int) -> Function:
    """Linear biases."""
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device="cuda") / HEADS)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def softcap(length: int, cap: int) -> Function:
    """Scores bent into a range."""
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def relative(length: int, number: int) -> Function:
    """A bias by distance and head, from a table."""
    table = torch.randn(HEADS, 2 * length - 1, device="cuda")
    return lambda score, b, h, q, k: score + table[h, q - k + length - 1]


def plain(length: int, number: int) -> Function:
    """The causal mask, of no number."""
    return causal


CASES = {
    "causal": FlexCase(plain),
    "window": FlexCase(window, None, 1024, 1000),
    "documents": FlexCase(documents, None, 8),
    "prefix": FlexCase(prefix, None, 1000, 1100),
    "dilated": FlexCase(dilated, None, 4, 6),
    "natten": FlexCase(natten, None, 13, 11),
    "alibi": FlexCase(plain, alibi),
    "softcap": FlexCase(plain, softcap, 20, 30),
    "relative": FlexCase(None, relative),
}


class Failed(Exception):
    """One of the libraries cannot serve a case."""


class Timed(NamedTuple):
    """A library's call: forward with gradients wanted, forward alone, and the gradients."""

    run: Callable[[], Tensor]
    leaves: list[Tensor]
    given: Tensor

    def forward(self) -> Tensor:
        """A pass without gradients."""
        with torch.no_grad():
            return self.run()

    def first(self) -> tuple[float, float]:
        """Seconds of a first pass, and of its backward pass, until the GPU is done."""
        torch.cuda.synchronize()
        begin = time.perf_counter()
        output = self.run()
        torch.cuda.synchronize()
        middle = time.perf_counter()
        torch.autograd.grad(output, self.leaves, self.given)
        torch.cuda.synchronize()
        return middle - begin, time.perf_counter() - middle


def made(name: str, length: int, dim: int, tokens: int, number: int) -> dict[str, Timed]:
    """Both calls over the same rows."""
    case, batch = CASES[name], max(1, tokens // length)
    shape = batch, HEADS, length, dim
    rows = [torch.randn(shape, device="cuda").bfloat16().requires_grad_() for _ in range(3)]
    given = torch.randn(shape, device="cuda").bfloat16()
    score = None if case.score is None else case.score(length, number)
    mask = None if case.mask is None else case.mask(length, number)
    compiled: Any = torch.compile(theirs.flex_attention, dynamic=False)
    found = {}
    for library, by, call in (("ours", ours, ours.flex_attention), ("theirs", theirs, compiled)):
        blocks = None
        if mask is not None:
            blocks = by.create_block_mask(mask, None, None, length, length, device="cuda")

        def run(call: Any = call, blocks: Any = blocks) -> Tensor:
            return call(*rows, score_mod=score, block_mask=blocks)

        found[library] = Timed(run, rows, given)
    return found


def passes(call: Timed) -> dict[str, Callable[[], Any]]:
    """What is timed."""
    output = call.run()
    return {
        "forward": call.forward,
        "backward": lambda: torch.autograd.grad(output, call.leaves, call.given, retain_graph=True),
    }


def milliseconds(work: Callable[[], Any]) -> float:
    """The GPU's time of a call, of several in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(SLEEP)
    begin.record()
    for _ in range(REPEATS):
        work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / REPEATS


def difference(calls: dict[str, Timed]) -> float:
    """The largest difference between both outputs."""
    found = [call.forward().float() for call in calls.values()]
    return float((found[0] - found[1]).abs().max())


def timed(name: str, length: int, dim: int, tokens: int, compile_only: bool) -> dict[str, Any]:
    """One line of results."""
    setattr(sys.modules["torch._functorch.config"], "donated_buffer", False)  # noqa: B010
    torch._dynamo.reset()
    case = CASES[name]
    calls = made(name, length, dim, tokens, case.number)
    row: dict[str, Any] = {"case": name, "length": length, "head_dim": dim}
    for library, call in calls.items():
        try:
            row[f"first_{library}_s"] = call.first()
        except Exception as error:  # whatever a compiler raises
            raise Failed(f"{library} failed: {type(error).__name__}: {error}"[:1000]) from error
    if compile_only:
        return row
    if case.other:
        for library, call in made(name, length, dim, tokens, case.other).items():
            row[f"other_number_{library}_s"] = call.first()
    row["difference"] = difference(calls)
    work = {library: passes(call) for library, call in calls.items()}
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        turns = [*itertools.product(("forward", "backward"), calls)]
        for which, library in turns if number % 2 else turns[::-1]:
            spent = milliseconds(work[library][which])
            taken.setdefault((which, library), []).append(spent)
    for (which, library), values in taken.items():
        row[f"{which}_{library}_ms"] = statistics.median(values)
    for which in ("forward", "backward"):
        row[f"{which}_ratio"] = row[f"{which}_theirs_ms"] / row[f"{which}_ours_ms"]
    row["device"] = torch.cuda.get_device_name()
    return row


def main() -> int:
    """Time every case; the exit status, 1 if one failed."""
    parser = argparse.ArgumentParser(
        "flex_times.py", description=HELP, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"of {', '.join(CASES)}")
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--dims", default="64,128")
    parser.add_argument("--compile", action="store_true", help="only fill the caches")
    parser.add_argument("--json", type=Path, help="append a line for each case")
    asked = parser.parse_args()
    lengths, dims = (
        [int(part) for part in text.split(",")] for text in (asked.lengths, asked.dims)
    )
    if unknown := [name for name in asked.cases if name not in CASES]:
        parser.error(f"CASE: got {unknown[0]}, takes {', '.join(CASES)}")
    ratios: dict[str, list[float]] = {"forward": [], "backward": []}
    failed = 0
    print(f"{'':28}{'forward':>10}{'backward':>10}{'first':>16}{'other number':>16}")
    for name, length, dim in itertools.product(asked.cases or CASES, lengths, dims):
        try:
            row = timed(name, length, dim, max(lengths), asked.compile)
        except Failed as error:
            print(f"{name} {length} d{dim}: {error}", flush=True)
            failed = 1
            continue
        if asked.json:
            with asked.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        seconds = [
            " / ".join(f"{sum(row[f'{key}_{library}_s']):.2f}" for library in ("ours", "theirs"))
            if f"{key}_ours_s" in row else ""
            for key in ("first", "other_number")
        ]  # fmt: skip
        shown = [f"{row[f'{which}_ratio']:.2f}" if not asked.compile else "" for which in ratios]
        at = f"{name} {length} d{dim}"
        print(f"{at:28}{shown[0]:>10}{shown[1]:>10}{seconds[0]:>16}{seconds[1]:>16}", flush=True)
        for which, values in ratios.items():
            if not asked.compile:
                values.append(row[f"{which}_ratio"])
        gc.collect()
        torch.cuda.empty_cache()
    if ratios["forward"]:
        means = [f"{statistics.geometric_mean(values):.2f}" for values in ratios.values()]
        print(f"{'geometric mean':28}{means[0]:>10}{means[1]:>10}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
