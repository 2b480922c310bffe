"""Descriptors: tensors as TMA reads and writes them, four axes: batch entry, head, row, channel.

Packed sequences are one batch entry. TMA fills what lies outside a tensor with zeros, and writes
nothing there, so rows past the end and channels past the last one need no care.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from saccade.gpu.language import gl
from saccade.gpu.launcher import next_width
from saccade.gpu.signature import ALIGNMENT, Described
from saccade.runtime.spec import Inputs, LinearInputs
from saccade.runtime.validation import strides_fit_tma

SMALLEST_WIDTH = 64  # channels: the 128 bytes that TMA swizzles at once
NVMMASharedLayout = gl.NVMMASharedLayout
PLAIN = NVMMASharedLayout(0, 32)
DTYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


class Box(NamedTuple):
    """Which part of a tensor moves at once, and how it lies in shared memory."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    sides: tuple[int, ...]
    layout: Any  # gl.NVMMASharedLayout

    @staticmethod
    def of(tensor: Tensor, packed: bool, rows: int, channels: int) -> Box:
        """Tiles of so many rows and channels of a dense or packed tensor."""
        shape, strides = tuple(tensor.shape), tensor.stride()
        if packed:
            tokens, heads, dim = shape
            shape, strides = (1, heads, tokens, dim), (0, strides[1], strides[0], strides[2])
        # A side of one has any stride; TMA wants one that it could use.
        strides = tuple(
            ALIGNMENT if side == 1 else stride
            for side, stride in zip(shape[:3], strides[:3], strict=True)
        )
        sides = (1, 1, rows, channels)
        return Box(shape, (*strides, 1), sides, _layout_of(sides, tensor.dtype))

    @staticmethod
    def plain(rows: int, columns: int, at_once: int) -> Box:
        """Some whole rows of a contiguous float32 matrix, which lie the same in shared memory."""
        return Box((rows, columns), (columns, 1), (at_once, columns), PLAIN)


@functools.cache
def _layout_of(sides: tuple[int, ...], dtype: torch.dtype) -> Any:
    return NVMMASharedLayout.get_default_for(list(sides), DTYPES[dtype])


def descriptor(tensor: Tensor, box: Box) -> Any:
    """A descriptor as a kernel argument."""
    return Described(tensor, *box, tensor.dtype)


def width_of(dim: int) -> int:
    """The channels that a kernel computes with."""
    return max(SMALLEST_WIDTH, next_width(dim))


AnyInputs = TypeVar("AnyInputs", Inputs, LinearInputs)


def aligned(inputs: AnyInputs) -> AnyInputs:
    """The inputs at addresses that TMA takes; copied where they are not."""
    query, key, value = inputs[:3]
    if (query.data_ptr() | key.data_ptr() | value.data_ptr()) % ALIGNMENT == 0:
        return inputs
    query, key, value = (
        tensor if tensor.data_ptr() % ALIGNMENT == 0 else tensor.clone()
        for tensor in (query, key, value)
    )
    return inputs._replace(query=query, key=key, value=value)


def readable(rows: Tensor) -> Tensor:
    """Rows as TMA can read them; copied where it could not (gradients of a sum have no strides)."""
    if strides_fit_tma(rows) and rows.data_ptr() % ALIGNMENT == 0:
        return rows
    return rows.clone(memory_format=torch.contiguous_format)
