"""Find the fastest tile sizes of a kernel: compile candidates, time them by turns, compare."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from saccade.bench.timing import Runnable, TimingPlan, rotate
from saccade.gpu import recording
from saccade.gpu.launcher import Launch
from saccade.kernel_check import worker
from saccade.kernel_check.calls import PASSES, KernelCall
from saccade.kernel_check.calls.attention import MASKS
from saccade.kernel_check.calls.tensors import DTYPES
from saccade.kernel_check.catalogue import Compiled, Job
from saccade.kernel_check.report import config_text, fault, kilobytes, problem_of
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import ConfigTable, KernelProblem
from saccade.runtime.backends import WIDEST_VALUE
from saccade.runtime.spec import KernelConfig

ROUNDS = 9
FINALISTS = 8  # candidates that take turns after a first look at all
WORTH_IT = 0.98  # of the default's time: less of a gain is noise
PASS_OF = {
    "forward": "forward",
    "backward_keys": "ordered",
    "backward_queries": "ordered",
    "backward_shared": "shared",
    "backward_bias": "bias",
}


class Task(NamedTuple):
    """An entry of the tables of configs that is searched, and the call that it is timed on."""

    problem: KernelProblem
    call: KernelCall

    @property
    def name(self) -> str:
        """The entry and the call."""
        problem, call = self.problem, self.call
        return (
            f"{problem.which} on {problem.architecture}: {call.name}, batch {call.batch}, "
            f"heads {call.heads}/{call.kv_heads}, length {call.length}"
        )


class MeasuredConfig(NamedTuple):
    """A candidate, and what was measured of it."""

    config: KernelConfig
    milliseconds: float = math.inf  # inf: it was not timed
    reason: str = ""  # why not
    registers: int = 0
    spills: int = 0
    shared: int = 0


def task(architecture: str, which: str, call: KernelCall) -> Task:
    """The entry of the tables that a kernel of a call looks up."""
    if which not in configs.PASSES:
        raise ValueError(f"--which: got {which!r}, takes {', '.join(configs.PASSES)}")
    if which == "backward_bias":
        call = call._replace(score="bias")
    return Task(problem_of(architecture, which, call), call)


def whole_config(which: str, config: KernelConfig) -> KernelConfig:
    """The config to give to a call, so that one kernel of it gets these numbers."""
    return config if which == "forward" else KernelConfig(backward=config)


def classified(
    problem: KernelProblem, config: KernelConfig, compiled: Sequence[Compiled]
) -> MeasuredConfig:
    """A candidate after it was compiled (NaN-safe, and not), before it is timed."""
    if not compiled:
        return MeasuredConfig(config, reason="was not compiled")
    used = [result.usage for result in compiled if result.usage is not None]
    failed = [fault(result) for result in compiled if result.usage is None]
    if failed:
        return MeasuredConfig(config, reason=failed[0])
    registers, spills, shared = (
        max(numbers) for numbers in zip(*(usage[:3] for usage in used), strict=True)
    )
    limit = configs.SHARED_MEMORY[problem.architecture]
    reason = f"{kilobytes(shared)} of shared memory" if shared > limit else ""
    return MeasuredConfig(config, math.inf, reason, registers, spills, shared)


def winner(measured: Sequence[MeasuredConfig], default: KernelConfig) -> MeasuredConfig | None:
    """The fastest, unless it gains too little on the default to be more than noise.

    None where nothing could be timed.
    """
    fastest = min(measured, key=lambda entry: entry.milliseconds)
    if math.isinf(fastest.milliseconds):
        return None
    for entry in measured:
        if entry.config == default and fastest.milliseconds >= WORTH_IT * entry.milliseconds:
            return entry
    return fastest


def results_table(found: Task, measured: Sequence[MeasuredConfig], shown: int = 20) -> Table:
    """Candidates by time; the default and the winner are marked."""
    default = configs.default(found.problem)
    best = winner(measured, default)
    timed = [entry for entry in measured if math.isfinite(entry.milliseconds)]
    [default_entry] = [entry for entry in measured if entry.config == default]
    table = Table(title=found.name, title_justify="left", caption_justify="left")
    for name in ("config", "ms", "× default", "registers", "spills", "shared", ""):
        table.add_column(name, justify="left" if name in ("config", "") else "right", no_wrap=True)
    for position, entry in enumerate(sorted(timed, key=lambda entry: entry.milliseconds)):
        marks = ["default"] * (entry is default_entry) + ["winner"] * (entry == best)
        if position >= shown and not marks:
            continue
        ratio = entry.milliseconds / default_entry.milliseconds
        table.add_row(
            config_text(entry.config.numbers()), f"{entry.milliseconds:.3f}",
            f"{ratio:.2f}" if default_entry in timed else "", str(entry.registers),
            str(entry.spills or ""), kilobytes(entry.shared), ", ".join(marks),
            style="bold green" if "winner" in marks else "bold" if marks else None,
        )  # fmt: skip
    table.caption = f"{len(timed)} timed, {len(measured) - len(timed)} left out"
    if default_entry not in timed:
        table.caption += f"; the default was not timed: {default_entry.reason}"
    return table


def line_to_commit(problem: KernelProblem, config: KernelConfig) -> str:
    """The row of configs.py with the config in its column."""
    name, row = configs.row_of(problem)
    column = configs.WIDTHS.index(problem.width)
    row = (*row[:column], config, *row[column + 1 :])
    cells = ", ".join(str(tuple(entry.numbers())) for entry in row)
    return f'"{name}": _row({cells}),'


# ---- candidates ----------------------------------------------------------------------------------
# The configs worth compiling for a kernel, pruned by what they must take at least.

TILES = (16, 32, 64, 128)
WARPS = (4, 8)
STAGES = (1, 2, 3, 4)
FEWEST_PAIRS, MOST_PAIRS = 16 * 32, 128 * 128  # in a tile: below, tensor cores idle
REGISTERS = 255  # of a thread, on NVIDIA's GPUs
# What is beside sums and pairs in registers (addresses, operands) is not estimated: a kernel may
# spill a little and still be the fastest, and the compiler will tell.
TENSOR_MEMORY = ("sm_100",)  # keeps sums outside of registers


def candidates(problem: KernelProblem) -> list[KernelConfig]:
    """Tiles × warps × stages that may fit; the default is always among them, and first."""
    found = [configs.default(problem)]
    for numbers in product(TILES, TILES, WARPS, _stages(problem.architecture)):
        config = KernelConfig(*numbers)
        if config not in found and _may_fit(problem, config):
            found.append(config)
    return found


def least_shared_memory(problem: KernelProblem, config: KernelConfig) -> int:
    """Bytes of the tiles that wait in shared memory while others are computed."""
    row = problem.width * (4 if problem.wide else 2)
    ahead = max(config.num_stages - 1, 0)
    streamed = config.query_tile if over_queries(problem.which) else config.kv_tile
    return 2 * ahead * streamed * row  # keys and values, or queries and gradients of outputs


def least_registers(problem: KernelProblem, config: KernelConfig) -> float:
    """Registers of a thread for the sums and for one tile of pairs."""
    threads = config.num_warps * (64 if problem.architecture.startswith("gfx") else 32)
    pairs = config.query_tile * config.kv_tile
    if problem.which == "backward_bias":
        sums = pairs
    elif over_queries(problem.which):
        sums = 2 * config.kv_tile * problem.width  # gradients of keys and of values
    else:
        sums = config.query_tile * problem.width
    return (sums + pairs) / threads


def over_queries(which: str) -> bool:
    """Whether each program of a kernel has a tile of keys and reads all queries."""
    return which in ("backward_keys", "backward_shared")


def _stages(architecture: str) -> tuple[int, ...]:
    if architecture == "sm_75":  # no asynchronous copies
        return STAGES[:1]
    return STAGES[:2] if architecture.startswith("gfx") else STAGES


def _may_fit(problem: KernelProblem, config: KernelConfig) -> bool:
    if not FEWEST_PAIRS <= config.query_tile * config.kv_tile <= MOST_PAIRS:
        return False
    if problem.which == "backward_bias" and config.num_stages > 1:
        return False  # its loops are short, and each tile is another
    if least_shared_memory(problem, config) > configs.SHARED_MEMORY[problem.architecture]:
        return False
    spacious = problem.architecture in TENSOR_MEMORY or problem.architecture.startswith("gfx")
    return spacious or least_registers(problem, config) <= REGISTERS


# ---- timing --------------------------------------------------------------------------------------


def calls_of(
    head_dims: Sequence[int],
    length: int,
    dtype: str,
    mask_names: Sequence[str],
    batch: int,
    heads: int,
    kv_heads: int | None,
) -> list[KernelCall]:
    """The calls that a user's options describe.
    """  # fmt: skip
    if dtype not in DTYPES:
        raise ValueError(f"--dtype: got {dtype!r}, takes {', '.join(DTYPES)}")
    for mask in mask_names:
        if mask not in MASKS:
            raise ValueError(f"--mask: got {mask!r}, takes {', '.join(MASKS)}")
    for dim in head_dims:
        if not 1 <= dim <= WIDEST_VALUE:  # of values as wide as keys
            raise ValueError(f"--head-dim: got {dim}, takes 1 to {WIDEST_VALUE}")
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % kv_heads:
        raise ValueError(f"--kv-heads: got {kv_heads}, takes a divisor of {heads} heads")
    return [
        KernelCall(dim, dtype, mask, batch=batch, heads=heads, kv_heads=kv_heads, length=length)
        for dim in head_dims
        for mask in mask_names
    ]


def tune(
    tasks: Sequence[Task], limit: float, processes: int | None, console: Console
) -> dict[KernelProblem, KernelConfig]:
    """Find and show the fastest config of each kernel on each call."""
    winners: dict[KernelProblem, KernelConfig] = {}
    for task in tasks:
        measured = measure(task, limit, processes, console)
        console.print(results_table(task, measured))
        best = winner(measured, configs.default(task.problem))
        if best is not None:
            winners[task.problem] = best.config
            line = line_to_commit(task.problem, best.config)
            architecture = task.problem.architecture
            console.print(f"configs.py, {architecture}: {line}\n", highlight=False, markup=False)
    return winners


def measure(
    task: Task, limit: float, processes: int | None, console: Console
) -> list[MeasuredConfig]:
    """Compile every candidate, look at each once, and let the fastest take turns."""
    measured = compiled(task, processes, console)
    fitting = [entry.config for entry in measured if not entry.reason]
    clock = KernelClock(task.problem.which)
    running = runnables(task, fitting, torch.device("cuda", torch.cuda.current_device()))
    first: dict[str, float] = {}
    failed: dict[str, str] = {}
    with clock.listening(), console.status(f"timing {len(fitting)} candidates"):
        for key, candidate in running.items():
            try:
                clock.ready(candidate)
                first[key] = min(clock.seconds(candidate.run, 2) for _ in range(2))
            except Exception as error:  # a config that the device refuses is left out, with why
                failed[key] = f"{type(error).__name__}: {error}".splitlines()[0]
        chosen = sorted(first, key=first.__getitem__)[:FINALISTS]
        default = str(configs.default(task.problem).numbers())
        chosen += [default] if default in first and default not in chosen else []
        plan = TimingPlan(rounds=ROUNDS, limit_seconds=limit)
        final = rotate({key: running[key] for key in chosen}, clock, plan) if chosen else {}
    times = {key: seconds * 1e3 for key, seconds in first.items()}
    times |= {key: timing.median_ms for key, timing in final.items()}
    return [with_time(entry, times, failed) for entry in measured]


def with_time(
    entry: MeasuredConfig, times: dict[str, float], failed: dict[str, str]
) -> MeasuredConfig:
    """A candidate with its time, or with the reason why it has none."""
    key = str(entry.config.numbers())
    if math.isfinite(milliseconds := times.get(key, math.inf)):
        return entry._replace(milliseconds=milliseconds)
    return entry._replace(reason=entry.reason or failed.get(key, "was not timed"))


def compiled(task: Task, processes: int | None, console: Console) -> list[MeasuredConfig]:
    """Compile all candidates, which also fills Triton's cache for the timing."""
    problem = task.problem
    of_pass = PASS_OF[problem.which]
    names = tuple(name for name in PASSES[of_pass] if name.split(",")[0] == problem.which)
    found = candidates(problem)
    jobs = [
        Job(problem.architecture, task.call, of_pass, names, whole_config(problem.which, config))
        for config in found
    ]
    results = worker.compile_with_progress(jobs, processes, console)
    return [
        classified(problem, config, [result for result in results if result.job is job])
        for config, job in zip(found, jobs, strict=True)
    ]


