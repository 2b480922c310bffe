"""Padding: from padded to packed tokens and back, as `flash_attn.bert_padding` has it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows by their numbers.

    Args:
        rows: (total, ...). indices: (tokens,).
    """
    return rows.index_select(0, indices)


def index_put_first_axis(values: Tensor, indices: Tensor, first_axis_dim: int) -> Tensor:
    """Rows at their places; zeros where there is none.

    Args:
        values: (tokens, ...). indices: (tokens,), each once.
        first_axis_dim: rows of the result.
    """
    zeros = values.new_zeros(first_axis_dim, *values.shape[1:])
    return zeros.index_copy(0, indices.long(), values)


def index_first_axis_residual(rows: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Rows by their numbers, and all rows, for a residual connection."""
    return rows.index_select(0, indices), rows.view_as(rows)


class IndexFirstAxis:
    """`index_first_axis` by the name of FlashAttention's function with a gradient."""

    apply: Any = staticmethod(index_first_axis)


class IndexPutFirstAxis:
    """`index_put_first_axis` by the name of FlashAttention's function with a gradient."""

    apply: Any = staticmethod(index_put_first_axis)


class IndexFirstAxisResidual:
    """`index_first_axis_residual` by the name of FlashAttention's function with a gradient."""

    apply: Any = staticmethod(index_first_axis_residual)


def unpad_input(
    hidden_states: Tensor, attention_mask: Tensor, unused_mask: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, int, Tensor]:
    """The tokens of padded sequences, laid end to end.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask: (batch, seqlen), 1 where there is a token.
        unused_mask: the same, 1 where there is room for a token that nobody attends to.

    Returns:
        tokens (total, ...); their places in the flattened batch; offsets int32 (batch + 1,); the
        longest length; and how many tokens each sequence has that are no unused ones. Reads the
        longest length from the device.
    """
    kept = attention_mask if unused_mask is None else attention_mask + unused_mask
    used = attention_mask.sum(-1, dtype=torch.int32)
    return *_laid_out(hidden_states, kept, kept.sum(-1, dtype=torch.int32)), used


def unpad_input_for_concatenated_sequences(
    hidden_states: Tensor, attention_mask_in_length: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The tokens of rows that hold several sequences each, laid end to end.

    Args:
        hidden_states: (batch, seqlen, ...).
        attention_mask_in_length: (batch, seqlen): a row [2, 3, 0, 0, 0, 0] begins with sequences
            of 2 and 3 tokens.

    Returns:
        The same as `unpad_input`, without the last, of the sequences.
    """
    total = attention_mask_in_length.sum(-1, keepdim=True)
    place = torch.arange(attention_mask_in_length.shape[-1], device=total.device)
    flat = attention_mask_in_length.flatten()
    lens = flat[flat.nonzero().flatten()].to(torch.int32)
    return _laid_out(hidden_states, place < total, lens)


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The way back; where there is no token stand zeros.

    Args:
        hidden_states: (total, ...). indices: as `unpad_input` gave them.

    Returns:
        (batch, seqlen, ...).
    """
    padded = index_put_first_axis(hidden_states, indices, batch * seqlen)
    return padded.unflatten(0, (batch, seqlen))


def _laid_out(
    hidden_states: Tensor, kept: Tensor, lens: Tensor
) -> tuple[Tensor, Tensor, Tensor, int]:
    """Tokens that are kept, their places, offsets of sequences of these lengths, the longest."""
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, offsets, int(lens.max())
