"""Configs of linear attention: channels that a program computes, rows of a chunk, warps, stages.

For 64 channels and more in half precision some were timed on an H200 (benchmarks/results/h200/
linear.txt). The others were chosen by what they compile to on sm_90, and elsewhere by counting
their state (width × tile numbers of float32) against a program's registers.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.ops.attention.triton.configs import WIDTHS, check
from saccade.runtime.spec import KernelConfig


class LinearConfig(NamedTuple):
    """How a scan runs."""

    tile: int  # channels of the result that a program computes
    chunk: int  # rows that are multiplied out pair by pair
    num_warps: int
    num_stages: int
    loading: int = 1  # stages of kernels that do little but load


REVERSE = ("grad_key", "grad_value")  # the scans from the last row to the first
SPILLING = "its tiles wait for a GPU; part lies in the loop that repeats what met NaN or inf"

# Columns: configs.WIDTHS.
_HALF = {
    "sm_75": ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1)),
    "sm_90": ((32, 64, 4, 2), (64, 64, 4, 3), (64, 64, 4, 2), (64, 64, 4, 1, 3)),
    "gfx942": ((32, 64, 4, 1), (64, 64, 4, 1), (64, 32, 4, 1), (32, 32, 4, 1)),
}
_TENSOR_CORES = ((32, 64, 4, 2), (64, 64, 8, 2), (64, 64, 8, 2), (32, 32, 8, 1))
# For the output alone, where that is faster: of a width.
_FORWARD = {("sm_90", 128): (128, 128, 8, 1, 3)}
# For gradients that are summed up over heads, whose rows take more registers.
_SHARED = {("sm_90", 256): (64, 64, 8, 2)}
_FLOAT32 = ((16, 16, 4, 1), (16, 16, 4, 1), (16, 16, 8, 1), (16, 16, 8, 1))


def choose(
    architecture: str, width: int, wide: bool, requested: KernelConfig | None, group: int = 1,
    forward: bool = False,
) -> LinearConfig:  # fmt: skip
    """The config of a call, or of its output alone if `forward`: `kv_tile` of what the caller gave
    is the chunk.

    group: query heads of a state. With 64 rows, products of Blackwell's take tensor memory for each
    of them: 608 columns of 512 for four heads.

    Raises:
        ValueError: for a requested number that no kernel can have.
    """
    column = next(column for column, widest in enumerate(WIDTHS) if width <= widest)
    row = _FLOAT32 if wide else _HALF.get(architecture, _TENSOR_CORES)
    config = LinearConfig(*row[column])
    if not wide and (forward or group > 1):
        special = _FORWARD if forward else _SHARED
        config = LinearConfig(*special.get((architecture, WIDTHS[column]), config))
    if config.num_stages > 1:
        config = config._replace(loading=3)
    if architecture == "sm_100" and group > 1:
        config = config._replace(chunk=min(config.chunk, 32))
    if requested is None:
        return config
    check(requested)
    return LinearConfig(
        requested.query_tile or config.tile,
        requested.kv_tile or config.chunk,
        requested.num_warps or config.num_warps,
        requested.num_stages or config.num_stages,
        config.loading,
    )


def collecting(config: LinearConfig, group: int) -> LinearConfig:
    """How states of segments are collected: next to nothing but loads takes shared memory, of as
    many heads as are summed up."""
    if group > 1:
        return config._replace(num_stages=1, num_warps=8)
    return config._replace(num_stages=config.loading)


def sharing(config: LinearConfig, which: str, group: int) -> LinearConfig:
    """How a scan runs where query heads share a state: gradients are summed over one such head
    after the other, and a pipeline would hold rows of all of them (698 KB for eight of 256)."""
    return config._replace(num_stages=1) if which in REVERSE and group > 1 else config


def counting(config: LinearConfig) -> LinearConfig:
    """How sums of scores are counted: without a state several programs fit a multiprocessor."""
    narrow = config._replace(chunk=32, num_warps=4) if config.chunk >= 32 else config
    return narrow._replace(num_stages=config.loading)
