"""Read a compiled kernel's registers, memory, spills and known faults from its binary."""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx  # comes with torch
import triton

WGMMA = re.compile("[HQ]GMMA")  # of 16 bits, and of e4m3 numbers


class Usage(NamedTuple):
    """What one program of a compiled kernel takes."""

    registers: int  # of a thread
    spills: int  # instructions that move registers to memory or back (AMD: registers moved)
    shared: int  # bytes of shared memory
    columns: int = 0  # of tensor memory
    looped: int = 0  # spills inside of loops (AMD: all of them, as nothing says which)
    # Of kernels whose warps have roles: WGMMA instructions, and the exponents that stand between
    # the wait for a product of keys and the wait for the product of values that began before it.
    products: int = 0
    covered: int = 0
    guarded: int = 0  # reductions behind a condition, which ptxas gets wrong
    unfenced: int = 0  # barriers that TMA may overtake, or what it writes in their place


def usage(compiled: Any) -> Usage:
    """What a compiled kernel takes, read from its binary: without a GPU no driver tells."""
    columns = getattr(compiled.metadata, "tmem_size", None) or 0
    shared = compiled.metadata.shared
    if "amdgcn" in compiled.asm:
        text = compiled.asm["amdgcn"]
        # Scalar registers spill into lanes of vector registers, not to memory: not counted.
        spills = _amd_number("vgpr_spill_count", text)
        return Usage(_amd_number("vgpr_count", text), spills, shared, columns, spills)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder, "kernel.cubin")
        binary.write_bytes(compiled.asm["cubin"])
        resources = _run("cuobjdump", "-res-usage", str(binary))
        registers, stack = (int(_first(rf"\b{name}:(\d+)", resources)) for name in ("REG", "STACK"))
        has_roles, reduces = (text in compiled.asm["ptx"] for text in ("setmaxnreg", "redux.sync"))
        if not (stack or has_roles or reduces):
            return Usage(registers, 0, shared, columns)
        listing = _run("nvdisasm", "-c", str(binary)).splitlines()
    used = Usage(registers, max(len(spilling(listing)), 1) if stack else 0, shared, columns)
    used = used._replace(guarded=guarded_reductions(listing))
    if not has_roles:
        return used._replace(looped=len(in_loops(listing)))
    used = used._replace(unfenced=unfenced_barriers(compiled.asm["ptx"]))
    looped = sum(len(spilling(listing[start:end])) for start, end in multiplying(listing))
    products = sum(WGMMA.search(line) is not None for line in listing)
    return used._replace(looped=looped, products=products, covered=covered(listing))


def spilling(listing: Sequence[str]) -> list[int]:
    """The lines of machine code that move a register to memory or back."""
    return [number for number, line in enumerate(listing) if re.search(r"\b(?:LDL|STL)\b", line)]


def in_loops(listing: Sequence[str]) -> list[int]:
    """Those of them that may run again and again, as control flow leads back to them."""
    labels = _labels(listing)
    flow = nx.DiGraph()
    for number, line in enumerate(listing):
        to = re.search(r"\bBRA\b.*(\.L_x_\d+)", line)
        if to and to[1] in labels:
            flow.add_edge(number, labels[to[1]])
        leaves = re.search(r"\b(?:BRA|EXIT|RET)\b", line)
        if not leaves or re.search(r"@!?U?P", line):  # unless on a condition, it goes no further
            flow.add_edge(number, number + 1)
    loops = [nodes for nodes in nx.strongly_connected_components(flow) if len(nodes) > 1]
    repeated = set().union(*loops)
    return [number for number in spilling(listing) if number in repeated]


def guarded_reductions(listing: Sequence[str]) -> int:
    """How many reductions of a warp stand behind a condition of their own.

    ptxas (12.8, in Triton 3.6) forgets in between that they read the condition's register: it put
    the mask of some channels there, and the warps that this was true of went on with rubbish. It
    makes them of a short branch that holds a reduction; there should be no such branch.
    """
    return sum(bool(re.search(r"@!?U?P\d+\s+REDUX\b", line)) for line in listing)


def unfenced_barriers(ptx: str) -> int:
    """How many barriers are made with no fence between them and the start of roles.

    TMA writes past the order that threads keep. Where Triton finds no use for a barrier it gives
    its memory to a tile, and what makes the barrier came later than the tile's first row: NaN.
    """
    made = 0
    for line in ptx.splitlines():
        if "mbarrier.init" in line:
            made += 1
        elif "fence.proxy.async" in line:
            made = 0
        elif made and "barrier.sync" in line:
            return made
    return 0


def multiplying(listing: Sequence[str]) -> list[tuple[int, int]]:
    """The innermost loops that hold WGMMA, as lines from the first to before the end.

    A program with roles is one large loop around all of them, which says nothing.
    """
    labels = _labels(listing)
    loops = []
    for number, line in enumerate(listing):
        to = re.search(r"@!?U?P\d.*\bBRA\b.*(\.L_x_\d+)", line)  # others return from waiting
        if to and labels.get(to[1], number) < number:
            loops.append((labels[to[1]], number + 1))
    loops = [loop for loop in loops if any(map(WGMMA.search, listing[slice(*loop)]))]
    return [
        (start, end)
        for start, end in loops
        if not any(start <= a and b <= end and (a, b) != (start, end) for a, b in loops)
    ]


def covered(listing: Sequence[str]) -> int:
    """How many exponents stand between two waits for WGMMA, at the least: the first lets one
    product run on, the second waits for that."""
    counts: list[int] = []
    inside = False
    for line in listing:
        if "DEPBAR.LE gsb0, 0x1" in line:
            inside = True
            counts.append(0)
        elif "DEPBAR.LE gsb0, 0x0" in line:
            inside = False
        elif inside and "MUFU.EX2" in line:
            counts[-1] += 1
    return min(filter(None, counts), default=0)


def _labels(listing: Sequence[str]) -> dict[str, int]:
    return {
        found[1]: number
        for number, line in enumerate(listing)
        if (found := re.match(r"\s*(\.L_x_\d+):", line))
    }


def _amd_number(name: str, text: str) -> int:
    return int(_first(rf"\.{name}:\s+(\d+)", text))


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"Triton {triton.__version__}: found no {pattern!r} in what it compiled")
    return found[1]


def _run(tool: str, *arguments: str) -> str:
    """One of NVIDIA's binary tools: Triton's own, or one that is installed."""
    bundled = Path(triton.__path__[0]) / "backends/nvidia/bin" / tool
    path = str(bundled) if bundled.exists() else shutil.which(tool)
    if path is None:
        raise FileNotFoundError(f"{tool} is neither in Triton's package nor on PATH")
    done = subprocess.run([path, *arguments], capture_output=True, text=True, check=True)
    return done.stdout
