"""Families of models of transformers, as tiny as can be, with the inputs that they take."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tiny_models
import torch
import transformers
from torch import Tensor

Inputs = dict[str, Tensor]
SIZES: dict[str, Any] = tiny_models.SIZES | {
    "hidden_size": 32, "intermediate_size": 32, "max_position_embeddings": 64,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    "num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
}  # fmt: skip
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4, "q_lora_rank": None, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16, "v_head_dim": 12, "first_k_dense_replace": 1, "n_routed_experts": 4,
    "num_experts_per_tok": 2, "moe_intermediate_size": 16, "n_group": 1, "topk_group": 1,
}  # fmt: skip
GPT: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
GROUPED = {**SIZES, "head_dim": 8}
UNGROUPED = {**SIZES, "num_key_value_heads": 4}
WINDOW = {**GROUPED, "sliding_window": 4}
ALTERNATING = {**WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
SPECIAL = {name: SIZES[name] for name in SIZES if name.endswith("token_id")}
BART: dict[str, Any] = {
    "vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, **SPECIAL,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 32,
    "decoder_ffn_dim": 32, "max_position_embeddings": 64, "decoder_start_token_id": 1,
    "forced_eos_token_id": None,
}  # fmt: skip
T5: dict[str, Any] = {
    "vocab_size": 97, "d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 4,
    "decoder_start_token_id": 0, **SPECIAL,
}  # fmt: skip
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 16, "patch_size": 4, "projection_dim": 16,
}  # fmt: skip
WAVES: dict[str, Any] = {
    **SIZES, "conv_dim": (16, 16), "conv_kernel": (10, 4), "conv_stride": (5, 4),
    "num_feat_extract_layers": 2, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2,
}  # fmt: skip
IMAGE_TOKEN = 2  # which no text has


@dataclass(frozen=True)
class Family:
    """One family: how a tiny model of it is made and called.

    Attributes:
        name: what stands in the table.
        model: the class. config: its config's class, if it is named otherwise.
        kind: "decoder", "encoder", "encoder-decoder", "vision", "audio" or "image and text".
        sizes: the arguments of the config.
        inputs: of a forward pass.
        judge: what transformers itself attends with, where its sdpa is wrong (it leaves out
            softcap, with which transformers 5.17 gives it all the same).
    """

    name: str
    model: str
    kind: str
    sizes: dict[str, Any]
    inputs: Callable[[], Inputs]
    config: str = ""
    compare: str = ""

    @property
    def model_class(self) -> Any:
        return getattr(transformers, self.model)

    @property
    def writes(self) -> bool:
        """Whether it generates text."""
        return hasattr(self.model_class, "generate") and self.model_class.can_generate()

    def make(self, implementation: str) -> Any:
        """The model, with weights that every implementation gets alike."""
        ending = next(each for each in ENDINGS if self.model.endswith(each))
        kind = getattr(transformers, self.config or self.model.removesuffix(ending) + "Config")
        config = kind(**copy.deepcopy(self.sizes))  # models write into configs of their parts
        torch.manual_seed(0)  # of what has one dimension
        made = self.model_class._from_config(config, attn_implementation=implementation)
        if made._can_set_experts_implementation():
            made.set_experts_implementation("eager")  # the others have no float64
        if getattr(made, "generation_config", None) is not None:
            made.generation_config.eos_token_id = None  # all generate equally many tokens
        return tiny_models.sharpened(made)


ENDINGS = (
    "ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "MTModel", "Model"
)  # fmt: skip


def text(length: int = 9) -> Inputs:
    """Two texts, the second of which is shorter."""
    real = torch.ones(2, length, dtype=torch.long)
    real[1, length - 2 :] = 0
    return {"input_ids": tiny_models.tokens(2, length) * real, "attention_mask": real}


def two_texts() -> Inputs:
    return {**text(), "decoder_input_ids": tiny_models.tokens(2, 5, seed=1)}


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def pixels() -> Inputs:
    return {"pixel_values": numbers(2, 3, 16, 16)}


def pixels_and_text() -> Inputs:
    return {**text(), **pixels()}


def pixels_in_text(patches: int = 16) -> Inputs:
    texts = text(patches + 6)
    texts["input_ids"][:, 2 : 2 + patches] = IMAGE_TOKEN
    return {**texts, **pixels()}


def waves() -> Inputs:
    return {"input_values": numbers(2, 400)}


def features() -> Inputs:
    return {
        "input_features": numbers(2, 8, 32), "decoder_input_ids": tiny_models.tokens(2, 5, seed=1)
    }  # fmt: skip


def decoder(name: str, model: str, sizes: dict[str, Any], **more: Any) -> Family:
    return Family(name, model, "decoder", sizes, text, **more)


def encoder(name: str, model: str, sizes: dict[str, Any], **more: Any) -> Family:
    return Family(name, model, "encoder", sizes, text, **more)


DECODERS = [
    decoder("Llama", "LlamaForCausalLM", GROUPED),
    decoder("Mistral", "MistralForCausalLM", WINDOW),
    decoder("Mixtral", "MixtralForCausalLM", {**GROUPED, **EXPERTS}),
    decoder("Qwen2", "Qwen2ForCausalLM", SIZES),
    decoder("Qwen3", "Qwen3ForCausalLM", {**ALTERNATING, "use_sliding_window": True}),
    decoder("Qwen3 MoE", "Qwen3MoeForCausalLM", {**GROUPED, **EXPERTS}),
    decoder("Gemma", "GemmaForCausalLM", GROUPED),
    decoder("Gemma 2", "Gemma2ForCausalLM", {**ALTERNATING, "query_pre_attn_scalar": 8},
            compare="eager"),
    decoder("Gemma 3", "Gemma3ForCausalLM", ALTERNATING, config="Gemma3TextConfig"),
    decoder("gpt-oss", "GptOssForCausalLM", {
        **ALTERNATING, **EXPERTS, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    }),
    decoder("Llama 4", "Llama4ForCausalLM", {
        **GROUPED, **EXPERTS, "intermediate_size_mlp": 32, "attention_chunk_size": 4,
        "layer_types": ["chunked_attention", "full_attention"],
    }, config="Llama4TextConfig"),
    decoder("Phi", "PhiForCausalLM", UNGROUPED),
    decoder("Phi-3", "Phi3ForCausalLM", SIZES),
    decoder("GPT-2", "GPT2LMHeadModel", {**GPT, "vocab_size": 97, **SPECIAL}),
    decoder("GPT-NeoX", "GPTNeoXForCausalLM", UNGROUPED),
    decoder("GPT-BigCode", "GPTBigCodeForCausalLM", {**GPT, "vocab_size": 97, **SPECIAL}),
    decoder("OPT", "OPTForCausalLM", {
        **SIZES, "ffn_dim": 32, "word_embed_proj_dim": 32, "max_position_embeddings": 64,
    }),
    decoder("BioGPT", "BioGptForCausalLM", SIZES),
    decoder("StarCoder2", "Starcoder2ForCausalLM", {**SIZES, "sliding_window": 4}),
    decoder("StableLM", "StableLmForCausalLM", SIZES),
    decoder("Cohere", "CohereForCausalLM", SIZES),
    decoder("Cohere 2", "Cohere2ForCausalLM", ALTERNATING),
    decoder("OLMo 2", "Olmo2ForCausalLM", SIZES),
    decoder("OLMoE", "OlmoeForCausalLM", {**SIZES, **EXPERTS}),
    decoder("Granite", "GraniteForCausalLM", {**SIZES, "attention_multiplier": 0.3}),
    decoder("GLM-4", "Glm4ForCausalLM", GROUPED),
    decoder("SmolLM3", "SmolLM3ForCausalLM", SIZES),
    decoder("Nemotron", "NemotronForCausalLM", GROUPED),
    decoder("EXAONE 4", "Exaone4ForCausalLM", ALTERNATING),
    decoder("DeepSeek V2", "DeepseekV2ForCausalLM", {**SIZES, **LATENT}),
    decoder("DeepSeek V3", "DeepseekV3ForCausalLM", {**SIZES, **LATENT}),
    decoder("DeepSeek V3.2", "DeepseekV32ForCausalLM", SIZES),
    decoder("Qwen3-Next", "Qwen3NextForCausalLM", {
        **GROUPED, **EXPERTS, "layer_types": ["linear_attention", "full_attention"],
        "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
        "linear_value_head_dim": 8, "shared_expert_intermediate_size": 16,
    }),
    decoder("Bamba", "BambaForCausalLM", {
        **SIZES, "attn_layer_indices": [1], "mamba_n_heads": 8, "mamba_d_head": 8,
        "mamba_n_groups": 1, "mamba_d_state": 8,
    }),
    decoder("Jamba", "JambaForCausalLM", {
        **SIZES, **EXPERTS, "attn_layer_period": 2, "attn_layer_offset": 1,
        "use_mamba_kernels": False, "mamba_d_state": 8, "mamba_dt_rank": 4,
    }),
    decoder("LFM2", "Lfm2ForCausalLM", {**SIZES, "layer_types": ["conv", "full_attention"]}),
    decoder("BLOOM", "BloomForCausalLM", {"hidden_size": 32, "n_layer": 2, "n_head": 4}),
    decoder("MPT", "MptForCausalLM", {"d_model": 32, "n_heads": 4, "n_layers": 2}),
    decoder("Falcon", "FalconForCausalLM", UNGROUPED),
    decoder("GPT-J", "GPTJForCausalLM", {**GPT, "vocab_size": 97, "rotary_dim": 4, **SPECIAL}),
]  # fmt: skip
ENCODERS = [
    encoder("BERT", "BertForMaskedLM", SIZES),
    encoder("RoBERTa", "RobertaForMaskedLM", SIZES),
    encoder("XLM-R", "XLMRobertaForMaskedLM", SIZES),
    encoder("DistilBERT", "DistilBertForMaskedLM", {
        "vocab_size": 97, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 32, **SPECIAL,
    }),
    encoder("ELECTRA", "ElectraForMaskedLM", {**SIZES, "embedding_size": 32}),
    encoder("ALBERT", "AlbertForMaskedLM", {**SIZES, "embedding_size": 16}),
    encoder("ModernBERT", "ModernBertForMaskedLM", {**SIZES, "local_attention": 4}),
    encoder("DeBERTa-v2", "DebertaV2ForMaskedLM", SIZES),
    encoder("BigBird", "BigBirdForMaskedLM", SIZES),
]  # fmt: skip
OTHERS = [
    Family("T5", "T5ForConditionalGeneration", "encoder-decoder", T5, two_texts),
    Family("mT5", "MT5ForConditionalGeneration", "encoder-decoder", T5, two_texts),
    Family("BART", "BartForConditionalGeneration", "encoder-decoder", BART, two_texts),
    Family("mBART", "MBartForConditionalGeneration", "encoder-decoder", BART, two_texts),
    Family("Pegasus", "PegasusForConditionalGeneration", "encoder-decoder", BART, two_texts),
    Family("Marian", "MarianMTModel", "encoder-decoder", BART, two_texts),
    Family("M2M-100", "M2M100ForConditionalGeneration", "encoder-decoder", BART, two_texts),
    Family("LED", "LEDForConditionalGeneration", "encoder-decoder", BART, two_texts),
    Family("Whisper", "WhisperForConditionalGeneration", "audio", {
        **BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 64,
        "suppress_tokens": [], "begin_suppress_tokens": [],
    }, features),
    Family("wav2vec 2.0", "Wav2Vec2Model", "audio", WAVES, waves),
    Family("HuBERT", "HubertModel", "audio", WAVES, waves),
    Family("AST", "ASTModel", "audio", {
        **VISION, "num_mel_bins": 16, "max_length": 32, "frequency_stride": 4, "time_stride": 4,
    }, lambda: {"input_values": numbers(2, 32, 16)}),
    Family("ViT", "ViTModel", "vision", VISION, pixels),
    Family("DeiT", "DeiTModel", "vision", VISION, pixels),
    Family("DINOv2", "Dinov2Model", "vision", {**VISION, "mlp_ratio": 1}, pixels),
    Family("SigLIP", "SiglipVisionModel", "vision", VISION, pixels),
    Family("VideoMAE", "VideoMAEModel", "vision", {**VISION, "num_frames": 2, "tubelet_size": 2},
           lambda: {"pixel_values": numbers(2, 2, 3, 16, 16)}),
    Family("SAM", "SamVisionModel", "vision", VISION, pixels),
    Family("CLIP", "CLIPModel", "image and text",
           {"text_config": {**SIZES, "projection_dim": 16}, "vision_config": VISION,
            "projection_dim": 16}, pixels_and_text),
    Family("LLaVA", "LlavaForConditionalGeneration", "image and text", {
        "text_config": transformers.LlamaConfig(**GROUPED),
        "vision_config": transformers.CLIPVisionConfig(**VISION), "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -1,
    }, pixels_in_text),
    Family("PaliGemma", "PaliGemmaForConditionalGeneration", "image and text", {
        "text_config": transformers.GemmaConfig(**GROUPED),
        "vision_config": transformers.SiglipVisionConfig(**VISION),
        "image_token_index": IMAGE_TOKEN, "projection_dim": 32, "hidden_size": 32,
    }, pixels_in_text),
]  # fmt: skip
LINEAR: dict[str, Any] = {
    **GROUPED, "layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4,
    "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
}  # fmt: skip
MAMBA: dict[str, Any] = {
    **SIZES, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8,
    "mamba_chunk_size": 4,
}  # fmt: skip
SHARED: dict[str, Any] = {
    **SIZES, "num_hidden_layers": 4, "num_key_value_heads": 4, "mamba_d_state": 8,
    "n_mamba_heads": 4, "layers_block_type": ["linear_attention", "hybrid"] * 2,
}  # fmt: skip
# Layers with states, beside attention or alone; those of DECODERS are not repeated.
HYBRIDS = [
    decoder("Qwen3.5", "Qwen3_5ForCausalLM", LINEAR, config="Qwen3_5TextConfig"),
    decoder("Qwen3.5 MoE", "Qwen3_5MoeForCausalLM", {
        **LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16,
    }, config="Qwen3_5MoeTextConfig"),
    decoder("OLMo Hybrid", "OlmoHybridForCausalLM", LINEAR),
    decoder("LFM2 MoE", "Lfm2MoeForCausalLM", {
        **SIZES, **EXPERTS, "layer_types": ["conv", "full_attention"], "num_dense_layers": 1,
    }),
    decoder("Falcon-H1", "FalconH1ForCausalLM", {**MAMBA, "mamba_d_ssm": 64}),
    decoder("Granite 4", "GraniteMoeHybridForCausalLM", {
        **MAMBA, **EXPERTS, "layer_types": ["linear_attention", "full_attention"],
        "shared_intermediate_size": 16,
    }, config="GraniteMoeHybridConfig"),
    decoder("Nemotron-H", "NemotronHForCausalLM", {
        **GROUPED, **EXPERTS, "num_hidden_layers": 4, "mamba_num_heads": 8, "mamba_head_dim": 8,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "mlp"], "n_groups": 1,
        "ssm_state_size": 8, "chunk_size": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1,
        "moe_shared_expert_intermediate_size": 16,
    }),
    decoder("Kimi Linear", "KimiLinearForCausalLM", {
        **SIZES, **LATENT, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "num_experts_per_token": 2, "linear_head_dim": 8, "linear_num_heads": 4,
    }),
    decoder("Bailing Hybrid", "BailingHybridForCausalLM", {
        **SIZES, **LATENT, "layer_types": ["linear_attention", "full_attention"], "num_experts": 4,
        "head_dim": 8,
    }),
    decoder("ZAYA1", "ZayaForCausalLM", {**GROUPED, **EXPERTS, "num_experts_per_tok": 1}),
    decoder("Mamba", "MambaForCausalLM", {**SIZES, "state_size": 8}),
    decoder("Mamba-2", "Mamba2ForCausalLM", {
        **SIZES, "num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 1, "chunk_size": 4,
    }),
    decoder("Falcon Mamba", "FalconMambaForCausalLM", {**SIZES, "state_size": 8}),
    decoder("Zamba", "ZambaForCausalLM", {
        **SHARED, "n_mamba_heads": 2, "mamba_dt_rank": 4, "attention_head_dim": 16,
    }),
    decoder("Zamba2", "Zamba2ForCausalLM", {
        **SHARED, "mamba_ngroups": 1, "attention_head_dim": 16, "num_mem_blocks": 1,
        "chunk_size": 4,
    }),
]  # fmt: skip
FAMILIES = {family.name: family for family in (*DECODERS, *ENCODERS, *OTHERS)}
