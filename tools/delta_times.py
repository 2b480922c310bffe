"""Time the gated delta rule beside fla's kernels on a GPU, or torch.bmm on a CPU; and its errors.

Usage: python tools/delta_times.py [CASE ...] [--device cuda|cpu] [--json FILE] [--kernels]

--help says more.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import saccade
from saccade.bench.timing import Clock, GpuClock, Runnable, Timing, TimingPlan, rotate
from saccade.ops.delta_rule import reference
from saccade.runtime.delta_spec import DeltaInputs, DeltaProblem, DeltaVariant

HELP = """\
Time the gated delta rule: forward, backward (of a forward pass that was run before), and a step of
decoding. On a GPU in bfloat16 beside fla, where it is installed, in turns whose order changes; a
step beside a copy of half a GiB. On a CPU in the processor's time of one thread, beside torch.bmm
of 16 pairs of 512 x 512 in float32 in the same turn. Queries, keys and values lie as models make
them ([batch, length, heads, channels]), queries and keys are divided by their lengths, decay is
uniform in (-1, 0), or in (-0.05, 0) where errors are told.
"""
EPILOG = """\
Errors are relative RMS against float64, of the first key head of the first sequence: of the output
over all its tokens, and of gradients of an output whose gradient is 0 behind 2,048 tokens.

On a GPU, processes side by side (--jobs) first make every kernel that a case wants, which fills
Triton's cache: fla tries dozens of configs of each kernel, and they are divided among four
processes. Then one process times. fla measures each config for 20 ms there (Triton's own 100 ms
would take minutes). Cases are told as they end; after --seconds no other begins.

  delta_times.py --json times.json                   all cases of a GPU, in about 4 minutes
  delta_times.py long --kernels                      and what each kernel takes
  delta_times.py --device cpu --json times.json     as benchmarks/results/cpu/delta_times.json

FLA_INTRACARD_CP=1 lets fla split one long packed sequence where nothing needs gradients.
"""
LIBRARIES = ("ours", "fla")
PARTS = 4  # processes that share fla's configs
GRADIENT_TOKENS = 2048
REFERENCE_CHUNK = 64
FIRST_TOKENS = 256  # of a sequence, where kernels are only to be compiled
MILD = 0.05  # decay where errors are told: a state that lasts 20 tokens and more
PLAN = TimingPlan(rounds=9, sample_seconds=0.02, warm_seconds=0.1, limit_seconds=12.0)
COPY_BYTES = 2**30  # read and written
COMPILING = 0.6  # of all seconds, after which no compiler runs


class DeltaTask(NamedTuple):
    """A problem that is timed."""

    name: str
    key_heads: int
    value_heads: int
    lengths: tuple[int, ...]  # of sequences
    decay: str = "heads"
    packed: bool = False
    step: bool = False  # one token more for each sequence; lengths are 1
    dim: int = 128
    dtype: str = "bfloat16"

    @property
    def tokens(self) -> int:
        """Of all sequences."""
        return sum(self.lengths)

    def problem(self) -> DeltaProblem:
        """What counts its operations."""
        return DeltaProblem(
            len(self.lengths), self.key_heads, self.value_heads,
            self.tokens if self.packed else self.lengths[0], self.dim, self.dim,
            getattr(torch, self.dtype), "cuda", self.decay, True, self.packed,
        )  # fmt: skip

    def short(self) -> DeltaTask:
        """The same with few tokens, where kernels are compiled for it alike."""
        if len(self.lengths) == 1:  # how a long sequence is cut depends on its length
            return self
        return self._replace(lengths=tuple(min(FIRST_TOKENS, n) for n in self.lengths))


PACKED = (20480, 14080, 10240, 8192, 6144, 4096, 1536, 768)  # 64k tokens, multiples of 256
CASES = {
    task.name: task
    for task in (  # what is most wanted comes first
        DeltaTask("qwen", 16, 32, (8192,) * 8),
        DeltaTask("qwen-step", 16, 32, (1,) * 64, step=True),
        DeltaTask("kimi-step", 32, 32, (1,) * 64, "channels", step=True),
        DeltaTask("long", 2, 8, (65536,), packed=True),
        DeltaTask("kimi", 32, 32, (8192,) * 4, "channels"),
        DeltaTask("qwen-packed", 16, 32, PACKED, packed=True),
    )
}
CPU_CASES = {
    task.name: task
    for task in (
        DeltaTask("none", 8, 8, (2048,), "none", dtype="float32"),
        DeltaTask("heads", 8, 8, (2048,), dtype="float32"),
        DeltaTask("channels", 8, 8, (2048,), "channels", dtype="float32"),
        DeltaTask("bfloat16", 4, 8, (2048,)),
        DeltaTask("channels-bfloat16", 8, 8, (2048,), "channels"),
        DeltaTask("batch", 8, 8, (512,) * 4, dtype="float32"),
        DeltaTask("long", 1, 2, (4096,), dtype="float32"),
    )
}
ERRORS_ON_CPU = DeltaTask("errors", 1, 2, (8192,))


# ---- tensors and calls ---------------------------------------------------------------------------


class Rows(NamedTuple):
    """A task's tensors, [batch, length, heads, channels]; packed sequences have a batch of 1."""

    query: Tensor
    key: Tensor
    value: Tensor
    beta: Tensor
    decay: Tensor | None
    grad_output: Tensor
    state: Tensor | None  # of a step
    offsets: Tensor | None

    def leaves(self) -> list[Tensor]:
        """What gets gradients."""
        return [each for each in self[:5] if each is not None]


