"""Planning: which tiles a mask that reads captured tensors lets programs visit, found ahead.

First the kernels that find it, then what starts them and keeps what they found.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu.kernel_args import (
    Geometry,
    MaskFunctions,
    mask_argument,
    mask_functions,
    tensors_of,
    view,
)
from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import Launch, current_device, next_width
from saccade.gpu.tensor_view import num_rows, wide
from saccade.gpu.tile_ranges import TILE_RANGE_SIZE, classify_tiles, find_tile_range
from saccade.modifiers.expression import slots
from saccade.runtime.spec import Inputs, Variant

# ---- tile lists ----------------------------------------------------------------------------------
# Such a tile class costs as much as reading the tensor, so it is made once for a tile and not by
# every program. A mask that reads a tensor along both rows and keys (block-sparse, dense) gets
# lists of tiles in a dense call; they are smaller than that tensor. All others get one tile range a
# tile, which is linear memory.

HIDDEN, PARTIAL, FULL = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)


@triton.jit(do_not_specialize=["mask"])
def find_tile_ranges(
    here, other, mask, tile_ranges, batch_step, head_step,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: the tile range of one tile. `here` is the side that stands, as a View of no
    rows."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    tile_range = find_tile_range(
        mask, batch, head, tile * TILE, lengths, TILE, OTHER, OVER_KEYS, AT_ONCE, 1
    )
    entry = tile_ranges + wide(batch * batch_step + head * head_step + slot * TILE_RANGE_SIZE)
    for number in tl.static_range(TILE_RANGE_SIZE):
        tl.store(entry + number, tile_range[number])


@triton.jit(do_not_specialize=["mask"])
def classify_pairs(
    here, other, mask, tile_classes, num_tiles, num_chunks,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """One program: classes on CHUNK tiles of the other side, AT_ONCE together."""
    program = tl.program_id(0)
    position = program // num_chunks
    batch, head, tile, slot = here.find(position, here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    first = (program % num_chunks) * CHUNK
    row = wide((batch * here.data[1] + head) * tl.cdiv(lengths[0], TILE) + slot)
    for base in range(first, tl.minimum(first + CHUNK, num_tiles), AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        possible, certain = classify_tiles(
            mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        tile_class = tl.where(certain, FULL, tl.where(possible, PARTIAL, HIDDEN)).to(tl.int8)
        tl.store(tile_classes + (row * num_tiles + tiles), tile_class, mask=tiles < num_tiles)


@triton.jit
def list_tiles(tile_classes, lists, counts, num_tiles, AT_ONCE: tl.constexpr):
    """One program: the list of one row of classes."""
    position = wide(tl.program_id(0))
    listed = (position.to(tl.int32) * 0, position.to(tl.int32) * 0)
    for base in range(0, num_tiles, AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        tile_class = tl.load(
            tile_classes + (position * num_tiles + tiles), mask=tiles < num_tiles, other=0
        )
        row = lists + position * num_tiles
        listed = add_to_list(
            row, num_tiles, listed, tiles, tile_class != HIDDEN, tile_class == FULL
        )
    tl.store(counts + 2 * position, listed[0])
    tl.store(counts + 2 * position + 1, listed[1])


@triton.jit(do_not_specialize=["mask"])
def list_blocks(
    here, other, mask, lists, counts, num_tiles,
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """One program: a list whose classes are made on the way, as few entries decide on a tile."""
    batch, head, tile, slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    position = wide((batch * here.data[1] + head) * tl.cdiv(lengths[0], TILE) + slot)
    listed = (slot * 0, slot * 0)
    for base in range(0, num_tiles, AT_ONCE):
        tiles = base + tl.arange(0, AT_ONCE)
        possible, certain = classify_tiles(
            mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
        )
        row = lists + position * num_tiles
        listed = add_to_list(row, num_tiles, listed, tiles, possible, certain)
    tl.store(counts + 2 * position, listed[0])
    tl.store(counts + 2 * position + 1, listed[1])


@triton.jit
def add_to_list(row, size, listed, tiles, possible, certain):
    """List more tiles in a row of so many places: full ones from its front, partial tiles from its
    end.

    listed: how many full tiles and partial tiles stand there; the new numbers are given back.
    """
    full, partial = certain.to(tl.int32), (possible & (certain == 0)).to(tl.int32)
    tl.store(row + (listed[0] + tl.cumsum(full, 0) - 1), tiles, mask=full > 0)
    tl.store(row + (size - listed[1] - tl.cumsum(partial, 0)), tiles, mask=partial > 0)
    return listed[0] + tl.sum(full, 0), listed[1] + tl.sum(partial, 0)


LISTED_AT_ONCE = 256  # tiles that a program classifies or lists together
ROWS_AT_ONCE = 4096  # rows of tiles that a program classifies together, if rows decide
ROW_WARPS = 8  # 16 rows a thread: with 64, kernels by Triton 3.7 to 3.9 spill thousands of numbers
CLASSIFIED_PER_PROGRAM = 32  # tiles of single pairs that a program classifies


class TileLists(NamedTuple):
    """Tile ranges, or lists and counts of tiles, and how far apart batch entries and heads are
    there."""

    tensors: tuple[Tensor, ...] = ()
    steps: tuple[int, int] = (0, 0)

    def argument(self) -> tuple[Any, ...]:
        """The plan as kernels take it."""
        return (*self.tensors, *self.steps) if self.tensors else ()


NO_PLAN = TileLists()


class Planner:
    """Plans for the programs of one kernel, for calls like one another; prepared as its kernel
    is."""

    def __init__(
        self,
        inputs: Inputs,
        variant: Variant,
        geometry: Geometry,
        sizes: tuple[int, int],
        over_keys: bool,
    ):
        """Sizes: (query tile, kv tile). over_keys: programs stand at queries and run over keys."""
        functions = mask_functions(variant.mask) if variant.mask else None
        self.needed = functions is not None and functions.spans_read > 0
        if functions is None or not self.needed:
            return
        here, self.other = geometry if over_keys else (geometry.keys, geometry.queries)
        self.tile, self.other_tile = sizes if over_keys else sizes[::-1]
        self.over_keys, self.in_pairs = over_keys, functions.spans_read == 2
        batches, heads = varies_by(functions, variant)
        here = here._replace(heads=geometry.queries.heads if heads else 1)
        self.here = here if here.packed or batches else here._replace(batch=1)
        self.rows = self.here.programs(self.tile)
        self.num_tiles = -(-self.other.length // self.other_tile)
        constants = {"TILE": self.tile, "OTHER": self.other_tile, "OVER_KEYS": over_keys}
        self.in_blocks = functions.in_blocks
        options = {"num_warps": 4, "num_stages": 1}
        self.tile_range = Launch(
            find_tile_ranges,
            {**constants, "AT_ONCE": 1 if self.in_pairs else ROWS_AT_ONCE // self.other_tile},
            options if self.in_pairs else {**options, "num_warps": ROW_WARPS},
        )
        self.classify = Launch(
            classify_pairs,
            {**constants, "AT_ONCE": 1, "CHUNK": CLASSIFIED_PER_PROGRAM},
            options,
        )
        at_once = {"AT_ONCE": min(LISTED_AT_ONCE, next_width(self.num_tiles))}
        # One warp: its threads add up without waiting for each other.
        alone = {"num_warps": 1, "num_stages": 1}
        self.list = Launch(list_tiles, at_once, alone)
        self.list_blocks = Launch(list_blocks, {**constants, **at_once}, alone)

    def __call__(self, inputs: Inputs, variant: Variant) -> TileLists:
        """What the mask lets the programs visit; nothing where they find it themselves."""
        if not self.needed:
            return NO_PLAN
        if self.in_pairs and not self.here.packed:
            return self._lists(inputs, variant)
        return self._tile_ranges(inputs, variant)

    def _tile_ranges(self, inputs: Inputs, variant: Variant) -> TileLists:
        device, steps = inputs.query.device, self._steps(TILE_RANGE_SIZE.value)
        tile_ranges = torch.empty(
            self.rows, TILE_RANGE_SIZE.value, dtype=torch.int32, device=device
        )
        self.tile_range(
            self.rows,
            current_device(tile_ranges),
            (*tensors_of(inputs, variant), tile_ranges),
            lambda: (*self._sides(inputs), mask_argument(variant), tile_ranges, *steps),
        )
        return TileLists((tile_ranges,), steps)

    def _lists(self, inputs: Inputs, variant: Variant) -> TileLists:
        device, num_tiles = inputs.query.device, self.num_tiles
        lists = torch.empty(self.rows, num_tiles, dtype=torch.int32, device=device)
        counts = torch.empty(self.rows, 2, dtype=torch.int32, device=device)
        if self.in_blocks:
            self.list_blocks(
                self.rows,
                current_device(lists),
                (*tensors_of(inputs, variant), lists, counts),
                lambda: (
                    *self._sides(inputs), mask_argument(variant), lists, counts,
                    num_tiles,
                ),
            )  # fmt: skip
        else:
            tile_classes = self._tile_classes(inputs, variant)
            self.list(
                self.rows,
                current_device(lists),
                (tile_classes, lists, counts),
                lambda: (tile_classes, lists, counts, num_tiles),
            )
        return TileLists((lists, counts), self._steps(2))

    def _tile_classes(self, inputs: Inputs, variant: Variant) -> Tensor:
        device, num_tiles = inputs.query.device, self.num_tiles
        num_chunks = -(-num_tiles // CLASSIFIED_PER_PROGRAM)
        tile_classes = torch.empty(self.rows, num_tiles, dtype=torch.int8, device=device)
        self.classify(
            self.rows * num_chunks,
            current_device(tile_classes),
            (*tensors_of(inputs, variant), tile_classes),
            lambda: (
                *self._sides(inputs), mask_argument(variant), tile_classes,
                num_tiles, num_chunks,
            ),
        )  # fmt: skip
        return tile_classes

    def _steps(self, entries: int) -> tuple[int, int]:
        """How far apart batch entries, and heads, are in a table of so many entries a slot."""
        of_head = self.here.slots(self.tile) * entries
        by_head = of_head if self.here.heads > 1 else 0
        by_batch = of_head * self.here.heads if self.here.sequences > 1 else 0
        return by_batch, by_head

    def _sides(self, inputs: Inputs) -> tuple[Any, Any]:
        """Views without memory, for lengths and for what a program stands at."""
        offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        here, other = offsets if self.over_keys else offsets[::-1]
        none = (0, 0, 0)
        return (
            view(None, none, self.here, here),
            view(None, none, self.other, other),
        )


def varies_by(functions: MaskFunctions, variant: Variant) -> tuple[bool, bool]:
    """Whether classes differ between batch entries, and between heads."""
    captured = variant.mask_captured
    values = [captured.value(slot) for slot in slots(variant.mask)]

    def differs(axis: str) -> bool:
        return any(
            found.slot < 0 or values[found.slot].shape[found.dim] > 1
            for found in functions.dependences
            if found.axis == axis
        )

    return differs("batch"), differs("head")
