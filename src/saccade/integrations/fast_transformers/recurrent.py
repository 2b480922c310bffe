"""Recurrent twins: the same attention one query at a time, with the state handed on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module

import saccade
from saccade import feature_maps
from saccade.integrations.fast_transformers.attention import (
    as_given,
    without_events,
    without_hidden,
)
from saccade.integrations.fast_transformers.features import (
    FeatureMap,
    elu_feature_map,
    in_our_terms,
)


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
        self.event_dispatcher = without_events(event_dispatcher)


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
            found = as_given
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