def rows_of(task: DeltaTask, device: str, strength: float = 1.0) -> Rows:
    """Normal rows, beta as models have it (the sigmoid of normal numbers), uniform decay."""
    generator = torch.Generator(device).manual_seed(0)
    shape = (1, task.tokens) if task.packed else (len(task.lengths), task.lengths[0])

    def normal(*channels: int, dtype: torch.dtype | None = None) -> Tensor:
        made = torch.empty(
            *shape, *channels, device=device, dtype=dtype or getattr(torch, task.dtype)
        )
        return made.normal_(generator=generator)

    query, key = normal(task.key_heads, task.dim), normal(task.key_heads, task.dim)
    value, grad_output = normal(task.value_heads, task.dim), normal(task.value_heads, task.dim)
    beta, decay = normal(task.value_heads).sigmoid_(), None
    if task.decay != "none":
        channels = (task.dim,) if task.decay == "channels" else ()
        decay = normal(task.value_heads, *channels, dtype=torch.float32)
        decay = decay.uniform_(-strength, 0, generator=generator)
    state = offsets = None
    if task.step:
        state = torch.empty(len(task.lengths), task.value_heads, task.dim, task.dim, device=device)
        state.normal_(generator=generator)
    if task.packed:
        ends = torch.tensor((0, *task.lengths)).cumsum(0)
        offsets = ends.to(device, torch.int32)
    return Rows(query, key, value, beta, decay, grad_output, state, offsets)


def ours(rows: Rows) -> Callable[..., Tensor]:
    """A call of Saccade's on leaves as `Rows.leaves` gives them; the output like grad_output."""

    def heads_first(rows: Tensor) -> Tensor:
        return rows.transpose(1, 2)

    def dense(*leaves: Tensor) -> Tensor:
        query, key, value, beta = map(heads_first, leaves[:4])
        decay = heads_first(leaves[4]) if len(leaves) > 4 else None
        found = saccade.gated_delta_rule(query, key, value, beta, decay=decay, normalize_qk=True)
        return found.transpose(1, 2)

    def packed(*leaves: Tensor) -> Tensor:
        given: list[Any] = [each.squeeze(0) for each in leaves]
        decay = given[4] if len(given) > 4 else None
        query, key, value, beta = given[:4]
        assert rows.offsets is not None
        found = saccade.gated_delta_rule_varlen(
            query, key, value, beta, rows.offsets, decay=decay, normalize_qk=True
        )
        return found.unsqueeze(0)

    def step(*leaves: Tensor) -> Tensor:
        query, key, value, beta = map(heads_first, leaves[:4])
        decay = heads_first(leaves[4]) if len(leaves) > 4 else None
        assert rows.state is not None
        found = saccade.gated_delta_rule_step(
            rows.state, query, key, value, beta, decay=decay, normalize_qk=True
        )
        return found.transpose(1, 2)

    return step if rows.state is not None else packed if rows.offsets is not None else dense


