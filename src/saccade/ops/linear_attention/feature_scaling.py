"""Feature scaling: features that no dtype holds, divided by factors that travel as logarithms.

Each query row is divided by a factor of its own, which cancels in the normaliser. Keys and state
are in units of the largest key. A row of a causal call sees a part of the keys, and the others may
be e^100 times as large: so there the units are those of the largest key so far, and as they grow,
the state fades by as much. Autograd takes units as constants, for what a state stands for, its sums
times its units, does not depend on them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.runtime.spec import (
    LinearInputs,
    LinearState,
    accumulate_dtype,
)
from saccade.runtime.validation import without_autocast


class Scaling(NamedTuple):
    """By what features were divided, as logarithms.

    Attributes:
        query: [batch, query_heads, query_len], or [tokens, query_heads] if packed.
        state: [batch, state_heads]: the units of the last state; -inf where there are no keys.
        initial: [batch, state_heads]: what the initial state is multiplied by, or None.
        dtype: that of the output.
    """

    query: Tensor
    state: Tensor
    initial: Tensor | None
    dtype: torch.dtype

    def of_initial(self, kv: Tensor, key_sum: Tensor) -> tuple[Tensor, Tensor]:
        """The sums of the initial state in the units of this call."""
        if self.initial is None:
            return kv, key_sum
        factor = self.initial.exp().unsqueeze(-1)
        return kv * factor.unsqueeze(-1), key_sum * factor

    def finished(self, output: Tensor, inputs: LinearInputs, normalize: str) -> Tensor:
        """The call's output; without a normaliser the factors are multiplied again."""
        if normalize != "none":
            return output.to(self.dtype)
        heads, offsets = output.shape[1], inputs.cu_seqlens_q
        if offsets is None:
            state = self.state.unsqueeze(-1)
        else:
            tokens = inputs.query.shape[0]
            state = self.state[sequence_of(tokens, offsets)]
            state = state.masked_fill(padding_of(tokens, offsets).unsqueeze(-1), 0)
        query = self.query.repeat_interleave(heads // max(self.query.shape[1], 1), 1)
        state = state.repeat_interleave(heads // max(state.shape[1], 1), 1)
        return (output * (query + state).unsqueeze(-1).exp()).to(self.dtype)


class _Units(NamedTuple):
    """Units as logarithms; -inf where no key has come yet."""

    rows: Tensor  # of each key row, [batch, key_heads, kv_len] or [kv_tokens, key_heads]
    before: Tensor  # of the row before each, alike
    last: Tensor  # [batch, key_heads]


def scale_features(
    inputs: LinearInputs, maps: tuple[Any, Any], state: LinearState | None, *, running: bool
) -> tuple[LinearInputs, Scaling]:
    """Queries and keys as scaled features, and by what they were divided.

    running: whether units grow along the keys, which the inputs' decay then tells of. Else all keys
    have those of the largest.
    """
    dtype, wide = inputs.query.dtype, accumulate_dtype(inputs.query.dtype)
    with without_autocast(inputs.query.device):  # exponents are as exact as the sums are
        query, of_query = _scaled("query", maps[0], inputs.query.to(wide))
        key, of_key = _scaled("key", maps[1], inputs.key.to(wide))
    group = inputs.state_heads // max(inputs.key.shape[1], 1)
    given_units = _of_state(inputs, state)
    start = of_key.new_full((inputs.num_sequences, of_key.shape[1]), -torch.inf)
    if given_units is not None and given_units.numel():
        start = given_units.detach().to(wide).unflatten(1, (-1, group)).amax(-1)
    units = (_running if running else _common)(inputs, _countable(inputs, of_key), start)
    key = key * (of_key - _finite(units.rows)).exp().unsqueeze(-1)
    if running:
        log_decay = (units.before - units.rows).masked_fill(units.before == -torch.inf, 0)
        log_decay = log_decay.clamp(max=0).repeat_interleave(group, 1)
        decay = inputs.decay
        if decay is not None:
            log_decay = log_decay + (
                decay.unsqueeze(-1) if decay.dim() == 1 and not inputs.packed else decay
            )
        inputs = inputs._replace(decay=log_decay)
    initial = None
    if given_units is not None:
        first = (start if running else units.last).repeat_interleave(group, 1)
        initial = (_finite(given_units) - _finite(first)).masked_fill(given_units == -torch.inf, 0)
    # The largest of a row's features may be much smaller than that of another, and a product of two
    # rows small in both: float16 would lose it.
    narrow = wide if dtype == torch.float16 else dtype
    inputs = inputs._replace(
        query=query.to(narrow), key=key.to(narrow), value=inputs.value.to(narrow)
    )
    return inputs, Scaling(of_query, units.last.repeat_interleave(group, 1), initial, dtype)


def ends_of(offsets: Tensor, num_tokens: int) -> Tensor:
    """Offsets as indices: within the tokens, whatever they hold."""
    return offsets.long().clamp(0, num_tokens)


def sequence_of(num_tokens: int, offsets: Tensor) -> Tensor:
    """For each packed token, the sequence that it belongs to; of padding, the last one."""
    token = torch.arange(num_tokens, device=offsets.device)
    found = torch.searchsorted(offsets[1:].long(), token, right=True)
    return found.clamp(max=max(offsets.shape[0] - 2, 0))


def hidden_keys(lengths: Tensor, kv_len: int) -> Tensor:
    """Which keys lie past the end of their sequence, [batch, 1, kv_len]."""
    return torch.arange(kv_len, device=lengths.device) >= lengths.view(-1, 1, 1)


def padding_of(num_tokens: int, offsets: Tensor) -> Tensor:
    """Which packed tokens belong to no sequence, as they are behind the last offset."""
    return torch.arange(num_tokens, device=offsets.device) >= offsets[-1]


def _scaled(name: str, one: Any, rows: Tensor) -> tuple[Tensor, Tensor]:
    features, factors = one.with_log_scale(rows)
    if not isinstance(factors, Tensor) or factors.shape != rows.shape[:-1]:
        got = tuple(factors.shape) if isinstance(factors, Tensor) else type(factors).__name__
        takes = f"{tuple(rows.shape[:-1])}, one for each row"
        raise ValueError(f"feature_map: got log-factors {got} for {name}, takes {takes}")
    return check_features(name, features, rows), factors


def _finite(units: Tensor) -> Tensor:
    """Units to compute with: where there are no keys any will do."""
    return units.masked_fill(units == -torch.inf, 0)


def _of_state(inputs: LinearInputs, state: LinearState | None) -> Tensor | None:
    """The units of the initial state, 0 if it has none; None where `check_state` will refuse it."""
    if not isinstance(state, LinearState) or not isinstance(state.kv, Tensor):
        return None
    wanted = (inputs.num_sequences, inputs.state_heads)
    if state.kv.shape[:2] != wanted:
        return None
    if state.log_scale is None:
        return state.kv.new_zeros(wanted, dtype=accumulate_dtype(inputs.query.dtype))
    fits = isinstance(state.log_scale, Tensor) and state.log_scale.shape == wanted
    return state.log_scale if fits and state.log_scale.is_floating_point() else None


def _countable(inputs: LinearInputs, of_key: Tensor) -> Tensor:
    """The log-factors of keys that can be seen and are finite; -inf for others."""
    of_key = of_key.detach()
    of_key = of_key.masked_fill(~of_key.isfinite(), -torch.inf)
    if inputs.cu_seqlens_k is not None:
        hidden = padding_of(of_key.shape[0], inputs.cu_seqlens_k)
        return of_key.masked_fill(hidden.unsqueeze(-1), -torch.inf)
    if inputs.key_lengths is None:
        return of_key
    return of_key.masked_fill(hidden_keys(inputs.key_lengths, of_key.shape[-1]), -torch.inf)


def _common(inputs: LinearInputs, of_key: Tensor, start: Tensor) -> _Units:
    """All rows of a sequence in the units of its largest key."""
    if inputs.cu_seqlens_k is None:
        last = torch.maximum(of_key.amax(-1), start) if of_key.shape[-1] else start
        rows = last.unsqueeze(-1).expand_as(of_key)
        return _Units(rows, rows, last)
    sequence = sequence_of(of_key.shape[0], inputs.cu_seqlens_k)
    last = start.scatter_reduce(0, sequence.unsqueeze(-1).expand_as(of_key), of_key, "amax")
    return _Units(last[sequence], last[sequence], last)


def _running(inputs: LinearInputs, of_key: Tensor, start: Tensor) -> _Units:
    """Each row in the units of the largest key up to it."""
    if inputs.cu_seqlens_k is None:
        so_far = torch.cat([start.unsqueeze(-1), of_key], -1).cummax(-1).values
        return _Units(so_far[..., 1:], so_far[..., :-1], so_far[..., -1])
    if of_key.shape[0] == 0:
        return _Units(of_key, of_key, start)
    offsets = ends_of(inputs.cu_seqlens_k, of_key.shape[0])
    sequence = sequence_of(of_key.shape[0], offsets)
    # One maximum over all tokens, in which each sequence stands above those before it.
    absent = of_key == -torch.inf
    height = of_key.masked_fill(absent, 0).double()
    height = height - height.amin(0)
    lifted = (height + 1).masked_fill(absent, 0) + sequence.unsqueeze(-1) * (height.amax(0) + 2)
    rows = torch.maximum(of_key.gather(0, lifted.cummax(0).indices), start[sequence])
    first = (offsets[sequence] == torch.arange(len(sequence), device=sequence.device)).unsqueeze(-1)
    empty = (offsets[1:] == offsets[:-1]).unsqueeze(-1)
    return _Units(
        rows,
        torch.where(first, start[sequence], rows.roll(1, 0)),
        torch.where(empty, start, rows[(offsets[1:] - 1).clamp(min=0)]),
    )


def check_features(name: str, features: Any, rows: Tensor) -> Tensor:
    """Refuse what a caller's feature map gave, if it is not features of every row."""
    takes = f"a floating-point tensor {(*rows.shape[:-1], 'feature_dim')} from the feature map"
    if not isinstance(features, Tensor) or not features.is_floating_point():
        got = features.dtype if isinstance(features, Tensor) else type(features).__name__
        raise TypeError(f"feature_map: got {got} for {name}, takes {takes}")
    if features.shape[:-1] != rows.shape[:-1]:
        raise ValueError(f"feature_map: got {tuple(features.shape)} for {name}, takes {takes}")
    return features
