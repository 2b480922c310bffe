"""Tuning: what is tuned, what was measured, and who won. Nothing here needs a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from typing import NamedTuple

from rich.table import Table

from saccade.kernel_check.calls import KernelCall
from saccade.kernel_check.pool import Compiled
from saccade.kernel_check.report import config_text, fault, kilobytes, problem_of
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.runtime.spec import KernelConfig

WORTH_IT = 0.98  # of the default's time: less of a gain is noise
PASS_OF = {
    "forward": "forward",
    "backward_keys": "ordered",
    "backward_queries": "ordered",
    "backward_shared": "shared",
    "backward_bias": "bias",
}


class Task(NamedTuple):
    """One entry of the tables that is to be found, and the call that it is timed on."""

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
    """What is known of one candidate."""

    config: KernelConfig
    milliseconds: float | None = None  # None: it was not timed
    reason: str = ""  # why not
    registers: int = 0
    spills: int = 0
    shared: int = 0


def task(architecture: str, which: str, call: KernelCall) -> Task:
    """The entry of the tables that a kernel of a call looks up.

    Raises:
        ValueError: for a kernel that has no config.
    """
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
    """A candidate as its compilation (NaN-safe, and without) leaves it, before it is timed."""
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
    return MeasuredConfig(config, None, reason, registers, spills, shared)


def winner(measured: Sequence[MeasuredConfig], default: KernelConfig) -> MeasuredConfig | None:
    """The fastest, unless it gains too little on the default to be more than noise.

    None where nothing could be timed.
    """
    timed = [entry for entry in measured if entry.milliseconds is not None]
    if not timed:
        return None
    fastest = min(timed, key=lambda entry: entry.milliseconds or 0.0)
    for entry in timed:
        if entry.config == default:
            gained = (fastest.milliseconds or 0.0) < WORTH_IT * (entry.milliseconds or 0.0)
            return fastest if gained else entry
    return fastest


def results_table(found: Task, measured: Sequence[MeasuredConfig], shown: int = 20) -> Table:
    """Candidates by time; the default and the winner are marked."""
    default = configs.default(found.problem)
    best = winner(measured, default)
    timed = sorted(
        (entry for entry in measured if entry.milliseconds is not None),
        key=lambda entry: entry.milliseconds or 0.0,
    )
    table = Table(title=found.name, title_justify="left", caption_justify="left")
    for name in ("config", "ms", "× default", "registers", "spills", "shared", ""):
        table.add_column(name, justify="left" if name in ("config", "") else "right", no_wrap=True)
    base = next((entry.milliseconds for entry in timed if entry.config == default), None)
    for place, entry in enumerate(timed):
        is_best = best is not None and entry.config == best.config
        if place >= shown and not is_best and entry.config != default:
            continue
        marks = ["default"] * (entry.config == default) + ["winner"] * is_best
        milliseconds = entry.milliseconds or 0.0
        table.add_row(
            config_text(entry.config.numbers()), f"{milliseconds:.3f}",
            "" if base is None else f"{milliseconds / base:.2f}", str(entry.registers),
            str(entry.spills or ""), kilobytes(entry.shared), ", ".join(marks),
            style="bold green" if is_best else "bold" if marks else None,
        )  # fmt: skip
    left_out = len(measured) - len(timed)
    table.caption = f"{len(timed)} timed, {left_out} left out"
    for entry in measured:
        if entry.config == default and entry.milliseconds is None:
            table.caption += f"; the default was not timed: {entry.reason}"
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
    """Whether programs of a kernel stand at keys and run over queries."""
    return which in ("backward_keys", "backward_shared")


def _stages(architecture: str) -> tuple[int, ...]:
    if architecture == "sm_75":  # no asynchronous copies
        return STAGES[:1]
    return STAGES[:2] if architecture.startswith("gfx") else STAGES


def _may_fit(problem: KernelProblem, config: KernelConfig) -> bool:
    most = FEWEST_PAIRS, MOST_PAIRS
    if not most[0] <= config.query_tile * config.kv_tile <= most[1]:
        return False
    if problem.which == "backward_bias" and config.num_stages > 1:
        return False  # its loops are short, and each tile is another
    if least_shared_memory(problem, config) > configs.SHARED_MEMORY[problem.architecture]:
        return False
    spacious = problem.architecture in TENSOR_MEMORY or problem.architecture.startswith("gfx")
    return spacious or least_registers(problem, config) <= REGISTERS
