"""What the engine is judged by: tiny models, and greedy generation without any cache."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any
from unittest import mock

import tiny_models
import torch
import transformers

import saccade
from saccade.serving import engine as engines
from saccade.serving.merged_products import check_merged
from saccade.serving.model import PackedModel

NAMES = ("llama", "qwen3", "gemma2", "gpt_oss", "mistral")
LENGTHS = (3, 20, 1, 33, 7, 7, 30, 12)


def mistral() -> Any:
    """All of its layers slide."""
    config = transformers.MistralConfig(**tiny_models.SIZES, head_dim=16, sliding_window=8)
    return tiny_models.sharpened(transformers.MistralForCausalLM(config)).double()


@functools.cache
def model(name: str) -> Any:
    return mistral() if name == "mistral" else tiny_models.model(name)


def prompts() -> list[list[int]]:
    """Of all lengths; the last two begin like others."""
    made = [tiny_models.tokens(1, length, length)[0].tolist() for length in LENGTHS]
    return [*made, [*made[3][:25], 5, 6], made[3]]


@functools.cache
def _tokens(name: str, prompt: tuple[int, ...]) -> list[int]:
    """A prompt, and what `uncached` has found to follow: longer texts begin as shorter ones."""
    return list(prompt)


def uncached(name: str, prompt: tuple[int, ...], new_tokens: int) -> list[int]:
    """Every token from a pass over all that stands before it, by transformers alone."""
    compared, tokens = model(name), _tokens(name, prompt)
    before = compared.config._attn_implementation
    compared.set_attn_implementation(tiny_models.OWN.get(name, "sdpa"))
    with torch.inference_mode():
        while len(tokens) < len(prompt) + new_tokens:
            logits = compared(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    compared.set_attn_implementation(before)
    return tokens[len(prompt) : len(prompt) + new_tokens]


def wanted(name: str, new_tokens: int = 10) -> list[list[int]]:
    return [uncached(name, tuple(prompt), new_tokens) for prompt in prompts()]


_TRIED: set[Any] = set()


def engine_of(served: Any, **options: Any) -> saccade.Engine:
    """An engine that tries a model only once in a way: it took a quarter of the time of such tests.

    It does so again with other pages or options, in other modes, and where products are merged.
    """

    def check(packed: PackedModel, page_size: int, asked: Mapping[str, Any], merge: bool) -> str:
        modes = (
            torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
            torch.is_autocast_enabled("cpu"), torch.get_default_dtype(),
        )  # fmt: skip
        way = served, page_size, repr(sorted(asked.items())), modes
        if merge or way not in _TRIED:
            said = check_merged(packed, page_size, asked, merge)
            if merge:
                return said
            _TRIED.add(way)
        return ""

    with mock.patch.object(engines, "check_merged", check):
        return saccade.Engine(served, **options)


def engine(name: str = "llama", **options: Any) -> saccade.Engine:
    """One whose pages are few and whose chunks are short, so that all paths are taken."""
    few = {"num_pages": 24, "page_size": 4, "max_batch_tokens": 16, "max_sequences": 6}
    if "memory" in options:
        del few["num_pages"]
    made = engine_of(model(name), **{**few, **options})
    for layer in range(tiny_models.SIZES["num_hidden_layers"]):
        for pages in made.cache.pages(layer)[:2]:
            if pages.dtype in (torch.float32, torch.float64):
                pages.fill_(torch.nan)  # what nobody wrote must not show
    return made


def tokens_of(generated: list[Any]) -> list[list[int]]:
    return [each.tokens for each in generated]


def assert_nothing_is_held(served: saccade.Engine) -> None:
    served.cache.check()
    held = served.statistics()
    assert (held.waiting, held.running) == (0, 0)
    assert held.cache.used == held.cache.host_used == held.cache.sequences == 0


class LetterTokenizer:
    """Token 3 + n is the n-th letter; special tokens have no text."""

    def encode(self, text: str) -> list[int]:
        return [3 + ord(letter) - 33 for letter in text]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(33 + token - 3) for token in token_ids if token >= 3)
