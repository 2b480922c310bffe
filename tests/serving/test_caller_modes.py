"""An engine gives the same tokens, whatever modes of PyTorch its callers are in."""

import contextlib
import copy
import functools
from typing import Any

import pytest
import served
import torch

import saccade

DRAWN = {"temperature": 0.9, "top_k": 9, "repetition_penalty": 1.2, "seed": 5}
MODES: dict[str, Any] = {
    "none": contextlib.nullcontext,
    "inference": torch.inference_mode,
    "autocast": functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16),
}


@functools.cache
def model() -> Any:
    """In float32, which autocast casts."""
    return copy.deepcopy(served.model("llama")).float()


def engine() -> saccade.Engine:
    return saccade.Engine(model(), num_pages=40, page_size=4, max_sequences=6)


def tokens(of: saccade.Engine) -> list[list[int]]:
    greedy = of.generate(served.prompts()[:4], max_new_tokens=6, stop_tokens=())
    drawn = of.generate(served.prompts()[:2], max_new_tokens=6, stop_tokens=(), **DRAWN)
    return [each.tokens for each in (*greedy, *drawn)]


@functools.cache
def wanted() -> list[list[int]]:
    return tokens(engine())


@pytest.mark.parametrize("made_in", MODES)
@pytest.mark.parametrize("asked_in", MODES)
def test_tokens_are_the_same_in_every_mode(made_in: str, asked_in: str) -> None:
    with MODES[made_in]():
        of = engine()
    with MODES[asked_in]():
        assert tokens(of) == wanted()
    # All of what was computed is found again, and written to, by callers in no mode.
    assert tokens(of) == wanted()


def test_callers_keep_their_modes() -> None:
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        tokens(engine())
        assert torch.is_inference_mode_enabled() and torch.is_autocast_enabled("cpu")
