"""How calls of linear attention are split into Hopper's programs, and what those are handed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from saccade.gpu.hopper.descriptors import Box, descriptor
from saccade.gpu.hopper.tile_scheduler import as_odd
from saccade.gpu.launcher import Pointer
from saccade.ops.linear_attention.hopper.program import Sizes
from saccade.ops.linear_attention.triton.kind import SHORTEST_SEGMENT, LinearKind

BLOCK = 64  # channels of a partition, and rows of a chunk
WIDE = 4  # blocks of keys' channels that scan_d256.py has, however many exist


class Split(NamedTuple):
    """How a call is split into programs; see program.py, and scan_d256.py for WIDE."""

    blocks: int
    tiles: int  # of 128 channels of values
    segments: int

    @staticmethod
    def of(kind: LinearKind) -> Split:
        """The split of a call. One program runs on a multiprocessor; few of them are cut along
        the length."""
        whole = Split.whole(kind)
        return whole if unlike_triton(kind, False) else whole.cut(kind)

    @staticmethod
    def whole(kind: LinearKind) -> Split:
        """The same with nothing cut along the length."""
        blocks = 1 if max(kind.head_dim, kind.value_dim) <= BLOCK else 2
        blocks = WIDE if kind.head_dim > 2 * BLOCK else blocks
        tiles = 1 if blocks == 1 else -(-kind.value_dim // (2 * BLOCK))
        return Split(blocks, tiles, 1)

    def cut(self, kind: LinearKind) -> Split:
        """The same in segments."""
        wanted = kind.multiprocessors // max(self.programs(kind, kind.heads), 1)
        return self._replace(segments=max(min(wanted, kind.places // SHORTEST_SEGMENT), 1))

    def programs(self, kind: LinearKind, heads: int) -> int:
        """How many programs so many heads take."""
        units = kind.sequences * heads
        units = -(-units // 2) if self.blocks == 1 else units
        return units * self.tiles * self.segments

    def constants(self, kind: LinearKind) -> dict[str, Any]:
        """What every kernel of a call is compiled for."""
        return {
            "HEAD_DIM": kind.head_dim,
            "VALUE_DIM": kind.value_dim,
            "BLOCKS": self.blocks,
            "TILES": self.tiles,
            "SEGMENTS": self.segments,
            "BOTTOM_RIGHT": kind.bottom_right,
            "FEATURE_MAP": kind.variant.feature_map,
        }

    @property
    def parts(self) -> int:
        """Blocks of values' channels in a head."""
        return 1 if self.blocks == 1 else 2 * self.tiles


def unlike_triton(kind: LinearKind, keys: bool) -> bool:
    """Whether chunks that begin where the queries do, or keys, are not those of Triton kernels,
    which begin with whoever comes first."""
    shift = kind.kv_len - kind.query_len if kind.bottom_right else 0
    return (-shift if keys else shift) > 0 and shift % BLOCK > 0


def moved(pointer: Pointer, tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """Tensors as TMA moves them, a block at a time."""
    for tensor in tensors:
        yield descriptor(pointer, tensor, Box.of(tensor, False, BLOCK, BLOCK))


def maybe(pointer: Pointer, tensor: Tensor | None) -> Any:
    """The address of a tensor, if there is one."""
    return None if tensor is None else pointer(tensor)


def sizes(kind: LinearKind, heads: int) -> Sizes:
    """The sizes of a call, for programs of so many heads."""
    return Sizes(*map(as_odd, (kind.query_len, kind.kv_len, heads, kind.sequences)))
