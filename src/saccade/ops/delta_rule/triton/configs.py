"""Configs of the gated delta rule: rows of a chunk, tiles of channels, warps and stages.

None was timed. They were chosen by what they compile to: the state of a program (channels of keys ×
its tile of values, in float32) against its registers, rows of a chunk against shared memory.
"""

from __future__ import annotations

from typing import NamedTuple

from saccade.ops.attention.triton.configs import check
from saccade.runtime.spec import KernelConfig


class DeltaConfig(NamedTuple):
    """How the kernels of a call run."""

    chunk: int  # rows whose pairs are multiplied out: 16, 32 or 64
    tile: int  # channels of values that a program of a scan holds
    num_warps: int  # of a scan
    num_stages: int
    system_tile: int = 64  # channels of keys at a time
    system_warps: int = 4
    gradient_tile: int = 32  # channels of keys, and of values, at a time
    gradient_warps: int = 8


CHUNKS = (16, 32, 64)
TENSOR_CORES_FOR_16_BITS = 80  # from this architecture of NVIDIA's on, in Triton


def choose(
    architecture: str, head_width: int, value_width: int, wide: bool, by_channel: bool,
    requested: KernelConfig | None,
) -> DeltaConfig:  # fmt: skip
    """The config of a call: `kv_tile` of what the caller gave is the chunk, `query_tile` the tile.

    wide: float32.

    Raises:
        ValueError: for a requested number that no kernel can have.
    """
    slow = wide or architecture == "sm_75"  # no tensor cores: operands lie in shared memory
    if slow:
        chunk, state = (16 if head_width > 128 or by_channel else 32), 2048
        config = DeltaConfig(chunk, 16, 4, 1, 16, 4, 16, 4)
    else:
        chunk, state = 64, 8192
        config = DeltaConfig(chunk, 64, 4, 1 if by_channel else 2, 64, 4, 32, 8)
    tile = min(max(state // head_width, 16), value_width, 64)
    config = config._replace(
        tile=tile,
        system_tile=min(config.system_tile, head_width),
        gradient_tile=min(config.gradient_tile, head_width, value_width),
    )
    if requested is None:
        return config
    check(requested)
    if requested.kv_tile and requested.kv_tile not in CHUNKS:
        raise ValueError(f"kv_tile: got {requested.kv_tile}, takes 16, 32 or 64 rows of a chunk")
    return config._replace(
        chunk=requested.kv_tile or config.chunk,
        tile=min(requested.query_tile or config.tile, value_width),
        num_warps=requested.num_warps or config.num_warps,
        num_stages=requested.num_stages or config.num_stages,
    )
