"""What only a fresh Python process can tell: the memory of a call on a CPU, and first calls.

    python -m saccade.bench.processes memory CASE WHO PASS
    python -m saccade.bench.processes first-call CASE WHO DEVICE

On a GPU the allocator counts memory. On a CPU a fresh process makes the inputs, forgets how much
memory it has held at most, makes the call, and looks again.

Of first calls, imports, the device's start and the drawing of the inputs do not count. What a
compiler left from an earlier process decides most of it, hence two processes one after the other:
the first finds an empty folder, the second what the first has left there.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import torch

from saccade.bench.case import BenchCase
from saccade.bench.cases import CASES
from saccade.bench.peers import Call, Peer, all_peers, in_layout, runnable
from saccade.bench.results import Absence, Result, record
from saccade.bench.timing import Runnable, Timing, wait


def fresh(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], limit_seconds: float
) -> dict[str, float] | str:
    """Run a module; the numbers that it prints last, as JSON, or the reason why there are none.

    environment: variables beside those of this process.
    """
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    variables = {
        **os.environ, **environment, "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": str(torch.get_num_threads()),
    }  # fmt: skip
    command = [sys.executable, "-m", module, *arguments]
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, env=variables, timeout=limit_seconds
        )
    except subprocess.TimeoutExpired:
        return f"not finished within {limit_seconds:.0f} s"
    if process.returncode != 0:
        lines = process.stderr.strip().splitlines()
        return lines[-1][:160] if lines else f"exit {process.returncode}"
    return json.loads(process.stdout.splitlines()[-1])


MODULE = "saccade.bench.processes"
MEMORY_LIMIT_SECONDS = 900
WARM_LENGTH, WARM_CACHE = 64, 256  # keys of a call that warms up; a cache is of whole pages

# By default glibc keeps freed blocks of up to 32 MB for later, and what a call takes from there
# does not show. With these, large blocks come from the system and go back to it.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "131072", "MALLOC_TRIM_THRESHOLD_": "131072"}


def peak_on_gpu(candidate: Runnable) -> float:
    """Megabytes that a call holds at most beyond what was there before."""
    with candidate.around():
        candidate.run()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        result = candidate.run()
        torch.cuda.synchronize()
    del result
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def peak_on_cpu(case: BenchCase, who: str, which_pass: str) -> float | str:
    """Megabytes that a call in a fresh process holds at most beyond its inputs, or why unknown."""
    arguments = ("memory", case.name, who, which_pass)
    found = fresh(MODULE, arguments, ALLOCATOR, MEMORY_LIMIT_SECONDS)
    return f"memory: {found}" if isinstance(found, str) else found["peak_mb"]


def growth(case: BenchCase, peer: Peer, which_pass: str) -> float:
    """In this process: by how many megabytes the largest memory grows over one call.

    Raises:
        SystemExit: with the peer's reason, where it cannot serve the case.
    """
    # Code, thread stacks and a compiler's leavings are no part of what a call needs. A peer that
    # compiles must see the case's own shapes, the others must not: they may keep buffers of them.
    warm = case if peer.compiles else case.shortened(WARM_CACHE if case.decodes else WARM_LENGTH)
    with _cpu_pass(warm, peer, which_pass) as run:
        run()
    with _cpu_pass(case, peer, which_pass) as run:
        with contextlib.suppress(AttributeError, OSError, TypeError):
            ctypes.CDLL(None).malloc_trim(0)  # the C library returns what it holds in reserve
        with contextlib.suppress(OSError):  # Linux only: the largest memory so far is now's
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        before = _resident_bytes("VmRSS")
        run()
        return (_resident_bytes("VmHWM") - before) / 1e6


@contextlib.contextmanager
def _cpu_pass(case: BenchCase, peer: Peer, which_pass: str) -> Iterator[Callable[[], object]]:
    device = torch.device("cpu")
    candidate = runnable(_prepared(peer, case, device), which_pass, case.make(device))
    with candidate.around():
        yield candidate.run


def _prepared(peer: Peer, case: BenchCase, device: torch.device) -> Call:
    call = peer.prepare(case, device)
    if isinstance(call, str):
        raise SystemExit(call)
    return call


def _resident_bytes(field: str) -> int:
    """Memory held now (VmRSS) or at most so far (VmHWM)."""
    status = Path("/proc/self/status")
    if status.exists():
        for line in status.read_text(encoding="ascii").splitlines():
            if line.startswith(f"{field}:"):
                return int(line.split()[1]) * 1024
    try:
        import resource
    except ImportError:
        raise SystemExit("this system does not say how much memory a process has held") from None
    # Only the largest so far is known here; it stands for both.
    largest = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return largest if sys.platform == "darwin" else largest * 1024


DEFAULT_CASES = {"cpu": "cpu-causal-fp32-d64-1k", "gpu": "gpu-causal-bf16-d128-4k"}
FIRST_CALL_LIMIT_SECONDS = 300

# What each process is called, behind "first forward" and "first backward".
SUFFIXES = ("", ", cached")


def measure_first_calls(
    case: BenchCase, peers: Sequence[Peer], device: torch.device
) -> tuple[list[Result], list[Absence]]:
    """First calls with an empty compiler's cache and with a filled one, and why some have none."""
    timings: dict[str, dict[str, Timing]] = {}
    absences = []
    for peer in peers:
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                "TRITON_CACHE_DIR": f"{folder}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            }
            arguments = ("first-call", case.name, peer.who, str(device))
            for suffix in SUFFIXES:
                seconds = fresh(MODULE, arguments, caches, FIRST_CALL_LIMIT_SECONDS)
                if isinstance(seconds, str):
                    absences.append(Absence(case.name, peer.who, f"first call: {seconds}"))
                    break
                for name, taken in seconds.items():
                    members = timings.setdefault(f"first {name}{suffix}", {})
                    members[peer.who] = Timing.of([taken])
    results = [
        result
        for which_pass, members in timings.items()
        for result in record(case, which_pass, members, device)
    ]
    return results, absences


def first_calls(case: BenchCase, peer: Peer, device: torch.device) -> dict[str, float]:
    """In this process, which should be a fresh one: seconds of the first call of each pass.

    Raises:
        SystemExit: with the peer's reason, where it cannot serve the case.
    """
    call = _prepared(peer, case, device)
    leaves, grad_output = in_layout(call, case.make(device), gradients=not case.decodes)
    # PyTorch imports a good part of itself in a process's first backward pass, whatever it is of:
    # 2 s where Python may not keep what it compiled of SymPy.
    number = torch.zeros((), device=device, requires_grad=True)
    torch.autograd.grad(number + number, number, torch.zeros_like(number))
    wait(device)
    seconds = {}
    with call.around():
        start = time.perf_counter()
        output = call.run(*leaves)
        wait(device)
        seconds["forward"] = time.perf_counter() - start
        if not case.decodes:
            start = time.perf_counter()
            torch.autograd.grad(output, leaves, grad_output)
            wait(device)
            seconds["backward"] = time.perf_counter() - start
    return seconds


def main(what: str, case_name: str, who: str, where: str) -> None:
    """Print what one process found, as JSON; `where` is a pass of memory, a device of a call."""
    case, peer = CASES[case_name], next(peer for peer in all_peers() if peer.who == who)
    if what == "memory":
        return print(json.dumps({"peak_mb": growth(case, peer, where)}))
    device = torch.device(where)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    print(json.dumps(first_calls(case, peer, device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
