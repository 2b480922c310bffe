"""Steps: what a serving engine hands through a model's forward pass to its attention layers."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

import saccade


class AttentionStep(Protocol):
    """One step of an engine that keeps keys and values itself.

    An engine calls ``model(input_ids, position_ids=…, saccade_step=step, use_cache=False)`` with
    the tokens of all its sequences laid side by side in one row. Every attention layer then calls
    `attend` in place of attending, and ignores the attention mask: which tokens are whose only
    the step knows.
    """

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        mask: saccade.masks.Mask,
        score: saccade.scores.Score | None,
        scale: float | None,
        sinks: Tensor | None,
    ) -> Tensor:
        """Keep the new keys and values, and attend to all that each sequence has.

        Args:
            layer: the attention layer's number in the model.
            query: [1, query_heads, tokens, head_dim], turned by its rotary embedding already.
            key, value: [1, kv_heads, tokens, dim]: of the new tokens only.
            mask: `masks.causal()`, or `masks.window(left)` in a layer with a sliding window;
                rows are numbered within each sequence and aligned at the bottom right.
            score: `scores.softcap(cap)` where the layer has one, else None.
            scale: the factor of the scores; 1/sqrt(head_dim) where None.
            sinks: [query_heads] logits, where the layer has some, else None.

        Returns:
            [1, tokens, query_heads, value_dim].
        """
        ...
