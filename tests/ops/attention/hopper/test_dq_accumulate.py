"""Turns: who adds to a tile of queries is known on both sides, or some program would wait forever.

The functions that find it run as the kernels call them, on a CPU.
"""

# Triton's language has no types that a checker follows.
# pyright: reportGeneralTypeIssues=false, reportArgumentType=false

from __future__ import annotations

import importlib.util
import inspect
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from saccade import masks
from saccade.gpu import language
from saccade.gpu.hopper import tile_scheduler
from saccade.gpu.kernel_args import mask_argument
from saccade.gpu.language import tl, triton
from saccade.gpu.tile_ranges import first_and_end
from saccade.modifiers.normal_form import PREFIX, WITHIN, contiguity_of
from saccade.ops.attention.hopper.dq_accumulate import first_semaphore
from saccade.runtime.spec import Variant

interpreted = pytest.mark.skipif(not language.INTERPRETED, reason="it takes the interpreter")
KV_TILE = 128


@triton.jit
def write_semaphores(mask, semaphores, lengths, QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """The first turn of each tile of queries; of batch entry 1."""
    tile = tl.program_id(0)
    both = tl.load(lengths), tl.load(lengths + 1)
    tl.store(semaphores + tile, first_semaphore(mask, 1, 0, tile, both, QUERY_TILE, KV_TILE))


@triton.jit
def write_tile_ranges(mask, tile_ranges, lengths, QUERY_TILE: tl.constexpr, KV_TILE: tl.constexpr):
    """The tiles of queries that each tile of keys visits: the first one, and the end."""
    tile = tl.program_id(0)
    both = tl.load(lengths + 1), tl.load(lengths)
    tile_range = mask.tile_range(mask, 1, 0, tile, tile * KV_TILE, both, KV_TILE, QUERY_TILE, False)
    first, end = first_and_end(tile_range)
    tl.store(tile_ranges + tile * 2, first)
    tl.store(tile_ranges + tile * 2 + 1, end)


def in_triton(function: Any, folder: Path) -> Any:
    """A Gluon function that names no more than one layout, as Triton has it."""
    text = inspect.getsource(function.fn).replace(
        ", gl.BlockedLayout([1], [32], [1], [0])", ""
    )  # fmt: skip
    text = text.replace("@gluon", "@triton").replace("gl.", "tl.")
    file = folder / f"{function.fn.__name__}_in_triton.py"
    imports = (
        "from saccade.gpu.language import tl, triton\nfrom saccade.gpu.tile_ranges import TileRange"
    )
    file.write_text(f"{imports}\n\n\n{text}")
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[file.stem] = module
    spec.loader.exec_module(module)
    return getattr(module, function.fn.__name__)


def random_mask(chance: random.Random, longest: int) -> masks.Mask | None:
    """A mask under which rows see one stretch of keys."""

    def align() -> str:
        return chance.choice(["bottom_right", "top_left"])

    def reach() -> int:
        return chance.choice([0, 1, 63, 64, 127, chance.randrange(longest)])

    few = torch.tensor([0, chance.choice([0, 1, 128, chance.randrange(longest)])])
    made = {
        "full": lambda: None,
        "causal": lambda: masks.causal(align()),
        "window": lambda: masks.window(reach(), reach(), align()),
        "lengths": lambda: masks.key_lengths(few),
        "prefix": lambda: masks.prefix(few, align()),
        "causal window": lambda: masks.causal(align()) & masks.window(reach(), 0, align()),
        "short window": lambda: masks.window(reach(), reach(), align()) & masks.key_lengths(few),
        "behind": lambda: ~masks.causal(align()),
        "short prefix": lambda: masks.prefix(few, align()) & masks.window(reach()),
    }
    return made[chance.choice(sorted(made))]()


@interpreted
@pytest.mark.parametrize("query_tile", [64, 128])
def test_who_visits_a_tile_of_queries_has_a_turn_there(query_tile: int, tmp_path: Path) -> None:
    chance, found = random.Random(query_tile), in_triton(tile_scheduler.found, tmp_path)
    for _ in range(SAMPLES):
        query_len, kv_len = (chance.choice([1, 64, 128, chance.randrange(1, 900)]) for _ in "qk")
        mask = random_mask(chance, 900)
        key, captured = ("", masks.NOTHING_HIDDEN.captured)
        if mask is not None:
            key, captured = mask.key, mask.captured
        assert contiguity_of(key) is not None
        argument = mask_argument(Variant(key, "", captured, captured, 1.0, 0.0))
        lengths = torch.tensor([query_len, kv_len], dtype=torch.int32)
        semaphores = torch.zeros(-(-query_len // query_tile), dtype=torch.int32)
        tile_ranges = torch.zeros(-(-kv_len // KV_TILE), 2, dtype=torch.int32)
        write_semaphores[(semaphores.numel(),)](argument, semaphores, lengths, query_tile, KV_TILE)
        if mask is not None:
            argument = argument._replace(tile_range=found)
        write_tile_ranges[(tile_ranges.shape[0],)](
            argument, tile_ranges, lengths, query_tile, KV_TILE
        )
        for tile, semaphore in enumerate(semaphores.tolist()):
            visitors = [
                i for i, (first, end) in enumerate(tile_ranges.tolist()) if first <= tile < end
            ]
            last = semaphore >> 1
            assert semaphore & 1
            # From the last one on each hands the turn to the one before.
            assert visitors == list(range(last - len(visitors) + 1, last + 1)), (mask, lengths)


SAMPLES = 12


@pytest.mark.parametrize(
    ("mask", "contiguity"),
    [
        (masks.causal(), PREFIX),
        (masks.causal("top_left"), PREFIX),
        (masks.prefix(torch.tensor([3])), PREFIX),
        (masks.causal() & masks.key_lengths(torch.tensor([3])), PREFIX),
        (masks.window(256), WITHIN),
        (masks.causal() & masks.window(256), WITHIN),
        (masks.window(256) & masks.window(3, 9, "top_left"), WITHIN),
        (masks.window(256) & masks.prefix(torch.tensor([3])), WITHIN),
        (masks.window(256) | masks.key_lengths(torch.tensor([3])), None),
        (masks.window(256) | masks.window(3), None),
        (~masks.window(256), None),
        (~masks.causal(), WITHIN),
        (masks.documents(torch.zeros(1, 9, dtype=torch.int32)), None),
        (masks.causal() & masks.documents(torch.zeros(1, 9, dtype=torch.int32)), None),
    ],
)
def test_which_masks_have_no_holes(mask: masks.Mask, contiguity: str | None) -> None:
    assert contiguity_of(mask.key) == contiguity
    assert contiguity_of("") == PREFIX
