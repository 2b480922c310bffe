"""Compile kernels in worker processes, for any architecture and without a GPU.

Each worker, `python -m saccade.kernel_check.worker`, compiles for one architecture: a process
remembers what the library prepared for one, and its kernels are not interpreted. It reads {"jobs":
[job, ...], "known": {key: usage, ...}} and answers with a line of JSON for each kernel; a known one
is not compiled.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import triton
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.launcher import Launch
from saccade.gpu.signature import Arguments
from saccade.gpu.triton_compiler import compiled, target_of
from saccade.kernel_check import left_operands, machine_code
from saccade.kernel_check.calls.tensors import CPU
from saccade.kernel_check.catalogue import Compiled, Job, Known, compiler_inputs, key_of
from saccade.kernel_check.machine_code import Usage
from saccade.kv_cache import storage
from saccade.ops.attention.hopper import configs as hopper_configs
from saccade.ops.attention.triton import call_spec
from saccade.runtime import arguments as runtime_arguments
from saccade.runtime import backends, call_cache

# ---- the process that starts workers -------------------------------------------------------------


def compile_with_progress(
    jobs: Sequence[Job], processes: int | None, console: Console, known: Known | None = None
) -> list[Compiled]:
    """Compile every job while a bar shows how far it has got; by default on every core."""
    total = sum(len(job.kernels) for job in jobs)
    columns = *Progress.get_default_columns(), TimeElapsedColumn(), TextColumn("{task.fields[at]}")
    with Progress(SpinnerColumn(), *columns, console=console, transient=True) as bar:
        task = bar.add_task("compiling", total=total, at="")

        def show(result: Compiled) -> None:
            at = f"{result.job.architecture} {result.kernel} {result.job.call.name}"
            bar.update(task, advance=1, at=at)

        return compile_all(jobs, processes or cores(), show, known)


def compile_all(
    jobs: Sequence[Job],
    processes: int,
    on_done: Callable[[Compiled], None] = lambda result: None,
    known: Known | None = None,
) -> list[Compiled]:
    """Compile every job; results in the order of jobs, equal binaries once.

    on_done: called with each result, by several threads.
    known: what need not be compiled again, see catalogue.py.

    Raises:
        RuntimeError: if a worker died, with the last line that it wrote.
    """

    def run(numbers: Sequence[int]) -> list[tuple[int, Compiled]]:
        return _run_worker({number: jobs[number] for number in numbers}, on_done, known or {})

    with ThreadPoolExecutor(max(processes, 1)) as threads:
        answers = chain.from_iterable(threads.map(run, _split(jobs, processes)))
        return _once([result for _, result in sorted(answers, key=lambda answer: answer[0])])


def _once(results: Sequence[Compiled]) -> list[Compiled]:
    """Several calls start the same kernel (row_statistics, say): it counts for the first."""
    kept: dict[object, Compiled] = {}
    for number, result in enumerate(results):
        kept.setdefault((result.kernel, result.key) if result.key else number, result)
    return list(kept.values())


def _split(jobs: Sequence[Job], processes: int) -> list[list[int]]:
    """Numbers of jobs, by worker: one architecture a worker, and no process without work."""
    of_architecture: dict[str, list[int]] = defaultdict(list)
    for number, job in enumerate(jobs):
        of_architecture[job.architecture].append(number)
    parts = -(-processes // max(len(of_architecture), 1))
    split = [numbers[part::parts] for numbers in of_architecture.values() for part in range(parts)]
    return sorted(filter(None, split), key=len, reverse=True)


def _run_worker(
    jobs: dict[int, Job], on_done: Callable[[Compiled], None], known: Known
) -> list[tuple[int, Compiled]]:
    """Results, each with the number of its job."""
    numbers, found = list(jobs), []
    command = [sys.executable, "-m", "saccade.kernel_check.worker"]
    pipe = subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+", errors="replace") as errors,
        subprocess.Popen(
            command, env=worker_environment(), stdin=pipe, stdout=pipe, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdin and process.stdout
        try:
            with suppress(BrokenPipeError), process.stdin as request:  # the exit status tells of it
                json.dump({"jobs": [job.plain() for job in jobs.values()], "known": known}, request)
            for line in process.stdout:
                position, kernel, config, seconds, usage, *rest = json.loads(line)
                number = numbers[position]
                used = None if usage is None else Usage(*usage)
                found.append(
                    (number, Compiled(jobs[number], kernel, tuple(config), seconds, used, *rest))
                )
                on_done(found[-1][1])
        except BaseException:
            process.kill()
            raise
        if status := process.wait():
            errors.seek(0)
            said = [line.strip() for line in errors if line.strip()] or ["it said nothing"]
            raise RuntimeError(f"a compiling process ended with {status}: {said[-1]}")
    return found


def worker_environment() -> dict[str, str]:
    """The environment of a worker: this package, the compiler, and default configs only."""
    package = str(Path(__file__).parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1",
        "SACCADE_CONFIGS": "",
    }  # fmt: skip
    environment.pop("TRITON_INTERPRET", None)
    return environment


def cores() -> int:
    """How many processes run side by side here."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


