"""Segments: a call as dense problems, and the rectangles of each, in the order of both passes.

A dense call is one dense problem; of a packed call neighbouring sequences of equal length are one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor

from saccade.modifiers.normal_form import is_causal
from saccade.ops.attention.cpu import block_mask
from saccade.ops.attention.cpu.block_mask import Run, TileSizes
from saccade.ops.attention.cpu.dense_tile import Draws, PairBlock
from saccade.runtime.arguments import OFFSETS
from saccade.runtime.spec import Inputs, KernelConfig, LinearInputs, Variant

# A rectangle in plain tiles holds at most about this many scores (2 MiB in float32): a dozen passes
# go over them, which take up to 1.4 times as long where they leave the cache of a processor.
TILE_SCORES = 2**19
TILE_ROWS = 256
# Key rows that PyTorch's flash kernel visits at once, whatever its causal form hides.
FLASH_KEYS = 512
TILE_KEYS = 512
# What plain tiles compute is planned in tiles of 64 × 64, as less is hidden in them: under a causal
# mask, 256 rows are 0.62 of the square. Below so many rows at once, starting operations costs more.
FINE_TILE = 64
FINE_ROWS = 512


class DenseProblem(NamedTuple):
    """One dense problem: a whole batch, or neighbouring sequences of a packed call.

    Where keys come in pieces, `key` and `value` hold the rows from `first_kv` on.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    sinks: Tensor | None
    draws: Draws | None
    variant: Variant
    sizes: TileSizes
    first_kv: int = 0

    @staticmethod
    def of(part: Segment, inputs: Inputs, variant: Variant, config: KernelConfig) -> DenseProblem:
        """The part of a call as a dense problem."""
        query, key = part.queries(inputs.query), part.keys(inputs.key)
        value = part.keys(inputs.value)
        tiles = block_mask.QUERY_TILE, block_mask.KV_TILE
        plain = bool(variant.score) or inputs.seed is not None
        if plain and FINE_TILE * query.shape[:2].numel() >= FINE_ROWS:
            tiles = FINE_TILE, FINE_TILE
        sizes = TileSizes(
            batch=query.shape[0],
            heads=query.shape[1],
            query_len=query.shape[2],
            kv_len=key.shape[2],
            first_batch=part.first_batch,
            query_tile=config.query_tile or tiles[0],
            kv_tile=config.kv_tile or tiles[1],
        )
        draws = part.draws(inputs, sizes.query_len, sizes.kv_len)
        return DenseProblem(query, key, value, inputs.sinks, draws, variant, sizes)

    @property
    def sees_nothing(self) -> bool:
        """No rows, or no keys."""
        return self.query.shape[:3].numel() == 0 or self.sizes.kv_len == 0

    @property
    def fits_flash(self) -> bool:
        """Whether PyTorch's flash kernel can compute the inner tiles."""
        plain = not self.variant.score and self.draws is None
        return plain and self.query.shape[-1] > 0 and self.value.shape[-1] > 0

    @property
    def flash_at_once(self) -> str | None:
        """Which form of the flash kernel serves all of it at once: "full", "causal", or None.

        The causal form skips nothing within 512 keys: up to there two tiles, the second under a
        mask, do less work.
        """
        if not self.fits_flash:
            return None
        if not self.variant.mask:
            return "full"
        causal = is_causal(self.variant.mask)
        length = self.sizes.query_len
        short = self.sizes.query_tile < length <= FLASH_KEYS
        return "causal" if causal and length == self.sizes.kv_len and not short else None


class Slices(NamedTuple):
    """A rectangle as slices of [batch, query_heads, rows] and [batch, kv_heads, keys]."""

    queries: tuple[slice, slice, slice]
    keys: tuple[slice, slice, slice]


