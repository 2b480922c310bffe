"""Attention: linear attention of whole sequences and of one query at a time, and layers with the
projections around it.

Names of parameters are fast-transformers', so its checkpoints load. Event dispatchers are not
called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear, Module

import saccade
from saccade import feature_maps
from saccade.integrations.arguments import as_features
from saccade.integrations.fast_transformers.features import (
    BaseMask,
    FeatureMap,
    FullMask,
    LengthMask,
    elu_feature_map,
    in_our_terms,
)


def causal_dot_product(Q: Tensor, K: Tensor, V: Tensor) -> Tensor:
    """Σ over j ≤ i of (Q_i · K_j) V_j: neither scaled nor normalised.

    Args:
        Q: (N, H, L, E), any strides and dtype.
        K: (N, H, S, E). V: (N, H, S, M).

    Returns:
        (N, H, L, M).

    Source: Katharopoulos et al. 2020, algorithm 1.

    Examples:
        >>> from saccade.integrations.fast_transformers import causal_dot_product
        >>> Q, K, V = torch.ones(3, 1, 1, 4, 1)
        >>> causal_dot_product(Q, K, V).flatten().tolist()
        [1.0, 2.0, 3.0, 4.0]
    """
    return saccade.linear_attention(
        Q, K, V, feature_map="identity", normalize="none", align="top_left"
    )


class _Layer(Module):
    feature_map: FeatureMap
    eps: float
    event_dispatcher: str

    def __init__(
        self,
        query_dimensions: int,
        feature_map: Callable[[int], FeatureMap] | None = None,
        eps: float = 1e-6,
        event_dispatcher: str = "",
    ):
        super().__init__()
        self.feature_map = (feature_map or elu_feature_map)(query_dimensions)
        self.eps = eps
        self.event_dispatcher = without_events(event_dispatcher)


class _LinearAttention(_Layer):
    causal: bool

    def forward(
        self,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        attn_mask: Any,
        query_lengths: Any,
        key_lengths: Any,
    ) -> Tensor:
        """Attention.

        Args:
            queries: (N, L, H, E). keys: (N, S, H, E). values: (N, S, H, M).
            attn_mask: all ones (lower triangular for the causal layer); else RuntimeError.
            query_lengths: not read.
            key_lengths: a mask (N, S): hidden keys and values count for nothing.

        Returns:
            (N, L, H, M), contiguous.
        """
        self._check(attn_mask)
        self.feature_map.new_feature_map(queries.device)
        query, key, value = (rows.transpose(1, 2) for rows in (queries, keys, values))
        rows, arguments = without_hidden(self.feature_map, query, key, value, key_lengths)
        output = saccade.linear_attention(
            *rows, causal=self.causal, align="top_left", eps=self.eps, **arguments
        )
        return output.transpose(1, 2).contiguous()

    def _check(self, attn_mask: Any) -> None:
        raise NotImplementedError


class LinearAttention(_LinearAttention):
    """Linear attention of all queries to all keys.

    Args:
        query_dimensions: channels of queries and keys.
        feature_map: a factory of one from query_dimensions; elu + 1 where None.
        eps: added to each row's sum of scores.
        event_dispatcher: "" alone: no events are dispatched.

    Source: Katharopoulos et al. 2020, section 3.2.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> rows, length = torch.randn(3, 2, 10, 4, 16), ft.LengthMask(torch.tensor([10, 7]))
        >>> ft.LinearAttention(16)(*rows, ft.FullMask(10), length, length).shape
        torch.Size([2, 10, 4, 16])
    """

    causal = False

    def _check(self, attn_mask: Any) -> None:
        if not attn_mask.all_ones:
            raise RuntimeError("attn_mask: got one that hides pairs, takes one of all ones")


class CausalLinearAttention(_LinearAttention):
    """Linear attention of each query to the keys up to its own position.

    With more keys than queries the last keys are not seen; with more queries than keys the last
    queries see all keys.

    Args: as `LinearAttention`. Source: Katharopoulos et al. 2020, section 3.3.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> rows, length = torch.randn(3, 2, 10, 4, 16), ft.LengthMask(torch.tensor([10, 7]))
        >>> ft.CausalLinearAttention(16)(*rows, ft.TriangularCausalMask(10), length, length).shape
        torch.Size([2, 10, 4, 16])
    """

    causal = True

    def _check(self, attn_mask: Any) -> None:
        if not attn_mask.lower_triangular:
            raise RuntimeError("attn_mask: got one that is not causal, takes a lower triangular")


def without_hidden(
    feature_map: FeatureMap, query: Tensor, key: Tensor, value: Tensor, mask: BaseMask | None
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """Rows (N, H, …) and arguments of a call without the keys that a mask (N, S) hides.

    A mask (1, S) is that of all sequences.

    Raises:
        TypeError: for what is no mask, such as a tensor.
        ValueError: for a mask of other sequences or keys, such as that of the queries.
    """
    found = in_our_terms(feature_map)
    batch, length = key.shape[0], key.shape[2]
    if mask is not None and not hasattr(type(mask), "bool_matrix"):  # nothing is made
        raise TypeError(f"key_lengths: got {type(mask).__name__}, takes a LengthMask or FullMask")
    if mask is not None and tuple(mask.shape) not in ((batch, length), (1, length)):
        got = tuple(mask.shape)
        raise ValueError(f"key_lengths: got a mask {got}, takes {(batch, length)} of keys")
    if isinstance(mask, LengthMask):
        lengths = mask.lengths.clamp(0, length).long().expand(batch)
        return (query, key, value), {"feature_map": found, "key_lengths": lengths}
    if mask is None or (isinstance(mask, FullMask) and mask.all_ones):
        return (query, key, value), {"feature_map": found}
    hidden = ~mask.bool_matrix[:, None, :, None]
    key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
    if isinstance(found, feature_maps.ScaledMap):
        return (query, key, value), {"feature_map": (found, _Hiding(found, hidden))}
    query = feature_map.forward_queries(query)
    key = feature_map.forward_keys(key).masked_fill(hidden, 0)  # after the map: elu(0) + 1 is 1
    return (query, key, value), {"feature_map": as_features}


class _Hiding(feature_maps.ScaledMap):
    """A feature map for keys of which some are hidden: their features are 0, their scales too."""

    def __init__(self, feature_map: feature_maps.ScaledMap, hidden: Tensor):
        super().__init__()
        self.feature_map, self.hidden = feature_map, hidden

    def with_log_scale(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Features, and log-factors, -inf where hidden."""
        features, factors = self.feature_map.with_log_scale(rows)
        hidden = self.hidden.squeeze(-1)
        return features.masked_fill(self.hidden, 0), factors.masked_fill(hidden, -torch.inf)


