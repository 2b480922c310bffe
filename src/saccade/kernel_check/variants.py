"""Variants: the kernels that calls with the library's own masks, scores and options reach.

They are found by making such calls by their public names, in a process that pretends to have a GPU,
and looking at what would be started. So what is listed is what a user's call looks for, by the
backend that it is served by. `saccade kernels --list` prints it, `--warm` compiles it into the
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
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from saccade.gpu import machine_code
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments
from saccade.gpu.stored_code import MachineCode
from saccade.kernel_check import worker
from saccade.kernel_check.calls import (
    Call,
    DeltaCall,
    Fp8KernelCall,
    KernelCall,
    LinearCall,
    PagedCall,
)
from saccade.kernel_check.calls.tensors import CPU

SHIPPED = ("sm_80", "sm_90", "sm_100", "sm_120")  # that a wheel holds machine code for
MULTIPROCESSORS = {"sm_80": 108, "sm_90": 132, "sm_100": 148, "sm_120": 170}
"""Of a GPU of each: linear attention cuts lengths into as many segments as keep all busy."""

LENGTHS = (
    64,
    256,
    384,
    512,
    1024,
    1536,
    2048,
    4096,
    65536,
)  # of every schedule that a length chooses
PACKED_LENGTHS = (8, 64, 512, 1024, 1536, 2048, 3072, 4096, 8192, 32768)  # tokens of two sequences
BATCHES = (1, 2, 4, 16)  # gradients split the query heads of a kv head where sequences are few
NOT_ALIGNED = 1  # that much longer, a length is no multiple of 16
MOST_OF_MANY = 8192  # rows of so many sequences each: memory that is never touched counts as well
HEADS = ((32, 32), (32, 8))  # query heads and kv heads
HALVES = ("bf16", "fp16")
WINDOWS = ("window", "window 4096")
"""Of few and of many keys."""
WIDTHS: dict[tuple[str, str], tuple[tuple[int, int], ...]] = {
    ("bf16", "none"): ((64, 0), (96, 0), (128, 0), (192, 128), (256, 0)),
    ("bf16", "causal"): ((64, 0), (96, 0), (128, 0), (192, 128), (256, 0)),
    **{("bf16", window): ((64, 0), (128, 0), (256, 0)) for window in WINDOWS},
    ("fp16", "none"): ((64, 0), (128, 0)),
    ("fp16", "causal"): ((64, 0), (128, 0)),
}
"""Of keys, and of values where they differ (else 0), by dtype and mask."""
OPTIONS: tuple[dict[str, Any], ...] = (  # of causal calls in bf16, as projections leave rows
    {"score": "softcap"}, {"score": "alibi"}, {"score": "bias", "mask": "none"},
    {"score": "bias like rows", "mask": "none"},
    {"mask": "documents, causal"}, {"mask": "prefix"}, {"sinks": True}, {"dropout_p": 0.1},
    {"deterministic": True},
)  # fmt: skip
OPTION_LENGTHS = (64, 512, 2048, 4096, 8192, 65536)
DECODED = (1, 2, 4, 8, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512)
"""Batches, of every number of parts into which keys are split."""
CHUNKS = (
    *range(2, 12), 16, 17, 24, 32, 33, 48, 60, 64, 96, 100, 128, 192, 256, 384, 512, 600, 640, 1024,
    3000, 4096,
)  # fmt: skip
"""Query rows of one sequence."""
LINEAR_HEADS = 16
LINEAR_LENGTHS = (256, *range(1024, 8193, 512))
"""Of every number of segments into which so many heads are cut, which is a constant of kernels."""

DELTA_LENGTHS = (512, 8192, 65536)
"""Of the gated delta rule: few rows, and those of long sequences, which are cut or are not."""

FP8_ARCHITECTURES = ("sm_89", "sm_90", "sm_100", "sm_120")
"""Whose products of e4m3 numbers kernels use."""
FP8_LENGTHS = (256, 4096, 16384, 32768)
"""Of every number of keys that one program sums, a constant of kernels, up to so many rows."""

LEAN = {"TRITON_DISABLE_LINE_INFO": "1"}
"""What Triton is told: which line an instruction came from takes more memory than all code."""

SAMPLE = 4  # kernels of a wheel that is made to be looked at


class Variant(NamedTuple):
    """A kernel that a call reaches."""

    address: str
    kernel: str
    of: str  # the call that reached it first


class Listed(NamedTuple):
    """A user's call, whose kernels are listed."""

    name: str
    run: Callable[[], Any]
    """Makes it; gives the output and what may have gradients, or something else."""

    @staticmethod
    def of(call: Call, what: str = "") -> Listed:
        """A described call by its public name; what: to tell it from others."""
        return Listed(f"{call.operation}: {call.name}{what}", partial(call.user_call, CPU))


