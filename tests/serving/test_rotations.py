"""Rotations that become others past a length follow each request's own."""

import functools
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import interrupts
import pytest
import served
import tiny_models
import torch
import transformers

import saccade
from saccade.serving.rotations import LongRotations

FIRST = 32
NEW = 12
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": FIRST,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0,
}  # fmt: skip
SIZES = tiny_models.SIZES | {"eos_token_id": None, "initializer_range": 0.4}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SIZES, rope_parameters=dict(LONGROPE))
    return transformers.LlamaForCausalLM(config).double().eval()


def phi3() -> Any:
    torch.manual_seed(0)
    config = transformers.Phi3Config(
        **SIZES, original_max_position_embeddings=FIRST, rope_parameters=dict(LONGROPE)
    )
    return transformers.Phi3ForCausalLM(config).double().eval()


# Short for good; growing past the length; long from the beginning; as long as it; longer by one.
PROMPTS = [
    [7, 5, 9], [*range(20, 46)], [*range(10, 60)], [*range(3, 3 + FIRST)],
    [*range(3, 4 + FIRST)],
]  # fmt: skip


def uncached(model: Any, prompt: list[int], new: int = NEW) -> list[int]:
    """By transformers alone, from a pass over all tokens for each."""
    tokens = list(prompt)
    with torch.inference_mode():
        for _ in range(new):
            logits = model(torch.tensor([tokens]), use_cache=False).logits
            tokens.append(int(logits[0, -1].argmax()))
    return tokens[len(prompt) :]


@functools.cache
def all_uncached(make: Callable[[], Any]) -> list[list[int]]:
    peer = make()
    return [uncached(peer, prompt) for prompt in PROMPTS]


WAYS: dict[str, dict[str, Any]] = {
    "all at once": {},
    "few pages, swapped": {"num_pages": 24},
    "few pages, recomputed": {"num_pages": 24, "preemption": "recompute"},
    "ahead, in short chunks": {"run_ahead": True, "max_batch_tokens": 8, "max_sequences": 4},
    "padded": {"batch_sizes": [2, 6], "prompt_sizes": [64], "max_sequences": 6},
    "merged products": {"merge_products": True},
}  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [llama, phi3])
def test_each_request_is_turned_by_its_own_length(make, way):
    wanted = all_uncached(make)
    options = {"num_pages": 128, "page_size": 4, **WAYS[way]}
    engine = served.engine_of(make(), **options)
    assert engine.max_length == 256
    for _ in range(2):  # and where beginnings are found again
        found = engine.generate(PROMPTS, max_new_tokens=NEW)
        assert [each.tokens for each in found] == wanted
    served.assert_nothing_is_held(engine)
    if way.startswith("few"):
        assert engine.statistics().preemptions


def test_phi_3_is_served_as_its_generate_does():
    peer = phi3()
    engine = saccade.Engine(phi3(), num_pages=128, page_size=4)
    for prompt, found in zip(PROMPTS, engine.generate(PROMPTS, max_new_tokens=NEW), strict=True):
        wanted = peer.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
        assert found.tokens == wanted[0, len(prompt) :].tolist()


def test_samples_of_one_prompt_grow_past_the_length_together():
    prompt = PROMPTS[3]
    engine = saccade.Engine(llama(), num_pages=128, page_size=4)
    samples = engine.submit_samples(prompt, 3, max_new_tokens=NEW)
    wanted = all_uncached(llama)[3]
    assert [sample.result().tokens for sample in samples] == [wanted] * 3
    assert {sample.statistics.recomputed_tokens for sample in samples} == {FIRST}


def test_the_model_turns_as_before_outside_of_steps():
    model = llama()
    engine = saccade.Engine(model, num_pages=128)
    engine.generate(PROMPTS, max_new_tokens=2)
    assert "forward" not in vars(model.model.rotary_emb)
    assert uncached(model, PROMPTS[2]) == all_uncached(llama)[2]


def test_an_interrupt_leaves_the_model_turning_as_before():
    model, wanted, line = llama(), all_uncached(llama), 0
    engine = saccade.Engine(model, num_pages=128, page_size=4)
    for line in itertools.count(step=3):
        interrupt = interrupts.Interrupt(line, "serving/rotations.py", instructions=True)
        completion = engine.submit(PROMPTS[line % 2], max_new_tokens=NEW)
        try:
            with interrupt.armed():
                engine.step()
        except KeyboardInterrupt:
            pass
        assert uncached(model, PROMPTS[3], 1) == wanted[3][:1]
        assert completion.result().tokens == wanted[line % 2]
        assert "forward" not in vars(model.model.rotary_emb)
        if not interrupt.came:
            break
    assert line > 40


def test_other_threads_turn_as_before_while_a_step_is_taken():
    model = llama()
    rotations = LongRotations.of(model)
    assert rotations is not None
    with rotations.by_rows(torch.tensor([True])), ThreadPoolExecutor(1) as other:
        found = other.submit(uncached, model, PROMPTS[0], 2).result()
    assert found == all_uncached(llama)[0][:2]


def test_modules_of_unlike_lengths_are_left_to_the_bound():
    model: Any = torch.nn.ModuleList([llama(), llama()])
    assert LongRotations.of(model) is not None
    model[1].model.rotary_emb.config.rope_parameters["original_max_position_embeddings"] = 9
    assert LongRotations.of(model) is None
    assert LongRotations.of(tiny_models.llama()) is None
