"""Time saccade.integrations.flex_attention beside PyTorch's compiled FlexAttention, on a GPU.

Usage: python tools/flex_times.py [--case GLOB] [--length GLOB] [--dim GLOB] [--json FILE]
                                  [--plot FILE] [--jobs N] [--seconds S] [--again]

--help says more.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
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
First, processes side by side (--jobs) make the first call of each library, forward and backward,
and one with another number in the same functions, which fills the caches; those seconds are theirs,
and longer than alone. They take what is in the caches: for empty ones give fresh folders by
TORCHINDUCTOR_CACHE_DIR, TRITON_CACHE_DIR and SACCADE_CACHE. Then one process times, and ends after
--seconds; a later run with the same --json goes on with what is missing.

  flex_times.py --json times.json --plot times.png         all, in about 4 minutes on 16 cores
  flex_times.py --case 'dil*' --dim 64 --json times.json --again
"""
LENGTHS, DIMS = (4096, 16384), (64, 128)
HEADS, ROUNDS, REPEATS = 16, 7, 4
TOKENS = max(LENGTHS)
SLEEP = 20_000_000  # cycles: 10 ms, in which the host puts all calls of a turn into the queue
COMPILING = 0.6  # of all seconds, after which no other compiler is started
LIBRARIES = ("ours", "theirs")
DEVICE = "cuda"
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
    ids = torch.searchsorted(ends.sort().values, torch.arange(length), right=True).to(DEVICE)
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
    slopes = torch.exp2(-8.0 * torch.arange(1, HEADS + 1, device=DEVICE) / HEADS)
    return lambda score, b, h, q, k: score + slopes[h] * (k - q)


def softcap(length: int, cap: int) -> Function:
    """Scores bent into a range."""
    return lambda score, b, h, q, k: cap * torch.tanh(score / cap)


def relative(length: int, number: int) -> Function:
    """A bias by distance and head, from a table."""
    generator = torch.Generator().manual_seed(0)  # the same for both libraries
    table = torch.randn(HEADS, 2 * length - 1, generator=generator).to(DEVICE)
    return lambda score, b, h, q, k: score + table[h, q - k + length - 1]


def plain(length: int, number: int) -> Function:
    """The causal mask, of no number."""
    return causal


CASES = {  # what takes least to compile comes first
    "causal": FlexCase(plain),
    "window": FlexCase(window, None, 1024, 1000),
    "prefix": FlexCase(prefix, None, 1000, 1100),
    "documents": FlexCase(documents, None, 8),
    "softcap": FlexCase(plain, softcap, 20, 30),
    "alibi": FlexCase(plain, alibi),
    "dilated": FlexCase(dilated, None, 4, 6),
    "relative": FlexCase(None, relative),
    "natten": FlexCase(natten, None, 13, 11),
}


class Cell(NamedTuple):
    """One line of results: a case of a length and a head_dim."""

    case: str
    length: int
    dim: int

    def __str__(self) -> str:
        return f"{self.case} {self.length} d{self.dim}"


def cells(cases: Sequence[str], lengths: Sequence[str], dims: Sequence[str]) -> list[Cell]:
    """The cells that globs fit, in order.

    Raises:
        ValueError: for a glob that fits nothing.
    """
    chosen = []
    for name, globs, values in (
        ("--case", cases, CASES), ("--length", lengths, LENGTHS), ("--dim", dims, DIMS),
    ):  # fmt: skip
        fit = [one for one in values if any(fnmatchcase(str(one), glob) for glob in globs)]
        idle = [glob for glob in globs if not any(fnmatchcase(str(one), glob) for one in values)]
        if idle:
            raise ValueError(f"{name}: got {idle[0]}, takes {', '.join(map(str, values))}")
        chosen.append(fit)
    return [
        Cell(case, length, dim) for case, dim, length in itertools.product(*chosen[::2], chosen[1])
    ]


# ---- calls ---------------------------------------------------------------------------------------


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


