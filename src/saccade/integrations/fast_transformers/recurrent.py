"""Recurrent twins: the same attention one query at a time, with the state handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import saccade
from saccade.integrations.fast_transformers.attention import as_given
from saccade.integrations.fast_transformers.features import FeatureMap, elu_feature_map
from saccade.integrations.fast_transformers.masks import LengthMask


class _Recurrent(Module):
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
        self.event_dispatcher = event_dispatcher  # there are no events here

    @property
    def arguments(self) -> dict[str, Any]:
        """What all calls pass on: features are made here, since states are sums of them."""
        return {"feature_map": as_given, "eps": self.eps}


class RecurrentLinearAttention(_Recurrent):
    """The step of `CausalLinearAttention`: one query, and the key and value that come with it.

    Args: as `LinearAttention`. Source: Katharopoulos et al. 2020, equations 18 to 20.
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
            state: what the last step gave; changed in place unless gradients are wanted.
            memory: an older name of state.

        Returns:
            (N, H, M), and the state [(N, H, E, M), (N, H, E)].
        """
        state = memory if state is None else state
        if state is None:
            self.feature_map.new_feature_map(query.device)
        features = self.feature_map.forward_queries(query), self.feature_map.forward_keys(key)
        rows = [tensor.unsqueeze(2) for tensor in (*features, value)]
        if state is not None and state[0].shape[0] != query.shape[0]:
            raise ValueError(
                f"state: got batch {state[0].shape[0]}, takes query's {query.shape[0]}"
            )
        wanted = any(tensor.requires_grad for tensor in (*rows, *(state or [])))
        if state is not None and not (wanted and torch.is_grad_enabled()):
            sums = saccade.LinearState(*state)
            output = saccade.linear_attention_step(sums, *rows, **self.arguments)
            return output.squeeze(2), state
        before = None if state is None else saccade.LinearState(*state)
        output, after = saccade.linear_attention(
            *rows, initial_state=before, return_state=True, **self.arguments
        )
        return output.squeeze(2), [after.kv, after.key_sum]


class RecurrentCrossLinearAttention(_Recurrent):
    """The step of `LinearAttention`: one query, and keys and values that are always the same.

    Args: as `LinearAttention`.
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
            state: what the last step gave; keys and values are then not read.

        Returns:
            (N, H, M), and the state [(N, H, M, E), (N, H, E)].
        """
        if state is None:
            self.feature_map.new_feature_map(query.device)
        features = self.feature_map.forward_queries(query).unsqueeze(2)
        if state is None:
            key, value = keys.transpose(1, 2), values.transpose(1, 2)
            kept = key_lengths.bool_matrix if key_lengths is not None else None
            if kept is not None and not isinstance(key_lengths, LengthMask):
                kept = kept.expand(key.shape[0], -1)
            if kept is not None:
                hidden = ~kept[:, None, :, None]
                key, value = key.masked_fill(hidden, 0), value.masked_fill(hidden, 0)
            key = self.feature_map.forward_keys(key)
            if kept is not None:
                key = key.masked_fill(~kept[:, None, :, None], 0)
            _, sums = saccade.linear_attention(
                features, key, value, causal=False, return_state=True, **self.arguments
            )
        else:
            sums = saccade.LinearState(state[0].mT, state[1])
        none = features[:, :, :0]
        output = saccade.linear_attention(
            features, none, none.new_empty(*none.shape[:3], sums.kv.shape[-1]),
            causal=False, initial_state=sums, **self.arguments,
        )  # fmt: skip
        return output.squeeze(2), [sums.kv.mT, sums.key_sum]
