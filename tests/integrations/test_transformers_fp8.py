"""Models of transformers attend in fp8 by attn_implementation="saccade-fp8", for inference."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny_models import left_padded, model, tokens
from torch import Tensor

import saccade
import saccade.integrations.transformers as integration
from saccade.integrations.transformers import attention


def half(name: str, implementation: str) -> Any:
    """A tiny model in bfloat16."""
    made = copy.deepcopy(model(name)).to(torch.bfloat16).eval()
    made.set_attn_implementation(implementation)
    return made


def logits(name: str, implementation: str) -> Tensor:
    with torch.no_grad():
        return half(name, implementation)(**left_padded()).logits.float()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_logits_are_those_of_16_bits_but_for_rounding(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def noted(*tensors: Tensor, **options: Any) -> Any:
        calls.append(options)
        return fp8(*tensors, **options)

    fp8 = saccade.attention_fp8
    monkeypatch.setattr(saccade, "attention_fp8", noted)
    found, wanted = logits(name, "saccade-fp8"), logits(name, "saccade")
    assert len(calls) == model(name).config.num_hidden_layers
    shown = left_padded()["attention_mask"].bool()
    off = (found - wanted)[shown]
    size = float(wanted[shown].square().mean().sqrt())  # a wrong mask would err by about as much
    assert 0 < float(off.square().mean().sqrt()) < 0.25 * size


def test_generates() -> None:
    with torch.no_grad():
        found = half("llama", "saccade-fp8").generate(
            **left_padded(), max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    assert found.shape[1] == left_padded()["input_ids"].shape[1] + 4


def test_says_what_it_does_not_take() -> None:
    single = copy.deepcopy(model("llama")).float()
    single.set_attn_implementation("saccade-fp8")
    with torch.no_grad(), pytest.raises(TypeError, match="query"):
        single(tokens(1, 5))
    trained = half("llama", "saccade-fp8")
    with pytest.raises(NotImplementedError, match="gradient of fp8 attention"):
        trained(tokens(1, 5))
    layer, rows = torch.nn.Module(), torch.zeros(3, 1, 2, 4, 16, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"dropout: got 0\.1, which .*saccade-fp8"):
        integration.fp8_forward(layer, rows[0], rows[1], rows[2], None, dropout=0.1)
    with pytest.raises(ValueError, match="saccade_step: got"):
        integration.fp8_forward(layer, rows[0], rows[1], rows[2], None, saccade_step=object())
    pages = integration.PagedGenerationCache.for_model(
        half("llama", "saccade"), max_tokens=16, batch_size=1, page_size=4
    )
    with torch.no_grad(), pytest.raises(ValueError, match="past_key_values: got PagedRows"):
        half("llama", "saccade-fp8").generate(
            tokens(1, 5), past_key_values=pages, max_new_tokens=3, do_sample=False
        )


def test_models_that_do_not_ask_are_refused_by_this_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = half("llama", "saccade")
    monkeypatch.setattr(attention, "why_not", lambda module: "it attends by itself")
    with pytest.raises(ValueError, match="got 'saccade-fp8' for LlamaForCausalLM"):
        made.set_attn_implementation("saccade-fp8")