def fla(rows: Rows) -> Callable[..., Tensor]:
    """The same of fla's."""
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule, fused_recurrent_gated_delta_rule
    from fla.ops.kda import chunk_kda, fused_recurrent_kda

    by_channel = rows.decay is not None and rows.decay.dim() == rows.query.dim()
    chunk: Any = chunk_kda if by_channel else chunk_gated_delta_rule
    recurrent: Any = fused_recurrent_kda if by_channel else fused_recurrent_gated_delta_rule
    options: dict[str, Any] = {"use_qk_l2norm_in_kernel": True}
    if rows.state is not None:
        options |= {"initial_state": rows.state, "output_final_state": True}
    elif rows.offsets is not None:
        options |= {"cu_seqlens": rows.offsets.long()}
    function = chunk if rows.state is None else recurrent

    def call(*leaves: Tensor) -> Tensor:
        query, key, value, beta, decay = leaves
        return function(query, key, value, g=decay, beta=beta, **options)[0]

    return call


CALLS: dict[str, Callable[[Rows], Callable[..., Tensor]]] = {"ours": ours, "fla": fla}


def forward_of(library: str, rows: Rows) -> Callable[[], object]:
    """A forward pass that keeps nothing for gradients."""
    call, leaves = CALLS[library](rows), rows.leaves()

    def run() -> object:
        with torch.inference_mode():
            return call(*leaves)

    return run


def gradients_of(library: str, rows: Rows) -> Callable[[], tuple[Tensor, ...]]:
    """A backward pass, of a forward pass that is run here."""
    leaves = [each.detach().requires_grad_() for each in rows.leaves()]
    output = CALLS[library](rows)(*leaves)
    return lambda: torch.autograd.grad(output, leaves, rows.grad_output, retain_graph=True)


# ---- first calls ---------------------------------------------------------------------------------


def first(task: DeltaTask, library: str, part: int) -> None:
    """Make the kernels of a task; of fla's configs every PARTS-th, from `part` on."""
    if library == "fla":
        from triton.runtime.autotuner import Autotuner

        every: Any = Autotuner.prune_configs

        def share(tuner: Any, given: Any) -> list[Any]:
            return every(tuner, given)[part::PARTS] or every(tuner, given)[:1]

        setattr(Autotuner, "prune_configs", share)  # noqa: B010
        measure_by(lambda call, quantiles: (call(), [1.0] * 3)[1])
    rows = rows_of(task.short(), "cuda")
    forward_of(library, rows)()
    if not task.step:
        gradients_of(library, rows)()
    torch.cuda.synchronize()


def measure_by(measure: Callable[..., Any]) -> None:
    """Let Triton's autotuner measure a config like this."""
    import triton

    triton.runtime.driver.active.get_benchmarker = lambda: measure


def make_kernels(
    tasks: Sequence[DeltaTask], libraries: Sequence[str], jobs: int, seconds: float
) -> None:
    """All first calls, so many processes side by side; failures are told."""
    environment = {**os.environ, "FLA_CACHE_RESULTS": "0", "OMP_NUM_THREADS": "1"}
    began = time.monotonic()

    def run(job: tuple[str, str, int]) -> str:
        command = [sys.executable, __file__, "--first", *map(str, job)]
        left = seconds - (time.monotonic() - began)
        try:
            if left < 1:
                raise subprocess.TimeoutExpired(command, 0)
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=left
            )
        except subprocess.TimeoutExpired:
            return f"{job[0]} by {job[1]}: no time is left to compile"
        said = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"{job[0]} by {job[1]}: {said}" if done.returncode else ""

    wanted = []
    for task in tasks:
        wanted.append((task.name, "ours", 0))
        if "fla" in libraries:
            wanted += [(task.name, "fla", part) for part in range(1 if task.step else PARTS)]
    with ThreadPoolExecutor(jobs) as pool:
        for failure in filter(None, pool.map(run, wanted)):
            print(failure[:300], flush=True)
    print(f"kernels made in {time.monotonic() - began:.0f} s", flush=True)


# ---- errors --------------------------------------------------------------------------------------


NAMES = ("query", "key", "value", "beta", "decay")