def calls(architecture: str) -> Iterator[Listed]:
    """Calls that reach the listed variants of an architecture."""
    for (dtype, mask), widths in WIDTHS.items():
        if architecture == "sm_75" and dtype == "bf16":
            continue
        for dim, value_dim in widths:
            call = KernelCall(dim, dtype, mask, value_dim=value_dim, batch=1)
            for one in _of_heads(call):
                for inside in (False, True):
                    yield from _of_lengths(one._replace(heads_inside=inside), LENGTHS)
                for apart in (False, True):
                    packed = one._replace(packed=True, offsets_apart=apart)
                    yield from _of_batches(packed, PACKED_LENGTHS)
                    for length in PACKED_LENGTHS:
                        yield Listed.of(packed._replace(length=length, alone=True))
                if dim in (64, 128) and mask not in WINDOWS:  # decoding without pages
                    for batch in (1, 2):
                        yield from _of_lengths(one._replace(query_len=1, batch=batch), (512,))
    half = HALVES[architecture == "sm_75"]
    for dim in (64, 128):
        call = KernelCall(dim, half, "causal", batch=1, heads_inside=True)
        for options in OPTIONS:
            quadratic = "bias" in options.get("score", "")  # in memory; one length reaches all
            lengths = OPTION_LENGTHS[:1] if quadratic else OPTION_LENGTHS
            for one in _of_heads(call._replace(**options)):
                yield from _of_lengths(one, lengths)
        for mask in ("none", "causal"):
            for one in _of_heads(KernelCall(dim, "fp32", mask, batch=1)):
                yield from _of_lengths(one, OPTION_LENGTHS)
    for dtype in HALVES[architecture == "sm_75" :]:
        yield from _paged(dtype, dtype == half)
    yield from _linear(half)
    yield from _delta(half)
    if architecture in FP8_ARCHITECTURES:
        yield from _fp8(half)


def _of_heads(call: Any) -> Iterator[Any]:
    for heads, kv_heads in HEADS:
        yield call._replace(heads=heads, kv_heads=kv_heads)


def _of_lengths(call: KernelCall, lengths: Sequence[int]) -> Iterator[Listed]:
    yield from _of_batches(call, [length + more for length in lengths for more in (0, NOT_ALIGNED)])


def _of_batches(call: KernelCall, lengths: Sequence[int]) -> Iterator[Listed]:
    grouped = call.heads > call.kv_heads and call.batch == 1
    for length in lengths:
        for batch in BATCHES if grouped and length <= MOST_OF_MANY else (call.batch,):
            one = call._replace(length=length, batch=batch)
            yield Listed.of(one, f" batch {batch}" if batch > 1 else "")


def _paged(dtype: str, chunks: bool) -> Iterator[Listed]:
    """Decoding and writing; chunks of several rows and pages of eight bits too, where asked."""
    for dim, page_size in ((64, 16), (64, 64), (128, 16), (128, 64), (256, 16)):
        for pages in ("", "fp8") if chunks and dim == 128 else ("",):
            for call in _of_heads(PagedCall(dim, dtype, "none", page_size, pages)):
                for batch in DECODED:
                    for mask in ("none", "causal"):
                        one = call._replace(batch=batch, mask=mask, length=page_size)
                        yield Listed.of(one, f" batch {batch}")
                for rows in CHUNKS if chunks and dim < 256 and not pages else ():
                    chunk = call._replace(mask="causal", query_len=rows, batch=1)
                    yield Listed.of(chunk, f" {rows} rows")
                for rotary in (False, True):
                    name = f"write_kv_cache: {call.name}{' rotary' if rotary else ''}"
                    yield Listed(name, partial(call.user_write, CPU, rotary))


