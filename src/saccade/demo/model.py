"""A small transformer over bytes whose attention is `saccade.attention`: model, sampling, files.

It computes what a Qwen2 of the same sizes does and is saved as one, so that anything that runs
models of Hugging Face runs this one.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

import saccade
from saccade.serving.token_text import byte_characters

VOCABULARY = 256
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-6
# Heads of the first layer begin by looking 1, 2, 3 … bytes back, whatever these hold. A short
# training would else be spent on learning that: its loss after 100 steps is 0.2 bits a byte higher.
LOOKING_BACK = 8.0  # how strongly: the size of the bias of a channel
# Pairs of channels that have one: those that turn fastest, as others tell no bytes apart.
LOOKING_PAIRS = 5
CONTENT = 0.05  # how much of what bytes hold counts there at first

Rows = Float[Tensor, "batch heads rows head_dim"]
Hidden = Float[Tensor, "batch rows width"]


@dataclass(frozen=True)
class DemoModelShape:
    """The sizes of the byte model."""

    width: int = 192  # channels of the residual stream
    query_heads: int = 6
    kv_heads: int = 2  # each serves query_heads / kv_heads of the former
    hidden: int = 384  # channels inside each MLP
    windows: tuple[int | None, ...] = (64, None, None)  # bytes back that each layer sees; None: all
    context: int = 256  # bytes of the longest text that it is trained on

    @property
    def head_dim(self) -> int:
        """Channels of one head."""
        return self.width // self.query_heads


@dataclass
class LayerCache:
    """The keys and values of the bytes read so far, in one layer; it grows by copying."""

    key: Rows | None = None
    value: Rows | None = None

    @property
    def length(self) -> int:
        """How many bytes have been read."""
        return 0 if self.key is None else self.key.shape[2]

    def extended(self, key: Rows, value: Rows) -> tuple[Rows, Rows]:
        """Add the rows of new bytes; give all rows."""
        if self.key is not None and self.value is not None:
            key, value = torch.cat([self.key, key], 2), torch.cat([self.value, value], 2)
        self.key, self.value = key, value
        return key, value


class AttentionCall(NamedTuple):
    """What one layer gives to `saccade.attention`."""

    layer: str
    window: int | None  # None: everything before
    query: Rows
    key: Rows
    value: Rows
    softcap: float | None = None  # the bound of scores


def mask_of(window: int | None) -> saccade.masks.Mask:
    """Everything before a row, or so many rows back; a window ends at the row itself."""
    return saccade.masks.causal() if window is None else saccade.masks.window(window)


class Attention(nn.Module):
    """Grouped-query attention with rotary positions, over a window or over everything before."""

    def __init__(self, shape: DemoModelShape, window: int | None) -> None:
        super().__init__()
        dim = shape.head_dim
        self.heads = (shape.query_heads, shape.kv_heads, shape.kv_heads)
        self.head_dim = dim
        self.window = window
        self.mask = mask_of(window)
        self.project = nn.Linear(shape.width, sum(self.heads) * dim)
        self.combine = nn.Linear(shape.query_heads * dim, shape.width, bias=False)

    def rows(self, hidden: Hidden, first_position: int) -> tuple[Rows, Rows, Rows]:
        """Query, key and value of each byte; the first stands at `first_position`."""
        projected = self.project(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        query, key, value = projected.split(self.heads, dim=1)
        return rotate(query, first_position), rotate(key, first_position), value

    @torch.no_grad()
    def look_back(self) -> None:
        """Let each head that shares a key head begin by looking so many bytes back: 1, 2, 3 …

        All keys get one bias, and a query the same turned back by the angles of its distance: their
        product, after both are turned by their positions, is largest at that distance. The pair
        that hardly turns takes this largest product away again, as a shift that softmax does not
        see: scores of hundreds would leave few digits for what an lse is compared with.
        """
        queries, keys, _ = self.heads
        self.project.weight[: (queries + keys) * self.head_dim].mul_(CONTENT)
        biases = self.project.bias.view(-1, self.head_dim)
        pairs, steady = min(LOOKING_PAIRS, self.head_dim // 2 - 1), self.head_dim // 2 - 1
        upright = torch.zeros(1, 1, 1, self.head_dim)
        upright[..., :pairs] = LOOKING_BACK
        biases[queries : queries + keys] = upright.view(-1)
        for head in range(queries):
            biases[head] = rotate(upright, -1 - head % (queries // keys)).view(-1)
        shift = LOOKING_BACK * pairs**0.5
        biases[:queries, steady], biases[queries : queries + keys, steady] = shift, -shift

    def forward(self, hidden: Hidden, cache: LayerCache | None) -> Hidden:
        """The attention of each byte over those it sees."""
        query, key, value = self.rows(hidden, cache.length if cache else 0)
        if cache is not None:
            key, value = cache.extended(key, value)
        output = saccade.attention(query, key, value, mask=self.mask)
        return self.combine(output.transpose(1, 2).flatten(2))


class GatedMLP(nn.Module):
    """SwiGLU: one half of the hidden channels opens or closes the other (Shazeer 2020)."""

    def __init__(self, shape: DemoModelShape) -> None:
        super().__init__()
        self.widen = nn.Linear(shape.width, 2 * shape.hidden, bias=False)
        self.narrow = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, hidden: Hidden) -> Hidden:
        """Each byte's channels, worked on by themselves."""
        gate, content = self.widen(hidden).chunk(2, dim=-1)
        return self.narrow(F.silu(gate) * content)