def one_head(rows: Rows, tokens: int) -> tuple[DeltaInputs, slice]:
    """The first tokens of the first sequence, its first key head, in float64; its value heads."""
    group = rows.value.shape[2] // rows.query.shape[2]

    def of(each: Tensor | None, heads: int) -> Any:
        return None if each is None else each[:1, :tokens, :heads].transpose(1, 2).double()

    keys, values = (of(each, 1) for each in rows[:2]), (of(each, group) for each in rows[2:5])
    return DeltaInputs(*keys, *values), slice(0, group)


def exact(inputs: DeltaInputs) -> Tensor:
    """The output in float64, in chunks: [1, tokens, heads, channels]."""
    variant = DeltaVariant(True, inputs.query.shape[-1] ** -0.5)
    laid_out = reference.lay_out(inputs, variant, torch.float64)
    return reference.chunked(laid_out, REFERENCE_CHUNK)[0].transpose(1, 2)


def distance(found: Tensor, truth: Tensor) -> float:
    """Relative RMS."""
    return float((found.double() - truth).norm() / truth.norm())


def errors_of(task: DeltaTask, library: str, device: str) -> dict[str, float]:
    """Of the output over the whole first sequence, and of gradients by its first tokens."""
    rows = rows_of(task, device, MILD)
    length = task.lengths[0]
    inputs, heads = one_head(rows, length)
    output = (
        CALLS[library](rows)(*rows.leaves()) if device == "cpu" else forward_of(library, rows)()
    )
    assert isinstance(output, Tensor)
    truth = exact(inputs)
    found = {"output": distance(output[:1, :length, heads], truth)}
    last = slice(max(length - 1024, 0), length)
    found["last 1024 rows"] = distance(output[:1, last, heads], truth[:, last])
    tokens = min(GRADIENT_TOKENS, length)
    inputs, _ = one_head(rows, tokens)
    rows.grad_output[:, tokens:] = 0
    rows.grad_output[1:] = 0
    leaves = [each.requires_grad_() for each in inputs if each is not None]
    arriving = rows.grad_output[:1, :tokens, heads].double()
    truths = torch.autograd.grad(exact(inputs), leaves, arriving)
    for name, ours, theirs in zip(NAMES, gradients_of(library, rows)(), truths, strict=False):
        ours = ours[:1, :tokens, : theirs.shape[1]].transpose(1, 2)
        found[name] = distance(ours, theirs)
    return found


# ---- times ---------------------------------------------------------------------------------------


