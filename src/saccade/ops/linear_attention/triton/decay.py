"""Decay: sums of its logarithms before the kernels run, and its gradient after them.

With R the gradient of a state and S the state, that of decay_n is ⟨R_n, e^{decay_n} S_{n−1}⟩: all
that keys before n give to rows at n and after it. Where every row sees all keys this is what keys
before n give at all, so it is a sum from the start of key · grad_key, with the normaliser too.

Else it is what rows at n and after it take from the state, less what keys at n and after it give,
plus what reaches the last state: a sum from the end of query · grad_query − key · grad_key. These
are numbers of float32, whose rounding errors add up: where a strong decay lets little flow over a
key, the difference is as far off as 6e-8 times the root of the sum of their squares.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.ops.linear_attention.feature_scaling import ends_of, padding_of, sequence_of
from saccade.ops.linear_attention.triton.call_spec import LinearCallSpec
from saccade.runtime.spec import LinearInputs, LinearVariant


def summed_decay_of(inputs: LinearInputs) -> Tensor | None:
    """Σ decay over all keys before each key row, and over all: float64, with one entry more.

    [batch, state_heads, kv_len + 1], without batch where it is the same; [state_heads, tokens + 1]
    if packed. Differences are what counts, so sequences need not start at 0.
    """
    decay, kv_len = inputs.decay, inputs.key.shape[0 if inputs.packed else 2]
    if decay is None or kv_len == 0:
        return None
    if decay.dim() == 1:
        rows = decay.double().unsqueeze(-1).expand(-1, kv_len)
    else:
        rows = decay.double().transpose(0, 1) if inputs.packed else decay.double()
    if inputs.key_lengths is not None:
        row = torch.arange(kv_len, device=decay.device)
        rows = rows.masked_fill(row >= inputs.key_lengths.view(-1, 1, 1), 0)
    summed_decay = rows.new_zeros(*rows.shape[:-1], kv_len + 1)
    torch.cumsum(rows, -1, out=summed_decay[..., 1:])
    return summed_decay


def whole_decays(
    summed_decay: Tensor | None, inputs: LinearInputs, spec: LinearCallSpec, segments: int
) -> Tensor | None:
    """How much each segment leaves of the state before it: [sequences, state_heads, segments]."""
    if summed_decay is None:
        return None
    if inputs.cu_seqlens_k is not None:  # one segment
        at_edges = summed_decay[:, ends_of(inputs.cu_seqlens_k, summed_decay.shape[-1] - 1)]
        return (at_edges[:, 1:] - at_edges[:, :-1]).exp().float().transpose(0, 1).unsqueeze(-1)
    shift = spec.kv_len - spec.query_len if spec.bottom_right else 0
    chunks = -(-spec.positions // spec.config.chunk)
    length = -(-chunks // segments) * spec.config.chunk
    edges = torch.arange(segments + 1, device=summed_decay.device) * length + min(shift, 0)
    at_edges = summed_decay[..., edges.clamp(0, spec.kv_len)]
    whole = (at_edges[..., 1:] - at_edges[..., :-1]).exp().float()
    return whole.expand(spec.sequences, spec.state_heads, segments)


def decay_gradient(
    inputs: LinearInputs,
    variant: LinearVariant,
    of_queries: Tensor | None,
    of_keys: Tensor,
    flow: Tensor | None,
) -> Tensor:
    """The gradient of decay, in its shape and dtype.

    of_queries (causal), of_keys: features · their gradients, [batch, heads · tiles, rows]
    ([heads · tiles, tokens] if packed).
    flow: [sequences, state_heads]: what comes from the first state (causal: reaches the last one).
    """
    assert inputs.decay is not None
    heads = inputs.state_heads
    given = _by_state_head(of_keys.double(), heads)
    if of_queries is not None:
        queries = _by_state_head(of_queries.double(), heads)
        positions, seeing = _positions(inputs, variant)
        at_keys = torch.zeros_like(given)
        if given.shape[-1] and queries.shape[-1]:
            at_keys.index_add_(-1, positions, queries.masked_fill(~seeing, 0))
        given = at_keys - given
    if inputs.cu_seqlens_k is not None:
        return _packed(inputs, given, flow, variant.causal)
    summed = _sum_along(given, variant.causal)
    if flow is not None:
        summed = summed + flow.unsqueeze(-1)
    if inputs.key_lengths is not None:
        row = torch.arange(summed.shape[-1], device=summed.device)
        summed = summed.masked_fill(row >= inputs.key_lengths.view(-1, 1, 1), 0)
    if inputs.decay.dim() == 1:
        summed = summed.sum((0, 2))
    return summed.to(inputs.decay.dtype)


def _sum_along(numbers: Tensor, from_end: bool) -> Tensor:
    """For each key the sum from it to the end, or over those before it."""
    if from_end:
        return numbers.flip(-1).cumsum(-1).flip(-1)
    return torch.nn.functional.pad(numbers, (1, 0))[..., :-1].cumsum(-1)


def _by_state_head(dots: Tensor, heads: int) -> Tensor:
    """Sums over tiles of channels, and over output heads that share a state."""
    if heads == 0:
        return dots
    return dots.unflatten(-2, (heads, -1)).sum(-2)


def _packed(inputs: LinearInputs, given: Tensor, flow: Tensor | None, from_end: bool) -> Tensor:
    """Sums along all tokens, as sums along each sequence."""
    assert inputs.cu_seqlens_k is not None and inputs.decay is not None
    tokens = given.shape[-1]
    ends = ends_of(inputs.cu_seqlens_k, tokens)
    sequence = sequence_of(tokens, ends)

    def along(numbers: Tensor) -> Tensor:
        summed = _sum_along(torch.nn.functional.pad(numbers, (0, 1)), from_end)
        edges = ends[1:] if from_end else ends[:-1]
        return summed[:, :-1] - summed[:, edges][:, sequence]

    nonfinite = ~given.isfinite()  # NaN stays in its sequence
    summed = along(given.masked_fill(nonfinite, 0))
    summed = summed.masked_fill(along(nonfinite.double()) > 0, torch.nan)
    if flow is not None:
        summed = summed + flow.transpose(0, 1)[:, sequence]
    summed = summed.masked_fill(padding_of(tokens, ends), 0)
    if inputs.decay.dim() == 1:
        return summed.sum(1).to(inputs.decay.dtype)
    return summed.transpose(0, 1).to(inputs.decay.dtype)


def _positions(inputs: LinearInputs, variant: LinearVariant) -> tuple[Tensor, Tensor]:
    """For each query row the last key row that it sees, and whether there is one."""
    query, key = inputs.query, inputs.key
    if inputs.cu_seqlens_q is None or inputs.cu_seqlens_k is None:
        query_len, kv_len = query.shape[2], key.shape[2]
        row = torch.arange(query_len, device=query.device)
        shift = kv_len - query_len if variant.align == "bottom_right" else 0
        position = row + shift if variant.causal else row * 0 + kv_len - 1
        return position.clamp(0, max(kv_len - 1, 0)), position >= 0
    ends_q = ends_of(inputs.cu_seqlens_q, query.shape[0])
    ends_k = ends_of(inputs.cu_seqlens_k, key.shape[0])
    sequence = sequence_of(query.shape[0], ends_q)
    row = torch.arange(query.shape[0], device=query.device) - ends_q[sequence]
    query_len = (ends_q[1:] - ends_q[:-1])[sequence]
    kv_len = (ends_k[1:] - ends_k[:-1])[sequence]
    shift = kv_len - query_len if variant.align == "bottom_right" else 0 * row
    position = row + shift if variant.causal else kv_len - 1
    seeing = (position >= 0) & (kv_len > 0) & (row < query_len)
    position = torch.minimum(position, kv_len - 1).clamp(min=0) + ends_k[sequence]
    return position.clamp(max=max(key.shape[0] - 1, 0)), seeing
