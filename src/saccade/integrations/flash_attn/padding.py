"""Padding: from padded to packed tokens and back, as `flash_attn.bert_padding` has it."""

from __future__ import annotations

import torch
from torch import Tensor


def index_first_axis(rows: Tensor, indices: Tensor) -> Tensor:
    """Rows by their numbers.

    Args:
        rows: (total, ...). indices: (tokens,).
    """
    return rows.index_select(0, indices)


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
    lens = kept.sum(-1, dtype=torch.int32)
    indices = kept.flatten().nonzero().flatten()
    offsets = torch.nn.functional.pad(lens.cumsum(0, dtype=torch.int32), (1, 0))
    used = attention_mask.sum(-1, dtype=torch.int32)
    tokens = index_first_axis(hidden_states.flatten(0, 1), indices)
    return tokens, indices, offsets, int(lens.max()), used


def pad_input(hidden_states: Tensor, indices: Tensor, batch: int, seqlen: int) -> Tensor:
    """The way back; where there is no token stand zeros.

    Args:
        hidden_states: (total, ...). indices: as `unpad_input` gave them.

    Returns:
        (batch, seqlen, ...).
    """
    padded = hidden_states.new_zeros(batch * seqlen, *hidden_states.shape[1:])
    return padded.index_copy(0, indices, hidden_states).unflatten(0, (batch, seqlen))