class CpuClock:
    """The processor's time of one thread, so that other programs do not count."""

    def ready(self, candidate: Runnable) -> Runnable:
        """Load all code."""
        candidate.run()
        return candidate

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The time of one call."""
        start = time.thread_time()
        for _ in range(repeats):
            run()
        return (time.thread_time() - start) / repeats


PRODUCT_FLOPS = 16 * 2 * 512**3


def product() -> Callable[[], object]:
    """torch.bmm of 16 pairs of 512 x 512 in float32."""
    left, right = torch.randn(2, 16, 512, 512)
    return lambda: torch.bmm(left, right)


def copied() -> Callable[[], object]:
    """A copy of half a GiB by an operation, as the bench has it."""
    source = torch.ones(COPY_BYTES // 8, device="cuda")
    target = torch.empty_like(source)
    return lambda: torch.neg(source, out=target)


def timed(candidates: dict[str, Callable[[], object]], clock: Clock) -> dict[str, Timing]:
    """Times by turns."""
    ready = {name: clock.ready(Runnable(run)) for name, run in candidates.items()}
    return rotate(ready, clock, PLAN)


def times_on_gpu(task: DeltaTask, libraries: Sequence[str]) -> Iterator[dict[str, Any]]:
    """A row for each pass and library; a pass that fails has none, and why is told."""
    rows, clock = rows_of(task, "cuda"), GpuClock(torch.device("cuda"))
    for name, maker in (
        ("step" if task.step else "forward", forward_of),
        ("backward", gradients_of),
    ):
        if task.step and name == "backward":
            continue
        candidates: dict[str, Callable[[], object]] = {}
        peaks: dict[str, float] = {}
        for library in libraries:
            try:
                run: Any = maker(library, rows)
                run()
                peaks[library], candidates[library] = peak_of(run), run
            except Exception as error:  # out of memory, say; the other is to be timed
                print(f"{task.name} {name} by {library}: {type(error).__name__}: {error}"[:400])
        if task.step:
            candidates["copy"] = copied()
        for library, timing in timed(candidates, clock).items() if candidates else ():
            found = {"pass": name, "by": library, **told(timing)}
            if library in peaks:
                found["peak_mb"] = round(peaks[library])
            yield {**found, **rates(task, name, timing.median_ms, library)}
        candidates.clear()
        gc.collect()
        torch.cuda.empty_cache()


def peak_of(run: Callable[[], object]) -> float:
    """What a call takes at most of memory beside what is there before it, in megabytes."""
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def told(timing: Timing) -> dict[str, float]:
    """A timing as a row has it."""
    return {
        "median_ms": round(timing.median_ms, 4), "min_ms": round(timing.min_ms, 4),
        "max_ms": round(timing.max_ms, 4), "rounds": timing.rounds,
    }  # fmt: skip


def rates(task: DeltaTask, name: str, milliseconds: float, library: str) -> dict[str, float]:
    """Bytes a second of a step, or operations a second as `saccade.explain` counts them."""
    if library == "copy":
        return {"gb_per_s": round(COPY_BYTES / milliseconds / 1e6)}
    if task.step:
        states = 2 * 4 * len(task.lengths) * task.value_heads * task.dim**2
        return {"gb_per_s": round((states + task.problem().bytes) / milliseconds / 1e6)}
    problem = task.problem()
    flops = problem.flops if name == "forward" else problem.backward_flops
    return {"tflops": round(flops / milliseconds / 1e9, 1)}


def times_on_cpu(task: DeltaTask) -> dict[str, Any]:
    """The least of a few rounds, of forward and of both passes, and their shares of bmm's rate."""
    rows, clock = rows_of(task, "cpu"), CpuClock()
    leaves = [each.detach().requires_grad_() for each in rows.leaves()]
    call = ours(rows)

    def both() -> object:
        return torch.autograd.grad(call(*leaves), leaves, rows.grad_output)

    found = timed({"forward": forward_of("ours", rows), "both": both, "bmm": product()}, clock)
    rate = PRODUCT_FLOPS / found["bmm"].min_ms / 1e6
    problem = task.problem()
    flops = {"forward": problem.flops, "both": problem.flops + problem.backward_flops}
    row: dict[str, Any] = {"by": "ours", "bmm_gflops": round(rate, 1)}
    for name, count in flops.items():
        row[f"{name}_ms"] = round(found[name].min_ms, 1)
        row[f"{name}_of_bmm"] = round(count / found[name].min_ms / 1e6 / rate, 2)
    return row


def kernels_of(task: DeltaTask, libraries: Sequence[str]) -> None:
    """Print what each kernel takes in one call."""
    rows = rows_of(task, "cuda")
    for library in libraries:
        for name, maker in (("forward", forward_of), ("backward", gradients_of)):
            if task.step and name == "backward":
                continue
            try:
                spent = profiled(maker(library, rows))
            except Exception as error:  # the others are to be told
                spent = f"{type(error).__name__}: {error}"[:200]
            print(f"{task.name} {name} by {library}, us: {spent}", flush=True)


def profiled(run: Callable[[], object]) -> str:
    """The kernels of a call that take longest."""
    from torch.profiler import ProfilerActivity, profile

    run()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spent = sorted(seen.key_averages(), key=lambda each: -each.device_time_total)
    return ", ".join(f"{each.key[:44]} {each.device_time_total:.0f}" for each in spent[:9])


# ---- the command line ----------------------------------------------------------------------------


