"""Interpreted: small kernels that show what the composed functions of masks and scores compute."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from saccade.gpu.kernel_args import Extent, mask_argument, mask_functions, score_argument, view
from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import plain
from saccade.gpu.tensor_view import num_rows
from saccade.gpu.tile_ranges import classify_tiles
from saccade.modifiers.evaluate import index_range
from saccade.modifiers.expression import Captured, Coordinates
from saccade.modifiers.modifier import expanded
from saccade.runtime.spec import Variant

NOTHING = Captured()


@triton.jit
def see(mask, result, sizes, shift, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A mask for all pairs of a batch entry and head, a program for each."""
    program = tl.program_id(0)
    rows, keys = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (rows < sizes[1]) & (keys < sizes[2])
    seen = mask.visible(program // sizes[0], program % sizes[0], rows, keys, shift, mask.data)
    places = (program * sizes[1] + rows) * sizes[2] + keys
    tl.store(result + places, seen.to(tl.int8), mask=inside)


@triton.jit
def bend(score, given, changed, slope, sizes, shift, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """A score and its derivative."""
    program = tl.program_id(0)
    batch, head = program // sizes[0], program % sizes[0]
    rows, keys = tl.arange(0, HEIGHT)[:, None], tl.arange(0, WIDTH)[None, :]
    inside = (rows < sizes[1]) & (keys < sizes[2])
    places = (program * sizes[1] + rows) * sizes[2] + keys
    scores = tl.load(given + places, mask=inside, other=0.0)
    bent = score.change(scores, batch, head, rows, keys, shift, score.data)
    tl.store(changed + places, bent, mask=inside)
    by = score.derivative(scores, batch, head, rows, keys, shift, score.data)
    tl.store(slope + places, by, mask=inside)


def coordinates(shape: tuple[int, ...]) -> Coordinates:
    """All pairs of a problem [batch, heads, query rows, key rows]."""
    rows = [index_range(0, size, dim) for dim, size in enumerate(shape)]
    return Coordinates(*rows, shift=shape[3] - shape[2])


def mask_of_kernel(mask: Any, shape: tuple[int, ...]) -> Tensor:
    """What a kernel sees of a mask."""
    variant = Variant(mask.key, "", expanded(mask.key, mask.captured), NOTHING, 1.0, 0.0)
    found = torch.full(shape, -1, dtype=torch.int8)
    height, width = (triton.next_power_of_2(size) for size in shape[2:])
    kernel: Any = see
    sizes, shift = shape[1:], shape[3] - shape[2]
    argument = plain(mask_argument(variant))
    kernel[(shape[0] * shape[1],)](argument, found, sizes, shift, height, width)
    assert bool((found >= 0).all())
    return found.bool()


def score_of_kernel(score: Any, given: Tensor) -> tuple[Tensor, Tensor]:
    """What a kernel makes of scores, and the derivative."""
    variant = Variant("", score.key, NOTHING, expanded(score.key, score.captured), 1.0, 0.0)
    changed, slope = torch.full_like(given, torch.nan), torch.full_like(given, torch.nan)
    shape = given.shape
    height, width = (triton.next_power_of_2(size) for size in shape[2:])
    kernel: Any = bend
    sizes, shift = tuple(shape[1:]), shape[3] - shape[2]
    argument = plain(score_argument(variant))
    kernel[(shape[0] * shape[1],)](argument, given, changed, slope, sizes, shift, height, width)
    return changed, slope


# ---- classes on tiles ------------------------------------------------------------------------


@triton.jit
def classify_all(
    here, other, mask, verdicts, sizes,  # of classes, from the heads on
    TILE: tl.constexpr, OTHER: tl.constexpr, OVER_KEYS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Classify all tiles: a program for each tile of one side."""
    batch, head, tile, _slot = here.find(tl.program_id(0), here.data, TILE)
    lengths = (num_rows(here, batch), num_rows(other, batch))
    tiles = tl.arange(0, AT_ONCE)
    possible, certain = classify_tiles(
        mask, batch, head, tile * TILE, lengths, tiles, TILE, OTHER, OVER_KEYS
    )
    place = (batch * sizes[0] + head) * sizes[1] + tile
    entries = verdicts + place * sizes[2] + tiles
    tl.store(entries, possible.to(tl.int8) + 2 * certain.to(tl.int8), mask=tiles < sizes[2])


def classified_by_kernel(
    mask: Any, shape: tuple[int, ...], tiles: tuple[int, int], over_keys: bool, coarse: bool = False
) -> tuple[Tensor, Tensor]:
    """The classes of a kernel, laid out as `reduced`; coarse: by the function for whole ranges."""
    captured = expanded(mask.key, mask.captured)
    variant = Variant(mask.key, "", captured, NOTHING, 1.0, 0.0)
    sides = [Extent(shape[0], length, shape[1], False) for length in shape[2:]]
    (here, tile), (other, other_tile) = zip(sides, tiles, strict=True)
    if not over_keys:
        here, tile, other, other_tile = other, other_tile, here, tile
    counts = -(-here.length // tile), -(-other.length // other_tile)
    verdicts = torch.full((*shape[:2], *counts), -1, dtype=torch.int8)
    views = [view(None, (0, 0, 0), side, None) for side in (here, other)]
    argument = mask_argument(variant)
    if coarse:
        argument = argument._replace(classify=mask_functions(mask.key).coarse_classify)
    kernel: Any = classify_all
    kernel[(here.programs(tile),)](
        *views, plain(argument), verdicts, (shape[1], *counts),
        tile, other_tile, over_keys, triton.next_power_of_2(counts[1]),
    )  # fmt: skip
    verdicts = verdicts if over_keys else verdicts.mT
    assert bool((verdicts >= 0).all())
    return verdicts % 2 == 1, verdicts >= 2


def reduced(seen: Tensor, tiles: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Of each tile: is any pair visible, are all: [batch, head, query tiles, kv tiles]."""
    pads = (0, -seen.shape[3] % tiles[1], 0, -seen.shape[2] % tiles[0])
    filled = [torch.nn.functional.pad(seen, pads, value=value) for value in (False, True)]
    split = [part.unflatten(3, (-1, tiles[1])).unflatten(2, (-1, tiles[0])) for part in filled]
    return split[0].any(5).any(3), split[1].all(5).all(3)
