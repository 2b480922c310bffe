"""Where scales and transposed values lie: one number, or one tile, for each block of BLOCK rows."""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.kernel_args import Extent
from saccade.gpu.language import Constant, tl, triton
from saccade.gpu.signature import Length, Stride
from saccade.gpu.tensor_view import View, first_slot, row_pointers, wide
from saccade.runtime.fp8_spec import BLOCK_ROWS

BLOCK = tl.constexpr(BLOCK_ROWS)


@triton.jit
def packed_blocks(batch, strides, STEP: tl.constexpr, data):
    """Where the blocks of a packed sequence begin, and how many there are at most: see
    `fp8_spec.num_slots`."""
    return wide(first_slot(data, batch, BLOCK)) * STEP, data[3] // BLOCK + data[1]


@triton.jit
def packed_parts(batch, strides, STEP: tl.constexpr, data):
    """Where the parts of a packed sequence begin, of so many rows each as the data end with."""
    return wide(first_slot(data, batch, data[4])) * STEP, data[3] // data[4] + data[1]


@triton.jit
def load_scale(scale, batch, head, start):
    """The scale of the rows of a block, of which `start` is one; 1 where there are none."""
    if scale is None:  # noqa: SIM108
        found = 1.0
    else:
        found = tl.load(row_pointers(scale, batch, head, start // BLOCK, 0))
    return found


def blocks_view(
    blocks: Tensor, step: int, strides: tuple[int, int], extent: Extent, offsets: Tensor | None
) -> View:
    """A View whose rows are blocks; strides are those of batch entries and heads."""
    constant = Constant(step)
    if step > 1:  # tiles, or rows, which are loaded 16 numbers at once
        strides = Stride(strides[0]), Stride(strides[1])
    if offsets is None:
        data: tuple[Any, ...] = (Length(extent.length), extent.heads)
        return View(blocks, strides, constant, tensor_view.dense, tensor_view.dense_program, data)
    data = (offsets, extent.batch, extent.heads, extent.length)
    find = tensor_view.packed_program_by_heads
    return View(blocks, (0, strides[1]), constant, packed_blocks, find, data)


def parts_view(
    parts: Tensor, rows: int, extent: Extent, offsets: Tensor | None
) -> View:  # [batch, heads, parts, dim], packed [1, heads, slots, dim]
    """A View whose rows belong to parts of so many rows each."""
    found = blocks_view(parts, parts.shape[3], parts.stride()[:2], extent, offsets)  # type: ignore[arg-type]
    if offsets is None:
        return found
    return found._replace(position=packed_parts, data=(*found.data, Constant(rows)))


def scale_view(scale: Tensor | None, extent: Extent, offsets: Tensor | None) -> View | None:
    """A View of a scale in any of its forms."""
    if scale is None:
        return None
    if scale.dim() == 3:
        scale = scale.contiguous()
        return blocks_view(scale, 1, scale.stride()[:2], extent, offsets)
    strides = (0, 0) if scale.dim() == 0 else scale.stride()
    return blocks_view(scale, 0, strides, extent, None)  # type: ignore[arg-type]