def parsed(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=HELP, epilog=EPILOG, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = f"of a GPU {', '.join(CASES)}; of a CPU {', '.join(CPU_CASES)}"
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"globs of names; {names}")
    where = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", choices=("cuda", "cpu"), default=where, help="where it is run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append a line for each result")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), help="processes that compile")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which no case begins")
    parser.add_argument("--kernels", action="store_true", help="also print what each kernel takes")
    for one in ("times", "errors", "first-calls"):
        parser.add_argument(f"--no-{one}", action="store_true", help=f"leave out {one}")
    parser.add_argument("--first", nargs=3, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def chosen(patterns: Sequence[str], cases: dict[str, DeltaTask]) -> list[DeltaTask]:
    """The cases that a glob fits.

    Raises:
        ValueError: for a glob that fits none.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in cases):
            raise ValueError(f"CASE: got {pattern}, takes {', '.join(cases)}")
    return [
        task
        for name, task in cases.items()
        if not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)
    ]


def machine(device: str) -> dict[str, str]:
    """What every line says of where it was measured."""
    if device == "cpu":
        return {"device": processor(), "torch": torch.__version__}
    import triton

    found = {"device": torch.cuda.get_device_name(), "torch": torch.__version__}
    return {**found, "triton": triton.__version__}


def processor() -> str:
    """The CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), "a CPU")


def about(task: DeltaTask) -> dict[str, Any]:
    """What every line says of its problem."""
    tokens = f"{task.tokens} packed" if task.packed else f"{len(task.lengths)}x{task.lengths[0]}"
    heads = f"{task.key_heads}/{task.value_heads}"
    found = {"case": task.name, "heads": heads, "tokens": tokens, "decay": task.decay}
    return {**found, "dtype": task.dtype}


class Report:
    """Lines that are printed and kept as they come."""

    def __init__(self, device: str, file: Path | None) -> None:
        self.where, self.file = machine(device), file

    def add(self, task: DeltaTask, row: dict[str, Any]) -> None:
        """One result."""
        line = {**about(task), **row, **self.where}
        short = ", ".join(f"{name} {value}" for name, value in row.items())
        print(f"{task.name:17} {short}", flush=True)
        if self.file is not None:
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(line) + "\n")

    def errors(self, task: DeltaTask, library: str, device: str) -> None:
        """The errors of one library."""
        try:
            found = errors_of(task, library, device)
        except Exception as error:  # the others are to be told
            print(f"{task.name} errors of {library}: {type(error).__name__}: {error}"[:400])
            return
        errors = {name: float(f"{value:.2g}") for name, value in found.items()}
        self.add(task, {"pass": "errors", "by": library, "errors": errors})


def on_gpu(asked: argparse.Namespace, report: Report) -> None:
    """All that was asked for on a GPU."""
    began = time.monotonic()
    tasks = chosen(asked.cases, CASES)
    libraries = LIBRARIES if has_fla() else LIBRARIES[:1]
    if not asked.no_first_calls:
        make_kernels(tasks, libraries, asked.jobs, COMPILING * asked.seconds)
    if "fla" in libraries:
        from triton.testing import do_bench

        measure_by(lambda call, quantiles: do_bench(call, 5, 20, quantiles=quantiles))
    for task in tasks:
        if time.monotonic() - began > asked.seconds:
            print(f"{task.name}: no time is left")
            continue
        for row in () if asked.no_times else times_on_gpu(task, libraries):
            report.add(task, row)
        for library in libraries if not (task.step or asked.no_errors) else ():
            report.errors(task, library, "cuda")
        if asked.kernels:
            kernels_of(task, libraries)
        gc.collect()
        torch.cuda.empty_cache()


def has_fla() -> bool:
    """Whether fla's operations can be imported."""
    try:
        import fla.ops.gated_delta_rule
        import fla.ops.kda  # noqa: F401
    except ImportError as error:
        print(f"without fla: {error}")
        return False
    return True


def on_cpu(asked: argparse.Namespace, report: Report) -> None:
    """All that was asked for on a CPU."""
    torch.set_num_threads(1)
    for task in () if asked.no_times else chosen(asked.cases, CPU_CASES):
        report.add(task, times_on_cpu(task))
    for decay in ("heads", "channels") if not asked.no_errors else ():
        for dtype in ("float32", "bfloat16"):
            report.errors(ERRORS_ON_CPU._replace(decay=decay, dtype=dtype), "ours", "cpu")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run what the command line asks for."""
    asked = parsed(arguments)
    if asked.first:
        name, library, part = asked.first
        first(CASES[name], library, int(part))
        return
    (on_cpu if asked.device == "cpu" else on_gpu)(asked, Report(asked.device, asked.json))


if __name__ == "__main__":
    main()
