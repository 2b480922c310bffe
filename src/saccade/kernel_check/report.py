"""Judge compiled kernels as defaults, and show them: tables for the terminal, JSON, Markdown."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table

from saccade.kernel_check.calls import DeltaCall, Fp8KernelCall, KernelCall, LinearCall, PagedCall
from saccade.kernel_check.catalogue import Compiled
from saccade.kernel_check.machine_code import Usage
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import KernelProblem
from saccade.ops.attention_fp8.triton import configs as fp8_configs
from saccade.ops.delta_rule.triton import configs as delta_configs
from saccade.ops.linear_attention.triton import configs as linear_configs

TENSOR_MEMORY_COLUMNS = 512  # of a multiprocessor of sm_100
# Masks of which most tiles are hidden or full, so that the loop over partial tiles counts little.
READ_BY_PAIR = ("blocks", "dense")
# Kernels whose warps have roles, and what runs on while their exponents are computed.
ROLES = {
    "hopper_forward": "the product of values",
    "hopper_pages_forward": "the product of values",
    "hopper_backward": "the product of values and gradients",
    "hopper_backward_queries": "the product of values and gradients",
}
FEW = 32  # reads and writes; of two consumers on Hopper, of 3,000 cycles a tile
CAPTION = (
    "config: query tile × kv tile, warps, stages. spills: instructions that move registers to"
    " memory or back (gfx942: registers). s: seconds"
)


def fault(compiled: Compiled) -> str:
    """Why a kernel should not be a default; "" if nothing is wrong with it."""
    usage, architecture = compiled.usage, compiled.job.architecture
    if usage is None:
        return compiled.error.splitlines()[0]
    faults = [f"spills ({usage.spills})"] if usage.spills else []
    return "; ".join([*faults, *_excesses(usage, architecture), *_lacks(compiled)])


def _excesses(usage: Usage, architecture: str) -> list[str]:
    found = []
    limit = configs.SHARED_MEMORY[architecture]
    if usage.shared > limit:
        found.append(f"{usage.shared} bytes of shared memory, more than {limit}")
    if usage.columns > TENSOR_MEMORY_COLUMNS:
        found.append(f"{usage.columns} columns of tensor memory, more than {TENSOR_MEMORY_COLUMNS}")
    if usage.unfenced:
        found.append(f"{usage.unfenced} barriers without a fence before roles start")
    if usage.guarded:
        found.append(f"{usage.guarded} reductions behind a condition, which ptxas gets wrong")
    return found


def _lacks(compiled: Compiled) -> list[str]:
    """What is missing from the machine code of a kernel whose warps have roles."""
    usage = compiled.usage
    kernel = compiled.kernel.split(",")[0]
    if usage is None or kernel not in ROLES:
        return []
    lacks = [] if usage.products else ["no WGMMA"]
    warps = compiled.config[2]
    if not usage.covered and warps // 4 < 3:  # three groups cover each other's exponents
        lacks.append(f"its exponents wait for {ROLES[kernel]}")
    return lacks


def excuse(compiled: Compiled) -> str:
    """Why a default is allowed to spill; "" where it does not, or is not allowed to."""
    usage, which = compiled.usage, compiled.kernel.split(",")[0]
    if usage is None or not usage.spills:
        return ""
    if _excesses(usage, compiled.job.architecture) or _lacks(compiled):
        return ""
    if not usage.looped and usage.products:
        return "outside of the loops that multiply"
    if not usage.looped:
        return "outside of its loops, so once a program"
    if compiled.kernel.endswith(", NaN-safe") or "_nan_safe" in compiled.kernel:
        return "it repeats only the programs that met NaN or inf"
    architecture, call = compiled.job.architecture, compiled.job.call
    if isinstance(call, LinearCall):
        return linear_configs.SPILLING
    if isinstance(call, DeltaCall):
        return delta_configs.may_spill(
            architecture, compiled.kernel, call.dtype == "fp32", call.head_dim
        )
    if isinstance(call, Fp8KernelCall):
        if not call.scaled:
            return "a few numbers, as three groups of warps share the registers, and are faster"
        return fp8_configs.may_spill(architecture, call.head_dim)
    if isinstance(call, PagedCall) and call.query_len > 1 and usage.looped <= FEW:
        return "a few numbers, once a tile, which short chunks wait for memory to bring"
    if isinstance(call, PagedCall):
        return configs.every_tile_spills(architecture, call.dtype == "fp32", call.head_dim)
    if which in ROLES and call.mask in (*READ_BY_PAIR, "documents"):
        return "its one loop serves edges too, in which every pair reads a captured tensor"
    if which.startswith("hopper_backward") and call.score != "none":
        return "changed scores and their derivatives have no registers beside the gradients"
    if which == "hopper_backward_queries" and usage.looped <= FEW:
        return "a few numbers, read once a tile, have no registers beside the gradients"
    if which == "hopper_forward" and call.head_dim <= 64 and usage.looped <= FEW:
        return "a few weights, as two programs share the registers of a multiprocessor"
    if which == "hopper_forward" and call.mask == "causal" and usage.looped <= FEW:
        return "a number, read once a tile, as each consumer has its own partial tiles"
    if which not in configs.PASSES:
        return ""
    if call.mask in READ_BY_PAIR:
        return "its loop over edges spills, in which every pair reads a captured tensor"
    return configs.may_spill(problem_of(architecture, which, call))


def problem_of(architecture: str, which: str, call: KernelCall) -> KernelProblem:
    """The entry of the tables that a kernel of a call looks up."""
    problem = KernelProblem(
        architecture, which, call.head_dim, call.dtype == "fp32", call.mask != "none",
        call.dropout_p > 0, call.mask in READ_BY_PAIR and not call.packed, call.is_short(),
        call.packed,
    )  # fmt: skip
    return configs.entry_of(problem)


def config_text(config: Sequence[int]) -> str:
    """Tiles, warps and stages, as short as they are legible: 64×128 w4 s2."""
    query_tile, kv_tile, warps, stages = config
    tiles = f"{query_tile}×{kv_tile}" if kv_tile else str(query_tile or "–")
    return f"{tiles} w{warps} s{stages}"


def kilobytes(count: int) -> str:
    """A size in KB, or in bytes below one."""
    return f"{count / 1024:.0f} KB" if count >= 1024 or not count else f"{count} B"


def usage_tables(results: Sequence[Compiled]) -> list[Table]:
    """All that was compiled, by architecture; faults in red, those that are allowed in yellow."""
    tables: dict[str, Table] = {}
    for compiled in results:
        architecture = compiled.job.architecture
        if architecture not in tables:
            tables[architecture] = _empty_table(architecture)
        style = "yellow" if excuse(compiled) else "red" if fault(compiled) else None
        cells = compiled.kernel, compiled.job.call.name, *_cells(compiled)
        tables[architecture].add_row(*cells, style=style)
    return list(tables.values())


def _empty_table(architecture: str) -> Table:
    limit = kilobytes(configs.SHARED_MEMORY[architecture])
    table = Table(
        title=f"{architecture} (shared memory: {limit})", title_justify="left",
        caption_justify="left", box=box.SIMPLE_HEAD, pad_edge=False,
    )  # fmt: skip
    table.add_column("kernel", no_wrap=True)
    table.add_column("call", min_width=14)
    for name in ("config", "regs", "spills", "shared", "s"):
        table.add_column(name, justify="right", no_wrap=True)
    return table


def _cells(compiled: Compiled) -> list[str]:
    usage, config = compiled.usage, config_text(compiled.config)
    if usage is None:
        return [config, "failed", "", "", f"{compiled.seconds:.1f}"]
    shared = kilobytes(usage.shared)
    return [config, str(usage.registers), str(usage.spills), shared, f"{compiled.seconds:.1f}"]


def offenders(results: Iterable[Compiled]) -> list[str]:
    """A line for each kernel that must not be a default."""
    return [_line(result) for result in results if fault(result) and not excuse(result)]


def excused(results: Iterable[Compiled]) -> list[str]:
    """A line for each default that is known to spill, with the reason why it is one."""
    return [f"{_line(result)}, allowed: {excuse(result)}" for result in results if excuse(result)]


def _line(compiled: Compiled) -> str:
    of = f"{compiled.job.call.name}, {config_text(compiled.config)}"
    return f"{compiled.job.architecture}: {compiled.kernel} ({of}): {fault(compiled)}"


def to_json(results: Iterable[Compiled], triton: str) -> str:
    """All results as JSON."""
    rows: list[dict[str, Any]] = []
    for compiled in results:
        usage = compiled.usage
        rows.append(
            {
                "architecture": compiled.job.architecture, "kernel": compiled.kernel,
                "call": compiled.job.call._asdict(), "config": list(compiled.config),
                "usage": None if usage is None else usage._asdict(),
                "seconds": round(compiled.seconds, 3), "fault": fault(compiled),
                "allowed": excuse(compiled),
            }
        )  # fmt: skip
    return json.dumps({"triton": triton, "kernels": rows}, indent=1) + "\n"


# ---- the tables of docs/kernels.md, written between two marks and nowhere else ----------------

BEGIN, END = "<!-- kernels: begin -->\n", "<!-- kernels: end -->"
REGION = re.compile(f"({re.escape(BEGIN)}).*?({re.escape(END)})", re.DOTALL)


def write_markdown(file: Path, results: Sequence[Compiled], triton: str) -> None:
    """Put the tables between the marks of a file.

    Raises:
        ValueError: for a file without both marks.
    """
    file.write_text(_renewed(file, results, triton), encoding="utf-8")


def compare_markdown(file: Path, results: Sequence[Compiled], triton: str) -> None:
    """Refuse a file whose tables are not those of what was compiled.

    Raises:
        ValueError: for such a file, with the first line that differs; for one without both marks.
    """
    there = file.read_text(encoding="utf-8").splitlines()
    wanted = _renewed(file, results, triton).splitlines()
    if there == wanted:
        return
    line = next(n for n in range(len(there) + 1) if there[n : n + 1] != wanted[n : n + 1])
    found = "".join(there[line : line + 1]) or "nothing"
    raise ValueError(
        f"{file}: line {line + 1} holds {found!r}, takes {''.join(wanted[line : line + 1])!r}; "
        f"write it anew with saccade kernels --arch all --markdown {file}"
    )


def _renewed(file: Path, results: Sequence[Compiled], triton: str) -> str:
    text = file.read_text(encoding="utf-8")
    body = f"{configs_markdown()}\n{usage_markdown(results, triton)}\n"
    fresh, count = REGION.subn(lambda found: f"{found[1]}\n{body}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"{file}: takes one {BEGIN.strip()!r} and after it one {END!r}")
    return fresh


def configs_markdown() -> str:
    """The default configs: a row for each kernel, a column for each architecture."""
    lines = [
        "### Default configs", "", "Query tile × kv tile, warps (w), stages (s).", "",
        *_header(("kernel", "width"), configs.ARCHITECTURES),
    ]  # fmt: skip
    for which in configs.PASSES:
        for masked, wide in ((False, False), (True, False), (False, True)):
            if which == "backward_bias" and masked:
                continue
            name = which + (", masked" if masked else ", float32" if wide else "")
            widths = configs.WIDTHS if which == "forward" else configs.WIDTHS[:-1]  # of gradients
            for width in widths[1:]:
                problems = [
                    KernelProblem(architecture, which, width, wide, masked)
                    for architecture in configs.ARCHITECTURES
                ]
                cells = [config_text(configs.default(problem).numbers()) for problem in problems]
                lines.append(_row([name if width == 64 else "", str(width), *cells]))
    return "\n".join(lines) + "\n"


def usage_markdown(results: Sequence[Compiled], triton: str) -> str:
    """What the kernels take: a row for each, a column for each architecture."""
    architectures = tuple(dict.fromkeys(compiled.job.architecture for compiled in results))
    cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for compiled in results:
        call = compiled.job.call.name.replace("fp16", "half").replace("bf16", "half")
        cells[compiled.kernel, call][compiled.job.architecture] = _markdown_cell(compiled)
    lines = [
        "### Registers and shared memory", "",
        f"Registers of a thread / KB of shared memory, by Triton {triton}. `half` is fp16 on sm_75"
        " and bf16 elsewhere; `d128` is the width; **bold**: spills, or takes too much.", "",
        *_header(("kernel", "call"), architectures),
    ]  # fmt: skip
    for (kernel, call), of_architecture in cells.items():
        row = [of_architecture.get(architecture, "") for architecture in architectures]
        lines.append(_row([kernel, call, *row]))
    return "\n".join(lines) + "\n"


def _markdown_cell(compiled: Compiled) -> str:
    usage = compiled.usage
    if usage is None:
        return "**failed**"
    text = f"{usage.registers} / {usage.shared / 1024:.0f}"
    return f"**{text}**" if fault(compiled) else text


def _header(left: Sequence[str], right: Sequence[str]) -> list[str]:
    rule = ["---"] * len(left) + ["---:"] * len(right)
    return [_row([*left, *right]), f"|{'|'.join(rule)}|"]


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
