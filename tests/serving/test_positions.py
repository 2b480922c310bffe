"""How long a request may be, where rotations past a length follow the longest of a step."""

import copy
from typing import Any

import pytest
import tiny_models
import torch
import transformers

import saccade
from saccade.serving.model import PackedModel

FIRST = 32
LONGROPE = {
    "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": FIRST,
    "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 8.0,
}  # fmt: skip
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}


def model_of(rope: dict[str, Any], positions: int) -> Any:
    torch.manual_seed(0)
    sizes = tiny_models.SIZES | {"max_position_embeddings": positions, "eos_token_id": None}
    config = transformers.LlamaConfig(**sizes, rope_parameters=rope, initializer_range=0.4)
    return transformers.LlamaForCausalLM(config).double().eval()


def without_long_rotations(monkeypatch: Any) -> None:
    """As where there are CUDA graphs."""
    monkeypatch.setattr(PackedModel, "turn_by_rows", lambda model: None)


@pytest.mark.parametrize(("rope", "positions"), [(LONGROPE, 256), (DYNAMIC, FIRST)])
def test_rotations_that_follow_the_longest_request_bound_all(rope, positions, monkeypatch):
    without_long_rotations(monkeypatch)
    model = model_of(rope, positions)
    with pytest.raises(ValueError, match=rf"max_length: got 256, takes at most {FIRST}, past"):
        saccade.Engine(model, num_pages=64, page_size=4, max_length=256)
    engine = saccade.Engine(model, num_pages=64, page_size=4)
    assert engine.max_length == FIRST
    with pytest.raises(ValueError, match=rf"takes fewer than max_length, {FIRST}"):
        engine.submit([5] * FIRST)
    prompts = [[7, 5, 9], [*range(20, 20 + FIRST - 6)]]
    found = engine.generate(prompts, max_new_tokens=6)
    peer = model_of(rope, positions)
    for prompt, completion in zip(prompts, found, strict=True):
        wanted = peer.generate(torch.tensor([prompt]), max_new_tokens=6, do_sample=False)
        assert completion.tokens == wanted[0, len(prompt) :].tolist()


@pytest.mark.parametrize("rope_type", ["default", "linear", "yarn"])
def test_rotations_of_positions_alone_have_no_bound(rope_type):
    rope = {"rope_type": rope_type, "rope_theta": 1e4, "factor": 4.0}
    assert saccade.Engine(model_of(rope, 64), num_pages=64, max_length=512).max_length == 512


def test_a_model_is_as_it_was_after_its_positions_were_tried():
    model = model_of(DYNAMIC, FIRST)
    before = model.model.rotary_emb.inv_freq.clone()
    with pytest.raises(ValueError, match="max_length"):
        saccade.Engine(model, num_pages=64, max_length=256)
    assert torch.equal(model.model.rotary_emb.inv_freq, before)


def test_a_bound_that_a_config_tells_takes_few_passes(monkeypatch):
    without_long_rotations(monkeypatch)
    passes = []
    probe = PackedModel.probe
    monkeypatch.setattr(
        PackedModel, "probe", lambda *given, **options: passes.append(0) or probe(*given, **options)
    )
    assert saccade.Engine(model_of(LONGROPE, 2**17), num_pages=16).max_length == FIRST
    assert len(passes) < 16


def test_a_bound_that_no_config_tells_is_found(monkeypatch):
    without_long_rotations(monkeypatch)
    model = model_of(LONGROPE | {"original_max_position_embeddings": 45}, 256)
    model.model.rotary_emb.config = copy.deepcopy(model.config)
    model.config.rope_parameters["original_max_position_embeddings"] = 9
    assert saccade.Engine(model, num_pages=64).max_length == 45
