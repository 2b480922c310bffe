"""Models of transformers generate through saccade what they generate without it."""

import functools
import importlib.metadata
import subprocess
import sys
from typing import Any

import pytest
import torch
import transformers
from tiny_models import OWN, left_padded, llama, model, sharpened, tokens
from torch import Tensor

import saccade
import saccade.integrations.transformers as integration
from saccade.integrations.transformers import attention, masks
from saccade.integrations.transformers import cache as caches

METHODS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 0},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "several": {"do_sample": True, "num_return_sequences": 2},
}
NEW_TOKENS = 10


@pytest.fixture
def nothing_written_out(monkeypatch):
    """Masks stay descriptions and pages are not gathered."""

    def refuse(self: Any) -> Tensor:
        raise AssertionError(f"a {type(self).__name__} was written out")

    monkeypatch.setattr(masks.LazyMask, "written_out", refuse)
    monkeypatch.setattr(caches.PagedRows, "written_out", refuse)


def generated(name: str, implementation: str, **options: Any) -> Tensor:
    tiny = model(name)
    tiny.set_attn_implementation(implementation)
    torch.manual_seed(0)
    counts = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}
    return tiny.generate(**left_padded() | counts | {"do_sample": False} | options)


@functools.cache
def expected(name: str, method: str) -> Tensor:
    return generated(name, OWN[name], **METHODS[method])


def paged(name: str, method: str, page_size: int = 4) -> integration.PagedGenerationCache:
    copies = max(METHODS[method].get(key, 1) for key in ("num_beams", "num_return_sequences"))
    longest = left_padded()["input_ids"].shape[1] + NEW_TOKENS
    return integration.PagedGenerationCache.for_model(
        model(name), max_tokens=longest, batch_size=3 * copies, page_size=page_size
    )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OWN)
def test_generates_what_transformers_own_attention_does(name, method, nothing_written_out):
    assert torch.equal(generated(name, "saccade", **METHODS[method]), expected(name, method))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", OWN)
def test_generates_the_same_from_pages(name, method, nothing_written_out):
    pages = paged(name, method)
    got = generated(name, "saccade", past_key_values=pages, **METHODS[method])
    assert torch.equal(got, expected(name, method))
    assert pages.pages is not None
    pages.pages.check()


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma2", "gpt_oss"])
@pytest.mark.parametrize("by", ["model", "prompt"])
def test_assisted_generation_is_greedy_generation(name, by, nothing_written_out):
    drafts: dict[str, Any] = {"prompt_lookup_num_tokens": 3}
    if by == "model":
        drafts = {"assistant_model": assistant()}
    prompt = tokens(1, 12)
    wanted = {"input_ids": prompt, "attention_mask": torch.ones_like(prompt)}
    greedy = generated(name, OWN[name], **wanted)
    for pages in (None, paged(name, "greedy")):
        got = generated(name, "saccade", past_key_values=pages, **wanted, **drafts)
        assert torch.equal(got, greedy)


@functools.cache
def assistant() -> Any:
    made = sharpened(llama(num_hidden_layers=1)).double()
    made.set_attn_implementation("saccade")
    return made


@pytest.mark.parametrize("name", ["llama", "qwen3"])
def test_static_cache_needs_no_written_out_mask(name, nothing_written_out):
    got = generated(name, "saccade", cache_implementation="static")
    assert torch.equal(got, expected(name, "greedy"))


def test_padding_changes_nothing():
    """Against a batch without padding: a fault that peers share would show."""
    batch = left_padded()
    together = generated("llama", "saccade", past_key_values=paged("llama", "greedy"))
    for row in range(3):
        real = int(batch["attention_mask"][row].sum())
        alone = {key: tensor[row : row + 1, -real:] for key, tensor in batch.items()}
        got = generated("llama", "saccade", **alone)
        assert torch.equal(got[0, real:], together[row, -NEW_TOKENS:])


# ---- a serving engine's steps --------------------------------------------------------------------


class OneSequence:
    """A step that keeps nothing: all tokens are one sequence's."""

    def __init__(self):
        self.calls: list[tuple[int, str, str | None]] = []

    def attend(self, layer, query, key, value, *, mask, score, scale, sinks):
        self.calls.append((layer, mask.key, score and score.key))
        options = {"mask": mask, "score": score, "scale": scale, "sinks": sinks}
        return saccade.attention(query, key, value, **options).transpose(1, 2)


@pytest.mark.parametrize(
    ("name", "kinds"),
    [
        ("llama", ["causal", "causal"]),
        ("qwen3", ["window", "causal"]),
        ("gemma2", ["window", "causal"]),
        ("gpt_oss", ["window", "causal"]),
    ],
)
def test_step_does_the_work_of_the_layers(name, kinds, nothing_written_out):
    step: integration.AttentionStep = OneSequence()
    tiny, input_ids = model(name), tokens(1, 20)
    tiny.set_attn_implementation("saccade")
    with torch.no_grad():
        alone = tiny(input_ids, use_cache=False).logits
        got = tiny(input_ids, use_cache=False, saccade_step=step).logits
    assert torch.equal(got, alone)
    assert [call[0] for call in step.calls] == [0, 1]
    keys = {"causal": saccade.masks.causal().key, "window": saccade.masks.window(1).key}
    assert [call[1] for call in step.calls] == [keys[kind] for kind in kinds]
    assert all((call[2] is not None) == (name == "gemma2") for call in step.calls)


