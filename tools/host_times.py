"""Time what the host does in a call: of a length that was never seen, and of one that was.

Usage: python tools/host_times.py [--kind GLOB] [--profile KIND] [--json FILE]

--help says more.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import saccade
from saccade.gpu import recording, stored_code

HELP = """\
Time what the host does in calls of lengths that were never seen, and of lengths that were seen so
often that their passes are recorded (saccade/gpu/recording.py): the medians, in microseconds, of
calls that a GPU of capability 9.0 would get. Without a GPU one is pretended: its memory is this
machine's, and kernels are launched that do nothing, so that all but the driver's work is there. On
a GPU kernels are compiled on first use, which is not timed, or come
from a folder that `tools/first_calls.py --compile` made.
"""
EPILOG = """\
examples:
  python tools/host_times.py
  python tools/host_times.py --kind dense --profile new > stages.txt
  python tools/host_times.py --many 10000
  python tools/host_times.py --code out/first

--many calls so many lengths, forward and backward: the memory that Python holds after half of them
and after all, the median, and the slowest call.
"""
DIM, HEADS, KV_HEADS, LINEAR_HEADS, PAGE = 128, 32, 8, 16, 16  # as tools/first_calls.py has them
PASSES = ("new", "known", "same")  # lengths: in turns, in turns again, and one alone
SHORTEST = 2049  # lengths are this and every second one that follows


class Kind(NamedTuple):
    """A kind of call; make gives, for a length, a call and its leaves."""

    name: str
    make: Callable[[int, torch.device], tuple[Callable[[], Any], list[Tensor]]]
    shortest: int = SHORTEST


def rows(device: torch.device, *shape: int, gradients: bool = True) -> Tensor:
    """Numbers of a kind that kernels take; of fewer heads where they lie on this machine, whose
    memory is slower to get."""
    if device.type == "cpu":
        shape = shape[0], shape[1] // 4, *shape[2:]
    made = torch.empty(shape, dtype=torch.bfloat16, device=device)
    return made.zero_().requires_grad_(gradients)


def dense(length: int, device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """A causal call of so many rows."""
    given = [rows(device, 1, heads, length, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    return lambda: saccade.attention(*given, causal=True), given


def varlen(length: int, device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """The same of so many tokens in 3 to 7 sequences."""
    given = [rows(device, length, heads, DIM) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    sequences = 3 + length // 2 % 5
    ends = [number * length // sequences for number in range(sequences + 1)]
    offsets = torch.tensor(ends, dtype=torch.int32, device=device)
    query, key, value = given
    return lambda: saccade.attention_varlen(query, key, value, offsets, causal=True), given


def decode(length: int, device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """A row each of four sequences of so many tokens."""
    pages = -(-length // PAGE)
    table = torch.arange(4 * pages, dtype=torch.int32, device=device).view(4, pages)
    lengths = torch.full((4,), length, dtype=torch.int32, device=device)
    shape = (4 * pages, KV_HEADS, PAGE, DIM)
    key_pages, value_pages = (rows(device, *shape, gradients=False) for _ in range(2))
    query = rows(device, 4, HEADS, 1, DIM, gradients=False)
    return lambda: saccade.attention_paged(query, key_pages, value_pages, table, lengths), []


def linear(length: int, device: torch.device) -> tuple[Callable[[], Any], list[Tensor]]:
    """Linear attention of so many rows."""
    given = [rows(device, 1, LINEAR_HEADS, length, DIM) for _ in range(3)]
    return lambda: saccade.linear_attention(*given, causal=True), given


KINDS = (
    Kind("dense", dense),
    Kind("varlen", varlen),
    Kind("decode", decode),
    Kind("linear", linear, 8193),
)


# ---- a GPU that is not there ---------------------------------------------------------------------


@contextmanager
def pretended() -> Iterator[None]:
    """A GPU of capability 9.0 whose memory is this machine's, and whose kernels do nothing."""
    from saccade.gpu import driver, launcher, machine_code, planning
    from saccade.gpu.hopper import tile_scheduler
    from saccade.ops.attention.triton import call_spec
    from saccade.ops.linear_attention.triton import passes
    from saccade.ops.paged_attention.triton import call_spec as paged
    from saccade.runtime import arguments, backends, call_cache

    class Idle(machine_code.Variant):
        """Machine code that does nothing."""

        def __init__(self, arguments: Any) -> None:
            self.by_triton, self.name, self.device = "", "idle", 0
            formats = machine_code.formats_of(arguments)
            self.maps = [MAP_KIND] * formats.count(machine_code.MAP)
            self._lay_out(formats)

        def launch(self, programs: int, stream: int) -> None:
            pass

    idle: dict[Any, Idle] = {}

    def variant(kernel: Any, arguments: Any, options: Any, device: int) -> Idle:
        key = kernel, device, *sorted(options.items()), arguments.key
        found = idle.get(key)
        if found is None:
            found = idle[key] = Idle(arguments)
        return found

    triton_too = tuple(entry for entry in backends.BACKENDS if entry.name != "cpu")
    counter = torch.zeros(tile_scheduler.NUMBERS, dtype=torch.int32)
    changes: list[tuple[Any, str, Any]] = [
        (backends, "_hopper_device_unsupported", lambda device, index: None),
        (backends, "_triton_device_unsupported", lambda device, index, dtype: None),
        (backends, "BACKENDS", triton_too),
        (call_spec, "architecture", lambda tensor: "sm_90"),
        (call_spec, "multiprocessors", lambda tensor: 132),
        (tile_scheduler, "counter_of", lambda device: counter),
        (machine_code, "variant", variant),
        (machine_code, "find_side_by_side", lambda wanted, device: None),
        (driver, "tensor_map", lambda kind, address, shape, strides: NO_MAP),
        (launcher, "INTERPRETED", False),
        (torch._C, "_cuda_getDevice", lambda: 0),
        (torch._C, "_cuda_getCurrentRawStream", lambda device: 0),
        (torch._C, "_cuda_isCurrentStreamCapturing", lambda: False),
        *((module, "current_device", lambda tensor: 0)
          for module in (launcher, planning, call_spec, passes, paged)),
        *((module, "values_readable", lambda tensor: False)
          for module in (arguments, call_cache)),
    ]  # fmt: skip
    patches = [mock.patch.object(*change, create=True) for change in changes]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