def rows_of(cell: Cell) -> list[Tensor]:
    """Query, key and value, and the gradient of the output."""
    shape = max(1, TOKENS // cell.length), HEADS, cell.length, cell.dim
    rows = [torch.randn(shape, device=DEVICE).bfloat16() for _ in range(4)]
    return [*(each.requires_grad_() for each in rows[:3]), rows[3]]


def made(cell: Cell, number: int, library: str, rows: Sequence[Tensor]) -> Timed:
    """A library's call over these rows."""
    case, length = CASES[cell.case], cell.length
    score = None if case.score is None else case.score(length, number)
    by: Any = ours if library == "ours" else theirs
    call: Any = by.flex_attention
    if library == "theirs":
        call = torch.compile(call, dynamic=False)
    blocks = None
    if case.mask is not None:
        mask = case.mask(length, number)
        blocks = by.create_block_mask(mask, None, None, length, length, device=DEVICE)

    def run() -> Tensor:
        return call(*rows[:3], score_mod=score, block_mask=blocks)

    return Timed(run, list(rows[:3]), rows[3])


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


def begin() -> None:
    """Forget what was compiled for other cells, and let gradients be taken again and again."""
    setattr(sys.modules["torch._functorch.config"], "donated_buffer", False)  # noqa: B010
    torch._dynamo.reset()


def said(error: BaseException) -> str:
    """An error in a line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:400]


def timed(cell: Cell, known: Mapping[str, Any]) -> dict[str, Any]:
    """A row: the times of both libraries; of one, where the other fails."""
    begin()
    row, rows = dict(known), rows_of(cell)
    calls, work = {}, {}
    for library in LIBRARIES:
        if f"error_{library}" in row:
            continue
        try:
            call = made(cell, CASES[cell.case].number, library, rows)
            work[library] = passes(call)
            work[library]["backward"]()
            calls[library] = call
        except Exception as error:  # whatever a compiler raises
            row[f"error_{library}"] = said(error)
            work.pop(library, None)
    if len(calls) == len(LIBRARIES):
        row["difference"] = difference(calls)
    taken: dict[tuple[str, str], list[float]] = {}
    for number in range(ROUNDS):
        turns = [*itertools.product(("forward", "backward"), work)]
        for which, library in turns if number % 2 else turns[::-1]:
            taken.setdefault((which, library), []).append(milliseconds(work[library][which]))
    for (which, library), values in taken.items():
        row[f"{which}_{library}_ms"] = statistics.median(values)
    if len(work) == len(LIBRARIES):
        for which in ("forward", "backward"):
            row[f"{which}_ratio"] = row[f"{which}_theirs_ms"] / row[f"{which}_ours_ms"]
    return {**row, "device": torch.cuda.get_device_name(), "torch": torch.__version__}


# ---- compiling -----------------------------------------------------------------------------------


class Unit(NamedTuple):
    """What one process compiles: calls of one library."""

    library: str
    cells: tuple[Cell, ...]


def units(asked: Sequence[Cell]) -> list[Unit]:
    """Kernels of ours know no length, so one process compiles for all lengths of a case."""
    found: list[Unit] = []
    for cell in asked:
        alike = tuple(one for one in asked if (one.case, one.dim) == (cell.case, cell.dim))
        if cell == alike[0]:
            found.append(Unit("ours", alike))
        found.append(Unit("theirs", (cell,)))
    return found


def compile_unit(unit: Unit) -> None:
    """Make the calls of a unit; print a line of JSON for each cell."""
    for cell in unit.cells:
        begin()
        case, row = CASES[cell.case], dict(cell._asdict())
        try:
            rows = rows_of(cell)
            call = made(cell, case.number, unit.library, rows)
            row[f"first_{unit.library}_s"] = call.first()
            if case.other:
                call = made(cell, case.other, unit.library, rows)
                row[f"other_number_{unit.library}_s"] = call.first()
        except Exception as error:  # whatever a compiler raises
            row[f"error_{unit.library}"] = said(error)
        print(json.dumps(row), flush=True)


def compiled(asked: Sequence[Cell], jobs: int, until: float) -> dict[Cell, dict[str, Any]]:
    """Fill both caches by processes side by side; what is known of each cell that was compiled."""
    rows: dict[Cell, dict[str, Any]] = {}

    def run(unit: Unit) -> None:
        if time.perf_counter() > until:
            return
        request = json.dumps([unit.library, unit.cells])
        done = subprocess.run(
            [sys.executable, __file__, "--compile", request], capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        answers = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        for cell, answer in itertools.zip_longest(unit.cells, answers):
            if answer is None:
                last = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1]
                answer = {f"error_{unit.library}": f"its process ended: {last}"[:400]}
            rows.setdefault(cell, {}).update(
                {key: value for key, value in answer.items() if key not in Cell._fields}
            )

    with ThreadPoolExecutor(max(jobs, 1)) as threads:
        list(threads.map(run, units(asked)))
    return {
        cell: {**row, "case": cell.case, "length": cell.length, "head_dim": cell.dim}
        for cell, row in rows.items()
        if all(f"first_{one}_s" in row or f"error_{one}" in row for one in LIBRARIES)
    }


# ---- results -------------------------------------------------------------------------------------


def read(file: Path | None) -> dict[Cell, dict[str, Any]]:
    """The rows of a file, which has one a line."""
    if file is None or not file.exists():
        return {}
    rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    return {Cell(row["case"], row["length"], row["head_dim"]): row for row in rows}


def write(file: Path | None, rows: Mapping[Cell, dict[str, Any]]) -> None:
    """Write rows in the order of cells; a reader sees the old file or the new one."""
    if file is None:
        return
    order = cells(["*"], ["*"], ["*"])
    place = {cell: number for number, cell in enumerate(order)}
    ordered = sorted(rows, key=lambda cell: (place.get(cell, len(order)), cell))
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text("".join(json.dumps(rows[cell]) + "\n" for cell in ordered), encoding="utf-8")
    fresh.replace(file)


HEADER = f"{'':24}{'forward, ms':>20}{'ratio':>7}{'backward, ms':>20}{'ratio':>7}" + (
    f"{'first, s':>16}{'other number, s':>18}"
)


def line_of(cell: Cell, row: Mapping[str, Any]) -> str:
    """A row as a line of the table, with the errors of libraries that failed behind it."""
    text = f"{cell!s:24}"
    for which in ("forward", "backward"):
        times = [row.get(f"{which}_{library}_ms") for library in LIBRARIES]
        shown = " / ".join("-" if ms is None else f"{ms:.3f}" for ms in times)
        ratio = row.get(f"{which}_ratio")
        text += f"{shown:>20}{'' if ratio is None else f'{ratio:.2f}':>7}"
    for key, width in (("first", 16), ("other_number", 18)):
        seconds = [row.get(f"{key}_{library}_s") for library in LIBRARIES]
        shown = " / ".join("-" if each is None else f"{sum(each):.2f}" for each in seconds)
        text += f"{shown if any(seconds) else '':>{width}}"
    errors = [
        f"    {library} failed: {row[f'error_{library}']}"
        for library in LIBRARIES
        if f"error_{library}" in row
    ]
    return "\n".join([text.rstrip(), *errors])


def means(rows: Iterable[Mapping[str, Any]]) -> str:
    """The geometric mean of each pass's ratios."""
    found = []
    for which in ("forward", "backward"):
        ratios = [row[f"{which}_ratio"] for row in rows if f"{which}_ratio" in row]
        if ratios:
            found.append(f"{which} {statistics.geometric_mean(ratios):.2f} of {len(ratios)}")
    return f"geometric mean: {', '.join(found) or 'of nothing'}"


def plot(file: Path, rows: Mapping[Cell, Mapping[str, Any]]) -> None:
    """Draw the ratios of each cell, forward and backward."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    drawn = {cell: row for cell, row in rows.items() if "forward_ratio" in row}
    figure, axes = pyplot.subplots(
        figsize=(8.0, 1.4 + 0.26 * max(len(drawn), 1)), layout="constrained"
    )
    axes.axvline(1, color="#888888", linewidth=1)
    for which, color, marker in (("forward", "#d55e00", "o"), ("backward", "#0072b2", "s")):
        ratios = [row[f"{which}_ratio"] for row in drawn.values()]
        axes.plot(
            ratios, range(len(drawn)), color=color, marker=marker, linestyle="none", label=which
        )
    axes.set_yticks(range(len(drawn)), [str(cell) for cell in drawn], fontsize=8)
    axes.set_ylim(len(drawn) - 0.5, -0.5)
    axes.set_xlabel(
        "FlexAttention's time over Saccade's (right of 1: Saccade is faster)", fontsize=9
    )
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right", fontsize=8)
    by = (f"{row.get('device')}, torch {row.get('torch')}" for row in drawn.values())
    axes.set_title(f"{'; '.join(dict.fromkeys(by))}: {means(drawn.values())}", fontsize=9)
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=130)
    pyplot.close(figure)


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        "flex_times.py", description=HELP, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    globs = (("case", CASES), ("length", LENGTHS), ("dim", DIMS))
    for name, values in globs:
        known = ", ".join(map(str, values))
        parser.add_argument(f"--{name}", action="append", metavar="GLOB", help=f"of {known}")
    parser.add_argument("--json", type=Path, help="a row a line; kept rows are not timed again")
    parser.add_argument("--again", action="store_true", help="time what the file has, too")
    parser.add_argument("--plot", type=Path, help="draw all rows of the file, or of this run")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="compilers side by side")
    parser.add_argument("--seconds", type=float, default=290.0, help="after which none is begun")
    parser.add_argument("--compile", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    try:
        asked.cells = cells(*(getattr(asked, name) or ["*"] for name, _ in globs))
    except ValueError as error:
        parser.error(str(error))
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Time every cell; the exit status, 1 if one failed or time ended before it."""
    asked, started = parsed(arguments), time.perf_counter()
    if asked.compile:
        library, chosen = json.loads(asked.compile)
        compile_unit(Unit(library, tuple(Cell(*cell) for cell in chosen)))
        return 0
    rows = read(asked.json)
    missing = [cell for cell in asked.cells if asked.again or cell not in rows]
    if missing and not torch.cuda.is_available():
        print("flex_times.py: there is no GPU")
        return 2
    known: dict[Cell, dict[str, Any]] = {}
    if missing:
        known = compiled(missing, asked.jobs, started + COMPILING * asked.seconds)
        print(f"compiled in {time.perf_counter() - started:.0f} s\n{HEADER}", flush=True)
    left = []
    for cell in missing:
        if cell not in known or time.perf_counter() - started > asked.seconds:
            left.append(cell)
            continue
        rows[cell] = timed(cell, known[cell])
        print(line_of(cell, rows[cell]), flush=True)
        write(asked.json, rows)
        gc.collect()
        torch.cuda.empty_cache()
    of_these = {cell: rows[cell] for cell in asked.cells if cell in rows}
    print(means(of_these.values()))
    if left:
        print(f"time ended before: {', '.join(map(str, left))}")
    if asked.plot:
        plot(asked.plot, rows)
    failed = any(key.startswith("error_") for row in of_these.values() for key in row)
    return int(failed or bool(left))


if __name__ == "__main__":
    sys.exit(main())
