"""Model: a Hugging Face causal model, called with packed rows of many sequences."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
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
        self.name = type(model).__name__
        _check_kind(model)
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

    @property
    def special_tokens(self) -> set[int]:
        """The tokens that the model's settings give a meaning: padding, a place for an image."""
        settings = {
            **self._model.config.to_dict(),
            **self._model.config.get_text_config().to_dict(),
        }
        named = [settings[name] for name in settings if "token_i" in name]
        return {token for token in named if isinstance(token, int)}

    @torch.inference_mode()
    def plain_logits(
        self, prompts: Int[Tensor, "batch rows"]
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """Logits of every row, as the model gives them with transformers' own attention."""
        self._model.set_attn_implementation("eager")
        try:
            return self._model(input_ids=prompts, use_cache=False).logits
        finally:
            self._model.set_attn_implementation("saccade")

    @torch.inference_mode()
    def whole_logits(
        self, prompts: Int[Tensor, "batch rows"], step: Any
    ) -> Float[Tensor, "batch rows vocabulary"]:
        """The same with a step's attention, which is given sequences as they are."""
        return self._model(input_ids=prompts, use_cache=False, saccade_step=step).logits

    @torch.inference_mode()
    def logits(self, step: Step) -> Float[Tensor, "drawn vocabulary"]:
        """Logits of the rows that a token is drawn from."""
        return self._call(step, step.input_ids, step.position_ids, step.last_rows)

    @torch.inference_mode()
    def _layers(self) -> dict[int, LayerShape]:
        probe = Probe()
        two = torch.arange(2, device=self.device)
        takes = "takes one whose attention goes through transformers' AttentionInterface"
        try:
            self._call(probe, two.new_zeros(1, 2), two.unsqueeze(0), two[-1:])
        except Exception as error:
            raise ValueError(
                f"model: got {self.name}, which fails with packed rows ({error}); {takes}"
            ) from error
        if not probe.layers:
            raise ValueError(f"model: got {self.name}, no layer of which attends so; {takes}")
        return probe.layers

    def _call(
        self, step: Step | Probe, input_ids: Tensor, position_ids: Tensor, rows: Tensor
    ) -> Tensor:
        output = self._model(
            input_ids=input_ids, position_ids=position_ids, use_cache=False, saccade_step=step,
            logits_to_keep=rows,
        )  # fmt: skip
        logits = output.logits[0]
        # Some models know no logits_to_keep, and give those of all rows.
        return logits if logits.shape[0] == rows.shape[0] else logits[rows]


# What a config's `layer_types` may say of layers that keep keys and values and nothing else.
KEPT_IN_PAGES = {"full_attention", "sliding_attention", "attention"}


def _check_kind(model: Any) -> None:
    """Refuse by name what is no causal language model, or keeps more than keys and values."""
    got = f"model: got {type(model).__name__}"
    if not callable(getattr(model, "set_attn_implementation", None)):
        raise TypeError(f"{got}, takes a causal language model of transformers")
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f"{got}, which has an encoder beside its decoder, takes a causal language model "
            "(…ForCausalLM); model.generate serves this one"
        )
    if not model.can_generate():
        raise ValueError(
            f"{got}, which predicts no next token (an encoder, or a model without its head), takes "
            "a causal language model (…ForCausalLM)"
        )
    config = model.config.get_text_config()
    for name in ("layer_types", "layers_block_type", "block_types"):
        others = sorted({str(kind) for kind in getattr(config, name, None) or ()} - KEPT_IN_PAGES)
        if others:
            raise ValueError(
                f"{got} with layers of {', '.join(others)} ({name}), which keep or see something "
                f"else than pages of keys and values; takes full_attention and "
                "sliding_attention only; model.generate serves this one"
            )


def register() -> None:
    """Make "saccade" an attention implementation of transformers."""
    from saccade.integrations import transformers

    transformers.register()
