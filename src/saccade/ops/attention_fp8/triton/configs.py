"""Configs of fp8 attention: which tiles its kernel computes, by architecture and channels.

Tiles are of at most 128 rows, whose scales are one number. None was timed where no comment says so:
they are the largest that compile without spilling.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from saccade.ops.attention.triton.configs import check
from saccade.runtime.fp8_spec import BLOCK_ROWS
from saccade.runtime.spec import CONFIG_NUMBERS, KernelConfig

WIDTHS = (64, 128, 256)
SMALLEST = 32  # channels, or keys, that a product of e4m3 numbers adds up at least

# Columns: WIDTHS. Entries: query_tile, kv_tile, num_warps, num_stages.
_HOPPER = (
    KernelConfig(128, 128, 8, 3), KernelConfig(128, 128, 8, 3), KernelConfig(64, 128, 8, 2),
)  # fmt: skip
_ADA = (
    KernelConfig(128, 64, 8, 3), KernelConfig(128, 64, 8, 2), KernelConfig(32, 64, 8, 2),
)  # fmt: skip
_BLACKWELL = (*_ADA[:2], KernelConfig(64, 64, 8, 2))  # sums stand in tensor memory
_TABLES = {"sm_90": _HOPPER, "sm_100": _BLACKWELL}
ARCHITECTURES = ("sm_89", "sm_90", "sm_100", "sm_120")


class QuantiseConfig(NamedTuple):
    """How the kernel runs that quantises blocks of queries and keys."""

    num_warps: int
    registers: int  # of a thread at most; 0: as many as it takes
    programs: int  # of a multiprocessor, which share out all blocks
    stages: int  # of the pipeline that loads blocks ahead

    @property
    def options(self) -> dict[str, int]:
        """Options of the launch."""
        limit = {"maxnreg": self.registers} if self.registers else {}
        return {"num_warps": self.num_warps, **limit}


# Columns: WIDTHS. Timed on an H200 (benchmarks/results/h200/fp8.txt).
_QUANTISE_HOPPER = (
    QuantiseConfig(4, 128, 4, 2), QuantiseConfig(8, 128, 2, 2), QuantiseConfig(8, 0, 1, 2),
)  # fmt: skip
_QUANTISE = QuantiseConfig(8, 0, 2, 1)


def quantise(architecture: str, head_dim: int) -> QuantiseConfig:
    """The config of what quantises rows of so many channels."""
    if architecture == "sm_100" and head_dim > WIDTHS[1]:
        return _QUANTISE_HOPPER[2]
    if architecture != "sm_90":
        return _QUANTISE
    return _QUANTISE_HOPPER[next(n for n, widest in enumerate(WIDTHS) if head_dim <= widest)]


def choose(architecture: str, width: int, requested: KernelConfig) -> KernelConfig:
    """The config of a kernel: what the caller gave, the rest from the tables.

    Raises:
        ValueError: for a requested number that no kernel can have.
    """
    column = next(column for column, widest in enumerate(WIDTHS) if width <= widest)
    config = _TABLES.get(architecture, _ADA)[column]
    check(requested)
    for name in ("query_tile", "kv_tile"):
        tile = getattr(requested, name)
        if tile > BLOCK_ROWS or (name == "kv_tile" and 0 < tile < SMALLEST):
            least = SMALLEST if name == "kv_tile" else 16
            takes = f"takes a power of two from {least} to {BLOCK_ROWS}, rows that share a scale"
            raise ValueError(f"{name}: got {tile}, {takes}")
    sizes = {name: getattr(requested, name) for name in CONFIG_NUMBERS}
    return replace(config, **{name: size for name, size in sizes.items() if size})


def may_spill(architecture: str, head_dim: int) -> str:
    """Why a default may spill; "" where it must not."""
    if architecture == "sm_90" and head_dim > WIDTHS[1]:
        return "two sums of so many channels have no registers beside a tile of weights"
    if architecture in ("sm_89", "sm_100") and head_dim > WIDTHS[1]:
        return "rows of so many channels have no registers but for a few numbers of each block"
    if architecture == "sm_120" and head_dim > WIDTHS[0]:
        return "values loaded ahead have no registers beside two sums; its tiles wait for a GPU"
    return ""
