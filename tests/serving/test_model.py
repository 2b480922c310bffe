"""What an engine would serve wrongly is refused when it is made, and nothing else is."""

from typing import Any

import pytest
import served
import tiny_models
import torch
import transformers

import saccade
import saccade.integrations.transformers as integration
from saccade.serving import model as models
from saccade.serving import states as step_states

MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LINEAR = {
    "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}  # fmt: skip
LATENT = {
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "first_k_dense_replace": 1, "num_key_value_heads": 4, "n_group": 1, "topk_group": 1,
}  # fmt: skip
SLIDING = {"head_dim": 16, "sliding_window": 8, "layer_types": tiny_models.ALTERNATING}
# Layers that keep another state, beside one of attention.
HYBRID: dict[str, dict[str, Any]] = {
    "qwen3_next": {
        "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
        "shared_expert_intermediate_size": 32, **EXPERTS, **LINEAR,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "bamba": {"attn_layer_indices": [1], **MAMBA},
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 2, "expert_layer_period": 2,
        "mamba_d_state": 8, "use_mamba_kernels": False,
    },
}  # fmt: skip
RIGHT: dict[str, dict[str, Any]] = {
    "llama": {}, "qwen3": {"use_sliding_window": True, **SLIDING}, "gemma2": SLIDING,
    "gemma3_text": SLIDING,
    "mistral": {"sliding_window": 8}, "mixtral": {"num_local_experts": 4},
    "qwen3_moe": {"head_dim": 16, **EXPERTS}, "phimoe": {}, "jetmoe": {},
    "deepseek_v2": {"q_lora_rank": None, **LATENT}, "deepseek_v3": {"q_lora_rank": 16, **LATENT},
    "gpt2": {}, "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64}, "phi": {}, "gpt_neox": {},
    "cohere2": {"sliding_window": 8}, "olmo2": {}, "granite": {}, "biogpt": {}, "gpt_bigcode": {},
}  # fmt: skip


def tiny(kind: str, sizes: dict[str, Any], seed: int = 3) -> Any:
    config = transformers.AutoConfig.for_model(kind, **tiny_models.SIZES | sizes)
    torch.manual_seed(0)
    made = transformers.AutoModelForCausalLM.from_config(config)
    return tiny_models.sharpened(made, seed)


def assert_fits(model: Any) -> None:
    engine = saccade.Engine(model, num_pages=8)
    assert model.config._attn_implementation == "saccade"
    assert engine.statistics().cache.asked == engine.statistics().cache.used == 0


@pytest.fixture
def no_states(monkeypatch):
    """Layers with states are not known as such, and neither are their names."""
    monkeypatch.setattr(integration.StateLayers, "of", lambda model: None)
    monkeypatch.setattr(models, "KEPT_IN_PAGES", models.KEPT_IN_PAGES | models.KEPT_AS_STATES)


@pytest.mark.parametrize("kind", ["minimax", "recurrent_gemma", "rwkv"])
def test_states_outside_of_transformers_cache_are_refused(kind):
    with pytest.raises(ValueError, match="model: got "):
        saccade.Engine(tiny(kind, {}))


def test_layers_that_keep_another_state_are_refused_by_name(monkeypatch):
    monkeypatch.setattr(integration.StateLayers, "of", lambda model: None)
    with pytest.raises(ValueError, match="model: got Lfm2ForCausalLM with layers of conv"):
        saccade.Engine(tiny("lfm2", HYBRID["lfm2"]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", HYBRID)
def test_what_is_not_known_by_name_is_found_out(kind, dtype, no_states):
    model = tiny(kind, HYBRID[kind]).to(dtype)
    with pytest.raises(ValueError, match=f"got {type(model).__name__}, whose logits differ by"):
        saccade.Engine(model)


@pytest.mark.parametrize("kind", HYBRID)
def test_states_that_are_lost_between_chunks_are_found_out(kind, monkeypatch):
    model = tiny(kind, HYBRID[kind]).to(torch.bfloat16)
    assert_fits(model)
    read = step_states.StepStates.read
    monkeypatch.setattr(
        step_states.StepStates, "read", lambda *of: [state.zero_() for state in read(*of)]
    )
    with pytest.raises(ValueError, match=f"got {type(model).__name__}, whose logits differ by"):
        saccade.Engine(model)


def test_weak_convolutions_are_found_out_too(no_states):
    model = tiny("lfm2", HYBRID["lfm2"])
    with torch.no_grad():
        model.model.layers[0].conv.conv.weight.mul_(0.01)
    with pytest.raises(ValueError, match="whose logits differ by"):
        saccade.Engine(model)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("phimoe", "of whose 256 tokens the last one sees 8 by the mask, and 256 by what it tells"),
        ("doge", "floating-point mask of its own"),
    ],
)
def test_layers_whose_mask_is_another_than_they_tell_are_refused(kind, message):
    with pytest.raises(ValueError, match=message):
        saccade.Engine(tiny(kind, {"sliding_window": 8}), num_pages=8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_keys_that_a_layer_hides_by_itself_are_found_out(dtype, monkeypatch):
    layer = transformers.models.llama.modeling_llama.LlamaAttention
    forward = layer.forward

    def of_even_keys(self: Any, *rows: Any, attention_mask: Any, **options: Any) -> Any:
        odd = torch.arange(attention_mask.shape[-1]) % 2 == 1
        if attention_mask.dtype == torch.bool:
            shown = attention_mask & ~odd
        else:
            shown = attention_mask.masked_fill(odd, torch.finfo(attention_mask.dtype).min)
        return forward(self, *rows, attention_mask=shown, **options)

    monkeypatch.setattr(layer, "forward", of_even_keys)
    with pytest.raises(ValueError, match="LlamaForCausalLM, whose logits differ by"):
        saccade.Engine(tiny("llama", {}).to(dtype), num_pages=8)


def test_positions_that_a_model_counts_otherwise_are_found_out():
    with pytest.raises(ValueError, match="RobertaForCausalLM, whose logits differ by"):
        saccade.Engine(tiny("roberta", {"is_decoder": True}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", RIGHT)
def test_models_that_are_served_rightly_are_taken(kind, dtype):
    for seed in range(2):
        assert_fits(tiny(kind, RIGHT[kind], seed).to(dtype))


@pytest.mark.parametrize("name", served.NAMES)
def test_float64_is_taken(name):
    assert_fits(served.model(name))


def test_random_numbers_of_others_go_on_as_if_nothing_had_been_tried():
    model = tiny("llama", {})
    before = torch.get_rng_state()
    engine = saccade.Engine(model, num_pages=8)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(pages.free.pages() == list(range(8)) for pages in pools(engine))


def pools(engine: saccade.Engine) -> list[Any]:
    return [group.pool for group in engine.cache.groups]


@pytest.mark.parametrize("max_length", [2, 3, 5])
def test_models_of_few_positions_are_taken(max_length):
    assert_fits(tiny("gpt2", {"max_position_embeddings": max_length, "n_positions": max_length}))


NO_HEAD = "which predicts no next token .* takes a causal language model"
ENCODER = "which has an encoder beside its decoder, takes a causal language model"


@pytest.mark.parametrize(
    ("name", "sizes", "message"),
    [
        ("Bert", {}, NO_HEAD),
        ("Llama", {}, NO_HEAD),
        ("ViT", {"image_size": 32, "patch_size": 16}, NO_HEAD),
        ("Whisper", {"d_model": 64, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
                     "encoder_layers": 1, "decoder_layers": 1}, ENCODER),
        ("T5", {"num_layers": 1, "d_model": 64, "num_heads": 4}, ENCODER),
    ],
)  # fmt: skip
def test_models_of_another_kind_are_answered_in_a_sentence(name, sizes, message):
    config = getattr(transformers, name + "Config")(**tiny_models.SIZES | sizes)
    of_name = {"Whisper": "ForConditionalGeneration", "T5": "ForConditionalGeneration"}
    model = getattr(transformers, name + of_name.get(name, "Model"))(config)
    with pytest.raises(ValueError, match=f"model: got {type(model).__name__}, {message}"):
        saccade.Engine(model)


def test_an_encoder_with_a_head_is_no_causal_model():
    with pytest.raises(ValueError, match="not causal"):
        saccade.Engine(tiny("bert", {"is_decoder": False}))


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [  # by a function; by multiplying what routers see
        ("opt", {**RIGHT["opt"], "dropout": 0.3}),
        ("phimoe", {"input_jitter_noise": 0.5}),
        ("llama", {"attention_dropout": 0.1}),
    ],
)
def test_what_is_random_in_training_without_a_module_for_it_is_refused(kind, sizes):
    model = tiny(kind, sizes)
    engine = saccade.Engine(model, num_pages=8)
    wanted = engine.generate([[5, 6, 7]], max_new_tokens=4)[0].tokens
    begun = engine.submit([5, 6, 7], max_new_tokens=4)
    model.train()
    for call in (engine.step, lambda: engine.submit([5], max_new_tokens=2)):
        with pytest.raises(ValueError, match=r"in training mode.*takes evaluation mode"):
            call()
    model.eval()
    assert begun.result().tokens == wanted


def test_training_mode_is_taken_where_nothing_is_random():
    model = tiny("llama", {})
    engine = saccade.Engine(model, num_pages=8)
    wanted = engine.generate([[5, 6, 7]], max_new_tokens=4)[0].tokens
    model.train()
    assert engine.generate([[5, 6, 7]], max_new_tokens=4)[0].tokens == wanted


def test_a_model_that_would_drop_activations_takes_no_request():
    config = transformers.GPT2Config(vocab_size=97, n_embd=32, n_layer=1, n_head=2, n_positions=64)
    engine = saccade.Engine(dropping := transformers.GPT2LMHeadModel(config), num_pages=8)
    dropping.train()
    with pytest.raises(ValueError, match=r"model: got GPT2LMHeadModel in training mode.*eval\(\)"):
        engine.submit([1, 2, 3])
    dropping.eval()
    assert len(engine.generate([1, 2, 3], max_new_tokens=2, stop_tokens=())[0].tokens) == 2
