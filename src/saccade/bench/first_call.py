"""First call: how long a fresh process waits for its first forward and its first backward pass.

Imports, the device's start and the drawing of the inputs do not count. What a compiler left from
an earlier process decides most of it, hence two processes one after the other: the first finds an
empty folder, the second what the first has left there.

    python -m saccade.bench.first_call CASE WHO DEVICE
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Sequence

import torch

from saccade.bench.cases import CASES, Case
from saccade.bench.measure import Absence
from saccade.bench.passes import in_layout
from saccade.bench.peers import Peer, all_peers
from saccade.bench.process import fresh
from saccade.bench.results import Result, record
from saccade.bench.timing import Timing

DEFAULT_CASES = {"cpu": "cpu-causal-fp32-d64-1k", "gpu": "gpu-causal-bf16-d128-4k"}
PROCESS_LIMIT_SECONDS = 300

# What each process is called, behind "first forward" and "first backward".
SUFFIXES = ("", ", cached")


def measure_first_calls(
    case: Case, peers: Sequence[Peer], device: torch.device
) -> tuple[list[Result], list[Absence]]:
    """First calls with an empty compiler's cache and with a filled one, and who has none."""
    timings: dict[str, dict[str, Timing]] = {}
    absences = []
    for peer in peers:
        with tempfile.TemporaryDirectory() as folder:
            caches = {
                "TRITON_CACHE_DIR": f"{folder}/triton",
                "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor",
            }
            arguments = (case.name, peer.who, str(device))
            for suffix in SUFFIXES:
                seconds = fresh(
                    "saccade.bench.first_call", arguments, caches, PROCESS_LIMIT_SECONDS
                )
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


def first_calls(case: Case, peer: Peer, device: torch.device) -> dict[str, float]:
    """In this process, which should be a fresh one: seconds of the first call of each pass.

    Raises:
        SystemExit: with the peer's reason, where it cannot serve the case.
    """
    call = peer.prepare(case, device)
    if isinstance(call, str):
        raise SystemExit(call)
    leaves, grad_output = in_layout(call, case.make(device), gradients=not case.decodes)
    _differentiate_something(device)
    _wait(device)
    seconds = {}
    with call.around():
        start = time.perf_counter()
        output = call.run(*leaves)
        _wait(device)
        seconds["forward"] = time.perf_counter() - start
        if not case.decodes:
            start = time.perf_counter()
            torch.autograd.grad(output, leaves, grad_output)
            _wait(device)
            seconds["backward"] = time.perf_counter() - start
    return seconds


def _differentiate_something(device: torch.device) -> None:
    """PyTorch imports a good part of itself in a process's first backward pass, whosever it is:
    2 s where Python may not keep what it compiled of SymPy."""
    number = torch.zeros((), device=device, requires_grad=True)
    torch.autograd.grad(number + number, number, torch.zeros_like(number))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(case_name: str, who: str, device_name: str) -> None:
    """Print the seconds of the first calls, as JSON."""
    device = torch.device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    peer = next(peer for peer in all_peers() if peer.who == who)
    print(json.dumps(first_calls(CASES[case_name], peer, device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