def without_events(event_dispatcher: Any) -> str:
    """The default event dispatcher; no events are dispatched.

    Raises:
        NotImplementedError: for another dispatcher, whose listeners would wait for events.
    """
    if event_dispatcher != "":
        raise NotImplementedError(f"event_dispatcher: got {event_dispatcher!r}, takes '' alone")
    return event_dispatcher


# ---- one query at a time -------------------------------------------------------------------------


class RecurrentLinearAttention(_Layer):
    """The step of `CausalLinearAttention`: one query, and the key and value that come with it.

    Args: as `LinearAttention`. Source: Katharopoulos et al. 2020, equations 18 to 20.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> layer, state = ft.RecurrentLinearAttention(16), None
        >>> for query, key, value in torch.randn(5, 3, 2, 4, 16):
        ...     output, state = layer(query, key, value, state)
        >>> output.shape
        torch.Size([2, 4, 16])
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        state: list[Tensor] | None = None,
        memory: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One step.

        Args:
            query, key: (N, H, E). value: (N, H, M).
            state: what the last step returned; changed in place unless gradients are wanted.
            memory: an older name of state.

        Returns:
            (N, H, M), and the state [(N, H, E, M), (N, H, E)]; of maps that scale their features
            (`Favor`) with the logarithm of what both sums are to be multiplied by, (N, H).
        """
        state = memory if state is None else state
        if state is None:
            self.feature_map.new_feature_map(query.device)
        found: Any = in_our_terms(self.feature_map)
        # Others are applied here: they may have parameters, whose gradients a step would lose.
        if not isinstance(found, feature_maps.ScaledMap):
            query, key = self.feature_map.forward_queries(query), self.feature_map.forward_keys(key)
            found = as_features
        elif state is not None and len(state) == 2:
            state = [*state, state[1].new_zeros(state[1].shape[:2])]
        arguments: dict[str, Any] = {"feature_map": found, "eps": self.eps}
        rows = [tensor.unsqueeze(2) for tensor in (query, key, value)]
        if state is not None and state[0].shape[0] != query.shape[0]:
            raise ValueError(
                f"state: got batch {state[0].shape[0]}, takes query's {query.shape[0]}"
            )
        wanted = any(tensor.requires_grad for tensor in (*rows, *(state or [])))
        if state is not None and not (wanted and torch.is_grad_enabled()):
            sums = saccade.LinearState(*state)
            output = saccade.linear_attention_step(sums, *rows, **arguments)
            return output.squeeze(2), state
        before = None if state is None else saccade.LinearState(*state)
        output, after = saccade.linear_attention(
            *rows, initial_state=before, return_state=True, **arguments
        )
        return output.squeeze(2), [part for part in after if part is not None]


