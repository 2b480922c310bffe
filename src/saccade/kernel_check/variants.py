"""Variants: the kernels that calls with the library's own masks, scores and options reach.

They are found by making such calls and looking at what would be launched, so what is listed here is
what a user's call looks for: `saccade kernels --list` prints it, `--warm` compiles it into the
user's cache, `make wheel` into the package (tools/compile_wheel.py).

A variant knows no length and no batch; only whether dense lengths are multiples of 16, and which
schedule a length chooses. So a few lengths reach all of them. It does know the step between rows,
which is that of all heads together where heads lie beside channels (as projections leave them, and
as dense gradients always lie), and how many query heads share a kv head. So what is listed serves
as many heads as HEADS says. Forward passes of contiguous dense rows depend on their ratio alone.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from saccade.gpu import machine_code
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments
from saccade.gpu.stored_code import MachineCode
from saccade.kernel_check import worker
from saccade.kernel_check.calls import CPU, Call, KernelCall, LinearCall, PagedCall

SHIPPED = ("sm_80", "sm_90", "sm_100", "sm_120")  # that a wheel holds machine code for
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 170}
"""Of a GPU of each: linear attention cuts lengths into as many segments as keep all busy."""

MASKS = ("none", "causal", "window")
LENGTHS = (512, 4096, 16384)  # of every schedule that a length chooses
HEADS = ((32, 32), (32, 8))  # query heads and kv heads
LINEAR_HEADS = 16  # of which lengths up to 1,535 take two segments, and from 4,096 on eight
MANY = 16  # sequences
NOT_ALIGNED = 1  # that much longer, a length is no multiple of 16
LEAN = {"TRITON_DISABLE_LINE_INFO": "1"}
"""What Triton is told: which line an instruction came from takes more memory than all code."""

SAMPLE = 6  # kernels of a wheel that is made to be looked at


class Variant(NamedTuple):
    """A kernel that a call reaches."""

    address: str
    kernel: str
    of: str  # the call that reached it first


class Reached(NamedTuple):
    """A call, and what of it is started."""

    call: Call
    passes: tuple[str, ...]


def calls(architecture: str) -> Iterator[Reached]:
    """Calls that reach the listed variants of an architecture."""
    halves = ("fp16",) if architecture == "sm_75" else ("bf16", "fp16")
    hopper = architecture == "sm_90"
    for dtype in halves:
        for dim, value_dim in ((64, 0), (96, 0), (128, 0), (192, 128), (256, 0)):
            for mask in MASKS:
                call = KernelCall(dim, dtype, mask, value_dim=value_dim)
                for one in (*_dense(call), *_packed(call)):
                    yield Reached(one, _passes(hopper, value_dim))
        for dim in (64, 128):
            for call in _dense(KernelCall(dim, dtype, "causal", "softcap"), LENGTHS[1:2]):
                yield Reached(call, _passes(hopper, 0))
        yield from _paged(dtype, hopper)
        yield from _linear(dtype, hopper)
    for dim in (64, 128):
        for mask in MASKS[:2]:
            for call in _dense(KernelCall(dim, "fp32", mask), LENGTHS[1:2]):
                yield Reached(call, ("forward", "backward"))


def _dense(call: KernelCall, lengths: Sequence[int] = LENGTHS) -> Iterator[KernelCall]:
    for inside in (False, True):
        for length in lengths:
            for more in (0, NOT_ALIGNED):
                one = call._replace(length=length + more, heads_inside=inside)
                yield from _with_heads(one)


def _packed(call: KernelCall) -> Iterator[KernelCall]:
    for apart in (False, True):
        yield from _with_heads(call._replace(packed=True, offsets_apart=apart))


def _with_heads(call: KernelCall) -> Iterator[KernelCall]:
    """By heads; where kv heads have several query heads, a small batch splits these over programs
    of a backward pass, and a large one does not."""
    for heads, kv_heads in HEADS:
        for batch in (1,) if heads == kv_heads else (1, MANY):
            yield call._replace(batch=batch, heads=heads, kv_heads=kv_heads)


def _passes(hopper: bool, value_dim: int) -> tuple[str, ...]:
    if not hopper:
        return "forward", "backward"
    return "hopper", "backward" if value_dim else "hopper_backward"


def _paged(dtype: str, hopper: bool) -> Iterator[Reached]:
    for dim in (64, 128, 256):
        for page_size in (16, 64):
            for heads in HEADS:
                decode = PagedCall(dim, dtype, "none", page_size, heads=heads[0], kv_heads=heads[1])
                yield Reached(decode, ("paged", "write"))
                for query_len in (20, 1024):
                    chunk = decode._replace(mask="causal", query_len=query_len)
                    long = hopper and query_len > 20
                    yield Reached(chunk, ("hopper_paged",) if long else ("paged",))


def _linear(dtype: str, hopper: bool) -> Iterator[Reached]:
    for dim in (64, 128):
        for length in (1024, 1024 + NOT_ALIGNED, 8192, 8192 + NOT_ALIGNED):
            call = LinearCall(dim, dtype, length=length, batch=1, heads=LINEAR_HEADS)
            backend = "hopper_linear" if hopper and dtype == "bf16" else "linear"
            yield Reached(call, (backend, f"{backend} backward", "linear step"))


def reach(
    architecture: str,
    on_variant: Callable[[Variant, Launch, Arguments], None],
    kernels: str = "*",
    of: Sequence[str] = ("*",),
) -> None:
    """Hand over each variant once, in a process that does not interpret kernels.

    kernels: only those whose names a glob fits. of: only calls that one of these globs fits.
    """
    seen: set[str] = set()
    at = ""

    def look(launch: Launch, make: Callable[[], Arguments]) -> None:
        if not fnmatchcase(launch.kernel.__name__, kernels):
            return
        arguments = make()
        address = machine_code.address_of(launch.kernel, arguments, launch.options, architecture)
        assert address is not None, "a kernel of the library's own"
        if address not in seen:
            seen.add(address)
            on_variant(Variant(address, launch.kernel.__name__, at), launch, arguments)

    worker.intercept_launches(architecture, look, MULTIPROCESSORS.get(architecture, 100))
    for call, passes in calls(architecture):
        names = {which: f"{which}: {call.name}" for which in passes}
        asked = [which for which, name in names.items() if any(fnmatchcase(name, g) for g in of)]
        if asked:
            start = call.prepared(CPU)
            for which in asked:
                at = names[which]
                start(which, None)


class Request(NamedTuple):
    """What a process is asked for: every so many-th variant, or those that `most` spreads over."""

    architecture: str
    kernels: str  # a glob
    of: Sequence[str] = ("*",)  # globs of calls
    folder: str = ""  # where machine code goes; "": variants are listed and not compiled
    most: int = 0  # of all of them; 0: all
    part: int = 0
    parts: int = 1


def variants_of(architecture: str, kernels: str = "*", of: Sequence[str] = ("*",)) -> list[Variant]:
    """All variants of an architecture, or some, by globs of kernels and of calls."""
    answers = _ask(Request(architecture, kernels, of))
    next(answers)
    return [Variant(*fields) for fields in answers]


def compile_with_progress(
    architecture: str,
    kernels: str,
    processes: int | None,
    console: Console,
    most: int = 0,
    of: Sequence[str] = ("*",),
) -> dict[str, MachineCode]:
    """Compile variants while a bar shows how far it has got; by default on every core.

    Variants that Triton has to start are left out.

    most: so many of them, spread over all. of: globs of calls.

    Raises:
        RuntimeError: if a compiling process died, with the last line that it wrote.
    """
    codes: dict[str, MachineCode] = {}
    parts = processes or worker.cores()
    columns = *Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[at]}")
    with (
        Progress(SpinnerColumn(), *columns, console=console, transient=True) as bar,
        ThreadPoolExecutor(parts) as threads,
    ):
        task = bar.add_task(architecture, total=None, at="looking at calls")

        def run(part: int) -> None:
            with tempfile.TemporaryDirectory() as folder:
                answers = _ask(Request(architecture, kernels, of, folder, most, part, parts))
                bar.update(task, total=next(answers))
                for fields in answers:
                    variant = Variant(*fields)
                    file = Path(folder) / variant.address
                    if file.exists():
                        codes[variant.address] = MachineCode.unpacked(file.read_bytes())
                    bar.update(task, advance=1, at=f"{variant.kernel} {variant.of}")

        list(threads.map(run, range(parts)))
    return codes


def _ask(request: Request) -> Iterator[Any]:
    """What a process answers: how many variants there are, then each one.

    Raises:
        ValueError: for a glob that no kernel's name fits.
        RuntimeError: if the process died, with the last line that it wrote.
    """
    command = [sys.executable, "-m", "saccade.kernel_check.variants", json.dumps(request)]
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, env={**worker.worker_environment(), **LEAN}, stdout=subprocess.PIPE,
            stderr=errors, text=True,
        ) as process,
    ):  # fmt: skip
        assert process.stdout
        try:
            for answer in map(json.loads, process.stdout):
                if answer == 0:
                    asked = f"kernel fits {request.kernels!r}"
                    if tuple(request.of) != ("*",):
                        asked += f" and whose call {' or '.join(map(repr, request.of))}"
                    raise ValueError(f"there is no variant whose {asked}")
                yield answer
        except BaseException:
            process.kill()
            raise
        if status := process.wait():
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()] or ["it said nothing"]
            raise RuntimeError(f"a compiling process ended with {status}: {said[-1]}")


def main(request: Request) -> None:
    """Answer a request."""
    found: list[tuple[Variant, Launch, Arguments]] = []
    reach(request.architecture, lambda *one: found.append(one), request.kernels, request.of)
    if request.most:
        found = found[:: max(len(found) // request.most, 1)][: request.most]
    print(len(found), flush=True)
    for variant, launch, arguments in found[request.part :: request.parts]:
        if request.folder:
            _compile(launch, arguments, request.architecture, Path(request.folder, variant.address))
        print(json.dumps(variant), flush=True)


def _compile(launch: Launch, arguments: Arguments, architecture: str, file: Path) -> None:
    from saccade.gpu import triton_compiler

    target = triton_compiler.target_of(architecture)
    made = triton_compiler.compiled(launch.kernel, arguments, launch.options, target)
    if not triton_compiler.needs_triton(made.metadata):
        file.write_bytes(triton_compiler.machine_code_of(made).packed())


if __name__ == "__main__":
    main(Request(*json.loads(sys.argv[1])))
