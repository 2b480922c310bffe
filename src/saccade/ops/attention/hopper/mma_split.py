"""Split MMA: products of rows of more than 128 channels, of which one consumer sums up all.

A tensor has a power of two of channels, and so is 256 wide above 128. Where no more than 192 are
there, sums are two tensors, of 128 and 64 channels, and products leave out the rest.
"""

# To Triton a condition on a constexpr is no branch: what one sets, the next may read. Its language
# has no types that a checker follows.
# pyright: reportPossiblyUnboundVariable=false, reportGeneralTypeIssues=false
# pyright: reportCallIssue=false, reportArgumentType=false, reportAttributeAccessIssue=false
# pyright: reportAssignmentType=false, reportOperatorIssue=false

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from saccade.gpu.hopper.pipeline import (
    store,
    wait_for_each_other,
    wait_for_stores,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from saccade.gpu.tensor_view import row_pointers
from saccade.ops.attention.hopper.forward import mma_layout
from saccade.ops.attention.hopper.nonfinite import note_nonfinite
from saccade.ops.attention.hopper.softmax import ROWS, as_matrix, places_of

WIDEST_PART = gl.constexpr(128)  # but for a single one


@gluon.constexpr_function
def parts_of(width, dim):
    """The widths of the tensors that so many channels are cut into."""
    return [128, 64] if width == 256 and dim <= 192 else [width]


@gluon.jit
def no_sums(PARTS: gl.constexpr):
    """Sums of 64 rows, as a tensor for each part."""
    sums = ()
    for index in gl.static_range(len(PARTS)):
        sums = sums + (_no_sums(PARTS[index]),)  # noqa: RUF005
    return sums


@gluon.jit
def _no_sums(WIDTH: gl.constexpr):
    return gl.zeros([ROWS, WIDTH], gl.float32, mma_layout(WIDTH))


@gluon.jit
def multiply_channels(left, right, pairs, PARTS: gl.constexpr):
    """Start to add left · rightᵀ, both [rows, channels] in shared memory, to a tile of pairs: as
    many products as there are parts."""
    for index in gl.static_range(len(PARTS)):
        pairs = _multiply_channels(left, right, pairs, WIDEST_PART * index, PARTS[index])
    return pairs


@gluon.jit
def _multiply_channels(left, right, pairs, FIRST: gl.constexpr, WIDTH: gl.constexpr):
    left, right = left.slice(FIRST, WIDTH, dim=1), right.slice(FIRST, WIDTH, dim=1)
    return warpgroup_mma(left, right.permute((1, 0)), pairs, is_async=True)


@gluon.jit
def add_rows(pairs, rows, sums):
    """Start to add pairs · rows, in 16 bits, to sums: as many products as there are parts."""
    found = ()
    for index in gl.static_range(len(sums)):
        part = _add_rows(pairs, rows, sums[index], WIDEST_PART * index)
        found = found + (part,)  # noqa: RUF005
    return found


@gluon.jit
def _add_rows(pairs, rows, sums, FIRST: gl.constexpr):
    LEFT: gl.constexpr = gl.DotOperandLayout(0, mma_layout(sums.shape[1]), 2)
    left, right = gl.convert_layout(pairs, LEFT), rows.slice(FIRST, sums.shape[1], dim=1)
    return warpgroup_mma(left, right, sums, is_async=True)


@gluon.jit
def wait_for_sums_of(RUNNING: gl.constexpr, sums):
    """Wait until all but so many products, later ones, are done."""
    if len(sums) == 1:
        found = (warpgroup_mma_wait(RUNNING, deps=[sums[0]]),)
    else:
        found = warpgroup_mma_wait(RUNNING, deps=[sums[0], sums[1]])
    return found


@gluon.jit
def finish_wide(
    sums, factor, desc, view, schedule, at, memory, flag, DIM: gl.constexpr, NAN_SAFE: gl.constexpr
):  # fmt: skip
    """Write the gradients of 64 rows through memory that nobody else reads any more, and wait until
    it may be filled again."""
    batch, head, first_row, length = at
    wait_for_each_other()
    for index in gl.static_range(len(sums)):
        if NAN_SAFE:
            note_nonfinite(flag, sums[index])
        _finish(sums[index] * factor, desc.dtype, view, at, memory, WIDEST_PART * index, DIM)
    if first_row + ROWS <= length:
        entry, row = schedule.origin(batch, view.data)
        store(desc, [entry, head, row + first_row, 0], memory)
    wait_for_stores()
    wait_for_each_other()


@gluon.jit
def _finish(
    sums, dtype: gl.constexpr, view, at, memory, FIRST: gl.constexpr, DIM: gl.constexpr
):  # fmt: skip
    batch, head, first_row, length = at
    numbers = sums.to(dtype)
    if first_row + ROWS <= length:
        as_matrix(memory).slice(FIRST, sums.shape[1], dim=1).store(numbers)
    else:  # rows past the end are another sequence's, or nobody's
        row, channel = places_of(numbers, first_row, FIRST)
        pointers = row_pointers(view, batch, head, row, channel)
        gl.store(pointers, numbers, mask=(row < length) & (channel < DIM))