def save_winners(found: ConfigTable, console: Console) -> None:
    """Write the user's own table, and say where it is."""
    file = configs.tuned_path()
    if file is None:
        raise ValueError("--save: SACCADE_CONFIGS is empty, which turns the user's table off")
    aside = configs.save_tuned(file, found)
    if aside is not None:
        console.print(f"The table there could not be read; it is now {aside}", style="yellow")
    console.print(
        f"Saved {len(found.entries)} configs to {file}; from now on calls on {found.architecture} "
        f"use them. To undo that, delete the file.", highlight=False, markup=False, soft_wrap=True,
    )  # fmt: skip


class KernelClock:
    """A clock for bench.timing.rotate that sees the kernels of one name.

    A kernel is started many times in a row, so that the host's part is hidden behind the device's.
    Of the others, those that nothing timed needs do not run at all.
    """

    def __init__(self, which: str) -> None:
        self.which = which
        self.repeats = 1
        self.events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def ready(self, candidate: Runnable) -> Runnable:
        """Compile and load by calling."""
        self.seconds(candidate.run, 1)
        return candidate

    def seconds(self, run: Callable[[], object], repeats: int) -> float:
        """The device's time for the kernel in one call (with what repeats it NaN-safe)."""
        self.repeats, self.events = repeats, []
        run()
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.events) / repeats / 1e3

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Hear of every kernel that the library launches in this process."""
        launch_now, relaunch_now = Launch.__call__, Launch.relaunch

        def launch(one: Launch, *call: Any) -> None:
            name = worker.kernel_name(one, PASS_OF[self.which]).removesuffix(", NaN-safe")
            with patch.object(Launch, "relaunch", relaunch_now):
                if name == self.which:
                    self._timed(lambda: launch_now(one, *call))
                elif name not in configs.PASSES or name == "backward_queries":
                    # What is timed may read what these write: row statistics and tile lists.
                    launch_now(one, *call)

        # Calls that were prepared relaunch; told that this does not fit, they launch.
        with (
            patch.multiple(Launch, __call__=launch, relaunch=lambda *call: False),
            patch.object(recording, "RECORDS", False),
        ):
            yield

    def _timed(self, start: Callable[[], None]) -> None:
        before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        before.record()
        for _ in range(self.repeats):
            start()
        after.record()
        self.events.append((before, after))


def runnables(
    task: Task, candidates: Sequence[KernelConfig], device: torch.device
) -> dict[str, Runnable]:
    """Calls that differ in one kernel's config, by the config's numbers as text."""
    which = task.problem.which
    start = task.call.prepared(device)

    def runnable(config: KernelConfig) -> Runnable:
        return Runnable(lambda: start(PASS_OF[which], whole_config(which, config)))

    return {str(config.numbers()): runnable(config) for config in candidates}