class RecurrentCrossLinearAttention(_Layer):
    """The step of `LinearAttention`: one query, and keys and values that are always the same.

    Args: as `LinearAttention`.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> query, (keys, values) = torch.randn(2, 4, 16), torch.randn(2, 2, 10, 4, 16)
        >>> layer = ft.RecurrentCrossLinearAttention(16)
        >>> length = ft.LengthMask(torch.tensor([10, 7]))
        >>> output, state = layer(query, keys, values, length)
    """

    def forward(
        self,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        key_lengths: Any,
        state: list[Tensor] | None = None,
    ) -> tuple[Tensor, list[Tensor]]:
        """One step.

        Args:
            query: (N, H, E). keys: (N, S, H, E). values: (N, S, H, M).
            key_lengths: a mask (N, S).
            state: what the last step returned; keys and values are then not read.

        Returns:
            (N, H, M), and the state [(N, H, M, E), (N, H, E)], for `Favor` with a third part as in
            `RecurrentLinearAttention`.
        """
        rows = query.unsqueeze(2)
        if state is None:
            self.feature_map.new_feature_map(query.device)
            key, value = keys.transpose(1, 2), values.transpose(1, 2)
            tensors, arguments = without_hidden(self.feature_map, rows, key, value, key_lengths)
            before = None
        else:
            before = saccade.LinearState(state[0].mT, *state[1:])
            none = rows[:, :, :0]
            tensors = rows, none, none.new_empty(*none.shape[:3], before.kv.shape[-1])
            arguments = {"feature_map": in_our_terms(self.feature_map)}
        output, sums = saccade.linear_attention(
            *tensors,
            causal=False,
            eps=self.eps,
            initial_state=before,
            return_state=True,
            **arguments,
        )
        kept = [part for part in sums[1:] if part is not None]
        return output.squeeze(2), state or [sums.kv.mT, *kept]


# ---- layers with projections ---------------------------------------------------------------------


class _Projections(Module):
    """The projections of queries, keys, values and the output.

    Args:
        attention: the module between them.
        d_model: channels of queries before their projection, and of the output.
        n_heads: heads.
        d_keys: channels of a head of queries and keys; d_model // n_heads where None.
        d_values: channels of a head of values; d_model // n_heads where None.
        d_model_keys: channels of keys and values before their projection; d_model where None.
        event_dispatcher: "" alone: no events are dispatched.
    """

    inner_attention: Module
    query_projection: Linear
    key_projection: Linear
    value_projection: Linear
    out_projection: Linear
    n_heads: int
    event_dispatcher: str

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

    def heads(self, **rows: Tensor) -> list[Tensor]:
        """Projections (..., H, channels of a head) of `query`, `key` and `value`."""
        return [
            getattr(self, f"{name}_projection")(each).unflatten(-1, (self.n_heads, -1))
            for name, each in rows.items()
        ]


class AttentionLayer(_Projections):
    """Projections, an attention such as `LinearAttention`, and the projection of its output.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> layer = ft.AttentionLayer(ft.CausalLinearAttention(16), d_model=32, n_heads=2)
        >>> x, length = torch.randn(2, 10, 32), ft.LengthMask(torch.tensor([10, 7]))
        >>> layer(x, x, x, ft.TriangularCausalMask(10), length, length).shape
        torch.Size([2, 10, 32])
    """

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
        rows = self.heads(query=queries, key=keys, value=values)
        found = self.inner_attention(*rows, attn_mask, query_lengths, key_lengths)
        return self.out_projection(found.flatten(-2))


class RecurrentAttentionLayer(_Projections):
    """`AttentionLayer` one row at a time, around `RecurrentLinearAttention`.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> inner = ft.RecurrentLinearAttention(16)
        >>> layer = ft.RecurrentAttentionLayer(inner, d_model=32, n_heads=2)
        >>> x = torch.randn(2, 32)
        >>> output, state = layer(x, x, x)
    """

    def __init__(
        self,
        attention: Module,
        d_model: int,
        n_heads: int,
        d_keys: int | None = None,
        d_values: int | None = None,
        event_dispatcher: str = "",
    ):
        super().__init__(
            attention, d_model, n_heads, d_keys, d_values, event_dispatcher=event_dispatcher
        )

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
            state: what the last step returned.
            memory: an older name of state.

        Returns:
            (N, d_model), and the state.
        """
        if memory is not None:
            warnings.warn("memory: takes None; its name is state", DeprecationWarning, stacklevel=2)
        rows = self.heads(query=query, key=key, value=value)
        found, state = self.inner_attention(*rows, memory if state is None else state)
        return self.out_projection(found.flatten(-2)), state


class RecurrentCrossAttentionLayer(_Projections):
    """`AttentionLayer` one query at a time, around `RecurrentCrossLinearAttention`.

    Examples:
        >>> from saccade.integrations import fast_transformers as ft
        >>> inner = ft.RecurrentCrossLinearAttention(16)
        >>> length = ft.LengthMask(torch.tensor([10, 7]))
        >>> layer = ft.RecurrentCrossAttentionLayer(inner, d_model=32, n_heads=2)
        >>> x, memory = torch.randn(2, 32), torch.randn(2, 10, 32)
        >>> output, state = layer(x, memory, memory, key_lengths=length)
    """

    def forward(
        self, query: Tensor, keys: Tensor, values: Tensor, key_lengths: Any, state: Any = None
    ) -> tuple[Tensor, Any]:
        """One step.

        Args:
            query: (N, d_model). keys, values: (N, S, d_model_keys), not read where there is a
                state.
            key_lengths: a mask (N, S).
            state: what the last step returned.

        Returns:
            (N, d_model), and the state.
        """
        rows: list[Any] = self.heads(query=query)
        rows += [None, None] if state is not None else self.heads(key=keys, value=values)
        found, state = self.inner_attention(*rows, key_lengths, state=state)
        return self.out_projection(found.flatten(-2)), state
