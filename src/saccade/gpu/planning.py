"""Planning: start the kernels of tile_lists.py for masks that need it, and keep what they find."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.gpu import tile_lists
from saccade.gpu.compose import MaskFunctions, mask_functions
from saccade.gpu.kernel_args import Geometry, mask_argument, tensors_of, view
from saccade.gpu.launcher import Launch, Pointer, current_device, next_width
from saccade.gpu.tile_ranges import TILE_RANGE_SIZE
from saccade.modifiers.expression import slots
from saccade.runtime.spec import Inputs, Variant

LISTED_AT_ONCE = 256  # tiles that a program classifies or lists together
ROWS_AT_ONCE = 4096  # rows of tiles that a program classifies together, if rows decide
ROW_WARPS = 8  # 16 rows a thread: with 64, kernels by Triton 3.7 to 3.9 spill thousands of numbers
CLASSIFIED_PER_PROGRAM = 32  # tiles of single pairs that a program classifies


class TileLists(NamedTuple):
    """Tile ranges, or lists and counts of tiles, and how far apart batch entries and heads are
    there."""

    tensors: tuple[Tensor, ...] = ()
    steps: tuple[int, int] = (0, 0)

    def argument(self, pointer: Pointer) -> tuple[Any, ...]:
        """The plan as kernels take it."""
        return (*map(pointer, self.tensors), *self.steps) if self.tensors else ()


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
            tile_lists.find_tile_ranges,
            {**constants, "AT_ONCE": 1 if self.in_pairs else ROWS_AT_ONCE // self.other_tile},
            options if self.in_pairs else {**options, "num_warps": ROW_WARPS},
        )
        self.classify = Launch(
            tile_lists.classify_pairs,
            {**constants, "AT_ONCE": 1, "CHUNK": CLASSIFIED_PER_PROGRAM},
            options,
        )
        at_once = {"AT_ONCE": min(LISTED_AT_ONCE, next_width(self.num_tiles))}
        # One warp: its threads add up without waiting for each other.
        alone = {"num_warps": 1, "num_stages": 1}
        self.list = Launch(tile_lists.list_tiles, at_once, alone)
        self.list_blocks = Launch(tile_lists.list_blocks, {**constants, **at_once}, alone)

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
            lambda p: (*self._sides(p, inputs), mask_argument(variant, p), p(tile_ranges), *steps),
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
                lambda p: (
                    *self._sides(p, inputs), mask_argument(variant, p), p(lists), p(counts),
                    num_tiles,
                ),
            )  # fmt: skip
        else:
            tile_classes = self._tile_classes(inputs, variant)
            self.list(
                self.rows,
                current_device(lists),
                (tile_classes, lists, counts),
                lambda p: (p(tile_classes), p(lists), p(counts), num_tiles),
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
            lambda p: (
                *self._sides(p, inputs), mask_argument(variant, p), p(tile_classes),
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

    def _sides(self, pointer: Pointer, inputs: Inputs) -> tuple[Any, Any]:
        """Views without memory, for lengths and for what a program stands at."""
        offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k
        mine, others = offsets if self.over_keys else offsets[::-1]
        none = (0, 0, 0)
        return (
            view(pointer, None, none, self.here, mine),
            view(pointer, None, none, self.other, others),
        )


def varies_by(functions: MaskFunctions, variant: Variant) -> tuple[bool, bool]:
    """Whether classes differ between batch entries, and between heads."""
    captured = variant.mask_captured
    values = [captured.value(slot) for slot in slots(variant.mask)]

    def differs(axis: str) -> bool:
        return any(
            found.place < 0 or values[found.place].shape[found.dim] > 1
            for found in functions.dependences
            if found.axis == axis
        )

    return differs("batch"), differs("head")
