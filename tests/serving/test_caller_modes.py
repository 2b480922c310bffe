"""An engine gives the same tokens, whatever modes of PyTorch its callers are in."""

import contextlib
import copy
import functools
import inspect
import random
from typing import Any

import interrupts
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


def modes() -> tuple[Any, ...]:
    depth = torch.autocast_increment_nesting() - 1
    torch.autocast_decrement_nesting()
    return (
        torch.is_inference_mode_enabled(), torch.is_grad_enabled(),
        torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu"), depth,
    )  # fmt: skip


@pytest.mark.parametrize("asked_in", MODES)
def test_an_interrupt_where_modes_change_leaves_the_callers(asked_in: str) -> None:
    """Wherever PyTorch enters or leaves a mode in a step, and where the engine itself does."""
    of, before, chance, instruction = engine(), modes(), random.Random(0), 0
    entering = [str(inspect.getsourcefile(mode)) for mode in (torch.no_grad, torch.autocast)]
    while True:
        interrupt = interrupts.Interrupt(
            instruction, "serving/caller_modes.py", *entering, instructions=True
        )
        completion = of.submit(served.prompts()[3], max_new_tokens=2, stop_tokens=())
        with MODES[asked_in]():
            inside = modes()
            try:
                with interrupt.armed():
                    of.run()
            except KeyboardInterrupt:
                pass
            assert modes() == inside
            of.run()
        assert modes() == before
        assert completion.result().tokens == wanted()[3][:2]
        if not interrupt.came:
            break
        instruction += 1 + chance.randrange(5)
    assert instruction > 100