# ---- the worker ----------------------------------------------------------------------------------


def main() -> None:
    """Compile what the input asks for."""
    request = json.load(sys.stdin)
    jobs, number = [Job.of_plain(plain) for plain in request["jobs"]], 0

    def compile_wanted(launch: Launch, make: Callable[[], Arguments]) -> None:
        job = jobs[number]
        if kernel_name(launch, job.which) in job.kernels:
            result = compile_launch(job, launch, make, request["known"])
            print(json.dumps([number, *result[1:]]), flush=True)

    intercept_launches(jobs[0].architecture, compile_wanted)
    for number, job in enumerate(jobs):  # noqa: B007 - compile_wanted reads it
        job.call.prepared(CPU)(job.which, job.config)


def intercept_launches(
    architecture: str,
    on_launch: Callable[[Launch, Callable[[], Arguments]], None],
    multiprocessors: int = 100,
) -> None:
    """Have this process hand its launches over from now on, as on a GPU of an architecture.

    The library's own code chooses kernels and makes their arguments; only its last step, and the
    questions which GPU the tensors lie on, are answered differently.

    on_launch: called with each launch and a function that makes its arguments.
    """

    def hand_over(launch: Launch, programs: int, device: Any, tensors: Any, make: Any) -> None:
        on_launch(launch, lambda: launch.arguments(make()))

    Launch.__call__ = hand_over  # type: ignore[method-assign]
    call_spec.architecture = lambda tensor: architecture
    call_spec.multiprocessors = lambda tensor: multiprocessors  # many: work over pages is split
    tile_scheduler.counter_of = lambda device: torch.zeros((), dtype=torch.int32)


def pretend_gpu(
    architecture: str,
    on_launch: Callable[[Launch, Callable[[], Arguments]], None],
    multiprocessors: int,
) -> None:
    """Have this process take calls on CPU tensors for calls on a GPU from now on.

    As `intercept_launches`; and backends are chosen as there, and no values of tensors are read.
    """
    intercept_launches(architecture, on_launch, multiprocessors)
    hopper = None if architecture == "sm_90" else f"it takes sm_90, not {architecture}"
    backends._triton_device_unsupported = lambda *device: None
    backends._hopper_device_unsupported = lambda *device: hopper
    others = [entry for entry in backends.BACKENDS if entry.name != "cpu"]
    setattr(backends, "BACKENDS", tuple(others))  # noqa: B010 - of another length
    for module in (runtime_arguments, call_cache, storage):
        setattr(module, "values_readable", lambda tensor: False)  # noqa: B010 - of any of them
    torch.library.impl("saccade::write_kv_cache", "CPU", storage._write_on_gpu)


def compile_launch(
    job: Job, launch: Launch, make: Callable[[], Arguments], known: Known
) -> Compiled:
    """What a kernel takes that a job launches, or why it cannot be compiled."""
    begin = time.perf_counter()
    usage, error, key = None, "", ""
    try:
        arguments = make()
        inputs = compiler_inputs(launch, arguments, job.architecture)
        key = key_of(triton.__version__, job.architecture, inputs)
        if key in known:
            usage = Usage(*known[key])
        else:
            asked = launch.kernel, arguments, launch.options, target_of(job.architecture)
            made = compiled(*asked)
            left_operands.check(made)
            usage = machine_code.usage(made)
    except Exception as failure:  # whatever the compiler raises is what is to be told
        error = f"{type(failure).__name__}: {failure}"[:400]
    seconds, name = time.perf_counter() - begin, kernel_name(launch, job.which)
    return Compiled(job, name, config_of(launch), seconds, usage, error, key)


