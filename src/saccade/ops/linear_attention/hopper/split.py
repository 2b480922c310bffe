"""How calls of linear attention are split into Hopper's programs, and what those are handed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.hopper.descriptors import Box, descriptor
from saccade.ops.linear_attention.hopper.program import LinearSizes
from saccade.ops.linear_attention.triton.call_spec import SHORTEST_SEGMENT, LinearCallSpec

BLOCK = 64  # channels of a partition, and rows of a chunk
WIDE = 4  # blocks of keys' channels that scan_d256.py has, however many exist


class HeadSplit(NamedTuple):
    """How a call is split into programs; see program.py, and scan_d256.py for WIDE."""

    blocks: int
    tiles: int  # of 128 channels of values
    segments: int

    @staticmethod
    def of(spec: LinearCallSpec) -> HeadSplit:
        """The split of a call. One program runs on a multiprocessor; few of them are cut along
        the length."""
        whole = HeadSplit.whole(spec)
        return whole if unlike_triton(spec, False) else whole.cut(spec)

    @staticmethod
    def whole(spec: LinearCallSpec) -> HeadSplit:
        """The same with nothing cut along the length."""
        blocks = 1 if max(spec.head_dim, spec.value_dim) <= BLOCK else 2
        blocks = WIDE if spec.head_dim > 2 * BLOCK else blocks
        tiles = 1 if blocks == 1 else -(-spec.value_dim // (2 * BLOCK))
        return HeadSplit(blocks, tiles, 1)

    def cut(self, spec: LinearCallSpec) -> HeadSplit:
        """The same in segments."""
        wanted = spec.multiprocessors // max(self.programs(spec, spec.heads), 1)
        return self._replace(segments=max(min(wanted, spec.positions // SHORTEST_SEGMENT), 1))

    def programs(self, spec: LinearCallSpec, heads: int) -> int:
        """How many programs so many heads take."""
        units = spec.sequences * heads
        units = -(-units // 2) if self.blocks == 1 else units
        return units * self.tiles * self.segments

    def constants(self, spec: LinearCallSpec) -> dict[str, Any]:
        """What every kernel of a call is compiled for."""
        return {
            "HEAD_DIM": spec.head_dim,
            "VALUE_DIM": spec.value_dim,
            "BLOCKS": self.blocks,
            "TILES": self.tiles,
            "SEGMENTS": self.segments,
            "BOTTOM_RIGHT": spec.bottom_right,
            "FEATURE_MAP": spec.variant.feature_map,
        }

    @property
    def parts(self) -> int:
        """Blocks of values' channels in a head."""
        return 1 if self.blocks == 1 else 2 * self.tiles


def unlike_triton(spec: LinearCallSpec, keys: bool) -> bool:
    """Whether chunks that begin where the queries do, or keys, are not those of Triton kernels,
    which begin with whoever comes first."""
    shift = spec.kv_len - spec.query_len if spec.bottom_right else 0
    return (-shift if keys else shift) > 0 and shift % BLOCK > 0


def moved(tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """Tensors as TMA moves them, a block at a time."""
    for tensor in tensors:
        yield descriptor(tensor, Box.of(tensor, False, BLOCK, BLOCK))


def sizes(spec: LinearCallSpec, heads: int) -> LinearSizes:
    """The sizes of a call, for programs of so many heads."""
    return LinearSizes(spec.query_len, spec.kv_len, heads, spec.sequences)
