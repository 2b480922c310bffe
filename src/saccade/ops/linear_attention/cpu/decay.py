"""Decay's gradient: what flows over each key from the keys before it to the rows that see it.

The gradient of decay_t is the sum of the shares in the result of all pairs of a key before t and a
row that sees key t. All that rows take from there on, less what keys from there on give, would be
the same number; but of a strong decay little flows over a key, and a difference of large sums
would leave of it no more than their rounding errors. So only what crosses is added up: pairs
within a chunk, what its rows take from the state, what its keys give to later rows, and the
product of the state before the chunk and of that state's gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from saccade.ops.linear_attention.cpu.chunk import Keys, State


def beyond(state: State, keys: Keys, later: State, grad_key: Tensor) -> Tensor:
    """What later rows take, from keys before each one and from the state: [count, keys].

    Args:
        state: before the chunk.
        later: the gradient of the state behind it.
        grad_key: what `later` gives to keys.
    """
    assert keys.fade is not None
    whole = (later.kv * state.kv).double().sum((1, 2))
    whole += (later.key_sum * state.key_sum).double().sum(1)
    dots = (keys.key * grad_key).double().sum(-1)
    return _sum_before(dots) + whole.unsqueeze(-1) * keys.fade.whole().squeeze(-1)


def within(pairs: Tensor, group: int) -> Tensor:
    """What rows take from keys of their own chunk: [count, keys].

    pairs: each one's share in the result, [count, group · rows, keys]; any number where hidden.
    """
    pairs = pairs.unflatten(1, (group, -1)).tril()
    return _sum_before(pairs).tril().sum((1, 2), dtype=torch.float64)


def from_state(dots: Tensor, group: int) -> Tensor:
    """What rows of a chunk take from the state before it: [count, keys].

    dots: each row's share in the result, [count, group · rows].
    """
    of_rows = dots.unflatten(1, (group, -1)).sum(1)
    return of_rows.flip(-1).cumsum(-1).flip(-1)


def _sum_before(numbers: Tensor) -> Tensor:
    """For each key the sum over those before it."""
    return torch.nn.functional.pad(numbers, (1, 0))[..., :-1].cumsum(-1)
