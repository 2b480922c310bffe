"""Tuner: runs `saccade tune` on a machine with a GPU: compile, take turns, show, save."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rich.console import Console

from saccade.bench.timing import TimingPlan, rotate
from saccade.kernel_check import clock, session, tuning
from saccade.kernel_check.calls import MASKS, PASSES, KernelCall
from saccade.kernel_check.dtypes import DTYPES
from saccade.kernel_check.pool import Job
from saccade.kernel_check.tuning import MeasuredConfig, Task, candidates
from saccade.ops.attention.triton import configs, tuned_configs
from saccade.ops.attention.triton.tuned_configs import ConfigTable
from saccade.runtime.spec import KernelConfig

ROUNDS = 9
FINALISTS = 8  # who take turns again after the first look


def tune(
    tasks: Sequence[tuple[str, KernelCall]], limit: float, processes: int | None, save: bool
) -> None:
    """Find the fastest config of each kernel on each call.

    Raises:
        RuntimeError: on a machine without a GPU.
        ValueError: for a kernel that has no config.
    """
    architecture, console = session.own_architecture(), Console()
    version = session.triton_version()
    if architecture is None:
        raise RuntimeError(
            "there is no GPU here, so nothing can be timed; `saccade kernels` compiles without one"
        )
    found = [tuning.task(architecture, which, call) for which, call in tasks]  # all names are known
    device = torch.device("cuda", torch.cuda.current_device())
    name = torch.cuda.get_device_name(device)
    console.print(f"{name} ({architecture}), Triton {version}", highlight=False)
    winners: dict[configs.KernelProblem, KernelConfig] = {}
    for task in found:
        measured = measure(task, device, limit, processes or session.cores(), console)
        console.print(tuning.results_table(task, measured))
        best = tuning.winner(measured, configs.default(task.problem))
        if best is not None:
            winners[task.problem] = best.config
            line = tuning.line_to_commit(task.problem, best.config)
            console.print(f"configs.py, {architecture}: {line}\n", highlight=False, markup=False)
    if save:
        save_winners(ConfigTable(architecture, name, version, winners), console)
    else:
        console.print(session.own_table(), highlight=False, markup=False, soft_wrap=True)


def measure(
    task: Task, device: torch.device, limit: float, processes: int, console: Console
) -> list[MeasuredConfig]:
    """Compile every candidate, look at each once, and let the fastest take turns."""
    measured = compiled(task, processes, console)
    fitting = [entry.config for entry in measured if not entry.reason]
    watch = clock.KernelClock(task.problem.which)
    running = clock.runnables(task, fitting, device)
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    with watch.listening(), console.status(f"timing {len(fitting)} candidates"):
        for key, candidate in running.items():
            try:
                watch.ready(candidate)
                first[key] = min(watch.seconds(candidate.run, 2) for _ in range(2))
            except Exception as error:  # a config that the device refuses is left out, with why
                failed[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        chosen = sorted(first, key=first.__getitem__)[:FINALISTS]
        default = str(configs.default(task.problem).numbers())
        chosen += [default] if default in first and default not in chosen else []
        plan = TimingPlan(rounds=ROUNDS, limit_seconds=limit)
        final = rotate({key: running[key] for key in chosen}, watch, plan) if chosen else {}
    times = {key: seconds * 1e3 for key, seconds in first.items()}
    times |= {key: timing.median_ms for key, timing in final.items()}
    return [with_time(entry, times, failed) for entry in measured]


def with_time(
    entry: MeasuredConfig, times: dict[str, float], failed: dict[str, str]
) -> MeasuredConfig:
    """A candidate with its time, or with the reason why it has none."""
    key = str(entry.config.numbers())
    milliseconds = times.get(key)
    if milliseconds is not None and math.isfinite(milliseconds):
        return entry._replace(milliseconds=milliseconds)
    return entry._replace(reason=entry.reason or failed.get(key, "was not timed"))


def compiled(task: Task, processes: int, console: Console) -> list[MeasuredConfig]:
    """Compile all candidates, which also fills Triton's cache for the timing."""
    which, problem = tuning.PASS_OF[task.problem.which], task.problem
    names = tuple(name for name in PASSES[which] if name.split(",")[0] == problem.which)
    found = candidates(problem)
    jobs = [
        Job(problem.architecture, task.call, which, names, tuning.whole_config(problem.which, one))
        for one in found
    ]
    results = session.compile_with_progress(jobs, processes, console)
    return [
        tuning.classified(problem, config, [result for result in results if result.job is job])
        for config, job in zip(found, jobs, strict=True)
    ]


def save_winners(found: ConfigTable, console: Console) -> None:
    """Write the user's own table, and say where it is."""
    file = tuned_configs.path()
    if file is None:
        raise ValueError("--save: SACCADE_CONFIGS is empty, which turns the user's table off")
    aside = tuned_configs.save(file, found)
    if aside is not None:
        console.print(f"The table there could not be read; it is now {aside}", style="yellow")
    console.print(
        f"Saved {len(found.entries)} configs to {file}; from now on calls on {found.architecture} "
        f"use them. To undo that, delete the file.", highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


def calls_of(
    head_dims: Sequence[int],
    lengths: Sequence[int],
    dtype: str,
    mask_names: Sequence[str],
    batch: int,
    heads: int,
    kv_heads: int | None,
) -> list[KernelCall]:
    """The calls that a user's options describe.

    Raises:
        ValueError: naming the option, what it got and what it takes.
    """  # fmt: skip
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: got {dtype!r}, takes {', '.join(DTYPES)}")
    for mask in mask_names:
        if mask not in MASKS:
            raise ValueError(f"--mask: got {mask!r}, takes {', '.join(MASKS)}")
    for dim in head_dims:
        if not 1 <= dim <= configs.WIDTHS[-1]:
            raise ValueError(f"--head-dim: got {dim}, takes 1 to {configs.WIDTHS[-1]}")
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ValueError(f"--kv-heads: got {kv_heads}, takes a divisor of {heads} heads")
    return [
        KernelCall(dim, dtype, mask, batch=batch, heads=heads, kv_heads=kv_heads, length=length)
        for dim in head_dims
        for mask in mask_names
        for length in lengths
    ]
