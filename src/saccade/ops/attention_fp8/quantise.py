"""Quantise: 16-bit queries, keys and values as e4m3 numbers with scales, in plain PyTorch.

Three steps, each of which leaves the scores what they are but for rounding:

- smooth: the mean key of a head is subtracted from its keys. That shifts all scores of a query row
  by one number, which the softmax does not see; it joins the lse and the sinks again (`shift`).
- incoherent: queries and keys are multiplied by one orthogonal matrix, signs and then a Hadamard
  matrix of the channels: products stay, and an outlier is spread over all channels.
- scales: the largest number of a block of rows (or of a head, or of the tensor) takes the whole
  range of e4m3.

What is NaN or inf takes part in no mean and no scale, and is NaN as an e4m3 number. All of it is in
float64, as rows of bfloat16 have sums and products that float32 does not hold.

Source: Shah et al. 2024 (FlashAttention-3), section 3.3; Zhang et al. 2024 (SageAttention),
section 4.2.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor

from saccade.runtime.fp8_spec import (
    BLOCK_ROWS,
    E4M3,
    GIVEN,
    LARGEST_E4M3,
    Fp8Inputs,
    Quantisation,
    num_slots,
)

WIDEST_TRANSFORM = 128  # channels that one Hadamard matrix mixes
TINIEST = 2.0**-118  # of scales, which divide: as small as kernels have them


class Quantised(NamedTuple):
    """A call of e4m3 rows with scales, and what smoothing took from the scores.

    Attributes:
        shift: float64, one number for each query row ([batch, heads, rows], packed [heads, tokens])
            to be added to the products of its e4m3 numbers and scales; None: nothing.
    """

    inputs: Fp8Inputs
    shift: Tensor | None


class Operands(NamedTuple):
    """Rows whose products are scores, and values, as e4m3 numbers and scales say.

    Attributes:
        shift: as in `Quantised`, of the scores.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor | None


def quantised(inputs: Fp8Inputs, quantisation: Quantisation) -> Quantised:
    """The call with e4m3 rows; as it is, where they are e4m3 already."""
    if quantisation.mode == GIVEN:
        return Quantised(inputs, None)
    query, key, value = (rows.double() for rows in inputs[:3])
    shift = None
    if quantisation.smooth:
        mean = mean_rows(key, inputs.cu_seqlens_k)
        key = key - _of_each_row(mean, key, inputs.cu_seqlens_k)
        group = query.shape[1] // max(key.shape[1], 1)
        mean = mean.repeat_interleave(group, 1)
        shift = (_finite(query) * _of_each_row(mean, query, inputs.cu_seqlens_q)).sum(-1)
        shift = shift.mT.contiguous() if inputs.cu_seqlens_q is not None else shift
    if quantisation.incoherent and query.shape[-1]:
        matrix = transform(query.shape[-1]).to(query.device)
        query, key = query @ matrix, key @ matrix
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k
    of_query, of_key, of_value = (
        _as_e4m3(rows, ends, quantisation.mode)
        for rows, ends in zip((query, key, value), offsets, strict=True)
    )
    found = inputs._replace(query=of_query[0], key=of_key[0], value=of_value[0])
    scales = {"query_scale": of_query[1], "key_scale": of_key[1], "value_scale": of_value[1]}
    return Quantised(found._replace(**scales), shift)


