"""Attention layers: the projections around an attention, as fast-transformers has them.

Names of parameters are the library's, so its checkpoints load. Nothing is told to event
dispatchers.
"""

from __future__ import annotations

import warnings
from typing import Any

from torch import Tensor
from torch.nn import Linear, Module

from saccade.integrations.fast_transformers.attention import without_events


class _Layer(Module):
    """The projections.

    Args:
        attention: the module between them.
        d_model: channels of queries before their projection, and of the output.
        n_heads: heads.
        d_keys: channels of a head of queries and keys; d_model // n_heads where None.
        d_values: channels of a head of values; d_model // n_heads where None.
        event_dispatcher: "" alone: nothing is dispatched here.
    """

    def __init__(
        self,
        attention: Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        event_dispatcher: str = "",
        *,
        d_model_keys: int | None = None,
    ):
        super().__init__()
        d_keys, d_values = (size or d_model // n_heads for size in (d_keys, d_values))
        d_model_keys = d_model_keys or d_model
        self.inner_attention = attention
        self.query_projection = Linear(d_model, d_keys * n_heads)
        self.key_projection = Linear(d_model_keys, d_keys * n_heads)
        self.value_projection = Linear(d_model_keys, d_values * n_heads)
        self.out_projection = Linear(d_values * n_heads, d_model)
        self.n_heads = n_heads
        self.event_dispatcher = without_events(event_dispatcher)

    def heads(self, projected: Tensor) -> Tensor:
        """Projected rows, (..., H, channels of a head)."""
        return projected.unflatten(-1, (self.n_heads, -1))


class _OfTwo(_Layer):
    """A layer whose keys and values may have another number of channels, `d_model_keys`."""

    def __init__(
        self,
        attention: Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        d_model_keys: int | None = None,
        event_dispatcher: str = "",
    ):
        super().__init__(
            attention,
            d_model,
            n_heads,
            d_keys,
            d_values,
            event_dispatcher,
            d_model_keys=d_model_keys,
        )


class AttentionLayer(_OfTwo):
    """Projections, an attention such as `LinearAttention`, and the projection of its output."""

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Any,
        query_lengths: Any,
        key_lengths: Any,
    ) -> Tensor:
        """The layer.

        Args:
            queries: (N, L, d_model). keys, values: (N, S, d_model_keys).
            attn_mask, query_lengths, key_lengths: masks, for the attention.

        Returns:
            (N, L, d_model).
        """
        rows = (
            self.heads(self.query_projection(queries)),
            self.heads(self.key_projection(keys)),
            self.heads(self.value_projection(values)),
        )
        found = self.inner_attention(*rows, attn_mask, query_lengths, key_lengths)
        return self.out_projection(found.flatten(-2))


class RecurrentAttentionLayer(_Layer):
    """`AttentionLayer` one row at a time, around `RecurrentLinearAttention`."""

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: Any = None,
        memory: Any = None,
    ) -> tuple[Tensor, Any]:
        """One step.

        Args:
            query, key, value: (N, d_model).
            state: what the last step gave.
            memory: an older name of state.

        Returns:
            (N, d_model), and the state.
        """
        if memory is not None:
            warnings.warn("memory: takes None; its name is state", DeprecationWarning, stacklevel=2)
        rows = (
            self.heads(self.query_projection(query)),
            self.heads(self.key_projection(key)),
            self.heads(self.value_projection(value)),
        )
        found, state = self.inner_attention(*rows, memory if state is None else state)
        return self.out_projection(found.flatten(-2)), state


class RecurrentCrossAttentionLayer(_OfTwo):
    """`AttentionLayer` one query at a time, around `RecurrentCrossLinearAttention`."""

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: Any, state: Any = None
    ) -> tuple[Tensor, Any]:
        """One step.

        Args:
            query: (N, d_model). keys, values: (N, S, d_model_keys), not read where there is a
                state.
            key_lengths: a mask (N, S).
            state: what the last step gave.

        Returns:
            (N, d_model), and the state.
        """
        rows: tuple[Any, Any] = (None, None)
        if state is None:
            rows = (
                self.heads(self.key_projection(keys)),
                self.heads(self.value_projection(values)),
            )
        found, state = self.inner_attention(
            self.heads(self.query_projection(query)), *rows, key_lengths, state=state
        )
        return self.out_projection(found.flatten(-2)), state
