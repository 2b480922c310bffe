"""Markdown: the tables of docs/kernels.md, written between two marks and nowhere else."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from saccade.kernel_check.pool import Compiled
from saccade.kernel_check.report import config_text, fault
from saccade.ops.attention.triton import configs
from saccade.ops.attention.triton.configs import KernelProblem

BEGIN, END = "<!-- kernels: begin -->\n", "<!-- kernels: end -->"
REGION = re.compile(f"({re.escape(BEGIN)}).*?({re.escape(END)})", re.DOTALL)


def write(file: Path, results: Sequence[Compiled], triton: str) -> None:
    """Put the tables between the marks of a file.

    Raises:
        ValueError: for a file without both marks.
    """
    file.write_text(_renewed(file, results, triton), encoding="utf-8")


def compare(file: Path, results: Sequence[Compiled], triton: str) -> None:
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
    body = f"{configs_tables()}\n{usage_tables(results, triton)}\n"
    fresh, count = REGION.subn(lambda found: f"{found[1]}\n{body}\n{found[2]}", text)
    if count != 1:
        raise ValueError(f"{file}: takes one {BEGIN.strip()!r} and after it one {END!r}")
    return fresh


def configs_tables() -> str:
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
            for width in configs.WIDTHS[1:]:
                problems = [
                    KernelProblem(architecture, which, width, wide, masked)
                    for architecture in configs.ARCHITECTURES
                ]
                cells = [config_text(configs.default(problem).numbers()) for problem in problems]
                lines.append(_line([name if width == 64 else "", str(width), *cells]))
    return "\n".join(lines) + "\n"


def usage_tables(results: Sequence[Compiled], triton: str) -> str:
    """What the kernels take: a row for each, a column for each architecture."""
    architectures = tuple(dict.fromkeys(compiled.job.architecture for compiled in results))
    cells: dict[tuple[str, str], dict[str, str]] = defaultdict(dict)
    for compiled in results:
        call = compiled.job.call.name.replace("fp16", "half").replace("bf16", "half")
        cells[compiled.kernel, call][compiled.job.architecture] = _cell(compiled)
    lines = [
        "### Registers and shared memory", "",
        f"Registers of a thread / KB of shared memory, by Triton {triton}. `half` is fp16 on sm_75"
        " and bf16 elsewhere; `d128` is the width; **bold**: spills, or takes too much.", "",
        *_header(("kernel", "call"), architectures),
    ]  # fmt: skip
    for (kernel, call), of_architecture in cells.items():
        row = [of_architecture.get(architecture, "") for architecture in architectures]
        lines.append(_line([kernel, call, *row]))
    return "\n".join(lines) + "\n"


def _cell(compiled: Compiled) -> str:
    usage = compiled.usage
    if usage is None:
        return "**failed**"
    text = f"{usage.registers} / {usage.shared / 1024:.0f}"
    return f"**{text}**" if fault(compiled) else text


def _header(left: Sequence[str], right: Sequence[str]) -> list[str]:
    rule = ["---"] * len(left) + ["---:"] * len(right)
    return [_line([*left, *right]), f"|{'|'.join(rule)}|"]


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"
