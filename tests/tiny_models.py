"""Tiny models of transformers with random weights, and a plain attention to judge them by."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

import saccade.integrations.transformers as integration

VOCABULARY = 97
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SLIDING: dict[str, Any] = {"head_dim": 16, "sliding_window": 8}
ALTERNATING = ["sliding_attention", "full_attention"]


def llama(**changes: Any) -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES | changes))


def qwen3() -> Any:
    config = transformers.Qwen3Config(
        **SIZES, **SLIDING, use_sliding_window=True, layer_types=ALTERNATING
    )
    return transformers.Qwen3ForCausalLM(config)


def gemma2() -> Any:
    config = transformers.Gemma2Config(
        **SIZES, **SLIDING, layer_types=ALTERNATING, query_pre_attn_scalar=16,
        attn_logit_softcapping=2.0,
    )  # fmt: skip
    return transformers.Gemma2ForCausalLM(config)


def gpt_oss() -> Any:
    config = transformers.GptOssConfig(
        **SIZES, **SLIDING, layer_types=ALTERNATING, num_local_experts=2, num_experts_per_tok=1,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )  # fmt: skip
    model = transformers.GptOssForCausalLM(config)
    model.set_experts_implementation("eager")  # the others have no float64
    return model


def llama4() -> Any:
    config = transformers.Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size_mlp=96, attention_chunk_size=8,
        num_local_experts=2, num_experts_per_tok=1,
        layer_types=["chunked_attention", "full_attention"],
    )  # fmt: skip
    return transformers.Llama4ForCausalLM(config)


MODELS = {f.__name__: f for f in (llama, qwen3, gemma2, gpt_oss, llama4)}
# What transformers itself attends with: its sdpa knows neither softcap nor sinks.
OWN = {"llama": "sdpa", "qwen3": "sdpa", "gemma2": "eager", "gpt_oss": "eager", "llama4": "sdpa"}


def sharpened(model: Any, seed: int = 3) -> Any:
    """The model with weights that let it make up its mind, so that rounding decides no token."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.dim() > 1:
                weights.normal_(std=weights.shape[-1] ** -0.5, generator=random)
            elif name.endswith("sinks"):
                weights.normal_(generator=random)
    return model.eval()


@functools.cache
def model(name: str) -> Any:
    """A model that tests share: they change its attention only.

    In float64, but where transformers' own attention rounds hidden pairs to -inf on the way to a
    float32 softmax, and gives NaN for padding.
    """
    integration.register()
    made = sharpened(MODELS[name]())
    return made if name == "gemma2" else made.double()


def tokens(batch: int, length: int, seed: int = 0) -> Tensor:
    """Tokens that are no special ones."""
    random = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCABULARY, (batch, length), generator=random)


def left_padded(batch: int = 3, length: int = 13) -> dict[str, Tensor]:
    """Prompts of unequal length as generate wants them."""
    input_ids, attention_mask = tokens(batch, length), torch.ones(batch, length, dtype=torch.long)
    for row in range(1, batch):
        attention_mask[row, : 2 * row + 1] = 0
    return {"input_ids": input_ids * attention_mask, "attention_mask": attention_mask}


def plain_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """The formula, written out, in the dtype of its arguments."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    scores = query @ key.transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~attention_mask, -torch.inf)
    if s_aux is not None:
        sinks = s_aux.to(scores.dtype).view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sinks], 3)
    weights = scores.softmax(3)[..., : key.shape[2]].nan_to_num(0.0)
    return (weights @ value).transpose(1, 2).contiguous(), None


def written_out_mask(**request: Any) -> Tensor | None:
    """transformers' own mask, never left out."""
    request |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    return sdpa_mask(**request)


AttentionInterface.register("plain", plain_attention)
AttentionMaskInterface.register("plain", written_out_mask)


def assert_errs_no_more(got: Tensor, plain: Tensor, exact: Tensor) -> None:
    """Saccade may err as plain PyTorch errs in the same dtype, plus six deviations of that, plus a
    rounding of the largest number: on some processors plain PyTorch errs by less than that."""
    error = (plain.double() - exact).abs()
    rounding = torch.finfo(got.dtype).eps * exact.abs().max()
    allowed = 1.1 * error.max() + 6 * error.square().mean().sqrt() + rounding
    largest = (got.double() - exact).abs().max()
    assert largest <= allowed, f"errs by {largest:.3g}, may err by {allowed:.3g}"