class Layer(nn.Module):
    """Attention and an MLP, each added to the residual stream."""

    def __init__(self, shape: DemoModelShape, window: int | None) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(shape.width, NORM_EPSILON)
        self.attention = Attention(shape, window)
        self.mlp_norm = nn.RMSNorm(shape.width, NORM_EPSILON)
        self.mlp = GatedMLP(shape)

    def forward(self, hidden: Hidden, cache: LayerCache | None) -> Hidden:
        """The residual stream with what this layer adds."""
        hidden = hidden + self.attention(self.attention_norm(hidden), cache)
        return hidden + self.mlp(self.mlp_norm(hidden))


class ByteModel(nn.Module):
    """Predicts the next byte of a text from those before it."""

    def __init__(self, shape: DemoModelShape) -> None:
        super().__init__()
        self.shape = shape
        self.embedding = nn.Embedding(VOCABULARY, shape.width)
        self.layers = nn.ModuleList(Layer(shape, window) for window in shape.windows)
        self.norm = nn.RMSNorm(shape.width, NORM_EPSILON)
        self._initialise()

    def _initialise(self) -> None:
        """Small weights, and smaller ones where a layer adds to the residual stream."""
        for name, weight in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(weight)
            elif weight.dim() == 2:
                added = name.endswith(("combine.weight", "narrow.weight"))
                deviation = 0.02 if name.startswith("embedding") else weight.shape[1] ** -0.5
                scale = (2 * len(self.layers)) ** -0.5 if added else 1.0
                nn.init.normal_(weight, std=deviation * scale)
        first = self.layers[0]
        assert isinstance(first, Layer)
        first.attention.look_back()

    @property
    def num_parameters(self) -> int:
        """How many numbers are learned; the embedding counts once, it is the output layer too."""
        return sum(weight.numel() for weight in self.parameters())

    def forward(
        self, tokens: Int[Tensor, "batch rows"], cache: list[LayerCache] | None = None
    ) -> Float[Tensor, "batch rows byte"]:
        """Logits of the next byte after each of `tokens`, which follow those in the cache."""
        hidden = self.embed(tokens)
        for index, layer in enumerate(self.layers):
            hidden = layer(hidden, cache[index] if cache else None)
        return F.linear(self.norm(hidden), self.embedding.weight)

    def embed(self, tokens: Int[Tensor, "batch rows"]) -> Hidden:
        """The residual stream before the first layer: each byte's channels at unit size.

        The weights themselves are small enough to give logits too.
        """
        return F.rms_norm(self.embedding(tokens), (self.shape.width,), eps=NORM_EPSILON)

    def empty_cache(self) -> list[LayerCache]:
        """The cache of texts of which nothing has been read, by layer."""
        return [LayerCache() for _ in self.layers]

    @torch.no_grad()
    def attention_calls(self, tokens: Int[Tensor, "batch rows"]) -> list[AttentionCall]:
        """The queries, keys and values that each layer attends with on a text."""
        calls, hidden = [], self.embed(tokens)
        for number, layer in enumerate(self.layers, start=1):
            assert isinstance(layer, Layer)
            rows = layer.attention.rows(layer.attention_norm(hidden), 0)
            window = layer.attention.window
            name = f"{number} ({'causal' if window is None else f'window {window}'})"
            calls.append(AttentionCall(name, window, *rows))
            hidden = layer(hidden, None)
        return calls


def rotate(rows: Rows, first_position: int) -> Rows:
    """Turn pairs of channels by angles that grow with the position (rotary, Su et al. 2021)."""
    half = rows.shape[-1] // 2
    frequencies = ROTARY_BASE ** (-torch.arange(half, device=rows.device) / half)
    positions = torch.arange(first_position, first_position + rows.shape[2], device=rows.device)
    angles = positions[:, None] * frequencies
    cosine, sine = angles.cos(), angles.sin()
    first, second = rows[..., :half], rows[..., half:]
    return torch.cat([first * cosine - second * sine, second * cosine + first * sine], -1)


