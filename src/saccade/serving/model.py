"""Model: a Hugging Face causal model, called with packed rows of many sequences."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from saccade.serving.step import LayerShape, Probe, Step, alike


class PackedModel:
    """A causal model of transformers whose attention is Saccade's.

    Args:
        model: any whose attention goes through transformers' AttentionInterface; it is set to
            "saccade" and otherwise used as it is.

    Raises:
        TypeError, ValueError: if it is no such model.
    """

    def __init__(self, model: Any):
        register()
        if not callable(getattr(model, "set_attn_implementation", None)):
            raise TypeError(
                f"model: got {type(model).__name__}, takes a causal language model of transformers"
            )
        model.set_attn_implementation("saccade")
        self._model = model.eval()
        config = model.config.get_text_config()
        self.vocabulary: int = config.vocab_size
        self.longest: int | None = getattr(config, "max_position_embeddings", None)
        self.device: torch.device = model.device
        layers = self._layers()
        self.numbers = {index: number for number, index in enumerate(layers)}
        self.shape: LayerShape = alike(list(layers.values()))
        self.windows = [each.window for each in layers.values()]

    @property
    def stop_tokens(self) -> frozenset[int]:
        """The tokens that end a text, as the model's own settings name them."""
        settings = getattr(self._model, "generation_config", None) or self._model.config
        found = getattr(settings, "eos_token_id", None)
        if found is None:
            return frozenset()
        return frozenset([found] if isinstance(found, int) else found)

    @torch.inference_mode()
    def logits(self, step: Step) -> Float[Tensor, "drawn vocabulary"]:
        """Logits of the rows that a token is drawn from."""
        return self._call(step, step.input_ids, step.position_ids, step.last_rows)

    @torch.inference_mode()
    def _layers(self) -> dict[int, LayerShape]:
        probe = Probe()
        two = torch.arange(2, device=self.device)
        self._call(probe, two.new_zeros(1, 2), two.unsqueeze(0), two[-1:])
        if not probe.layers:
            raise ValueError(
                f"model: got {type(self._model).__name__}, whose attention does not go through "
                "transformers' AttentionInterface; takes one whose does"
            )
        return probe.layers

    def _call(
        self, step: Step | Probe, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        output = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, saccade_step=step,
            logits_to_keep=rows,
        )  # fmt: skip
        return output.logits[0]


def register() -> None:
    """Make "saccade" an attention implementation of transformers."""
    from saccade.integrations import transformers

    transformers.register()
