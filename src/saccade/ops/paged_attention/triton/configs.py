"""Configs of attention over pages: a pure function of the problem and the device's capability.

Sequences of few query rows (decoding, drafts) have tiles of 16 rows; what matters there is how
many bytes are on their way, that is tiles, stages and programs on each multiprocessor. Chunks of
prompts have tiles like the forward kernel of dense calls. Timed on an H200 was what
sequences of few rows take there at 128 channels (benchmarks/results/h200/pages_tiles.txt).
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.ops.attention.triton.configs import NARROW, WIDTHS, check
from saccade.runtime.spec import KernelConfig


class PagedConfig(NamedTuple):
    """How attention over pages runs."""

    query_tile: int  # rows of a tile: query rows × query heads of one key head
    kv_tile: int
    num_warps: int
    num_stages: int
    programs: int  # on each multiprocessor


class PagedProblem(NamedTuple):
    """What a config depends on."""

    architecture: str  # one of configs.ARCHITECTURES
    chunks: bool  # sequences of many query rows
    width: int  # the larger of head_dim and value_dim, as the kernel widens them
    wide: bool  # float32: no tensor cores, twice the memory
    group: int = 1  # query heads of a key head
    rows: int = 0  # query rows × query heads of a key head, if they are known to be few
    converted: bool = False  # pages of eight bits, which take registers to convert
    by_pair: bool = False  # mask or score reads a captured tensor for each pair
    plain: bool = False  # neither mask nor score, which take registers too
    latent: bool = False  # values are the first channels of keys, and are read with them
    fp8: bool = False  # products are of e4m3 numbers, for which values change places in registers


CONVERTS_FP8 = ("sm_89", "sm_90", "sm_100", "sm_120")  # float8_e4m3fn, that is
CHAINS = ("sm_90", "sm_100", "sm_120")  # programmatic dependent launch
LEAST_PAYLOAD = 2  # steps that are worth a program; one of so many keys is by itself:
LONG_TILE = 128
# With batch_invariant=True work tiles are cut every so many steps, or into MOST_SPLITS parts;
# chunks are not cut at all, as partial results of all their tiles would take too much memory.
FIXED_PAYLOAD = 33
MOST_SPLITS = 16
LARGEST_GROUP = 64  # query heads that share a tile; a larger group reads its keys more than once

Row = tuple[tuple[int, int, int, int, int], ...]

# Columns: configs.WIDTHS up to NARROW. Chunks have smaller tiles where more is done for each pair.
_FEW: dict[str, Row] = {
    "sm_75": ((16, 32, 4, 1, 2), (16, 32, 4, 1, 2), (16, 16, 4, 1, 2), (16, 16, 8, 1, 1)),
    "sm_80": ((16, 128, 4, 3, 2), (16, 128, 4, 3, 2), (16, 64, 4, 3, 2), (16, 32, 4, 3, 2)),
    "sm_86": ((16, 64, 4, 3, 2), (16, 64, 4, 3, 2), (16, 32, 4, 3, 2), (16, 32, 4, 2, 1)),
    "sm_90": ((16, 128, 4, 3, 2), (16, 128, 4, 3, 2), (16, 64, 4, 4, 2), (16, 32, 4, 4, 2)),
    "gfx942": ((16, 64, 4, 2, 2), (16, 64, 4, 2, 2), (16, 64, 4, 1, 2), (16, 32, 4, 1, 2)),
}
_CHUNKS: dict[str, Row] = {
    "sm_75": ((32, 32, 8, 1, 2), (32, 32, 8, 1, 2), (16, 16, 4, 1, 2), (16, 16, 8, 1, 1)),
    "sm_80": ((64, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 64, 8, 2, 1), (32, 32, 8, 2, 1)),
    "sm_86": ((64, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 32, 4, 2, 1), (32, 32, 8, 2, 1)),
    "sm_90": ((128, 64, 8, 3, 1), (128, 64, 8, 3, 1), (128, 64, 8, 3, 1), (64, 32, 8, 2, 1)),
    "sm_100": ((128, 64, 8, 3, 1), (128, 64, 8, 3, 1), (64, 64, 8, 3, 1), (64, 32, 8, 1, 1)),
    "gfx942": ((64, 64, 4, 2, 2), (64, 64, 4, 2, 2), (64, 32, 4, 1, 1), (32, 32, 4, 1, 1)),
}
_BUSY_CHUNKS: dict[str, Row] = {
    "sm_75": ((32, 32, 8, 1, 2), (32, 32, 8, 1, 2), (16, 16, 8, 1, 2), (16, 16, 8, 1, 1)),
    "sm_80": ((64, 32, 4, 2, 2), (64, 32, 4, 2, 2), (64, 32, 4, 2, 1), (32, 32, 8, 2, 1)),
    "sm_86": ((64, 32, 4, 2, 2), (64, 32, 4, 2, 2), (64, 32, 4, 2, 1), (32, 32, 8, 2, 1)),
    "sm_90": ((64, 32, 4, 3, 2), (64, 32, 4, 3, 2), (64, 32, 4, 3, 2), (32, 32, 8, 2, 1)),
    "sm_100": ((64, 32, 8, 3, 1), (64, 32, 8, 3, 1), (64, 32, 8, 3, 1), (32, 32, 8, 2, 1)),
    "gfx942": ((32, 32, 4, 1, 2), (32, 32, 4, 1, 2), (32, 32, 4, 1, 1), (16, 32, 4, 1, 1)),
}
_FLOAT32: dict[bool, Row] = {
    False: ((16, 32, 4, 1, 2), (16, 16, 8, 1, 2), (16, 16, 4, 1, 2), (16, 16, 8, 1, 1)),
    True: ((32, 32, 4, 1, 2), (32, 32, 4, 1, 2), (16, 16, 8, 1, 2), (16, 16, 8, 1, 1)),
}
_FEW_FLOAT32: dict[str, Row] = dict.fromkeys(  # where the second tile above spills two registers
    ("sm_86", "sm_89", "sm_120"),
    ((16, 32, 4, 1, 2), (16, 32, 8, 1, 2), (16, 16, 4, 1, 2), (16, 16, 8, 1, 1)),
)
_FEW["sm_100"] = _FEW["sm_90"]
# The same for pages of eight bits, where a tile of 16 rows holds all heads of a group: twice the
# keys are as many bytes, and share what is done once for a tile.
_FEW_CONVERTED: dict[str, Row] = {
    "sm_90": ((16, 128, 4, 3, 2), (16, 128, 4, 3, 2), (16, 128, 4, 3, 2), (16, 32, 4, 4, 2)),
}
# The same where nothing is converted, hidden or changed.
_FEW_PLAIN: dict[str, Row] = {
    "sm_90": ((16, 128, 4, 3, 2), (16, 128, 4, 3, 2), (16, 128, 4, 3, 1), (16, 32, 4, 4, 2)),
}
# Of more channels: sequences of few query rows, by 16 and by 32 rows of a tile, and chunks.
_WIDE: dict[str, Row] = {
    "sm_75": ((16, 16, 8, 1, 1), (16, 16, 8, 1, 1), (16, 16, 8, 1, 1)),
    "sm_80": ((16, 32, 8, 3, 1), (32, 32, 8, 2, 1), (16, 32, 8, 2, 1)),
    "sm_86": ((16, 16, 8, 2, 1), (16, 16, 8, 2, 1), (16, 16, 8, 2, 1)),
    "sm_90": ((16, 32, 8, 3, 1), (32, 32, 8, 2, 1), (16, 32, 8, 2, 1)),
    "sm_100": ((16, 32, 8, 3, 1), (32, 32, 8, 2, 1), (16, 32, 8, 2, 1)),
    "gfx942": ((16, 16, 4, 1, 1), (16, 16, 4, 1, 1), (16, 16, 4, 1, 1)),
}
# The same where values are read with keys, which halves the bytes of a tile.
_LATENT: dict[str, Row] = _WIDE | {
    "sm_80": ((16, 64, 8, 2, 1), (32, 32, 8, 3, 1), (32, 32, 8, 2, 1)),
    "sm_86": ((16, 32, 8, 3, 1), (32, 16, 8, 2, 1), (16, 32, 8, 2, 1)),
    "sm_90": ((16, 64, 8, 3, 1), (32, 32, 8, 3, 1), (32, 32, 8, 2, 1)),
    "sm_100": ((16, 64, 8, 3, 1), (32, 32, 8, 3, 1), (32, 32, 8, 2, 1)),
}
_ALIKE = {"sm_89": "sm_86", "sm_120": "sm_86"}
_MOST_FEW = 64  # rows of a tile that is read for few query rows


def default(problem: PagedProblem) -> PagedConfig:
    """The config in the tables above; tiles of few rows hold all of them, if they can."""
    architecture = _ALIKE.get(problem.architecture, problem.architecture)
    if problem.width > NARROW:
        return _of_wide_heads(problem, "sm_75" if problem.wide else architecture)
    column = next(column for column, widest in enumerate(WIDTHS) if problem.width <= widest)
    of_eight_bits = problem.converted or problem.fp8
    busy = problem.by_pair or (of_eight_bits and architecture != "sm_75")
    chunks = _BUSY_CHUNKS if busy else _CHUNKS
    row = (chunks if problem.chunks else _FEW)[architecture]
    if problem.wide:
        row = _FLOAT32[problem.chunks]
        if not problem.chunks:
            row = _FEW_FLOAT32.get(problem.architecture, row)
    config = PagedConfig(*row[column])
    if problem.fp8 and problem.chunks:
        config = config._replace(num_warps=8, num_stages=2)
    elif problem.fp8:
        keys, stages = config.kv_tile, 3
        if architecture != "sm_90":
            keys, stages = 32, 2 if problem.width <= 64 and architecture != "sm_100" else 3
        config = config._replace(kv_tile=keys, num_stages=stages)
    if problem.chunks or problem.wide or architecture == "sm_75":
        return config
    rows = max(problem.rows, min(problem.group, LARGEST_GROUP))
    rows = 1 << (max(rows, 1) - 1).bit_length()
    fitting = rows <= (_MOST_FEW if problem.width <= 128 else 32)
    special = _FEW_CONVERTED if problem.converted else _FEW_PLAIN if problem.plain else {}
    special = {} if problem.fp8 else special
    if rows <= 16 and architecture in special:
        return PagedConfig(*special[architecture][column])
    return config._replace(query_tile=max(config.query_tile, rows)) if fitting else config


def _of_wide_heads(problem: PagedProblem, architecture: str) -> PagedConfig:
    rows = max(problem.rows, min(problem.group, LARGEST_GROUP))
    table = _LATENT if problem.latent else _WIDE
    config = PagedConfig(*table[architecture][2 if problem.chunks else int(rows > 16)])
    if problem.converted:  # which takes registers
        config = config._replace(kv_tile=max(config.kv_tile // 2, 16))
    return config


def choose(problem: PagedProblem, requested: KernelConfig) -> PagedConfig:
    """The config of a launch: what the caller gave, and the default for the rest.

    Raises:
        ValueError: for a requested number that no kernel can have.
    """
    config = default(problem)
    check(requested)
    return PagedConfig(
        requested.query_tile or config.query_tile,
        requested.kv_tile or config.kv_tile,
        requested.num_warps or config.num_warps,
        requested.num_stages or config.num_stages,
        config.programs,
    )
