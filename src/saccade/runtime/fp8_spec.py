"""Call specification of fp8 attention: its tensors, and how 16-bit rows become e4m3 numbers."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from saccade.runtime.spec import heads_inside, row_shape

E4M3 = torch.float8_e4m3fn
LARGEST_E4M3 = 448.0
BLOCK_ROWS = 128  # rows of a head that share a scale, where scales go by blocks of rows
MODES = ("block", "head", "tensor")
GIVEN = "given"  # the mode of a call whose rows are e4m3 already
# Weights, at most 1, times 2^8 are e4m3 numbers of at most 256; those under 2^-18 become 0.
WEIGHTS_LOG2 = 8


def rounded_weights(weights: Tensor) -> Tensor:
    """Weights of at most 1 as the nearest e4m3 numbers over 2^8."""
    return (weights * 2.0**WEIGHTS_LOG2).to(E4M3).to(weights.dtype) / 2.0**WEIGHTS_LOG2


class Fp8Inputs(NamedTuple):
    """The tensors of one call, in the order of the operator's arguments.

    Rows are e4m3 numbers with scales (None: 1), or of 16 bits, without. A scale is one number,
    [batch, heads], or [batch, heads, blocks]; of packed rows [1, heads, slots], see `num_slots`.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    query_scale: Tensor | None = None
    key_scale: Tensor | None = None
    value_scale: Tensor | None = None
    sinks: Tensor | None = None
    cu_seqlens_q: Tensor | None = None
    cu_seqlens_k: Tensor | None = None

    @property
    def seed(self) -> None:
        """Of dropout, which there is none of."""
        return None


class Quantisation(NamedTuple):
    """How 16-bit rows become e4m3 numbers, and what dtype the output has."""

    mode: str  # one of MODES, or GIVEN
    incoherent: bool
    smooth: bool
    dtype: torch.dtype


def num_slots(rows: int, packed_sequences: int | None) -> int:
    """How many scales a head has if they go by blocks of rows.

    Of packed rows, block n of sequence b has the number offsets[b] // BLOCK_ROWS + b + n: so each
    has one of its own, and no length need be known on the host.
    """
    if packed_sequences is None:
        return -(-rows // BLOCK_ROWS)
    return rows // BLOCK_ROWS + packed_sequences


def empty_fp8_results(inputs: Fp8Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Memory for output and lse, laid out as every implementation lays it out."""
    query, dim = inputs.query, inputs.value.shape[-1]
    packed = inputs.cu_seqlens_q is not None
    if packed:
        output = query.new_empty(*query.shape[:2], dim, dtype=dtype)
    else:
        batch, heads, length = query.shape[:3]
        if heads_inside(query):
            output = query.new_empty(batch, length, heads, dim, dtype=dtype).transpose(1, 2)
        else:
            output = query.new_empty(batch, heads, length, dim, dtype=dtype)
    return output, query.new_empty(row_shape(output, packed), dtype=torch.float32)