def kernel_name(launch: Launch, which: str) -> str:
    """The name in `calls.KERNELS` of a kernel that a pass launches."""
    name = launch.kernel.__name__.removeprefix("attention_")
    if which == "hopper_ordered":
        return f"hopper_{name}, ordered"
    if which == "hopper_in_order":
        return f"hopper_{name}, in key order"
    if (which, name) == ("hopper_split", "backward"):
        return "hopper_backward, split"
    if (which, name) == ("paged", "forward"):  # the dense kernel, whose keys lie in pages
        return "pages_forward"
    if name == "linear_nan_safe":  # one kernel for four passes
        return f"hopper_linear_{launch.constants['PASS']}_nan_safe"
    if name == "linear_wide":
        return f"hopper_linear_wide_{launch.constants['PASS']}"
    if which.startswith("hopper"):
        return f"hopper_{name}, keeping" if launch.constants.get("KEEPS") else f"hopper_{name}"
    if "PASS" in launch.constants:  # a scan of linear attention serves two of them
        return f"linear_{launch.constants['PASS']}"
    if which == "shared":
        name = name.replace("backward_keys", "backward_shared")
    return f"{name}, NaN-safe" if launch.constants.get("NAN_SAFE") else name


def config_of(launch: Launch) -> tuple[int, int, int, int]:
    """Tiles (0 where a kernel has none), warps and stages of a kernel."""
    constants, options = launch.constants, launch.options
    if "CONSUMERS" in constants:  # its tile of keys is a side of a descriptor, but for pages
        rows, warps = hopper_configs.ROWS * constants["CONSUMERS"], 4 * constants["CONSUMERS"] + 2
        warps *= 2 if "maxnreg" in options else 1  # of the programs that share a multiprocessor
        return rows, constants.get("KV_TILE", 0), warps, constants["STAGES"]
    if "MAPPER_REGISTERS" in constants:  # linear attention: two consumers, two that map, one loads
        warps = 16 if "PASS" in constants else 17  # the wide kernel's load as well
        return hopper_configs.ROWS, hopper_configs.ROWS, warps, constants["STAGES"]
    if "SOLVE_REGISTERS" in constants:  # the delta rule: 8 warps scan, 4 solve, 2 measure, 1 loads
        return hopper_configs.ROWS, hopper_configs.ROWS, 15, constants["STAGES"]
    if "ADD_REGISTERS" in constants:  # its gradients: 8 warps add, 2 look at rows, 1 loads
        return hopper_configs.ROWS, hopper_configs.ROWS, 11, 1
    if "CONSUMER_REGISTERS" in constants:  # two of them; tiles are sides of descriptors
        return _backward_config(launch)
    if "CHUNK" in constants and "OUTER_TILE" not in constants:  # of the delta rule
        tile = constants.get("VALUE_TILE", constants.get("KEY_TILE", 0))
        return constants["CHUNK"], tile, options["num_warps"], options["num_stages"]
    if "OUTER_TILE" in constants:  # of linear attention: channels and rows
        tile, chunk = constants["OUTER_TILE"], constants["CHUNK"]
        return tile, chunk, options["num_warps"], options["num_stages"]
    query_tile = constants.get("QUERY_TILE", constants.get("TILE", 0))
    kv_tile = constants.get("KV_TILE", constants.get("OTHER", 0))
    return query_tile, kv_tile, options["num_warps"], options["num_stages"]


def _backward_config(launch: Launch) -> tuple[int, int, int, int]:
    stages = launch.constants["STAGES"]
    if launch.kernel.__name__ == "attention_backward_queries":
        chosen = hopper_configs.QuerySchedule()
        return chosen.query_tile, chosen.kv_tile, 10, stages
    apart = launch.kernel.__name__ == "attention_backward_keys"
    return 0, hopper_configs.WIDE_KV_TILE if apart else hopper_configs.BACKWARD_KV_TILE, 9, stages


if __name__ == "__main__":
    main()
