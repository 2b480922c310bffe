"""transformers' own continuous batching, through saccade."""

import inspect
from typing import Any

import pytest
import tiny_models
import torch
import transformers
from tiny_models import model, tokens
from transformers import ContinuousBatchingConfig, GenerationConfig

import saccade
from saccade.integrations.transformers import attention

# transformers 5.17 has other names, puts "paged|" before an attention's and lets any pass.
NEWER = "page_size" in inspect.signature(ContinuousBatchingConfig).parameters


def batched(name: str, implementation: str = "saccade") -> list[list[int]]:
    """What four prompts of unequal length give, in chunks of at most 24 tokens a step."""
    tiny = model(name).float()
    try:
        tiny.set_attn_implementation(implementation)
        sizes: dict[str, Any] = {"page_size" if NEWER else "block_size": 16}
        sizes |= {"auto_switch_to_flash": False} if NEWER else {}
        outputs = tiny.generate_batch(
            inputs=prompts(),
            generation_config=GenerationConfig(
                max_new_tokens=10, do_sample=False, eos_token_id=2, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(
                num_blocks=40, max_batch_tokens=24, **sizes
            ),
            progress_bar=False,
        )
        assert tiny.config._attn_implementation == implementation
        return sorted(output.generated_tokens for output in outputs.values())
    finally:
        tiny.double() if name != "gemma2" else tiny  # as other tests expect it


def prompts() -> list[list[int]]:
    return [tokens(1, length, seed=length)[0].tolist() for length in (5, 30, 17, 9)]


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
def test_batch_gives_what_each_prompt_gives_alone(name, monkeypatch):
    calls = []
    through = saccade.attention_varlen

    def counted(*tensors: Any, **options: Any) -> Any:
        calls.append(tensors[0].shape[0])
        return through(*tensors, **options)

    monkeypatch.setattr(saccade, "attention_varlen", counted)
    got = batched(name)
    assert max(calls) == 24  # a step was full
    tiny = model(name)
    tiny.set_attn_implementation("saccade")
    alone = []
    for prompt in prompts():
        row = tiny.generate(torch.tensor([prompt]), max_new_tokens=10, do_sample=False)[0]
        alone.append(row[len(prompt) :].tolist())
    assert got == sorted(alone)


@pytest.mark.skipif(not NEWER, reason="5.17's cache reads windows off layer types alone")
def test_windows_that_layers_do_not_tell_are_those_of_the_cache():
    """All layers of Phi-MoE slide by the model's masks, of which there are none in a batch."""
    config = transformers.PhimoeConfig(**tiny_models.SIZES, num_local_experts=4, sliding_window=8)
    torch.manual_seed(0)
    tiny = tiny_models.sharpened(transformers.PhimoeForCausalLM(config))
    found = {}
    for implementation in ("eager", "saccade"):
        tiny.set_attn_implementation(implementation)
        outputs = tiny.generate_batch(
            inputs=prompts(),
            generation_config=GenerationConfig(
                max_new_tokens=10, do_sample=False, eos_token_id=-1, pad_token_id=0
            ),
            continuous_batching_config=ContinuousBatchingConfig(auto_switch_to_flash=False),
            progress_bar=False,
        )
        found[implementation] = sorted(output.generated_tokens for output in outputs.values())
    assert found["saccade"] == found["eager"]


def test_a_mask_of_a_layers_own_is_refused_in_a_batch():
    row, own = torch.zeros(1, 1, 2, 4), torch.zeros(1, 1, 2, 2)
    with pytest.raises(ValueError, match="floating-point mask of its own"):
        attention.attention_forward(torch.nn.Module(), row, row, row, own, cache=object())


@pytest.mark.skipif(not NEWER, reason="transformers 5.17 lets any attention pass")
def test_other_attentions_are_admitted_or_refused_as_before():
    with pytest.raises(ValueError, match="Implementation plain is not supported"):
        batched("llama", "plain")
    assert len(batched("llama", "sdpa")) == 4


def test_name_for_batches_is_for_nothing_else():
    row = torch.zeros(1, 1, 2, 4)
    with pytest.raises(ValueError, match=r"got 'paged\|saccade' outside of generate_batch"):
        attention.continuous_forward(torch.nn.Module(), row, row, row, None)


def test_page_tables_for_flash_attention_are_refused():
    row = torch.zeros(1, 1, 2, 4)
    with pytest.raises(NotImplementedError, match="block_table: got one"):
        attention.attend_batch(torch.nn.Module(), row, row, row, {"block_table": torch.zeros(1)})
