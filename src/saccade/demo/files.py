"""Files: the trained model and all results, written where the user wants them.

The model computes what Qwen2 does, so as a folder of Hugging Face's kind it needs no code of its
own, and transformers reads it offline. Such a folder takes four small files, which are written by
hand: the demo needs no other package for them.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import saccade
from saccade.demo.comparison import HEAD_DIM, HEADS, Measured
from saccade.demo.exactness import Finding
from saccade.demo.model import NORM_EPSILON, ROTARY_BASE, VOCABULARY, ByteModel, Layer
from saccade.demo.settings import DemoModelShape


def save_model(model: ByteModel, folder: Path) -> Path:
    """Write the weights and, beside them as JSON, the sizes; gives the weights' path."""
    weights = folder / "model.pt"
    torch.save(model.state_dict(), weights)
    _write(folder / "model.json", asdict(model.shape))
    return weights


def load_model(folder: Path) -> ByteModel:
    """The model that `save_model` wrote."""
    sizes = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model = ByteModel(DemoModelShape(**{**sizes, "windows": tuple(sizes["windows"])}))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


def save_results(
    path: Path,
    about: dict[str, Any],
    bits: dict[str, float],
    findings: list[Finding],
    measured: list[Measured],
) -> None:
    """Write every number that the demo printed, as JSON."""
    _write(
        path,
        {
            "device": device_name(),
            "versions": versions(),
            **about,
            "bits_per_byte": bits,
            "exactness": [
                {
                    **finding._asdict(),
                    "output": finding.output._asdict(),
                    "gradient": finding.gradient._asdict(),
                }
                for finding in findings
            ],
            "comparison": {
                "batch": 1,
                "heads": HEADS,
                "head_dim": HEAD_DIM,
                "dtype": "float32",
                "measured": [one._asdict() for one in measured],
            },
        },
    )


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str]:
    """Versions of what computed the results."""
    return {
        "saccade": saccade.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def device_name() -> str:
    """The processor, as well as the system knows it, and the threads that PyTorch uses."""
    name = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")  # Linux says more here than Python's platform module does
    if cpuinfo.exists():
        lines = cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines()
        models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        name = models[0] if models else name
    threads = torch.get_num_threads()
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def export(model: ByteModel, folder: Path) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = qwen2_config(model)
    context = model.shape.context
    settings = {"do_sample": False}
    for name, content in (
        ("config.json", config),
        ("generation_config.json", settings),
        ("tokenizer.json", byte_tokenizer()),
        ("tokenizer_config.json", tokenizer_config(context)),
    ):
        path = folder / name
        path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    write_safetensors(qwen2_weights(model), folder / "model.safetensors")
    return folder


def qwen2_config(model: ByteModel) -> dict[str, Any]:
    """The model's sizes by the names of transformers' Qwen2."""
    shape = model.shape
    windows = {window for window in shape.windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"windows: got {shape.windows}, takes one width for all layers with one")
    kinds = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY,
        "hidden_size": shape.width,
        "intermediate_size": shape.hidden,
        "num_hidden_layers": len(shape.windows),
        "num_attention_heads": shape.query_heads,
        "num_key_value_heads": shape.kv_heads,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": NORM_EPSILON,
        "rope_parameters": {"rope_type": "default", "rope_theta": ROTARY_BASE},
        # Embeddings go in at unit size, and come out as they are learned.
        "tie_word_embeddings": False,
        "use_sliding_window": bool(windows),
        # Counts the byte itself, which `saccade.masks.window` does not.
        "sliding_window": max(windows) + 1 if windows else None,
        "max_window_layers": 0,
        "layer_types": kinds,
        "bos_token_id": None,
        "eos_token_id": None,
        "dtype": "float32",
    }


def qwen2_weights(model: ByteModel) -> dict[str, Tensor]:
    """The model's weights by the names of transformers' Qwen2."""
    embedding = model.embedding.weight
    weights = {
        "model.embed_tokens.weight": F.rms_norm(embedding, (model.shape.width,), eps=NORM_EPSILON),
        "model.norm.weight": model.norm.weight,
        "lm_head.weight": embedding,
    }
    for number, layer in enumerate(model.layers):
        assert isinstance(layer, Layer)
        attention, sizes = (
            layer.attention,
            [n * model.shape.head_dim for n in layer.attention.heads],
        )
        gate, up = layer.mlp.widen.weight.chunk(2)
        own = {
            "input_layernorm.weight": layer.attention_norm.weight,
            "post_attention_layernorm.weight": layer.mlp_norm.weight,
            "self_attn.o_proj.weight": attention.combine.weight,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": layer.mlp.narrow.weight,
        }
        for kind in ("weight", "bias"):
            parts = getattr(attention.project, kind).split(sizes)
            for name, part in zip("qkv", parts, strict=True):
                own[f"self_attn.{name}_proj.{kind}"] = part
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in own.items()}
    return {name: weight.detach().float().contiguous() for name, weight in weights.items()}


def write_safetensors(weights: dict[str, Tensor], path: Path) -> None:
    """Write float32 tensors: the length of a JSON header, the header, then all numbers in a row."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, weight in weights.items():
        start, end = end, end + weight.numel() * weight.element_size()
        header[name] = {"dtype": "F32", "shape": [*weight.shape], "data_offsets": [start, end]}
    described = json.dumps(header).encode()
    described += b" " * (-len(described) % 8)
    numbers = torch.cat([weight.flatten() for weight in weights.values()])
    content = bytes(numbers.view(torch.uint8).tolist())
    path.write_bytes(len(described).to_bytes(8, "little") + described + content)


def byte_characters() -> list[str]:
    """The character by which a byte-level tokenizer writes each byte (Radford et al. 2019).

    Printable bytes stand for themselves, all others for characters from 256 on, in order.
    """
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def byte_tokenizer() -> dict[str, Any]:
    """A tokenizer whose tokens are bytes: the byte-level alphabet, and nothing is merged."""
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}
    level["use_regex"] = False
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": {character: byte for byte, character in enumerate(byte_characters())},
            "merges": [],
        },
    }


def tokenizer_config(context: int) -> dict[str, Any]:
    """How transformers loads the tokenizer."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "clean_up_tokenization_spaces": False,
        # Or transformers' tokenizer for Qwen2 adds its own.
        "unk_token": None,
        "eos_token": None,
        "pad_token": None,
    }
