"""Tiny: a model with random weights, a tokenizer and texts, all made in memory."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit

WORDS = [f"w{number}" for number in range(93)]
VOCABULARY = {
    word: index for index, word in enumerate(["<pad>", "<bos>", "<eos>", "<unk>", *WORDS])
}
CHAT = (
    "{% for message in messages %}{{ message['content'] + ' ' }}"
    "{% if message['role'] == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
)


SIZES: dict[str, Any] = {
    "vocab_size": len(VOCABULARY), "hidden_size": 64, "intermediate_size": 96,
    "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip


class Run(NamedTuple):
    """Who attends, and whether in float64 from end to end."""

    attention: str
    exact: bool

    def model(self) -> Any:
        """A causal model with grouped heads, a layer with a window and one without."""
        config = transformers.Qwen3Config(
            **SIZES,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=256,
            use_sliding_window=True,
            sliding_window=8,
            layer_types=["sliding_attention", "full_attention"],
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        made = transformers.AutoModelForCausalLM.from_config(
            config, attn_implementation=self.attention
        )
        return self.finished(made)

    def classifier(self) -> Any:
        """An encoder that sees both ways."""
        config = transformers.BertConfig(
            **SIZES,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
        made = transformers.AutoModelForSequenceClassification.from_config(
            config, attn_implementation=self.attention
        )
        return self.finished(made)

    def finished(self, model: Any) -> Any:
        """Weights that make attention decide something, the same ones in every process."""
        numbers = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights.normal_(std=weights.shape[-1] ** -0.5, generator=numbers)
        return model.double() if self.exact else model

    @property
    def precision(self) -> dict[str, bool]:
        """What turns a tool's own mixed precision off where float64 is asked for."""
        return {"bf16": False} if self.exact else {}


def tokenizer(padding_side: str = "right") -> Any:
    """Words split at spaces."""
    words = Tokenizer(WordLevel(VOCABULARY, unk_token="<unk>"))
    words.pre_tokenizer = WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>",
        unk_token="<unk>", padding_side=padding_side, chat_template=CHAT,
    )  # fmt: skip


def texts(count: int, shortest: int = 3, longest: int = 20, seed: int = 0) -> list[str]:
    """Texts of unequal length, every one another."""
    numbers = random.Random(seed)
    return [
        " ".join(numbers.choices(WORDS, k=numbers.randint(shortest, longest))) for _ in range(count)
    ]


def rows(count: int, **lengths: int) -> list[dict[str, list[int]]]:
    """The same as token numbers, as a Trainer takes them."""
    read = tokenizer()
    return [{"input_ids": read(text)["input_ids"]} for text in texts(count, **lengths)]


def padded(count: int, length: int = 12) -> dict[str, torch.Tensor]:
    """One batch, padded on the right."""
    batch = tokenizer()(
        texts(count, longest=length), padding="max_length", max_length=length, return_tensors="pt"
    )
    ids, real = batch["input_ids"], batch["attention_mask"]
    return {"input_ids": ids, "attention_mask": real, "labels": ids.masked_fill(real == 0, -100)}
