"""Configs: which tile sizes a kernel gets, as a pure function of the problem and the device.

The tables below were timed where a comment says so; elsewhere they are the largest of the usual
tiles that compile without spilling (docs/kernels.md). Nothing is tried out on a user's first call.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from saccade.runtime.spec import CONFIG_NUMBERS, KernelConfig

# Shared memory that one program may take, in bytes (`saccade kernels --check` compares with it).
SHARED_MEMORY = {
    "sm_75": 64 << 10,
    "sm_80": 163 << 10,
    "sm_86": 99 << 10,
    "sm_89": 99 << 10,
    "sm_90": 227 << 10,
    "sm_100": 227 << 10,
    "sm_120": 99 << 10,
    "gfx942": 64 << 10,
}
ARCHITECTURES = tuple(SHARED_MEMORY)
PASSES = ("forward", "backward_keys", "backward_queries", "backward_shared", "backward_bias")
WIDTHS = (32, 64, 128, 256, 512, 576)
"""The columns of the tables: the most channels that each is for."""
NARROW = 256  # channels; beyond, a tile of 16 rows takes as many registers as one of 64 does at 128

WARPS = (1, 2, 4, 8, 16)
LARGEST_TILE = 2**16
# Capabilities whose nearest older neighbour in the list has less of what matters: Orin, the 8.7,
# has the shared memory of the 8.0 and not that of the 8.6.
EXCEPTIONS = {(8, 7): "sm_80"}


class KernelProblem(NamedTuple):
    """What a config depends on."""

    architecture: str  # one of ARCHITECTURES
    which: str  # one of PASSES
    width: int  # the larger of head_dim and value_dim, as the kernel widens them
    wide: bool  # float32: no tensor cores, twice the memory
    masked: bool = False  # whether there is a mask: smaller tiles waste less at its partial tiles
    dropout: bool = False  # whether weights are dropped: random numbers take registers
    listed: bool = False  # whether tiles are listed: then few are partial tiles, and those are slow
    short: bool = False  # whether rows see few keys of many: beginnings and ends count
    packed: bool = False  # whether sequences are packed: some programs have no rows
    latent: bool = False  # whether values are the first channels of wide keys, and read with them


def architecture_of(capability: tuple[int, int]) -> str:
    """The newest architecture named here that is not newer than a CUDA capability."""
    if capability in EXCEPTIONS:
        return EXCEPTIONS[capability]
    number = capability[0] * 10 + capability[1]
    known = sorted(int(name[3:]) for name in ARCHITECTURES if name.startswith("sm_"))
    fitting = [known_number for known_number in known if known_number <= number]
    if not fitting:
        raise ValueError(f"capability: got {capability}, takes (7, 5) or newer")
    return f"sm_{fitting[-1]}"


def choose(
    problem: KernelProblem,
    requested: KernelConfig | None = None,
    table: Mapping[KernelProblem, KernelConfig] | None = None,
) -> KernelConfig:
    """The config of a kernel: what the caller gave; the rest from the user's table, or the default.

    Raises:
        ValueError: for a requested number that no kernel can have.
    """
    entry, table = entry_of(problem), table or {}
    config = table.get(entry) or table.get(entry._replace(packed=False)) or default(problem)
    if requested is None:
        return config
    check(requested)
    sizes = {name: getattr(requested, name) for name in CONFIG_NUMBERS}
    return replace(config, **{name: size for name, size in sizes.items() if size})


def check(config: KernelConfig) -> None:
    """Refuse numbers that no kernel can have; 0 leaves a choice open."""
    for name in ("query_tile", "kv_tile"):
        tile = getattr(config, name)
        if tile and (not 16 <= tile <= LARGEST_TILE or tile & (tile - 1)):
            takes = f"takes a power of two from 16 to {LARGEST_TILE}"
            raise ValueError(f"{name}: got {tile}, {takes}")
    if config.num_warps and config.num_warps not in WARPS:
        allowed = ", ".join(map(str, WARPS))
        raise ValueError(f"num_warps: got {config.num_warps}, takes one of {allowed}")


def entry_of(problem: KernelProblem) -> KernelProblem:
    """The problem as tables know it: with the width of its column."""
    return problem._replace(width=WIDTHS[_column(problem.width)])


def default(problem: KernelProblem) -> KernelConfig:
    """The config in the tables below."""
    _, row = row_of(problem)
    return row[_column(problem.width)]


def every_tile_spills(architecture: str, wide: bool, width: int) -> str:
    """Why there is no tile that does not spill, or "" where there may be one."""
    if (wide or architecture == "sm_75") and width > 64:
        return "products without tensor cores hold whole rows in registers: every tile spills"
    return ""


def may_spill(problem: KernelProblem) -> str:
    """Why the default is allowed to spill, or "" where it is not."""
    if reason := every_tile_spills(problem.architecture, problem.wide, problem.width):
        return reason
    return _TIMED.get((problem.architecture, *row_of(problem)[:1], problem.width), "")


def row_of(problem: KernelProblem) -> tuple[str, tuple[KernelConfig, ...]]:
    """The row of the tables that serves a problem, by its name there."""
    rows = _FLOAT32 if problem.wide else _HALF[problem.architecture]
    forms = ("latent", "dropout", "listed", "short", "masked")
    forms = [form for form in forms if getattr(problem, form)]
    names = [*(f"{problem.which}, {form}" for form in forms), problem.which]
    if problem.packed:
        names = [form for name in names for form in (f"{name}, packed", name)]
    name = next(filter(rows.__contains__, names))
    return name, rows[name]


def in_one_loop(problem: KernelProblem) -> bool:
    """Whether full tiles and partial tiles of a short tile range share a loop in the forward pass.

    Timed on an H200 for causal masks of 1k and less and a window of 256, at width 128; at width 64
    it takes longer.
    """
    timed = problem.architecture == "sm_90" and 64 < problem.width <= 128
    return timed and problem.short and not (problem.wide or problem.dropout)


def _column(width: int) -> int:
    return next(column for column, widest in enumerate(WIDTHS) if width <= widest)


def _row(*columns: tuple[int, int, int, int]) -> tuple[KernelConfig, ...]:
    """A row of the tables; its last column serves all that is wider too."""
    columns += columns[-1:] * (len(WIDTHS) - len(columns))
    return tuple(KernelConfig(*column) for column in columns)


# Columns: WIDTHS. Entries: query_tile, kv_tile, num_warps, num_stages. A row with a mask or with
# dropout stands where the plain one would not do.
_AMPERE = {  # sm_80: 163 KB
    "forward": _row(
        (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (64, 64, 8, 2), (64, 16, 8, 2)
    ),
    "forward, masked": _row(
        (64, 64, 4, 2),
        (64, 64, 4, 2),
        (128, 32, 8, 3),
        (64, 64, 8, 2),
        (32, 32, 8, 2),
        (16, 32, 8, 2),
    ),
    "forward, dropout": _row(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 1), (16, 32, 8, 1)
    ),
    "forward, latent": _row((32, 64, 8, 2)),
    "backward_keys": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 3), (16, 64, 8, 2), (32, 16, 8, 1)
    ),
    "backward_keys, masked": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 2), (16, 32, 8, 1)
    ),
    "backward_keys, dropout": _row(
        (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_queries": _row(
        (128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)
    ),
    "backward_queries, masked": _row(
        (64, 32, 4, 3), (64, 32, 4, 3), (64, 64, 8, 2), (32, 32, 8, 1), (16, 32, 8, 1)
    ),
    "backward_queries, dropout": _row(
        (64, 32, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 3), (16, 64, 8, 2), (16, 16, 8, 1)
    ),
    "backward_shared, masked": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1)
    ),
    "backward_shared, dropout": _row(
        (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_bias": _row(
        (64, 64, 4, 1), (64, 64, 4, 1), (32, 64, 8, 1), (16, 16, 4, 1), (16, 16, 4, 1)
    ),
}
_ADA = {  # sm_86, sm_89: 99 KB
    **_AMPERE,
    "forward": _row(
        (128, 64, 4, 3),
        (128, 64, 4, 2),
        (128, 64, 8, 2),
        (64, 32, 8, 2),
        (64, 16, 8, 2),
        (32, 16, 8, 2),
    ),
    "forward, masked": _row(
        (64, 64, 4, 2),
        (64, 64, 4, 2),
        (128, 32, 8, 2),
        (64, 32, 8, 2),
        (32, 32, 8, 1),
        (16, 32, 8, 2),
    ),
    "forward, latent": _row((32, 32, 8, 2)),
    "backward_keys": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (16, 64, 8, 2), (16, 16, 8, 1)
    ),
    "backward_keys, masked": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (64, 64, 8, 2), (32, 32, 8, 2), (16, 16, 8, 1)
    ),
    "backward_queries": _row(
        (128, 64, 8, 2), (128, 64, 8, 2), (64, 64, 8, 2), (64, 32, 8, 1), (16, 32, 8, 1)
    ),
    "backward_shared": _row(
        (32, 32, 4, 2), (32, 32, 4, 2), (64, 64, 8, 2), (16, 64, 8, 2), (16, 16, 8, 1)
    ),
    "backward_bias": _row(
        (64, 64, 4, 1), (64, 64, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1)
    ),
}
_GEFORCE = {  # sm_120: 99 KB too; by Triton 3.9 the wider forward tile spills 53 registers there
    **_ADA,
    "forward": _row(
        (128, 64, 4, 3),
        (128, 64, 4, 3),
        (128, 32, 8, 2),
        (64, 32, 8, 2),
        (64, 16, 8, 2),
        (32, 16, 8, 2),
    ),
}
# Timed on an H200, but for backward_bias; at width 256 forward, backward_keys and backward_queries.
_HOPPER = {  # sm_90: 227 KB
    "forward": _row(
        (64, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
        (64, 32, 8, 2),
        (64, 16, 8, 2),
    ),
    "forward, masked": _row(
        (64, 64, 4, 3),
        (64, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 64, 8, 2),
        (32, 32, 8, 3),
        (16, 64, 8, 2),
    ),
    "forward, listed": _row(
        (64, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 32, 8, 3),
        (32, 32, 8, 3),
        (16, 64, 8, 2),
    ),
    "forward, dropout": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 2), (16, 32, 8, 1)
    ),
    "forward, latent": _row((32, 64, 8, 2)),
    "backward_keys": _row(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 4, 2), (64, 64, 8, 2), (16, 32, 8, 1)
    ),
    "backward_keys, masked": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (32, 64, 4, 3), (64, 64, 8, 2), (16, 32, 8, 1)
    ),
    "backward_keys, short, packed": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 8, 2), (16, 32, 8, 1)
    ),
    "backward_keys, dropout": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_queries": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (128, 32, 8, 3), (128, 32, 8, 2), (32, 32, 8, 1)
    ),
    "backward_queries, packed": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 2), (32, 32, 8, 1)
    ),
    "backward_queries, masked": _row(
        (128, 64, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 32, 8, 2), (16, 32, 8, 1)
    ),
    "backward_queries, short": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (128, 32, 8, 2), (16, 32, 8, 1)
    ),
    "backward_queries, dropout": _row(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared": _row(
        (64, 128, 8, 3), (64, 128, 8, 3), (64, 128, 8, 3), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared, dropout": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_bias": _row(
        (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (16, 16, 4, 1)
    ),
}
_BLACKWELL = {  # sm_100: 227 KB, and tensor memory for sums
    "forward": _row(
        (128, 64, 4, 3),
        (128, 64, 4, 3),
        (128, 64, 8, 3),
        (128, 64, 8, 2),
        (64, 32, 8, 2),
        (64, 16, 8, 2),
    ),
    "forward, masked": _row(
        (64, 64, 4, 3),
        (64, 64, 4, 3),
        (128, 32, 8, 3),
        (64, 64, 8, 2),
        (32, 32, 8, 2),
        (16, 32, 8, 2),
    ),
    "forward, dropout": _row(
        (64, 64, 4, 3), (64, 64, 4, 3), (64, 64, 4, 2), (64, 32, 8, 2), (16, 32, 8, 1)
    ),
    "forward, latent": _row((32, 64, 8, 2)),
    "backward_keys": _row(
        (64, 128, 8, 3), (64, 128, 8, 3), (64, 128, 8, 2), (32, 64, 8, 2), (16, 32, 8, 1)
    ),
    "backward_keys, masked": _row(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 128, 8, 2), (32, 64, 8, 2), (16, 32, 8, 1)
    ),
    "backward_keys, dropout": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_queries": _row(
        (128, 64, 8, 3), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1)
    ),
    "backward_queries, masked": _row(
        (128, 64, 8, 3), (128, 64, 8, 3), (64, 64, 8, 3), (32, 32, 8, 2), (16, 32, 8, 1)
    ),
    "backward_queries, dropout": _row(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 32, 8, 2), (16, 16, 8, 1)
    ),
    "backward_shared": _row(
        (64, 128, 8, 3), (64, 128, 8, 3), (64, 64, 8, 3), (16, 64, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared, masked": _row(
        (64, 128, 8, 3), (64, 128, 8, 3), (32, 128, 8, 2), (16, 64, 8, 2), (16, 16, 8, 1)
    ),
    "backward_shared, dropout": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 8, 1), (16, 16, 8, 1)
    ),
    "backward_bias": _row(
        (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 8, 1), (16, 16, 4, 1), (16, 16, 4, 1)
    ),
}
# gfx942: 64 KB, and 512 registers. By Triton 3.9 wider tiles of packed rows spill under documents.
_CDNA = {
    "forward": _row(
        (128, 64, 4, 2),
        (128, 64, 4, 2),
        (64, 64, 4, 2),
        (64, 32, 8, 2),
        (64, 16, 4, 1),
        (32, 16, 4, 1),
    ),
    "forward, masked, packed": _row(
        (128, 64, 4, 2), (128, 64, 4, 2), (64, 32, 8, 2), (64, 32, 4, 2), (32, 16, 4, 1)
    ),
    "forward, masked": _row(
        (128, 64, 4, 2), (128, 64, 4, 2), (128, 32, 8, 2), (64, 32, 4, 2), (32, 16, 4, 1)
    ),
    "backward_keys": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1), (16, 32, 8, 1), (16, 16, 4, 1)
    ),
    "backward_queries": _row(
        (64, 64, 4, 2), (64, 64, 4, 2), (64, 32, 4, 2), (64, 16, 8, 1), (16, 16, 4, 1)
    ),
    "backward_shared": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 64, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)
    ),
    "backward_shared, masked": _row(
        (32, 64, 4, 2), (32, 64, 4, 2), (32, 32, 4, 1), (16, 32, 4, 1), (16, 16, 4, 1)
    ),
    "backward_bias": _row(
        (64, 64, 4, 1), (64, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (16, 16, 4, 1)
    ),
}
# Without tensor cores a thread holds whole rows of both operands of a product, so tiles are small.
# That is float32 as IEEE has it, and everything on Turing, whose tensor cores Triton has given up.
_SCALAR = {
    "forward": _row((32, 32, 4, 1), (32, 32, 4, 1), (32, 32, 8, 1), (32, 16, 8, 1), (16, 16, 8, 1)),
    "forward, masked": _row(
        (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_keys": _row(
        (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_keys, masked": _row(
        (32, 16, 4, 1), (32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_queries": _row(
        (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_queries, masked": _row(
        (32, 16, 4, 1), (32, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared": _row(
        (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared, masked": _row(
        (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_bias": _row(
        (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
}
_FLOAT32 = {  # of every architecture
    "forward": _row((32, 32, 4, 1), (32, 32, 8, 1), (32, 32, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)),
    "backward_keys": _row(
        (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_queries": _row(
        (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_shared": _row(
        (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
    "backward_bias": _row(
        (32, 32, 4, 1), (32, 32, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1)
    ),
}
_HALF = {
    "sm_75": _SCALAR,
    "sm_80": _AMPERE,
    "sm_86": _ADA,
    "sm_89": _ADA,
    "sm_90": _HOPPER,
    "sm_100": _BLACKWELL,
    "sm_120": _GEFORCE,
    "gfx942": _CDNA,
}
# Defaults that spill and stay, as they were timed: (architecture, row, width).
_TIMED = {
    ("sm_90", "backward_keys", 128): "chosen by its time on an H200",
    ("sm_90", "backward_keys", 256): "chosen by its time on an H200",
    ("sm_90", "backward_keys, masked", 256): "chosen by its time on an H200",
    ("sm_90", "backward_keys, short, packed", 128): "chosen by its time on an H200",
    ("sm_90", "backward_keys, short, packed", 256): "chosen by its time on an H200",
    ("sm_90", "backward_shared", 128): "chosen by its time on an H200",
}


# ---- tuned configs -------------------------------------------------------------------------------
# The user's own table of configs, which `saccade tune --save` writes. It is a JSON file and holds
# one table for each architecture that was tuned:
#
#   {"version": 1, "tables": [{"architecture": "sm_90", "device": "NVIDIA H200", "triton": "3.6.0",
#     "entries": [{"which": "forward", "width": 128, "wide": false, "masked": true,
#                  "dropout": false, "listed": false, "short": false, "config": [64, 64, 4, 3]}]}]}

VERSION = 1
FLAGS = ("wide", "masked", "dropout", "listed", "short")


class ConfigTable(NamedTuple):
    """What was found on one device."""

    architecture: str
    device: str
    triton: str
    entries: dict[KernelProblem, KernelConfig]


def tuned_path() -> Path | None:
    """Where the file is looked for: $SACCADE_CONFIGS, or in the user's folder of settings.

    None where $SACCADE_CONFIGS is empty, which turns the table off.
    """
    named = os.environ.get("SACCADE_CONFIGS")
    if named is not None:
        return Path(named).expanduser() if named else None
    folder = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(folder).expanduser() / "saccade" / "configs.json"


@functools.cache
def tuned() -> Mapping[KernelProblem, KernelConfig]:
    """The configs of the user's own table, read once; nothing if there is no file.

    Raises:
        ValueError: naming the file, what is wrong with it, and how to get rid of it.
    """
    file = tuned_path()
    if file is None:
        return {}
    return {
        problem: config
        for table in read_tuned(file).values()
        for problem, config in table.entries.items()
    }


def read_tuned(file: Path) -> dict[str, ConfigTable]:
    """The tables of a file by architecture; none if there is no file."""
    try:
        tables = [_table(table) for table in _tables(json.loads(file.read_text(encoding="utf-8")))]
    except FileNotFoundError:
        return {}
    except OSError as error:  # a folder, or a file of somebody else
        raise ValueError(
            f"{file}: cannot be read: {error.strerror}. $SACCADE_CONFIGS names another file"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:  # of text, of JSON or of what it holds
        raise ValueError(
            f"{file}: {error}. Delete the file, or write it anew with `saccade tune --save`"
        ) from None
    return {table.architecture: table for table in tables}


def save_tuned(file: Path, found: ConfigTable) -> Path | None:
    """Add what was found to a file; entries for other problems stay.

    A file that cannot be read is put aside under the name that this returns.
    """
    aside = None
    try:
        tables = read_tuned(file)
    except ValueError:
        if not file.is_file():  # a folder is not ours to put aside
            raise
        tables, aside = {}, file.with_name(f"{file.name}.broken")
        file.replace(aside)
    before = tables.get(found.architecture)
    kept = {} if before is None else before.entries
    tables[found.architecture] = found._replace(entries={**kept, **found.entries})
    text = json.dumps({"version": VERSION, "tables": list(map(_plain, tables.values()))}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text(f"{text}\n", encoding="utf-8")
    fresh.replace(file)  # a reader sees the old file or the new one
    tuned.cache_clear()
    return aside


def _plain(table: ConfigTable) -> dict[str, Any]:
    entries = [
        {
            "which": problem.which, "width": problem.width,
            **{name: getattr(problem, name) for name in FLAGS}, "config": config.numbers()[:4],
        }
        for problem, config in sorted(table.entries.items())
    ]  # fmt: skip
    return {**table._asdict(), "entries": entries}


def _tables(document: Any) -> list[Any]:
    _fields("the file", document, ("version", "tables"))
    if document["version"] != VERSION:
        raise ValueError(f"version: got {document['version']!r}, takes {VERSION}")
    return _list("tables", document["tables"])


def _table(plain: Any) -> ConfigTable:
    _fields("a table", plain, ConfigTable._fields)
    architecture = plain["architecture"]
    if architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise ValueError(f"architecture: got {architecture!r}, takes one of {known}")
    entries = dict(_entry(architecture, entry) for entry in _list("entries", plain["entries"]))
    return ConfigTable(architecture, str(plain["device"]), str(plain["triton"]), entries)


def _entry(architecture: str, plain: Any) -> tuple[KernelProblem, KernelConfig]:
    _fields("an entry", plain, ("which", "width", *FLAGS, "config"))
    if plain["which"] not in PASSES:
        raise ValueError(f"which: got {plain['which']!r}, takes one of {', '.join(PASSES)}")
    if plain["width"] not in WIDTHS:
        raise ValueError(f"width: got {plain['width']!r}, takes one of {WIDTHS}")
    for name in FLAGS:
        if not isinstance(plain[name], bool):
            raise ValueError(f"{name}: got {plain[name]!r}, takes true or false")
    numbers = _list("config", plain["config"])
    if len(numbers) != 4 or not all(numbers):
        raise ValueError(f"config: got {numbers}, takes two tiles, warps and stages")
    config = KernelConfig(*numbers)
    check(config)
    flags = {name: plain[name] for name in FLAGS}
    return KernelProblem(architecture, plain["which"], plain["width"], **flags), config


def _fields(what: str, plain: Any, names: tuple[str, ...]) -> None:
    got = sorted(plain) if isinstance(plain, dict) else plain
    if got != sorted(names):
        raise ValueError(f"{what}: got {got!r}, takes fields {', '.join(names)}")


def _list(name: str, plain: Any) -> list[Any]:
    if not isinstance(plain, list):
        raise ValueError(f"{name}: got {plain!r}, takes a list")
    return plain
