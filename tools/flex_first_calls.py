"""First calls of saccade.integrations.flex_attention and of PyTorch's, with empty caches, on a GPU.

Usage: python tools/flex_first_calls.py [--case GLOB] [--length GLOB] [--dim GLOB]
                                        [--json FILE] [--jobs N] [--seconds S]

Each is the first call of a process of its own, in which every cache is empty: seconds in which it
is made (torch.compile of FlexAttention, and each library's create_block_mask), then until the GPU
has done a forward pass with gradients due, then its backward pass. Both libraries compile in as
many threads or processes as they like; --jobs processes share the cores out among themselves.
Functions and shapes are those of flex_times.py.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import flex_times
import torch

CACHES = ("SACCADE_CACHE", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR")


def first_call(cell: flex_times.Cell, library: str) -> dict[str, Any]:
    """Seconds of this process's first call: what comes before it, forward, backward."""
    rows = flex_times.rows_of(cell)
    torch.cuda.synchronize()
    used = sum(os.times()[:4])
    begin = time.perf_counter()
    call = flex_times.made(cell, flex_times.CASES[cell.case].number, library, rows)
    made = time.perf_counter() - begin
    forward, backward = call.first()
    processor = sum(os.times()[:4]) - used  # without processes that still wait for work
    return {"made_s": made, "forward_s": forward, "backward_s": backward, "processor_s": processor}


def alone(cell: flex_times.Cell, library: str, cores: Sequence[int]) -> dict[str, Any]:
    """A process of its own makes the call, on these cores."""
    request = json.dumps([cell, library])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        environment = {**os.environ, **{name: f"{folder}/{name}" for name in CACHES}}
        environment.pop("TORCHINDUCTOR_COMPILE_THREADS", None)
        done = subprocess.run(
            [sys.executable, __file__, "--one", request, "--cores", ",".join(map(str, cores))],
            capture_output=True, text=True, check=False, env=environment,
        )  # fmt: skip
    answers = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if answers:
        return json.loads(answers[-1])
    return {"error": (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[-1][:400]}


def line_of(cell: flex_times.Cell, found: dict[str, dict[str, Any]]) -> str:
    """Both libraries' seconds, and theirs over ours with and without what comes before."""
    text, whole = f"{cell!s:24}", []
    for library in flex_times.LIBRARIES:
        row = found.get(library, {"error": "no time was left"})
        if "error" in row:
            text += f"  {library} failed: {row['error']}"
            continue
        passes = row["forward_s"], row["backward_s"]
        whole.append((sum(passes), sum(passes) + row["made_s"]))
        text += f"  {library} {row['made_s']:.2f} + {passes[0]:.2f} + {passes[1]:.2f}"
        text += f" = {whole[-1][1]:.2f}"
    if len(whole) == len(flex_times.LIBRARIES):
        ours, theirs = whole
        text += f"  ratio {theirs[1] / ours[1]:.2f}, {theirs[0] / ours[0]:.2f} of the calls"
    return text


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        "flex_first_calls.py", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    for name in ("case", "length", "dim"):
        parser.add_argument(f"--{name}", action="append", metavar="GLOB")
    parser.add_argument("--json", type=Path, help="add a row a line")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side")
    parser.add_argument("--seconds", type=float, default=600.0, help="after which none is begun")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--cores", help=argparse.SUPPRESS)
    asked = parser.parse_args(arguments)
    try:
        globs = asked.case or ["*"], asked.length or ["4096"], asked.dim or ["*"]
        asked.cells = flex_times.cells(*globs)
    except ValueError as error:
        parser.error(str(error))
    return asked


def main(arguments: Sequence[str] | None = None) -> int:
    """Make the calls; the exit status, 1 if one failed."""
    asked, started = parsed(arguments), time.perf_counter()
    if asked.one:
        os.sched_setaffinity(0, set(map(int, asked.cores.split(","))))
        cell, library = json.loads(asked.one)
        print(json.dumps(first_call(flex_times.Cell(*cell), library)), flush=True)
        return 0
    if not torch.cuda.is_available():
        print("flex_first_calls.py: there is no GPU")
        return 2
    cores = sorted(os.sched_getaffinity(0))
    each = max(len(cores) // asked.jobs, 1)
    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for number in range(asked.jobs):
        shares.put(cores[number * each :][:each] or cores)

    def run(cell: flex_times.Cell) -> bool:
        share, found = shares.get(), dict[str, dict[str, Any]]()
        for library in flex_times.LIBRARIES:
            if time.perf_counter() - started < asked.seconds:
                found[library] = alone(cell, library, share)
        shares.put(share)
        print(line_of(cell, found), flush=True)
        if asked.json:
            by = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
            with asked.json.open("a", encoding="utf-8") as file:
                print(json.dumps({**cell._asdict(), **by, "cores": each, **found}), file=file)
        return len(found) == len(flex_times.LIBRARIES) and not any(
            "error" in row for row in found.values()
        )

    with ThreadPoolExecutor(asked.jobs) as threads:
        return int(not all(list(threads.map(run, asked.cells))))


if __name__ == "__main__":
    sys.exit(main())
