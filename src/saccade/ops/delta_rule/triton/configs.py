"""Configs of the gated delta rule: rows of a chunk, tiles of channels, warps and stages.

They were chosen by what they compile to: the state of a program (channels of keys × its tile of
values, in float32) against its registers, rows of a chunk against shared memory. Those of Hopper
with 128 channels are the fastest of several that were timed and compared with float64, kernel by
kernel (benchmarks/results/h200/delta_tiles.txt). By Triton 3.6, a scan of four warps that loads
nothing ahead (one stage) reads outside of its memory on Hopper, and gradients of four warps are
wrong there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from saccade.ops.attention.triton.configs import check
from saccade.runtime.spec import KernelConfig


class DeltaConfig(NamedTuple):
    """How the kernels of a call run."""

    chunk: int  # rows whose pairs are multiplied out: 16, 32 or 64
    tile: int  # channels of values that a program of a scan holds
    num_warps: int  # of a scan
    num_stages: int
    back: tuple[int, int, int]  # tile, warps and stages of the scan back
    system_tile: int  # channels of keys at a time
    system_warps: int
    gradient_tile: int  # channels of keys at a time
    gradient_values: int  # and of values
    gradient_warps: int
    gradient_stages: int


CHUNKS = (16, 32, 64)
COLUMNS = (64, 128, 256)
"""The most channels of keys that a column is for."""

# Entries: DeltaConfig without what depends on the call alone. On Hopper an address takes one
# register for a whole tile of rows (`tensor_view.tile_pointers`), elsewhere one for each.
_HOPPER = (
    DeltaConfig(64, 64, 4, 2, (64, 4, 2), 64, 4, 64, 64, 8, 1),
    DeltaConfig(64, 64, 4, 2, (64, 4, 2), 128, 4, 128, 64, 8, 2),
    DeltaConfig(64, 64, 8, 2, (64, 8, 2), 64, 4, 32, 32, 8, 1),
)
_AMPERE = (
    DeltaConfig(64, 32, 4, 2, (32, 4, 2), 32, 8, 16, 16, 8, 1),
    DeltaConfig(64, 32, 8, 2, (32, 8, 2), 32, 8, 16, 16, 8, 1),
    DeltaConfig(64, 16, 8, 1, (16, 8, 1), 32, 8, 16, 16, 8, 1),
)
_CDNA = (
    DeltaConfig(64, 64, 4, 1, (64, 4, 1), 64, 4, 32, 32, 4, 1),
    DeltaConfig(64, 64, 4, 1, (64, 4, 1), 64, 4, 32, 32, 4, 1),
    DeltaConfig(64, 16, 4, 1, (32, 4, 1), 64, 4, 32, 32, 4, 1),
)
# Without tensor cores, float32 and all of Turing: operands lie in shared memory.
_SLOW = (
    DeltaConfig(16, 16, 4, 1, (16, 4, 1), 16, 4, 16, 16, 8, 1),
    DeltaConfig(16, 16, 8, 1, (16, 8, 1), 16, 4, 16, 16, 4, 1),
    DeltaConfig(16, 16, 8, 1, (16, 8, 1), 16, 4, 16, 16, 4, 1),
)
_TABLES = {"sm_75": _SLOW, "sm_90": _HOPPER, "gfx942": _CDNA}


def choose(
    architecture: str, head_width: int, value_width: int, wide: bool, by_channel: bool,
    requested: KernelConfig | None,
) -> DeltaConfig:  # fmt: skip
    """The config of a call: `kv_tile` of what the caller gave is the chunk, `query_tile` the tile.

    head_width, value_width: channels of keys and of values, as kernels widen them. wide: float32.

    Raises:
        ValueError: for a requested number that no kernel can have.
    """
    column = next(column for column, most in enumerate(COLUMNS) if head_width <= most)
    table = _SLOW if wide else _TABLES.get(architecture, _AMPERE)
    config = table[column]
    if by_channel and table is not _SLOW:  # sums of decay and their exponentials besides
        config = config._replace(
            system_tile=min(config.system_tile, 32),
            system_warps=8 if table is _AMPERE else 4,
            gradient_tile=32 if table is _HOPPER else 16,
            gradient_values=min(config.gradient_values, 32),
            gradient_stages=1,
        )
        if table is _HOPPER and column == 1:  # three tiles of rows: two programs have no memory
            config = config._replace(tile=128, num_warps=8, back=(128, 8, 2))
        elif table is _HOPPER and column == 2:
            config = config._replace(num_stages=1, back=(64, 8, 1))
    if requested is not None:
        check(requested)
        if requested.kv_tile and requested.kv_tile not in CHUNKS:
            takes = "takes 16, 32 or 64, the rows of a chunk"
            raise ValueError(f"kv_tile: got {requested.kv_tile}, {takes}")
        config = config._replace(
            chunk=requested.kv_tile or config.chunk,
            tile=requested.query_tile or config.tile,
            num_warps=requested.num_warps or config.num_warps,
            num_stages=requested.num_stages or config.num_stages,
        )
        if architecture == "sm_90" and not wide and (config.num_warps, config.num_stages) == (4, 1):
            raise ValueError(
                "num_stages: got 1 with num_warps 4, takes 2 or more on sm_90, where such a "
                "scan reads outside of its memory"
            )
        if requested.query_tile or requested.num_warps or requested.num_stages:
            config = config._replace(back=(config.tile, config.num_warps, config.num_stages))
    back_tile, *back = config.back
    return config._replace(
        tile=min(config.tile, value_width),
        back=(min(back_tile, value_width), *back),
        system_tile=min(config.system_tile, head_width),
        gradient_tile=min(config.gradient_tile, head_width),
        gradient_values=min(config.gradient_values, value_width),
    )


RESIDENT = 2  # programs of a scan that a multiprocessor runs side by side, about
JOIN_STEPS = 0.7  # what a segment's place in the join takes, in chunks of a scan
SPLIT_GAIN = 0.8  # of a scan's time, which cutting must come below
SEGMENT_CHUNKS = (16, 64, 256)  # a kernel is compiled for each


def segment(programs: int, chunks: int, moves: float, processors: int) -> int:
    """Into segments of how many chunks sequences are cut (segments.py), or 0 where they are not.

    Time is counted in chunks that one program scans after the other.

    programs: of a scan that is not cut; chunks: of a sequence, on average; moves: columns of
    M for one of N; processors: of the GPU.
    """

    def turns(count: float) -> int:
        return -(-math.ceil(count) // (RESIDENT * processors))

    best, least = 0, SPLIT_GAIN * chunks * turns(programs)
    for each in SEGMENT_CHUNKS:
        pieces = -(-chunks // each)
        if pieces < 2:
            break
        scans = turns(programs * pieces * (1 + moves)) + turns(programs * pieces)
        taken = each * scans + JOIN_STEPS * pieces
        if taken < least:
            best, least = each, taken
    return best


def may_spill(architecture: str, kernel: str, wide: bool, head_dim: int) -> str:
    """Why a default may spill; "" where it must not."""
    if (wide or architecture == "sm_75") and head_dim > COLUMNS[0]:
        return "without tensor cores a product of so many channels is unrolled; waits for a GPU"
    if kernel.startswith("hopper_delta_forward"):
        return "numbers that warps which measure rows keep, a few a chunk, and none of the products"
    if kernel == "hopper_delta_chunk_gradients":
        return "numbers of warps that look at rows, one or two a chunk, and none of the products"
    spilling = ("delta_reverse_scan", "delta_gradients")
    if head_dim > COLUMNS[1]:
        spilling += ("delta_forward_scan",)
    if architecture == "sm_90" and kernel in spilling:
        return "tiles that spill less take longer (benchmarks/results/h200/delta_tiles.txt)"
    if kernel == "delta_gradients":
        return "all pairs of a chunk are left operands, in registers; waits for a GPU"
    return ""
