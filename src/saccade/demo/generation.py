"""Generation: write on from a prompt, one byte at a time, with a cache of keys and values."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor

from saccade.demo.model import ByteModel

SEARCHED_BYTES = 10_000


class Sampling(NamedTuple):
    """How a byte is drawn: only the `top_k` likeliest, sharpened by a temperature below 1."""

    temperature: float = 0.7
    top_k: int = 40
    seed: int = 0


@torch.no_grad()
def generate(model: ByteModel, prompt: bytes, new_bytes: int, sampling: Sampling) -> bytes:
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


def draw(logits: Float[Tensor, " byte"], sampling: Sampling, generator: torch.Generator) -> int:
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
