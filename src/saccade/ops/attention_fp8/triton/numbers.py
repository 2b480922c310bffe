"""Numbers of eight bits in kernels: e4m3 conversions, and where scales and transposed values lie.

Triton's interpreter converts to e4m3 wrongly (it rounds halves up, and a carry into the exponent is
lost) and reads e4m3's NaN as 480. There bits are put together by hand, and products are of float16,
which holds all e4m3 numbers exactly; a GPU has instructions for both.
"""

# Triton's language has no types that a checker follows.
# pyright: reportArgumentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

from torch import Tensor

from saccade.gpu import tensor_view
from saccade.gpu.device_ops import as_fp8_bytes
from saccade.gpu.kernel_args import Extent
from saccade.gpu.language import Constant, builtin_of_ours, tl, triton
from saccade.gpu.signature import Length, Stride
from saccade.gpu.tensor_view import View, first_slot, row_pointers, wide
from saccade.runtime.fp8_spec import BLOCK_ROWS

BLOCK = tl.constexpr(BLOCK_ROWS)


@builtin_of_ours
def interpreted(_semantic: Any = None) -> Any:
    """Whether Triton's interpreter runs the kernel."""
    return True if _semantic is None else tl.constexpr(False)


@triton.jit
def as_e4m3(numbers):
    """float32 numbers of at most 448, rounded to the nearest, halves to even; NaN stays."""
    if interpreted():
        rounded = as_fp8_bytes(numbers).to(tl.float8e4nv, bitcast=True)
    else:
        rounded = numbers.to(tl.float8e4nv)
    return rounded


@triton.jit
def as_half(numbers):
    """e4m3 numbers as float16, exactly."""
    if interpreted():
        bits = numbers.to(tl.uint8, bitcast=True).to(tl.uint16)
        # float16's layout but for a shorter mantissa and a bias of 7 instead of 15.
        half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
        exact = (half.to(tl.float32) * 256.0).to(tl.float16)
        exact = tl.where((bits & 0x7F) == 0x7F, float("nan"), exact)
    else:
        exact = numbers.to(tl.float16)
    return exact


@triton.jit
def operand(numbers, EXACT: tl.constexpr):
    """e4m3 numbers as a product takes them; EXACT: as float16, whose sums are of float32."""
    if EXACT or interpreted():  # noqa: SIM108
        made = as_half(numbers)
    else:
        made = numbers
    return made


# ---- one number, or one tile, for each block of BLOCK rows ---------------------------------------


@triton.jit
def packed_blocks(batch, strides, STEP: tl.constexpr, data):
    """Where the blocks of a packed sequence begin, and how many there are at most: see
    `fp8_spec.num_slots`."""
    return wide(first_slot(data, batch, BLOCK)) * STEP, data[3] // BLOCK + data[1]


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


def scale_view(scale: Tensor | None, extent: Extent, offsets: Tensor | None) -> View | None:
    """A View of a scale in any of its forms."""
    if scale is None:
        return None
    if scale.dim() == 3:
        scale = scale.contiguous()
        return blocks_view(scale, 1, scale.stride()[:2], extent, offsets)
    strides = (0, 0) if scale.dim() == 0 else scale.stride()
    return blocks_view(scale, 0, strides, extent, None)  # type: ignore[arg-type]