@functools.cache
def transform(head_dim: int) -> Tensor:
    """The orthogonal matrix of the channels, in float64: random signs, then Hadamard matrices.

    These are of the largest power of two that divides head_dim, up to WIDEST_TRANSFORM: as many of
    them as it takes, one beside the other.
    """
    size = transform_size(head_dim)
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    while hadamard.shape[0] < size:
        above, below = torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)
        hadamard = torch.cat([above, below])
    matrix = torch.block_diag(*[hadamard / size**0.5] * (head_dim // size))
    return matrix * signs(head_dim).unsqueeze(1)


def transform_size(head_dim: int) -> int:
    """How many channels one Hadamard matrix mixes."""
    return min(head_dim & -head_dim, WIDEST_TRANSFORM)


def signs(head_dim: int) -> Tensor:
    """1 or -1 for each channel: the highest bit of its hash, the same everywhere and always."""
    bits = [_hash(channel) >> 31 for channel in range(head_dim)]
    return 1.0 - 2.0 * torch.tensor(bits, dtype=torch.float32)


def _hash(number: int) -> int:
    """32 bits that look random (`triton/quantise.py` has the same)."""
    number = (number + 1) * 0x9E3779B1 & 0xFFFFFFFF
    number = (number ^ (number >> 15)) * 0x85EBCA6B & 0xFFFFFFFF
    return (number ^ (number >> 13)) * 0xC2B2AE35 & 0xFFFFFFFF


def mean_rows(rows: Tensor, offsets: Tensor | None) -> Tensor:
    """The mean row of each sequence and head, [batch, heads, dim]; nonfinite numbers count as 0."""
    rows = _finite(rows)
    if offsets is None:
        return rows.sum(2) / max(rows.shape[2], 1)
    sequence = sequence_of_rows(offsets, rows.shape[0])
    total = rows.new_zeros(offsets.shape[0], *rows.shape[1:])  # padding has an entry of its own
    total.index_add_(0, sequence, rows)
    lengths = offsets.diff().clamp_min(1).view(-1, 1, 1)
    return total[:-1] / lengths


def _finite(rows: Tensor) -> Tensor:
    """Rows with 0 for what is nonfinite."""
    return torch.where(rows.isfinite(), rows, 0.0)


def sequence_of_rows(offsets: Tensor, rows: int) -> Tensor:
    """Which sequence each packed row belongs to; padding to one behind the last."""
    row = torch.arange(rows, device=offsets.device)
    return torch.searchsorted(offsets[1:].contiguous(), row, right=True)


def _of_each_row(numbers: Tensor, rows: Tensor, offsets: Tensor | None) -> Tensor:
    """[batch, heads, dim] for each of a call's rows; 0 for padding."""
    if offsets is None:
        return numbers.unsqueeze(2)
    padded = torch.cat([numbers, numbers.new_zeros(1, *numbers.shape[1:])])
    return padded[sequence_of_rows(offsets, rows.shape[0])]


def _as_e4m3(rows: Tensor, offsets: Tensor | None, mode: str) -> tuple[Tensor, Tensor]:
    """Rows as e4m3 numbers, and their scales; padding becomes 0."""
    finite = rows.isfinite()
    sizes = _finite(rows).abs()
    if offsets is not None:
        padding = sequence_of_rows(offsets, rows.shape[0]) == offsets.shape[0] - 1
        rows = rows.masked_fill(padding.view(-1, 1, 1), 0)
        sizes = sizes.masked_fill(padding.view(-1, 1, 1), 0)
    largest = sizes.amax(-1) if rows.shape[-1] else sizes.new_zeros(sizes.shape[:-1])
    blocks = block_of_rows(rows.shape, offsets, rows.device)
    slots = num_slots(*_rows_and_sequences(rows, offsets))
    if offsets is not None:
        largest = largest.mT.unsqueeze(0)  # [1, heads, tokens]
    of_blocks = largest.new_zeros(*largest.shape[:2], slots)
    of_blocks.scatter_reduce_(2, blocks.expand(largest.shape), largest, "amax")
    if mode == "tensor":
        found = of_blocks.amax() if of_blocks.numel() else of_blocks.new_zeros(())
    elif mode == "head":
        found = of_heads(of_blocks, rows, offsets)
    else:
        found = of_blocks
    scales = scale_of_largest(found).float()
    units = rows / scale_of_rows(scales, rows, offsets)
    numbers = units.clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return torch.where(finite, numbers, torch.nan).float().to(E4M3), scales


def scale_of_largest(largest: Tensor, unit: float = 1.0) -> Tensor:
    """The scale that gives numbers up to the largest one the range of e4m3; 1 where all are 0.

    unit: in which the largest is counted; by itself it may leave float32.
    """
    return (largest / LARGEST_E4M3 * unit).clamp_min(TINIEST).masked_fill(largest == 0, 1.0)


def of_heads(of_blocks: Tensor, rows: Tensor, offsets: Tensor | None) -> Tensor:
    """The largest of the numbers of a head's blocks, [batch, heads], all at least 0."""
    if offsets is None:
        return of_blocks.amax(2) if of_blocks.shape[2] else of_blocks.new_zeros(rows.shape[:2])
    firsts = offsets // BLOCK_ROWS + torch.arange(offsets.shape[0], device=offsets.device)
    slot = torch.arange(of_blocks.shape[2], device=offsets.device)
    sequence = torch.searchsorted(firsts[1:].contiguous(), slot, right=True)
    found = of_blocks.new_zeros(offsets.shape[0], rows.shape[1])  # the last is for no sequence
    index = sequence.unsqueeze(1).expand(-1, rows.shape[1])
    return found.scatter_reduce(0, index, of_blocks[0].mT, "amax")[:-1]


def block_of_rows(shape: torch.Size, offsets: Tensor | None, device: torch.device) -> Tensor:
    """Which of a head's block scales each row has: one index a row."""
    if offsets is None:
        return torch.arange(shape[2], device=device) // BLOCK_ROWS
    sequence = sequence_of_rows(offsets, shape[0])
    first = offsets.long()[sequence.clamp_max(max(offsets.shape[0] - 2, 0))]
    row = torch.arange(shape[0], device=device)
    sequence = sequence.clamp_max(max(offsets.shape[0] - 2, 0))
    found = first // BLOCK_ROWS + sequence + (row - first) // BLOCK_ROWS
    return found.clamp_max(max(num_slots(shape[0], offsets.shape[0] - 1) - 1, 0))


def scale_of_rows(scale: Tensor | None, rows: Tensor, offsets: Tensor | None) -> Tensor:
    """A scale in any of its forms as a factor for each row and head, before the channels."""
    if scale is None:
        return torch.ones((), device=rows.device)
    if scale.dim() < 2:
        return scale.reshape(())
    if scale.dim() == 3:
        blocks = block_of_rows(rows.shape, offsets, rows.device)
        of_rows = scale[..., blocks]  # [batch, heads, rows]
        return of_rows.unsqueeze(-1) if offsets is None else of_rows[0].mT.unsqueeze(-1)
    if offsets is None:
        return scale[:, :, None, None]
    padded = torch.cat([scale, scale.new_ones(1, scale.shape[1])])
    return padded[sequence_of_rows(offsets, rows.shape[0])].unsqueeze(-1)


def operands(found: Quantised, scale: float, dtype: torch.dtype) -> Operands:
    """The operands of a call whose scores have this factor.

    A power of two goes from the scales of queries to those of keys, or back, so that both are of
    one size: a large scale beside a small one, or a large factor, then takes no product out of the
    range of float32 that belongs into it.
    """
    inputs, shift = found
    of_query, of_key = (_largest_log2(each, inputs.query) for each in inputs[3:5])
    of_factor = math.log2(abs(scale)) if scale else 0.0
    power = torch.exp2(((of_query + of_factor - of_key) / 2).round())
    offsets = inputs.cu_seqlens_q, inputs.cu_seqlens_k, inputs.cu_seqlens_k
    of_rows = [
        scale_of_rows(each, rows, ends).double()
        for rows, each, ends in zip(inputs[:3], inputs[3:6], offsets, strict=True)
    ]
    factors = of_rows[0] * (scale / power), of_rows[1] * power, of_rows[2]
    query, key, value = (
        rows.to(dtype) * factor.to(dtype) for rows, factor in zip(inputs[:3], factors, strict=True)
    )
    return Operands(query, key, value, None if shift is None else (shift * scale).to(dtype))


def _largest_log2(scale: Tensor | None, rows: Tensor) -> Tensor:
    """The logarithm of the largest of a tensor's scales, in float64."""
    if scale is None or not scale.numel():
        return rows.new_zeros((), dtype=torch.float64)
    return scale.amax().double().log2()


def _rows_and_sequences(rows: Tensor, offsets: Tensor | None) -> tuple[int, int | None]:
    return (rows.shape[2], None) if offsets is None else (rows.shape[0], offsets.shape[0] - 1)
