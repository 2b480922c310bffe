"""Scaling: features that no dtype holds, divided by factors whose logarithms travel beside them.

Each query row is divided by a factor of its own, which cancels in the normaliser. The keys of a
sequence share one factor, that of the largest key so far; the state remembers it as `log_scale`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.linear.problem import LinearInputs, LinearState
from saccade.problem import accumulate_dtype


class Scaling(NamedTuple):
    """By what features were divided, as logarithms.

    Attributes:
        query: [batch, query_heads, query_len], or [tokens, query_heads] if packed.
        state: [batch, state_heads]: the factor of keys and state; -inf where there are no keys.
        initial: [batch, state_heads]: what the initial state is multiplied by, or None.
    """

    query: Tensor
    state: Tensor
    initial: Tensor | None

    def of_initial(self, kv: Tensor, key_sum: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the initial state in the units of this call."""
        if self.initial is None:
            return kv, key_sum
        factor = self.initial.exp().unsqueeze(-1)
        return kv * factor.unsqueeze(-1), key_sum * factor

    def undone(self, output: Tensor, inputs: LinearInputs) -> Tensor:
        """An output without a normaliser, with the factors multiplied again."""
        heads, offsets = output.shape[1], inputs.cu_seqlens_q
        if offsets is None:
            state = self.state.unsqueeze(-1)
        else:
            state = self.state[sequence_of(inputs.query.shape[0], offsets)]
        query = self.query.repeat_interleave(heads // max(self.query.shape[1], 1), 1)
        state = state.repeat_interleave(heads // max(state.shape[1], 1), 1)
        return (output * (query + state).unsqueeze(-1).exp()).to(output.dtype)


def scale_features(
    inputs: LinearInputs, maps: tuple[Any, Any], state: LinearState | None
) -> tuple[LinearInputs, Scaling]:
    """Queries and keys as scaled features, and by what they were divided."""
    wide = accumulate_dtype(inputs.query.dtype)
    query, of_query = maps[0].with_log_scale(inputs.query.to(wide))
    key, of_key = maps[1].with_log_scale(inputs.key.to(wide))
    group = inputs.state_heads // max(inputs.key.shape[1], 1)
    largest = _largest(inputs, of_key)  # [batch, key_heads]
    before = None
    if state is not None and isinstance(state.kv, Tensor):
        before = state.log_scale
        if before is None:
            before = largest.new_zeros(state.kv.shape[:2])
        if before.shape != (largest.shape[0], inputs.state_heads):
            before = None  # `check_state` will refuse it
        else:
            shared = before.unflatten(1, (-1, group)).amax(-1) if before.numel() else largest
            largest = torch.maximum(largest, shared)
    finite = largest.masked_fill(largest == -torch.inf, 0)
    if inputs.cu_seqlens_k is None:
        of_rows = finite.unsqueeze(-1)
    else:
        of_rows = finite[sequence_of(inputs.key.shape[0], inputs.cu_seqlens_k)]
    key = key * (of_key - of_rows).exp().unsqueeze(-1)
    of_state = largest.repeat_interleave(group, 1)
    initial = None
    if before is not None:
        nothing = before == -torch.inf
        gap = before.masked_fill(nothing, 0) - of_state.masked_fill(of_state == -torch.inf, 0)
        initial = gap.masked_fill(nothing, 0)
    dtype = inputs.query.dtype
    inputs = inputs._replace(query=query.to(dtype), key=key.to(dtype))
    return inputs, Scaling(of_query, of_state, initial)


def sequence_of(num_tokens: int, offsets: Tensor) -> Tensor:
    """For each packed token, the sequence that it belongs to."""
    token = torch.arange(num_tokens, device=offsets.device)
    return torch.searchsorted(offsets[1:].long(), token, right=True)


def _largest(inputs: LinearInputs, of_key: Tensor) -> Tensor:
    """The largest log-factor of each sequence's keys that can be seen and are finite."""
    of_key = of_key.masked_fill(~of_key.isfinite(), -torch.inf)
    if inputs.key_lengths is not None:
        row = torch.arange(of_key.shape[-1], device=of_key.device)
        of_key = of_key.masked_fill(row >= inputs.key_lengths.view(-1, 1, 1), -torch.inf)
    nothing = of_key.new_full((inputs.num_sequences, of_key.shape[1]), -torch.inf)
    if inputs.cu_seqlens_k is None:
        return of_key.amax(-1) if of_key.shape[-1] else nothing
    place = sequence_of(of_key.shape[0], inputs.cu_seqlens_k).unsqueeze(-1).expand_as(of_key)
    return nothing.scatter_reduce(0, place, of_key, "amax")
