"""Memory: how much more than its inputs a call holds at its worst moment.

On a GPU the allocator counts. On a CPU a fresh process makes the inputs, forgets how much memory
it has held at most, makes the call, and looks again:

    python -m saccade.bench.memory CASE WHO PASS
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import sys
from pathlib import Path

import torch

from saccade.bench.cases import CASES, Case
from saccade.bench.passes import Runnable, runnable
from saccade.bench.peers import Peer, all_peers
from saccade.bench.process import fresh

PROCESS_LIMIT_SECONDS = 900
WARM_LENGTH = 64

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


def peak_on_cpu(case: Case, who: str, which_pass: str) -> float | str:
    """Megabytes that a call in a fresh process holds at most beyond its inputs, or why unknown."""
    arguments = (case.name, who, which_pass)
    found = fresh("saccade.bench.memory", arguments, ALLOCATOR, PROCESS_LIMIT_SECONDS)
    return f"memory: {found}" if isinstance(found, str) else found["peak_mb"]


def growth(case: Case, peer: Peer, which_pass: str) -> float:
    """In this process: by how many megabytes the largest memory grows over one call."""
    # Code, thread stacks and a compiler's leavings are no part of what a call needs. A peer that
    # compiles must see the case's own shapes, the others must not: they may keep buffers of them.
    _run(_ready(case if peer.compiles else _shortened(case), peer, which_pass))
    candidate = _ready(case, peer, which_pass)
    _give_back_free_memory()
    _forget_peak()
    before = _resident_bytes("VmRSS")
    _run(candidate)
    return (_resident_bytes("VmHWM") - before) / 1e6


def _ready(case: Case, peer: Peer, which_pass: str) -> Runnable:
    device = torch.device("cpu")
    call = peer.prepare(case, device)
    if isinstance(call, str):
        raise SystemExit(call)
    return runnable(call, which_pass, case.make(device))


def _run(candidate: Runnable) -> None:
    with candidate.around():
        candidate.run()


def _shortened(case: Case) -> Case:
    """The same kind of problem, too short to need memory."""
    documents = case.visibility.documents[:1]
    length = documents[0] if documents else WARM_LENGTH
    return dataclasses.replace(
        case,
        query_len=1 if case.decodes else min(case.query_len, length),
        kv_len=min(case.kv_len, length),
        visibility=dataclasses.replace(case.visibility, documents=documents),
    )


def _give_back_free_memory() -> None:
    """Ask the C library to return what it holds in reserve, where it can be asked."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def _forget_peak() -> None:
    """Set the kernel's record of the largest memory back to now (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


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


def main(case_name: str, who: str, which_pass: str) -> None:
    """Print what one call needs, as JSON."""
    peer = next(peer for peer in all_peers() if peer.who == who)
    print(json.dumps({"peak_mb": growth(CASES[case_name], peer, which_pass)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