def _linear(dtype: str) -> Iterator[Listed]:
    for dim in (64, 128):
        for length in LINEAR_LENGTHS:
            for rows in (length, length + NOT_ALIGNED):
                call = LinearCall(dim, dtype, length=rows, batch=1, heads=LINEAR_HEADS)
                yield Listed.of(call, f" {rows} rows")
        call = LinearCall(dim, dtype, batch=1, heads=LINEAR_HEADS)
        yield Listed(f"linear_attention_step: {call.name}", partial(call.user_step, CPU))


def _delta(dtype: str) -> Iterator[Listed]:
    """Layers of Qwen3-Next and of Kimi Linear; one long sequence of few heads, which is cut."""
    for decay, key_heads in (("heads", 16), ("channels", 32)):
        call = DeltaCall(128, dtype, decay, key_heads=key_heads, heads_inside=True)
        for length in DELTA_LENGTHS:
            # Without bfloat16 states of eight long sequences take 64 GB, four times what a T4 has.
            batches = (1,) if (dtype, length) == ("fp16", DELTA_LENGTHS[-1]) else (1, 8)
            for rows in (length, length + NOT_ALIGNED):
                for batch in batches:
                    one = call._replace(length=rows, batch=batch)
                    yield Listed.of(one, f" {rows} rows batch {batch}")
        yield Listed(f"gated_delta_rule_step: {call.name}", partial(call.user_step, CPU))
    long = DeltaCall(128, dtype, length=65536, batch=1, heads=8, key_heads=2, heads_inside=True)
    yield Listed.of(long)


def _fp8(dtype: str) -> Iterator[Listed]:
    """e4m3 rows with scales, and rows of 16 bits with scales by blocks, which are quantised."""
    for dim in (64, 128, 256):
        for mask in ("none", "causal"):
            for rows in (dtype, "fp8"):
                for call in _of_heads(Fp8KernelCall(dim, rows, mask, batch=1)):
                    for length in FP8_LENGTHS:
                        for more in (0, NOT_ALIGNED):
                            one = call._replace(length=length + more)
                            yield Listed.of(one, f" {one.length} rows")
                            inside = one._replace(heads_inside=True)
                            yield Listed.of(inside, f" {one.length} rows heads inside")
                            packed = one._replace(packed=True)
                            yield Listed.of(packed, f" {one.length} rows")


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
    reached: set[Any] = set()  # by what a process knows a variant by: its address takes longer
    at = ""

    def wanted(name: str) -> bool:
        return any(fnmatchcase(name, glob) for glob in of)

    def look(launch: Launch, make: Callable[[], Arguments]) -> None:
        if not wanted(at) or not fnmatchcase(launch.kernel.__name__, kernels):
            return
        arguments = make()
        variant = launch.kernel, arguments.key, *launch.options.items()
        if variant in reached:
            return
        reached.add(variant)
        address = machine_code.address_of(launch.kernel, arguments, launch.options, architecture)
        assert address is not None, "a kernel of the library's own"
        if address not in seen:
            seen.add(address)
            on_variant(Variant(address, launch.kernel.__name__, at), launch, arguments)

    worker.pretend_gpu(architecture, look, MULTIPROCESSORS.get(architecture, 100))
    for listed in calls(architecture):
        at, backward = listed.name, listed.name.replace(":", " backward:")
        if not (wanted(at) or wanted(backward)):
            continue
        found = listed.run()
        output, leaves = found if isinstance(found, tuple) else (found, ())
        if leaves:  # where no gradient is due, no residual is written
            with torch.no_grad():
                listed.run()
        at = backward
        if leaves and wanted(at):
            torch.autograd.grad(output, leaves, torch.empty_like(output))


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

    most: so many of them, spread from the first to the last. of: globs of calls.

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
    if 0 < request.most < len(found):
        last, parts = len(found) - 1, max(request.most - 1, 1)
        found = [found[number * last // parts] for number in range(request.most)]
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