# ---- sampling ------------------------------------------------------------------------------------

SEARCHED_BYTES = 10_000


class TextSampling(NamedTuple):
    """How a byte is drawn: only the `top_k` likeliest, sharpened by a temperature below 1."""

    temperature: float = 0.7
    top_k: int = 40
    seed: int = 0


@torch.no_grad()
def generate(model: ByteModel, prompt: bytes, new_bytes: int, sampling: TextSampling) -> bytes:
    """The bytes that the model writes after the prompt.

    The text stays within the length that the model was trained on: of a long prompt only the end
    is read, and fewer bytes than asked for are written where they do not fit at all.
    """
    new_bytes = min(new_bytes, model.shape.context - 1)
    read = prompt[-(model.shape.context - new_bytes) :] or b"\n"
    generator = torch.Generator().manual_seed(sampling.seed)
    cache = model.empty_cache()
    logits = model(torch.tensor([list(read)]), cache)
    written = bytearray()
    while True:
        written.append(draw(logits[0, -1], sampling, generator))
        if len(written) == new_bytes:
            return bytes(written)
        # One query row against all keys so far: masks are aligned at the bottom right, so this
        # row stands beside the last key.
        logits = model(torch.tensor([[written[-1]]]), cache)


def draw(logits: Float[Tensor, " byte"], sampling: TextSampling, generator: torch.Generator) -> int:
    """One byte from the likeliest ones."""
    likeliest = logits.topk(min(sampling.top_k, len(logits)))
    weights = (likeliest.values / sampling.temperature).softmax(-1)
    return int(likeliest.indices[torch.multinomial(weights, 1, generator=generator)])


def opening(content: UInt8[Tensor, " bytes"], length: int) -> bytes:
    """A prompt from the middle of a text: the first words of a line that begins with a letter."""
    middle = bytes(content[len(content) // 2 :][:SEARCHED_BYTES].tolist())
    lines = middle.split(b"\n")[1:] or [middle]
    chosen = next((line for line in lines if len(line) > 20 and line[:1].isalpha()), middle)
    piece = chosen[:length]
    last_space = piece.rstrip().rfind(b" ")
    return piece[: last_space + 1] if last_space > length // 4 else piece


@torch.no_grad()
def cache_error(model: ByteModel, tokens: Int[Tensor, " rows"]) -> float:
    """How far logits computed byte by byte with a cache are from those computed at once."""
    cache = model.empty_cache()
    stepwise = torch.cat([model(token.view(1, 1), cache) for token in tokens], dim=1)
    return float((stepwise - model(tokens.view(1, -1))).abs().max())


# ---- files ---------------------------------------------------------------------------------------


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write JSON as a person reads it."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def save_model(model: ByteModel, folder: Path) -> Path:
    """Write the weights and, beside them as JSON, the sizes; gives the weights' path."""
    weights = folder / "model.pt"
    torch.save(model.state_dict(), weights)
    write_json(folder / "model.json", asdict(model.shape))
    return weights


def load_model(folder: Path) -> ByteModel:
    """The model that `save_model` wrote."""
    sizes = json.loads((folder / "model.json").read_text(encoding="utf-8"))
    model = ByteModel(DemoModelShape(**{**sizes, "windows": tuple(sizes["windows"])}))
    model.load_state_dict(torch.load(folder / "model.pt", weights_only=True))
    return model.eval()


def export(model: ByteModel, folder: Path) -> Path:
    """Write config.json, model.safetensors and the tokenizer's files; gives the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / "config.json", qwen2_config(model))
    write_json(folder / "generation_config.json", {"do_sample": False})
    write_json(folder / "tokenizer.json", byte_tokenizer())
    write_json(folder / "tokenizer_config.json", tokenizer_config(model.shape.context))
    write_safetensors(qwen2_weights(model), folder / "model.safetensors")
    return folder


def qwen2_config(model: ByteModel) -> dict[str, Any]:
    """The model's sizes by the names of transformers' Qwen2."""
    shape = model.shape
    windows = {window for window in shape.windows if window is not None}
    if len(windows) > 1:
        raise ValueError(f"windows: got {shape.windows}, takes one width for all layers with one")
    layer_types = ["full_attention" if w is None else "sliding_attention" for w in shape.windows]
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
        "layer_types": layer_types,
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
        attention = layer.attention
        sizes = [heads * model.shape.head_dim for heads in attention.heads]
        gate, up = layer.mlp.widen.weight.chunk(2)
        named = {
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
                named[f"self_attn.{name}_proj.{kind}"] = part
        weights |= {f"model.layers.{number}.{name}": weight for name, weight in named.items()}
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
