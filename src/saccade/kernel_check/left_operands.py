"""Operands and results of WGMMA in registers: whether machine code writes them when it may.

A product runs on while its warps do, and reads registers until it is waited for. ptxas errs here
(12.8 to 13.1; 13.3 and 13.4 were not seen to). Where two products that are waited for apart have
one left operand, it writes the constants in it a second time, for the second product, and may do so
while the first still reads them, or write them for the second alone: the first then multiplies with
whatever was there.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from triton import knobs

from saccade.kernel_check.machine_code import WGMMA

MULTIPLIED = re.compile(r"\s*wgmma\.mma_async\S*\s+\{[^}]*\},\s*\{([^}]*)\}")
ASSIGNED = re.compile(r"\s*(?:@!?%p\d+\s+)?(\S+)\s+(%r\d+),\s*([^,;]+)")
INSTRUCTION = re.compile(r"\s*/\*\w+\*/\s+(@!?U?P\w+\s+)?([\w.]+)\s*(.*?)\s*;")
LABEL = re.compile(r"\s*(\.L_x_\d+):")
REGISTER = re.compile(r"(?<![UB])\bR(\d+)")
# What names no register that it writes first.
WRITES_NONE = re.compile(
    r"ST|RED|BAR|B?MOV\.B|SYNCS|MEMBAR|FENCE|WARP|UTMA|CCTL|DEPBAR|LDGSTS|LDGDEPBAR|[IFDH]SETP"
    r"|PLOP3|UBLKCP|USETMAXREG|ATOMS|R2P|BRA|EXIT|RET|NOP|NANOSLEEP|ELECT|VOTE"
)


def check(compiled: Any) -> None:
    """Look at a compiled kernel for NVIDIA's GPUs.

    Raises:
        ValueError: if its products read other numbers than they should.
    """
    ptx = compiled.asm.get("ptx", "")
    if "wgmma.mma_async" not in ptx:
        return
    listing = disassembled(compiled.asm["cubin"])
    lost = lost_constants(of_ptx(ptx), listing)
    if lost:
        raise ValueError(f"ptxas left out {lost} constants of left operands of WGMMA")
    if early := too_early(listing):
        raise ValueError(f"ptxas does not wait for WGMMA: {'; '.join(early[:3])}")


def disassembled(cubin: bytes) -> list[str]:
    """Machine code, line by line."""
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(cubin)
        command = [knobs.nvidia.nvdisasm.path, "-c", str(binary)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.splitlines()


# ---- constants -----------------------------------------------------------------------------------


def of_ptx(ptx: str) -> list[list[str]]:
    """What the registers of left operands hold: constants in hexadecimal, "" for all others.

    A list for each product whose left operand stands in registers, in order.
    """
    given: dict[str, str] = {}
    products: list[str] = []
    for line in ptx.splitlines():
        if found := MULTIPLIED.match(line):
            products.append(found[1])
        elif found := ASSIGNED.match(line):
            moved = found[1] in ("mov.b32", "mov.u32") and found[2] not in given
            given[found[2]] = found[3] if moved else ""  # what is assigned twice is no constant

    def constant(name: str) -> str:
        while name.startswith("%"):
            name = given.get(name, "")
        return f"{int(name) & 0xFFFFFFFF:#x}" if re.fullmatch(r"-?\d+", name) else ""

    return [[constant(name.strip()) for name in each.split(",")] for each in products]


def lost_constants(operands: Sequence[Sequence[str]], listing: Sequence[str]) -> int:
    """How many constants are not in their registers when a product begins."""
    held: dict[str, str] = {}  # what a register was last given: a constant, or ""
    products: list[list[str]] = []
    for line in listing:
        found = INSTRUCTION.match(line)
        if not found:
            continue
        _, name, arguments = found.groups()
        target, *sources = operands_of(arguments)
        if WGMMA.match(name) and re.fullmatch(r"R\d+", sources[0]):
            left = int(sources[0][1:])
            products.append([held.get(f"R{left + each}", "") for each in range(4)])
        into = re.fullmatch(r"(U?R)(\d+)", target)
        if not into or not sources or WRITES_NONE.match(name):
            continue
        source = sources[-1] if re.match(r"U?MOV|IMAD\.(MOV|U32)|CS2R", name) else ""
        for each in range(written(name)):
            held[f"{into[1]}{int(into[2]) + each}"] = moved(source, held)
    if len(products) != len(operands):
        raise ValueError(
            f"{len(products)} products of machine code have a left operand in registers, "
            f"{len(operands)} of PTX"
        )
    return sum(
        bool(wanted) and wanted != there
        for pair in zip(operands, products, strict=True)
        for wanted, there in zip(*pair, strict=True)
    )


def moved(source: str, held: dict[str, str]) -> str:
    """The constant that a source has, in hexadecimal; "" if it is none."""
    if source in ("RZ", "URZ", "SRZ"):
        return "0x0"
    if re.fullmatch(r"-?0x[0-9a-f]+", source):
        return f"{int(source, 16) & 0xFFFFFFFF:#x}"
    return held.get(source, "")


def written(instruction: str) -> int:
    """How many registers an instruction writes, at the most."""
    if WGMMA.match(instruction):
        columns = re.search(r"64x(\d+)x", instruction)
        return int(columns[1]) // 2 if columns else 1
    if ".128" in instruction or ".M88.4" in instruction:
        return 4
    return 2 if re.search(r"\.64|\.WIDE|CS2R|\.M88\.2", instruction) else 1


def operands_of(arguments: str) -> list[str]:
    """What an instruction is given."""
    return [text.strip().removesuffix(".reuse") for text in arguments.split(",")]


# ---- waits ---------------------------------------------------------------------------------------


class Running(NamedTuple):
    """What a register is to a product that may not have ended."""

    groups: int  # that were closed since, its own one too: a wait leaves only so many
    result: bool  # or a left operand


State = dict[int, Running]
"""By the number of a register."""


def too_early(listing: Sequence[str]) -> list[str]:
    """Instructions that write operands or results of a product, or read results, before it is
    waited for, along any path."""
    code, follow = flow_of(listing)
    before: list[State | None] = [{}, *[None] * (len(code) - 1)]
    found: dict[int, str] = {}
    left = [0] if code else []
    while left:
        number = left.pop()
        _, name, arguments = code[number]
        after, said = step(before[number] or {}, name, operands_of(arguments))
        if said:
            found[number] = f"{name} {arguments} {said}"
        for to in follow[number]:
            joined = merged(before[to], after)
            if joined != before[to]:
                before[to] = joined
                left.append(to)
    return [found[number] for number in sorted(found)]


def flow_of(listing: Sequence[str]) -> tuple[list[tuple[str, str, str]], list[list[int]]]:
    """Instructions (condition, name, what they are given), and which may follow each of them."""
    code: list[tuple[str, str, str]] = []
    labels: dict[str, int] = {}
    for line in listing:
        if found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.match(line):
            code.append((found[1] or "", found[2], found[3]))
    follow: list[list[int]] = []
    for number, (condition, name, arguments) in enumerate(code):
        to = re.search(r"\.L_x_\d+", arguments) if name.startswith("BRA") else None
        others = [labels[to[0]]] if to and labels.get(to[0], len(code)) < len(code) else []
        always = re.match(r"BRA|EXIT|RET", name) and not condition and "P" not in arguments
        ahead = [] if always or number + 1 == len(code) else [number + 1]
        follow.append([*others, *ahead])
    return code, follow


def merged(state: State | None, other: State) -> State:
    """What holds on one of two paths."""
    if state is None:
        return other
    joined = dict(state)
    for register, running in other.items():
        if register not in joined or running.groups < joined[register].groups:
            joined[register] = running
    return joined


def step(state: State, name: str, operands: list[str]) -> tuple[State, str]:
    """What holds after an instruction, and what it does too early, or ""."""
    if WGMMA.match(name):
        first = int(operands[0][1:])
        after = {**state, **dict.fromkeys(range(first, first + written(name)), Running(0, True))}
        if left := re.fullmatch(r"R(\d+)", operands[1]):
            for register in range(int(left[1]), int(left[1]) + 4):
                after.setdefault(register, Running(0, False))
                after[register] = after[register]._replace(groups=0)
        if "gsb0" in operands:  # which closes a group of products
            after = {each: run._replace(groups=run.groups + 1) for each, run in after.items()}
        return after, ""
    if name.startswith("WARPGROUP.DEPBAR"):
        most = int(operands[-1], 16)
        return {each: run for each, run in state.items() if run.groups <= most}, ""
    into = None if WRITES_NONE.match(name) else re.match(r"R(\d+)", operands[0])
    if into:
        registers = range(int(into[1]), int(into[1]) + written(name))
        met = [register for register in registers if register in state]
        if met:
            after = {each: run for each, run in state.items() if each not in registers}
            return after, f"writes R{met[0]}"
    for operand in operands[1:] if into else operands:
        for register in REGISTER.findall(operand):
            if int(register) in state and state[int(register)].result:
                return state, f"reads R{register}"
    return state, ""
