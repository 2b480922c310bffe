"""Wide heads: rows of more channels than a tile holds, as a first tile and a rest.

The sides of a tile are powers of two, so keys of 576 channels (512 of a latent, 64 of its position)
would be multiplied as 1,024. Their scores are the sum of two products instead: of the first
WIDEST_TILE channels, and of those behind them. Values have no rest: their product is a tile of sums
that a program keeps, and twice as many channels have no registers.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from saccade.gpu.language import tl, triton
from saccade.gpu.launcher import next_width
from saccade.gpu.paged_view import slot_pointers
from saccade.gpu.tensor_view import load_rows, row_pointers

WIDEST_TILE = 512  # channels


def tile_width(dim: int) -> int:
    """Channels of the first tile of rows of so many: a power of two of at least 16."""
    return min(next_width(dim), WIDEST_TILE)


def width_of(constants: Mapping[str, Any]) -> int:
    """What configs look at: the wider of keys and values, as a kernel widens them."""
    head_dim, head_width = constants["HEAD_DIM"], constants["HEAD_WIDTH"]
    rest = max(16, next_width(head_dim - head_width)) if head_dim > head_width else 0
    return max(head_width + rest, constants["VALUE_WIDTH"])


@triton.constexpr_function
def within(dim: int, width: int) -> int:
    """Channels that lie in the first tile."""
    return min(dim, width)


@triton.constexpr_function
def rest_width(dim: int, width: int) -> int:
    """What channels behind the first tile are widened to."""
    return max(16, 1 << (dim - width - 1).bit_length())


@triton.jit
def load_parts(
    view, batch, head, rows, length, DIM: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Rows of DIM channels as a tuple: the tile of the first ones, [rows, WIDTH], and where there
    are more a tile of the rest. Rows past the end are 0."""
    parts = (load_rows(view, batch, head, rows, length, within(DIM, WIDTH), WIDTH, False),)
    if DIM > WIDTH:
        channels = WIDTH + tl.arange(0, rest_width(DIM, WIDTH))[None, :]
        exists = (rows < length)[:, None] & (channels < DIM)
        pointers = row_pointers(view, batch, head, rows[:, None], channels)
        parts = parts + (tl.load(pointers, mask=exists, other=0.0),)  # noqa: RUF005
    return parts


@triton.jit
def load_rest(
    view, ahead, batch, head, start, length,
    ROWS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The channels behind the first WIDTH of ROWS adjacent rows; as `tensor_view.load_tile`."""
    channels = WIDTH + tl.arange(0, rest_width(DIM, WIDTH))[None, :]
    pointers = view.rows(view, ahead, batch, head, start, channels, ROWS, False)
    exists = channels < DIM
    if not WHOLE:
        exists = exists & (start + tl.arange(0, ROWS)[:, None] < length)
    return tl.load(pointers, mask=exists, other=0.0)


@triton.jit
def load_rest_of_slots(
    view, head, position, exists, DIM: tl.constexpr, WIDTH: tl.constexpr, WHOLE: tl.constexpr
):
    """The channels behind the first WIDTH of rows in pages; as `paged_view.load_slots`."""
    channels = WIDTH + tl.arange(0, rest_width(DIM, WIDTH))[None, :]
    pointers = slot_pointers(view, head, position, channels)
    if WHOLE:  # noqa: SIM108
        exists = channels < DIM
    else:
        exists = exists & (channels < DIM)
    return tl.load(pointers, mask=exists, other=0.0)