NO_MAP = bytes(128)
MAP_KIND = (3, 2, 9, (1, 1, 64, 64))


# ---- timing --------------------------------------------------------------------------------------


class Timer:
    """What calls of one kind take."""

    def __init__(self, kind: Kind, device: torch.device):
        self.kind, self.device = kind, device
        self.profile: cProfile.Profile | None = None

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def seconds(self, run: Callable[[], Any]) -> tuple[float, Any]:
        """Seconds that a call keeps the host, and what it gives."""
        self._wait()
        if self.profile:
            self.profile.enable()
        begin = time.perf_counter()
        result = run()
        taken = time.perf_counter() - begin
        if self.profile:
            self.profile.disable()
        return taken, result

    def once(self, length: int, calls: Any = None) -> tuple[float, float, float]:
        """Seconds of a forward pass without gradients, of one with them, of its backward pass."""
        run, leaves = calls or self.kind.make(length, self.device)
        with torch.no_grad():
            alone, output = self.seconds(run)
        if not leaves:
            return alone, 0.0, 0.0
        given = torch.empty_like(output)  # not written: the caches of a host with a GPU stay warm
        forward, output = self.seconds(run)
        backward, _ = self.seconds(lambda: torch.autograd.grad(output, leaves, given))
        return alone, forward, backward

    def table(self, lengths: int, profiled: str | None) -> dict[str, list[float]]:
        """Medians of each pass: of new lengths, of known ones in turns once their passes are
        recorded, and of one alone."""
        first = self.kind.shortest
        for length in (first - 1, first - 2, first - 18, first - 34, first - 50):
            self.once(length)
        made = {n: self.kind.make(n, self.device) for n in range(first, first + 2 * lengths, 2)}
        found: dict[str, list[float]] = {}
        gc.collect()
        for name in PASSES:
            if name == "known":
                for _ in range(recording.STEP_BY_STEP):
                    for length, calls in made.items():
                        self.once(length, calls)
            self.profile = cProfile.Profile() if profiled == name else None
            if name == "same":
                taken = [self.once(first, made[first]) for _ in range(lengths)]
            else:
                taken = [self.once(length, calls) for length, calls in made.items()]
            found[name] = [statistics.median(each) for each in zip(*taken, strict=True)]
            if self.profile:
                stats = pstats.Stats(self.profile)
                stats.sort_stats("tottime").print_stats(45)
        self.profile = None
        return found

    def many(self, lengths: int) -> dict[str, float]:
        """Memory and times of so many lengths."""
        tracemalloc.start(1)
        taken, held = [], []
        for number in range(lengths):
            taken.append(sum(self.once(self.kind.shortest + number)[1:]))
            if number + 1 in (lengths // 2, lengths):
                gc.collect()
                held.append(tracemalloc.get_traced_memory()[0] / 2**20)
        tracemalloc.stop()
        half, full = held
        median, slowest = statistics.median(taken), max(taken[lengths // 100 :])
        return {"MiB of half": half, "MiB of all": full, "median": median, "slowest": slowest}


def main(arguments: argparse.Namespace) -> int:
    """Time every kind of call; the exit status."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    on = torch.cuda.get_device_name() if device.type == "cuda" else "a pretended GPU"
    kinds = [kind for kind in KINDS if fnmatchcase(kind.name, arguments.kind)]
    torch.set_num_threads(1)
    if arguments.code:
        stored_code.COMPILED = arguments.code.resolve()
    if arguments.many:
        for kind in kinds:
            found = Timer(kind, device).many(arguments.many)
            print(kind.name, *(f"{name} {value:.6g}" for name, value in found.items()), sep="  ")
        return 0
    print(f"host times in us, on {on}\n")
    print(f"{'':10}" + "".join(f"{name:>30}" for name in ("new", "known", "the same")))
    heads = "".join(f"{head:>10}" for head in ("forward", "grad fwd", "backward"))
    print(f"{'':10}{heads * 3}")
    for kind in kinds:
        found = Timer(kind, device).table(arguments.lengths, arguments.profile)
        numbers = [1e6 * number for passes in found.values() for number in passes]
        print(f"{kind.name:10}" + "".join(f"{number:10.1f}" for number in numbers), flush=True)
        if arguments.json:
            with arguments.json.open("a", encoding="utf-8") as file:
                file.write(json.dumps({"kind": kind.name, "on": on, **found}) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        "host_times.py", description=HELP, epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    made.add_argument("--kind", default="*", help="a glob of kinds of calls (all)")
    made.add_argument("--lengths", type=int, default=200, help="how many are timed (200)")
    made.add_argument("--profile", choices=PASSES, help="profile these calls")
    made.add_argument("--many", type=int, help="call so many lengths instead")
    made.add_argument("--code", type=Path, help="a folder of machine code")
    made.add_argument("--json", type=Path, help="append what was found to this file")
    return made


if __name__ == "__main__":
    read = parser().parse_args()
    if torch.cuda.is_available():
        sys.exit(main(read))
    with pretended():
        sys.exit(main(read))
