"""Models whose layers keep unlike heads, and models that keep a latent, are served right."""

from __future__ import annotations

from typing import Any

import pytest
import tiny_models
import torch
import transformers

import saccade
from saccade.integrations.transformers import LatentLayers, register
from saccade.serving.model import AlonePass

LATENT = {
    "kv_lora_rank": 32, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16,
    "v_head_dim": 12, "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
}  # fmt: skip
GEMMA = {
    "head_dim": 256, "global_head_dim": 512, "num_key_value_heads": 2, "sliding_window": 6,
    "num_hidden_layers": 4, "vocab_size_per_layer_input": 97, "hidden_size_per_layer_input": 8,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}  # fmt: skip
PROMPTS = [[1, 5, 9, 20, 33], [7, 8], [4] * 11]


def made(kind: str, sizes: dict[str, Any]) -> Any:
    config = transformers.AutoConfig.for_model(kind, **tiny_models.SIZES | sizes)
    torch.manual_seed(0)
    return tiny_models.sharpened(transformers.AutoModelForCausalLM.from_config(config), 3).eval()


def uncached(model: Any, prompt: list[int], count: int) -> list[int]:
    """What a model writes by its own attention."""
    model.set_attn_implementation("eager")
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(count):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    model.set_attn_implementation("saccade")
    return tokens[len(prompt) :]


def assert_served(model: Any, **options: Any) -> saccade.Engine:
    engine = saccade.Engine(model, page_size=4, **options)
    results = engine.generate(PROMPTS, max_new_tokens=8, stop_tokens=[])
    assert [result.tokens for result in results] == [uncached(model, each, 8) for each in PROMPTS]
    engine.cache.check()
    return engine


def test_a_latent_is_kept_once_and_served_in_its_absorbed_form() -> None:
    model = made("deepseek_v3", LATENT)
    engine = assert_served(model, num_pages=8, max_sequences=4, preemption="swap")
    assert engine.statistics().preemptions > 0  # latents are swapped as keys and values are
    pages = engine.cache.pages(0)
    assert engine.cache.latent and pages.latent
    assert pages.key_pages.shape[1::2] == (1, 40) and pages.value_pages.shape[3] == 32


class Adapted(torch.nn.Linear):
    """A projection that is more than its weight says."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input) + input.sum(-1, keepdim=True)


def test_a_projection_with_an_adapter_is_not_absorbed() -> None:
    model = made("deepseek_v3", LATENT)
    model.model.layers[1].self_attn.kv_b_proj.__class__ = Adapted
    engine = assert_served(model, num_pages=64)
    assert not engine.cache.latent and engine.cache.pages(0).key_pages.shape[1::2] == (4, 24)


def test_the_absorbed_form_is_exact() -> None:
    """In float64 nothing but the order of sums is left between the two forms."""
    model = made("deepseek_v3", LATENT).double()
    register()
    model.set_attn_implementation("saccade")
    latent = LatentLayers.of(model)
    assert latent is not None
    layer = model.model.layers[1].self_attn
    hidden = torch.randn(2, 9, 64, dtype=torch.float64)
    angles = model.model.rotary_emb(hidden, torch.arange(9)[None])
    with torch.no_grad():
        exact, _ = layer(hidden, angles, None, saccade_step=AlonePass())
        found, _ = layer(hidden, angles, None, **latent.options(AlonePass()))
    # What is summed on the way to a number: latents of at most √rank (they are normalised), times
    # to_value, times weights that sum to 1, times the output's projection. Each of the two forms
    # rounds each sum once a term.
    projections = layer.kv_b_proj.weight, layer.o_proj.weight
    largest = [float(weight.detach().abs().sum(1).max()) for weight in projections]
    terms = LATENT["kv_lora_rank"] + 40 + 9 + layer.o_proj.in_features
    bound = 2 * terms * torch.finfo(torch.float64).eps * largest[0] * largest[1] * 32**0.5
    torch.testing.assert_close(found, exact, rtol=0, atol=bound)


@pytest.mark.parametrize(
    "more",
    [{"num_kv_shared_layers": 1}, {"attention_k_eq_v": True, "num_global_key_value_heads": 1}],
    ids=["shared", "equal"],
)  # fmt: skip
def test_heads_of_512_beside_heads_of_256(more: dict[str, Any]) -> None:
    engine = assert_served(made("gemma4_text", GEMMA | more), num_pages=64)
    dims = [engine.cache.pages(layer).key_pages.shape[3] for layer in range(4)]
    assert dims == [256, 512, 256, 512]