def slices_of(dense: DenseProblem, pair_block: PairBlock) -> Slices:
    """Where a rectangle's rows lie in the tensors of its problem."""
    group = dense.query.shape[1] // dense.key.shape[1]
    first = dense.sizes.first_batch
    batch = slice(pair_block.batch[0] - first, pair_block.batch[1] - first)
    kv_heads = slice(pair_block.heads[0] // group, -(-pair_block.heads[1] // group))
    return Slices(
        (batch, slice(*pair_block.heads), slice(*pair_block.query_rows)),
        (batch, kv_heads, slice(*(row - dense.first_kv for row in pair_block.kv_rows))),
    )


def row_tiles(dense: DenseProblem) -> Iterator[tuple[PairBlock, tuple[Run, ...]]]:
    """Each tile of query rows (a rectangle over all keys) with the runs of keys that it sees."""
    first, everything = dense.sizes.first_batch, whole(dense)
    for group in block_mask.head_groups(dense.sizes, dense.variant):
        batch = (group.batch[0] + first, group.batch[1] + first)
        alike = everything._replace(batch=batch, heads=group.heads)
        for query_tile in group.tiles:
            yield alike._replace(query_rows=(query_tile.start, query_tile.stop)), query_tile.runs


def whole(dense: DenseProblem) -> PairBlock:
    """The one rectangle that holds every pair."""
    sizes = dense.sizes
    return PairBlock(
        batch=(sizes.first_batch, sizes.first_batch + sizes.batch),
        heads=(0, sizes.heads),
        query_rows=(0, sizes.query_len),
        kv_rows=(0, sizes.kv_len),
        shift=sizes.kv_len - sizes.query_len,
    )


def row_pieces(pair_block: PairBlock) -> list[list[PairBlock]]:
    """Cut a rectangle for plain tiles by batch entries, and those by query rows."""
    heads = pair_block.heads[1] - pair_block.heads[0]
    keys = min(TILE_KEYS, max(1, pair_block.kv_rows[1] - pair_block.kv_rows[0]))
    num_rows = min(TILE_ROWS, max(1, pair_block.query_rows[1] - pair_block.query_rows[0]))
    batch_step = max(1, TILE_SCORES // (heads * num_rows * keys))
    row_step = min(TILE_ROWS, max(16, TILE_SCORES // (heads * batch_step * keys)))
    return [
        [
            pair_block._replace(batch=batch, query_rows=rows)
            for rows in _cut(pair_block.query_rows, row_step)
        ]
        for batch in _cut(pair_block.batch, batch_step)
    ]


def key_pieces(pair_block: PairBlock) -> Iterator[PairBlock]:
    """Cut a rectangle for plain tiles by key rows."""
    for keys in _cut(pair_block.kv_rows, TILE_KEYS):
        yield pair_block._replace(kv_rows=keys)


def _cut(whole: tuple[int, int], step: int) -> Iterator[tuple[int, int]]:
    for start in range(whole[0], whole[1], step):
        yield start, min(start + step, whole[1])


class Segment(NamedTuple):
    """Adjacent sequences of one query length and one key length, as views [batch, heads, …]."""

    first_batch: int
    batch: int
    query_tokens: slice | None  # None: the call is dense, and this part is all of it
    kv_tokens: slice | None

    def draws(self, inputs: Inputs, query_len: int, kv_len: int) -> Draws | None:
        """What dropout draws by in this part; None: nothing is dropped."""
        if inputs.seed is None:
            return None
        if self.query_tokens is None or self.kv_tokens is None:
            return Draws(inputs.seed, inputs.numbers)
        first = self.query_tokens.start, self.kv_tokens.start
        return Draws(inputs.seed, inputs.numbers, first, (query_len, kv_len), self.first_batch)

    def queries(self, tensor: Tensor) -> Tensor:
        """The part's rows of query, output, or their gradients."""
        return self._rows(tensor, self.query_tokens)

    def keys(self, tensor: Tensor) -> Tensor:
        """The part's rows of key, value, or their gradients."""
        return self._rows(tensor, self.kv_tokens)

    def lse(self, lse: Tensor) -> Tensor:
        """The part's rows of the lse or its gradient, [batch, heads, rows]."""
        if self.query_tokens is None:
            return lse
        rows = lse[:, self.query_tokens]
        return rows.unflatten(1, (self.batch, rows.shape[1] // self.batch)).transpose(0, 1)

    def _rows(self, tensor: Tensor, tokens: slice | None) -> Tensor:
        if tokens is None:
            return tensor
        rows = tensor[tokens]
        return rows.unflatten(0, (self.batch, rows.shape[0] // self.batch)).transpose(1, 2)


def check_ends(name: str, ends: Sequence[int], num_tokens: int) -> None:
    """Refuse offsets that lead out of the tensors: their values were not checked with the call."""
    ascend = all(first <= second for first, second in itertools.pairwise([0, *ends, num_tokens]))
    if not ascend or ends[0] != 0:
        raise ValueError(f"{name}: got {ends} for {num_tokens} tokens, takes {OFFSETS}")


def clear_padding(
    offsets: Tensor | None, *rows: Tensor | None, dim: int = 0, number: float = 0.0
) -> None:
    """Write a number to what is behind the last offset, along a dimension, in what is there."""
    if offsets is not None:
        end = int(offsets[-1])
        for tensor in rows:
            if tensor is not None and tensor.dim() > dim:
                tensor.narrow(dim, end, tensor.shape[dim] - end).fill_(number)


def parts_of(inputs: Inputs | LinearInputs) -> list[Segment]:
    """The dense problems that make up a call, in order."""
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        return [Segment(0, inputs.query.shape[0], None, None)]
    query_ends, kv_ends = inputs.cu_seqlens_q.tolist(), inputs.cu_seqlens_k.tolist()
    lengths = [
        (query_ends[b + 1] - query_ends[b], kv_ends[b + 1] - kv_ends[b])
        for b in range(len(query_ends) - 1)
    ]
    check_ends("cu_seqlens_q", query_ends, inputs.query.shape[0])
    check_ends("cu_seqlens_k", kv_ends, inputs.key.shape[0])
    parts = []
    first = 0
    for b in range(1, len(lengths) + 1):
        if b < len(lengths) and lengths[b] == lengths[first]:
            continue
        query_tokens = slice(query_ends[first], query_ends[b])
        parts.append(Segment(first, b - first, query_tokens, slice(kv_ends[first], kv_ends[b])))
        first = b
    return parts