def test_step_refuses_layers_that_it_is_not_told_of():
    tiny = model("llama4")
    tiny.set_attn_implementation("saccade")
    with pytest.raises(ValueError, match="saccade_step: got a layer of chunked_attention"):
        tiny(tokens(1, 9), use_cache=False, saccade_step=OneSequence())


# ---- the attention function and its registration -------------------------------------------------


def test_registering_again_changes_nothing():
    from transformers import AttentionInterface, AttentionMaskInterface

    integration.register()
    integration.register()
    assert AttentionInterface()["saccade"] is integration.attention_forward
    assert AttentionMaskInterface()["saccade"] is integration.lazy_mask


@pytest.mark.parametrize("found", ["4.57.1", "5.16.3"])
def test_an_old_transformers_is_named(monkeypatch, found):
    monkeypatch.setattr(importlib.metadata, "version", lambda name: found)
    with pytest.raises(
        ImportError, match=rf"found transformers {found}, needs 5\.17 or newer: pip"
    ):
        integration.require()


def test_no_transformers_is_named(monkeypatch):
    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", absent)
    with pytest.raises(ImportError, match=r"found no transformers, needs 5\.17"):
        integration.require()


WITHOUT_TRANSFORMERS = """
import importlib.metadata, sys
import saccade

def absent(name):
    raise importlib.metadata.PackageNotFoundError(name)

importlib.metadata.version, sys.modules["transformers"] = absent, None
import saccade.integrations.transformers
"""


def test_importing_the_package_without_transformers_says_what_to_install():
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True
    )
    assert "found no transformers, needs 5.17 or newer: pip install" in run.stderr


class Layer(torch.nn.Module):
    is_causal = True


def attended(query_len: int, kv_len: int, mask: Any = None, **options: Any) -> Tensor:
    """Which keys each row gives weight to: the weights, [query_len, kv_len]."""
    query, key = torch.zeros(1, 2, query_len, 4), torch.zeros(1, 1, kv_len, 4)
    value = torch.eye(kv_len)[None, None]
    output, weights = attention.attention_forward(Layer(), query, key, value, mask, **options)
    assert weights is None and output.is_contiguous()
    assert output.shape == (1, query_len, 2, kv_len)
    return output[0, :, 0]


def test_without_a_mask_a_layer_says_what_is_hidden():
    causal = torch.ones(5, 5).tril()
    assert torch.equal(attended(5, 5) > 0, causal.bool())
    assert bool((attended(5, 5, is_causal=False) > 0).all())
    assert bool((attended(1, 5) > 0).all())
    assert torch.equal(attended(5, 5, sliding_window=2) > 0, (causal - causal.tril(-2)).bool())
    near = causal.tril() - causal.tril(-2)
    both = attended(5, 5, sliding_window=2, is_causal=False) > 0
    assert torch.equal(both, (near + near.T).bool())
    assert torch.equal(attended(1, 5, sliding_window=2)[0] > 0, torch.arange(5) > 2)


def test_rows_that_could_stand_in_two_places_are_refused():
    with pytest.raises(ValueError, match="attention_mask: got None for 3 query rows and 5 keys"):
        attended(3, 5)


def test_packed_sequences_of_a_collator_for_flash_attention():
    offsets = torch.tensor([0, 2, 5], dtype=torch.int32)
    packed = {"cu_seq_lens_q": offsets, "cu_seq_lens_k": offsets, "max_length_q": 3}
    apart = torch.block_diag(torch.ones(2, 2), torch.ones(3, 3))
    assert torch.equal(attended(5, 5, **packed) > 0, apart.tril().bool())
    assert torch.equal(attended(5, 5, is_causal=False, **packed) > 0, apart.bool())


def test_dropped_weights_are_made_up_for():
    torch.manual_seed(0)
    weights = attended(64, 64, is_causal=False, dropout=0.25)
    kept = weights > 0
    torch.testing.assert_close(weights[kept], torch.full_like(weights[kept], 1 / 64 / 0.75))
    # six deviations of a binomial share
    assert abs(float((~kept).float().mean()) - 0.25) < 6 * (0.25 * 0.75 / kept.numel()) ** 0.5


def test_position_bias_and_softcap_change_scores_in_that_order():
    bias = torch.zeros(1, 1, 2, 2)
    bias[..., 0] = 3.0  # beyond the softcap, which must not reach it
    weights = attended(2, 2, is_causal=False, position_bias=bias, softcap=1.0)
    torch.testing.assert_close(weights, torch.tensor([3.0, 0.0]).softmax(0).expand(2, 2))


def test_weights_are_not_to_be_had():
    with pytest.raises(ValueError, match="output_attentions: got True"):
        attended(2, 2, output_attentions=True)


def test_weights_are_refused_where_layers_do_not_hand_on_that_they_are_wanted():
    config = transformers.GPT2Config(
        vocab_size=97, n_embd=32, n_layer=1, n_head=2, n_positions=32, eos_token_id=2
    )
    integration.register()
    gpt2 = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="saccade")
    with pytest.raises(ValueError, match="output_attentions: got True"):
        gpt2(tokens(1, 5), output_attentions=True)
    assert gpt2(tokens(1, 5)).attentions is None


def test_paged_cache_drops_nothing():
    step = caches.PagedStep(
        1, 1, torch.tensor([1]), torch.zeros(1, 1).int(), torch.tensor([2]).int()
    )
    held = caches.PagedRows(torch.zeros(1, 1, 4, 4), None, step, torch.float32)
    with pytest.raises(ValueError, match=r"dropout: got 0\.5, takes 0"):
        attention.attention_forward(Layer(), torch.zeros(1, 1, 1, 4), held, held, None, dropout=0.5)
