"""Models with linear layers of the gated delta rule: prompts, training and tokens by saccade."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor

transformers: Any = pytest.importorskip("transformers")

from saccade.integrations.transformers import (  # noqa: E402
    delta_rule,
    layer_functions,
    register,
)

SIZES: dict[str, Any] = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 128,
    "pad_token_id": 0, "eos_token_id": None, "bos_token_id": None,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
LINEAR: dict[str, Any] = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "qwen3_next": ("Qwen3NextConfig", "Qwen3NextForCausalLM", {
        **LINEAR, **EXPERTS, "head_dim": 16, "num_experts": 2,
        "shared_expert_intermediate_size": 16}),
    "qwen3_5": ("Qwen3_5TextConfig", "Qwen3_5ForCausalLM", {**LINEAR, "head_dim": 16}),
    "olmo_hybrid": ("OlmoHybridConfig", "OlmoHybridForCausalLM", LINEAR),
    "kimi_linear": ("KimiLinearConfig", "KimiLinearForCausalLM", {
        **EXPERTS, "linear_num_heads": 2, "linear_head_dim": 16, "num_local_experts": 2,
        "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "kv_lora_rank": 16}),
}  # fmt: skip
# The fallback is float32 as our own path is, and both sum up a few hundred terms a number; a layer
# of norms and products comes behind them, and gradients come through twice as many.
OUTPUTS, GRADIENTS = 1e-5, 3e-4


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The shape of the queries of every call that came to saccade."""
    seen: list[tuple[int, ...]] = []

    def served(theirs: Any, query: Tensor, *arguments: Any, **options: Any) -> Any:
        seen.append(tuple(query.shape))
        return delta_rule.gated_delta_rule(theirs, query, *arguments, **options)

    for name in delta_rule.FUNCTIONS:
        monkeypatch.setitem(layer_functions.FUNCTIONS, name, served)
    return seen


def tiny(family: str, name: str = "saccade") -> Any:
    register()
    config, model, sizes = FAMILIES[family]
    if not hasattr(transformers, model):
        pytest.skip(f"transformers {transformers.__version__} has no {model}")
    torch.manual_seed(0)
    made = getattr(transformers, config)(**SIZES | sizes, attn_implementation=name)
    return getattr(transformers, model)(made).eval()


def results(model: Any, ids: Tensor, padding: Tensor) -> list[Tensor]:
    """Logits of what is no padding, and gradients of all weights."""
    logits = model(ids, attention_mask=padding).logits[padding.bool()]
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    grads = torch.autograd.grad(logits.square().mean(), weights, allow_unused=True)
    return [logits.detach(), *(grad for grad in grads if grad is not None)]


@pytest.mark.parametrize("family", FAMILIES)
def test_prompts_training_and_generation(family: str, calls: list[Any]) -> None:
    model = tiny(family)
    ids = torch.randint(1, 97, (2, 70))
    padding = torch.ones_like(ids)
    padding[1, :9] = 0
    ours = results(model, ids, padding)
    assert [shape[1] for shape in calls] == [70]
    written = model.generate(ids[:, :9], max_new_tokens=5, do_sample=False)
    assert [shape[1] for shape in calls] == [70, 9, 1, 1, 1, 1]
    model.set_attn_implementation("eager")
    calls.clear()
    theirs = results(model, ids, padding)
    for bound, one, two in zip([OUTPUTS, *[GRADIENTS] * len(ours)], ours, theirs, strict=False):
        size = float(two.abs().max())
        torch.testing.assert_close(one, two, atol=bound * size + 1e-9, rtol=0)
    assert torch.equal(model.generate(ids[:, :9], max_new_tokens=5, do_sample=False), written)
    assert calls == []


def test_models_of_another_name_and_copies(calls: list[Any]) -> None:
    """One model's choice is not another's, of the same module; a copy makes its own."""
    ours, theirs, ids = tiny("qwen3_5"), tiny("qwen3_5", "eager"), torch.randint(1, 97, (1, 5))
    with torch.no_grad():
        theirs(ids)
        assert calls == []
        ours(ids)
        assert len(calls) == 1
        twin = copy.deepcopy(ours)
        ours.set_attn_implementation("eager")
        ours(ids)
        assert len(calls) == 1
        twin(ids)
        assert len(calls) == 2
        pickle.loads(pickle.dumps(twin))(ids)
        assert len(calls) == 3
        theirs.set_attn_implementation("saccade")
        theirs(ids)
        assert len(calls) == 4


def test_a_chunk_of_a_prompt_goes_on_from_the_cache(calls: list[Any]) -> None:
    model, ids = tiny("qwen3_next"), torch.randint(1, 97, (1, 20))
    with torch.no_grad():
        whole = model(ids).logits
        first = model(ids[:, :13], use_cache=True)
        rest = model(ids[:, 13:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(rest, whole[:, 13:], atol=1e-5, rtol=1e-4)
    assert [shape[1] for shape in calls] == [20, 13, 7]
