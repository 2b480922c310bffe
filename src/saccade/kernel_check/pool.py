"""Pool: worker processes that compile, so many at a time, and what they answered."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from saccade.kernel_check.calls import KernelCall
from saccade.kernel_check.linear_calls import LinearCall
from saccade.kernel_check.paged_calls import PagedCall
from saccade.runtime.spec import KernelConfig


class Job(NamedTuple):
    """Kernels to compile: some of those that a pass of a call starts."""

    architecture: str
    call: KernelCall | PagedCall | LinearCall
    which: str  # one of calls.PASSES
    kernels: tuple[str, ...]
    config: KernelConfig | None = None  # None: the default of each kernel


class Usage(NamedTuple):
    """What one program of a compiled kernel takes."""

    registers: int  # of a thread
    spills: int  # instructions that move registers to memory or back (AMD: registers moved)
    shared: int  # bytes of shared memory
    columns: int = 0  # of tensor memory
    looped: int = 0  # spills inside of loops (AMD: all of them, as nothing says which)
    # Of kernels whose warps have roles: WGMMA instructions, and the exponents that stand between
    # the wait for a product of keys and the wait for the product of values that began before it.
    products: int = 0
    covered: int = 0
    guarded: int = 0  # reductions behind a condition, which ptxas gets wrong
    unfenced: int = 0  # barriers that TMA may overtake, or what it writes in their place


class Compiled(NamedTuple):
    """One compiled kernel, or why there is none."""

    job: Job
    kernel: str
    config: tuple[int, int, int, int]  # tiles (0 where it has none), warps, stages
    seconds: float
    usage: Usage | None
    error: str
    key: str  # of all that the compiler was given, see compile_cache.py: equal for equal binaries


def compile_all(
    jobs: Sequence[Job],
    processes: int,
    on_done: Callable[[Compiled], None] = lambda compiled: None,
    known: Mapping[str, Sequence[Any]] | None = None,
) -> list[Compiled]:
    """Compile every job; results in the order of jobs, equal binaries once.

    known: what need not be compiled again, see compile_cache.py.

    Raises:
        RuntimeError: if a worker died, with the last line that it wrote.
    """
    shares = _shares(jobs, processes)
    found: dict[int, list[Compiled]] = defaultdict(list)
    lock = threading.Lock()

    def tell(number: int, compiled: Compiled) -> None:
        with lock:
            found[number].append(compiled)
            on_done(compiled)

    with ThreadPoolExecutor(max(processes, 1)) as threads:
        running = [threads.submit(_run_worker, jobs, share, tell, known or {}) for share in shares]
        for future in running:
            future.result()
    return _once([compiled for number in range(len(jobs)) for compiled in found[number]])


def _once(results: Sequence[Compiled]) -> list[Compiled]:
    """Several calls start the same kernel (row_statistics, say): it counts for the first."""
    kept: dict[object, Compiled] = {}
    for number, compiled in enumerate(results):
        identity = compiled.kernel, compiled.key
        kept.setdefault(identity if compiled.key else number, compiled)
    return list(kept.values())


def _shares(jobs: Sequence[Job], processes: int) -> list[list[int]]:
    """Numbers of jobs, by worker: one architecture a worker, and no process without work."""
    of_architecture: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        of_architecture[job.architecture].append(number)
    parts = -(-processes // max(len(of_architecture), 1))
    shares = [numbers[part::parts] for numbers in of_architecture.values() for part in range(parts)]
    return sorted(filter(None, shares), key=len, reverse=True)


def _run_worker(
    jobs: Sequence[Job],
    share: Sequence[int],
    tell: Callable[[int, Compiled], None],
    known: Mapping[str, Sequence[Any]],
) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "saccade.kernel_check.worker"], env=worker_environment(),
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdin and process.stdout and process.stderr
    errors: list[str] = []
    listener = threading.Thread(target=lambda: errors.extend(process.stderr or ()), daemon=True)
    listener.start()  # or a worker that complains much would wait for us for ever
    plain = [(*jobs[n][1:4], _numbers(jobs[n].config)) for n in share]
    try:
        with process.stdin as request:
            architecture = jobs[share[0]].architecture
            json.dump({"architecture": architecture, "jobs": plain, "known": known}, request)
        for line in process.stdout:
            place, kernel, config, seconds, usage, *rest = json.loads(line)
            job, used = jobs[share[place]], None if usage is None else Usage(*usage)
            answer = Compiled(job, kernel, tuple(config), seconds, used, *rest)
            tell(share[place], answer)
    except BrokenPipeError:
        pass  # it died before it had read all; the exit status says so
    finally:
        if sys.exc_info()[0] is not None:
            process.kill()
        status = process.wait()
        listener.join()
        process.stdout.close()
        process.stderr.close()
    if status != 0:
        said = [line.strip() for line in errors if line.strip()] or ["it said nothing"]
        raise RuntimeError(f"a compiling process ended with {status}: {said[-1]}")


def _numbers(config: KernelConfig | None) -> list[int] | None:
    return None if config is None else config.numbers()


def worker_environment() -> dict[str, str]:
    """The environment of a worker: this package, the compiler, and default configs only."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    given = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
        "SACCADE_CONFIGS": "",
    }  # fmt: skip
    given.pop("TRITON_INTERPRET", None)
    return given
