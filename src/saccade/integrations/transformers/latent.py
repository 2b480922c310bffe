"""Latent attention in its absorbed form, for an engine that keeps a latent for each token.

A layer of latent attention (DeepSeek V2 and V3, GLM-4 MoE Lite, MiniCPM3 and others) makes keys and
values of a token from a latent of `kv_lora_rank` numbers, which all heads share, and of a position
of `qk_rope_head_dim` numbers. With the two halves of its `kv_b_proj`, to_key and to_value,

    score  = query_nope · (to_key · latent) + query_rope · position
           = (to_keyᵀ · query_nope) · latent + query_rope · position
    output = Σ weight · (to_value · latent) = to_value · (Σ weight · latent)

so attention of all heads to one head of (latent, position), whose values are the latent, gives the
same, and a token keeps 576 numbers where its keys and values are 40,960. Source: DeepSeek-V2
(2024), section 2.1.2.

The model stays as it is, and so do its weights. Its layers hand latents to the cache that they are
called with: that is how an engine gets them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


class _Latents(DynamicCache):
    """Takes each layer's new latents and positions, and keeps them until the layer attends."""

    def __init__(self) -> None:
        super().__init__()
        self.taken: dict[int, tuple[Tensor, Tensor]] = {}

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Keep what comes. One row goes back: what the layer makes of it is not read."""
        self.taken[layer_idx] = key_states, value_states
        return key_states[:, :, :1], value_states[:, :, :1]


class LatentLayers:
    """The layers of a model whose attention is latent and can be absorbed.

    Examples:
        >>> from saccade.integrations.transformers import LatentLayers
        >>> LatentLayers.of(torch.nn.Linear(2, 2)) is None  # it has no such layers
        True
    """

    def __init__(self, layers: Mapping[int, Any]):
        self._layers = dict(layers)

    @staticmethod
    def of(model: torch.nn.Module) -> LatentLayers | None:
        """A model's layers; None unless all that attend can be absorbed.

        A projection that is more than a weight (quantised, with an adapter, a bias or hooks)
        cannot: its layers attend with keys and values for each head.
        """
        attending: list[Any] = [
            each for each in model.modules() if isinstance(getattr(each, "layer_idx", None), int)
        ]
        layers = {each.layer_idx: each for each in attending if hasattr(each, "kv_b_proj")}
        others = [each for each in attending if each.layer_idx not in layers]
        if not layers or others or not all(map(_is_absorbable, layers.values())):
            return None
        return LatentLayers(layers)

    def options(self, step: Any) -> dict[str, Any]:
        """What a model is called with, beside tokens and positions, so that a step attends to
        latents: `attend` gets one kv head, whose values are the first channels of its keys, in
        the same memory (see `AttentionStep`)."""
        latents = _Latents()
        return {
            "saccade_step": _AbsorbedStep(step, self._layers, latents),
            "past_key_values": latents,
        }


class _AbsorbedStep:
    """A step between a model's layers and an engine's step."""

    def __init__(self, step: Any, layers: Mapping[int, Any], latents: _Latents):
        self._step, self._layers, self._latents = step, layers, latents

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor,
        *, scale: float | None, **options: Any,
    ) -> Tensor:  # fmt: skip
        """Attend by the engine's step, in place of a layer's heads."""
        of, (latent, position) = self._layers[layer], self._latents.taken.pop(layer)
        rank, nope = of.kv_lora_rank, of.qk_nope_head_dim
        weight = of.kv_b_proj.weight.view(query.shape[1], nope + of.v_head_dim, rank)
        to_key, to_value = weight.split([nope, of.v_head_dim], dim=1)
        of_latent = torch.matmul(query[..., :nope], to_key)
        absorbed = torch.cat([of_latent, query[..., nope:]], dim=-1)
        kept = torch.cat([latent, position], dim=-1)
        found = self._step.attend(
            layer, absorbed, kept, kept[..., :rank],
            scale=query.shape[-1] ** -0.5 if scale is None else scale, **options,
        )  # fmt: skip
        return torch.matmul(found.transpose(1, 2), to_value.transpose(1, 2)).transpose(1, 2)


def _is_absorbable(layer: Any) -> bool:
    """Whether a layer is made as the formula above has it, by its names and its projection."""
    projection = layer.kv_b_proj
    hooks = projection._forward_hooks or projection._forward_pre_hooks
    if type(projection) is not torch.nn.Linear or projection.bias is not None or hooks:
        return False
    if not callable(getattr(layer, "expand_kv", None)):
        return False
    if any(not isinstance(getattr(layer, name, None), int) for name in SIZES):
        return False
    of_head = layer.qk_nope_head_dim + layer.v_head_dim
    return projection.in_features == layer.kv_lora_rank and projection.out_features % of_head == 0
