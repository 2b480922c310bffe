"""Step: what the attention layers of a model are given for one forward pass.

A model whose attention goes through transformers' interface hands its rows to `attend`, layer by
layer (`saccade.integrations.transformers`). Everything that layers share, that is slots, tables
and offsets, is made once a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

import saccade
from saccade.serving.scheduler import Plan

# One sequence in the batch, as models are called: its rows are those of all sequences.
Rows = Float[Tensor, "1 heads rows dim"]


class Step:
    """One forward pass over the rows of several sequences, packed into one.

    Args:
        cache: where keys and values go.
        plan: whose rows they are, and their slots.
        layers: for each layer index of the model its number in the cache.
        options: of `saccade.attention_paged`, such as batch_invariant.
    """

    def __init__(
        self, cache: saccade.LayeredCache, plan: Plan, layers: Mapping[int, int],
        options: Mapping[str, Any],
    ):  # fmt: skip
        self._cache, self._layers, self._options = cache, layers, options
        self._slots = plan.slots
        sequences = [share.request.sequence for share in plan.shares]
        self._tables = cache.tables([sequence for sequence in sequences if sequence is not None])
        ends = [0]
        tokens: list[int] = []
        positions: list[int] = []
        last_rows: list[int] = []
        for share in plan.shares:
            tokens += share.request.tokens_between(share.start, share.stop)
            positions += range(share.start, share.stop)
            ends.append(len(tokens))
            last_rows.append(len(tokens) - 1)
        device = cache.device
        self._offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        self.input_ids = torch.tensor([tokens], device=device)
        self.position_ids = torch.tensor([positions], device=device)
        self.last_rows = torch.tensor(last_rows, dtype=torch.int64, device=device)

    def attend(
        self,
        layer_index: int,
        query: Rows,
        key: Rows,
        value: Rows,
        *,
        mask: saccade.masks.Mask | None = None,
        score: Any = None,
        scale: float | None = None,
        sinks: Tensor | None = None,
    ) -> Float[Tensor, "1 rows heads value_dim"]:
        """Write a layer's new keys and values, and attend over all of each sequence."""
        layer = self._layers[layer_index]
        pages, kind = self._cache.pages(layer), self._cache.places[layer].kind
        scales: dict[str, Any] = {
            "key_scales": pages.key_scales,
            "value_scales": pages.value_scales,
        }
        saccade.cache_write(
            key[0].transpose(0, 1), value[0].transpose(0, 1), pages.key_pages, pages.value_pages,
            self._slots[kind], **scales,
        )  # fmt: skip
        output = saccade.attention_paged(
            query[0].transpose(0, 1), pages.key_pages, pages.value_pages, *self._tables[kind],
            cu_seqlens_q=self._offsets, mask=mask, score=score, scale=scale, sinks=sinks,
            **scales, **self._options,
        )  # fmt: skip
        return output.unsqueeze(0)


@dataclass(frozen=True)
class LayerShape:
    """What one attention layer has to keep for each token, and how far back it looks."""

    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype
    window: int | None  # tokens seen before the token itself; None: all


class Probe:
    """Stands in the place of a `Step` once, to learn what layers a model has.

    Asking the layers themselves needs no knowledge of how an architecture names its sizes.
    """

    def __init__(self) -> None:
        self.layers: dict[int, LayerShape] = {}

    def attend(
        self, layer_index: int, query: Rows, key: Rows, value: Rows,
        *, mask: saccade.masks.Mask | None = None, **_: Any,
    ) -> Float[Tensor, "1 rows heads value_dim"]:  # fmt: skip
        """Note the layer's sizes; the result is nothing but of the right shape."""
        if layer_index in self.layers:
            raise ValueError(
                f"model: its attention layer {layer_index} is called twice in one pass, takes a "
                "model whose layers each keep their own keys and values"
            )
        self.layers[layer_index] = LayerShape(
            key.shape[1], key.shape[3], value.shape[3], key.dtype, window_of(mask)
        )
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3])


def window_of(mask: saccade.masks.Mask | None) -> int | None:
    """How many tokens before itself a token sees at most, if the mask is a plain window."""
    if mask is not None and mask.key == saccade.masks.window(0).key:
        return mask.captured.ints[0]
    return None


def alike(layers: Sequence[LayerShape]) -> LayerShape:
    """The shape of all layers, but for their windows: that of the first.

    Raises:
        ValueError: if they have not all the same shape.
    """
    shapes = {(each.kv_heads, each.head_dim, each.value_dim, each.dtype) for each in layers}
    if len(shapes) > 1:
        raise ValueError(
            "model: got attention layers with (kv_heads, head_dim, value_dim, dtype) of "
            f"{sorted(shapes, key=str)}, takes a model whose layers are alike in these"
        )
    return layers[0]
