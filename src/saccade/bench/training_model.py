"""Training model: a Llama-like model of random weights, once for each attention that it tries.

The models share one set of weights, so that only activations count twice; what differs between two
steps is the attention alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from saccade.bench.case import SHORT_DTYPES, Case, short
from saccade.bench.visibility import CAUSAL

OPTIMIZER = "AdamW, fused, learning rate 1e-4"
LEARNING_RATE = 1e-4  # at 3e-4 the first steps of a wide model diverge
WEIGHTS_DEVIATION = 0.02  # of the normal distribution that weights are drawn from, as Llama's were
SEED = 0
INSTALL = "--training needs transformers 5.17 or newer: pip install 'saccade[transformers]'"


class ModelShape(NamedTuple):
    """The sizes of a model, and what one step of it takes.

    Attributes:
        tokens: of a step; a longer sequence is a batch of one, with activation checkpointing.
        lengths: of the sequences, where none are named.
    """

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    dtype: str
    tokens: int
    lengths: tuple[int, ...]


SHAPES = {
    "gpu": ModelShape(2560, 8960, 12, 20, 5, 32_000, "bfloat16", 2**14, (2048, 8192, 32768)),
    "cpu": ModelShape(256, 704, 4, 4, 2, 2048, "float32", 1024, (256, 1024, 2048)),
}


class Workload(NamedTuple):
    """Steps of a model on sequences of one length."""

    machine: str  # "gpu" or "cpu": the first word of the case's name
    shape: ModelShape
    length: int

    @property
    def batch(self) -> int:
        """How many sequences a step takes."""
        return max(1, self.shape.tokens // self.length)

    @property
    def checkpointing(self) -> bool:
        """Whether activations are computed again in the backward pass."""
        return self.length > self.shape.tokens

    @property
    def num_tokens(self) -> int:
        """Tokens of a step."""
        return self.batch * self.length

    def case(self) -> Case:
        """The attention of one layer, under the workload's name."""
        shape, length = self.shape, self.length
        dim = shape.hidden // shape.heads
        name = f"{self.machine}-training-{SHORT_DTYPES[shape.dtype]}-d{dim}-{short(length)}"
        heads, lengths, dims = (shape.heads, shape.kv_heads), (length, length), (dim, dim)
        return Case(name, self.batch, *heads, *lengths, *dims, shape.dtype, CAUSAL)

    def flops(self, parameters: int) -> int:
        """Operations of a step: 6 for each token and each weight of a product, and attention's.

        What checkpointing computes again does not count.
        """
        multiplied = parameters - self.shape.vocabulary * self.shape.hidden  # an embedding is read
        attention = self.shape.layers * self.case().flops("forward+backward")
        return 6 * multiplied * self.num_tokens + attention


class Models:
    """One set of weights, and for each attention a model that computes with them.

    Raises:
        ModuleNotFoundError: without transformers, saying how to get it.
    """

    def __init__(self, work: Workload, attentions: Sequence[str], device: torch.device) -> None:
        self.work, self.device = work, device
        self.by_attention = {name: _model(work, name, device) for name in attentions}
        first, *others = self.by_attention.values()
        for model in others:
            model.load_state_dict(first.state_dict(keep_vars=True), assign=True)
        self.weights: list[Tensor] = list(first.parameters())
        self.optimizer = torch.optim.AdamW(self.weights, lr=LEARNING_RATE, fused=True)

    @property
    def num_parameters(self) -> int:
        """Numbers that are trained."""
        return sum(weights.numel() for weights in self.weights)

    @torch.no_grad()
    def start(self) -> None:
        """Draw the weights, always the same ones; the optimizer forgets what it has seen."""
        self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.state.clear()
        generator = torch.Generator(self.device).manual_seed(SEED)
        for weights in self.weights:
            if weights.dim() > 1:
                weights.normal_(0.0, WEIGHTS_DEVIATION, generator=generator)
            else:
                weights.fill_(1.0)  # of a norm

    def update(self) -> None:
        """Take a step of the optimizer and drop the gradients."""
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """The Euclidean norm of all gradients, added up in float32."""
        norms = [
            torch.linalg.vector_norm(weights.grad, dtype=torch.float32)
            for weights in self.weights
            if weights.grad is not None
        ]
        return float(torch.linalg.vector_norm(torch.stack(norms)))


def require() -> None:
    """Refuse before anything is measured, if there is no model to train.

    Raises:
        ModuleNotFoundError: without transformers, or with one that is too old.
    """
    try:
        from saccade.integrations.transformers import (  # breaks public-names-only: an extra's door
            register,
        )
    except ImportError as error:
        raise ModuleNotFoundError(f"{INSTALL} ({error})") from None
    register()


def _model(work: Workload, attention: str, device: torch.device) -> Any:
    require()
    from transformers import AutoModelForCausalLM, LlamaConfig

    shape = work.shape
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=work.length,
        tie_word_embeddings=False,
    )
    with device:
        model = AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, dtype=getattr(torch, shape.dtype)
        )
    if work.checkpointing:
        with warnings.catch_warnings():  # a later transformers calls it activation checkpointing
            warnings.simplefilter("ignore", FutureWarning)
            model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def batches(work: Workload, count: int, device: torch.device) -> list[Tensor]:
    """Tokens of steps, [batch, length] each: a few are frequent, as words are (Zipf's law)."""
    generator = torch.Generator().manual_seed(SEED)
    frequency = 1 / torch.arange(1, work.shape.vocabulary + 1)
    drawn = torch.multinomial(
        frequency, count * work.num_tokens, replacement=True, generator=generator
    )
    return list(drawn.view(count, work.batch, work.length).to(device))
