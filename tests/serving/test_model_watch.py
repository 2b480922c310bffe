"""A model that is changed under an engine: noticed, and refused by what was changed."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import served
import tiny_models
import torch
import transformers
from replayed import with_graphs
from torch._dynamo.testing import CompileCounter

import saccade
from saccade.serving.model_watch import ModelWatch

PROMPT, NEW = [5, 9, 2, 7], 6


def model_of() -> Any:
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**tiny_models.SIZES)).double()


def engine_of(model: Any, **options: Any) -> saccade.Engine:
    return saccade.Engine(model, num_pages=64, page_size=4, max_sequences=4, **options)


def tokens(engine: saccade.Engine) -> list[int]:
    return engine.generate([PROMPT], max_new_tokens=NEW, stop_tokens=())[0].tokens


def cached(engine: saccade.Engine) -> int:
    """Tokens of a second request like one before that are found again."""
    longer = PROMPT + tokens(engine)
    return engine.generate([longer], max_new_tokens=1)[0].statistics.cached_tokens


def wanted(model: Any) -> list[int]:
    """Greedy tokens without a cache, by a copy."""
    peer = copy.deepcopy(model).eval()
    peer.set_attn_implementation("sdpa")
    found = list(PROMPT)
    with torch.inference_mode():
        for _ in range(NEW):
            logits = peer(torch.tensor([found]), use_cache=False).logits
            found.append(int(logits[0, -1].argmax()))
    return found[len(PROMPT) :]


def other_layer(model: Any) -> None:
    model.model.layers[1] = model_of().model.layers[1]


def other_layer_past_the_hooks(model: Any) -> None:
    model.model.layers._modules["1"] = model_of().model.layers[1]


def wrapped_projection(model: Any) -> None:
    attention = model.model.layers[0].self_attn
    attention.q_proj = torch.nn.Sequential(attention.q_proj)


def more_layers(model: Any) -> None:
    model.model.layers.append(model_of().model.layers[0])


def fewer_layers(model: Any) -> None:
    del model.model.layers[1]


CHANGES: list[tuple[Callable[[Any], Any], str]] = [
    (other_layer, "module model.layers.1, a LlamaDecoderLayer, is now a LlamaDecoderLayer"),
    (other_layer_past_the_hooks, "module model.layers.1, a LlamaDecoderLayer, is now a Llama"),
    (wrapped_projection, "module model.layers.0.self_attn.q_proj, a Linear, is now a Sequential"),
    (more_layers, "a module was added to its model.layers"),
    (fewer_layers, "a module was taken out of its model.layers"),
    (lambda model: model.half(), r"was cast from torch\.float64 to torch\.float16"),
    (lambda model: model.to("meta"), "was moved from cpu to meta"),
    (lambda model: model.set_attn_implementation("sdpa"), "implementation is 'sdpa', .* 'saccade'"),
    (lambda model: model.lm_head.register_parameter("weight", None), "lm_head.weight was taken"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_a_changed_model_is_refused_by_what_was_changed(change, message):
    model = model_of()
    engine = engine_of(model)
    assert tokens(engine) == wanted(model)
    change(model)
    asked = engine.submit(PROMPT, max_new_tokens=NEW)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=f"model: .*{message}.*; .*make another engine"):
            engine.step()
    asked.cancel()
    served.assert_nothing_is_held(engine)


# What registers a module, or casts every weight, shows in the next step; the rest in a later one.
@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_it_is_noticed_in_the_middle_of_a_request(change, message):
    model = model_of()
    engine = engine_of(model)
    engine.submit(PROMPT, max_new_tokens=200, stop_tokens=())
    for _ in range(3):
        engine.step()
    change(model)
    with pytest.raises(RuntimeError, match=message):
        for _ in range(100):
            engine.step()


def test_a_request_goes_on_once_the_model_is_put_back():
    model = model_of()
    engine, before = engine_of(model), model.model.layers[1]
    asked = engine.submit(PROMPT, max_new_tokens=NEW, stop_tokens=())
    for _ in range(3):
        engine.step()
    other_layer(model)
    with pytest.raises(RuntimeError, match=r"module model\.layers\.1"):
        engine.step()
    model.model.layers[1] = before
    assert asked.result().tokens == wanted(model)


def other_weights(model: Any, replace: Callable[[Any, Any], None]) -> None:
    """Weights of the same kind elsewhere, which give other tokens."""
    torch.manual_seed(7)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            replace(module, torch.randn_like(module.weight) * 0.2)


def new_parameter(module: Any, weight: torch.Tensor) -> None:
    module.weight = torch.nn.Parameter(weight)


def new_memory(module: Any, weight: torch.Tensor) -> None:
    module.weight.data = weight


@pytest.mark.parametrize("replace", [new_parameter, new_memory])
def test_weights_that_were_replaced_count_as_written(replace):
    model = model_of()
    engine = engine_of(model)
    before = tokens(engine)
    other_weights(model, replace)
    assert tokens(engine) == wanted(model) != before  # no page of the old ones is found
    other_weights(model, lambda module, weight: module.weight.data.neg_())


@pytest.mark.parametrize("replace", [new_parameter, new_memory])
def test_graphs_read_the_weights_where_they_lay(replace, monkeypatch):
    with_graphs(monkeypatch)
    model = model_of()
    engine = engine_of(model, cuda_graphs=True, compile=False, warm_up=False)
    assert tokens(engine) == wanted(model)
    other_weights(model, replace)
    with pytest.raises(RuntimeError, match=r"was .*, whose memory CUDA graphs read; .*LlamaFor"):
        tokens(engine)


def turn_otherwise(model: Any) -> None:
    model.model.rotary_emb.inv_freq.mul_(3.0)


def replace_rotations(model: Any) -> None:
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq * 3.0


@pytest.mark.parametrize("change", [turn_otherwise, replace_rotations])
def test_buffers_count_as_weights(change):
    model = model_of()
    for parameter in model.parameters():
        parameter.data.mul_(20)  # positions change its tokens
    engine = engine_of(model)
    before = tokens(engine)
    assert tokens(engine) == before
    assert cached(engine)
    change(model)
    assert tokens(engine) == wanted(model) != before


def test_graphs_read_buffers_where_they_lay(monkeypatch):
    with_graphs(monkeypatch)
    model = model_of()
    engine = engine_of(model, cuda_graphs=True, compile=False, warm_up=False)
    assert tokens(engine) == wanted(model)
    replace_rotations(model)
    with pytest.raises(RuntimeError, match=r"inv_freq was replaced, whose memory CUDA graphs read"):
        tokens(engine)


def test_buffers_that_a_pass_writes_are_no_weights():
    rotations = {
        "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 8, "long_factor": [4.0] * 8, "factor": 2.0,
    }  # fmt: skip
    model = tiny_models.llama(rope_parameters=rotations)
    engine = engine_of(model)
    version = engine._model.weights_version()
    assert tokens(engine) == tokens(engine)
    assert cached(engine)
    assert engine._model.weights_version() == version


def test_an_engine_that_moves_weights_is_noticed_by_one_that_was_there(monkeypatch):
    model = model_of()
    first = engine_of(model)
    second = engine_of(model, merge_products=True)
    assert tokens(first) == tokens(second) == wanted(model)
    with_graphs(monkeypatch)
    graphs = engine_of(model_of(), cuda_graphs=True, compile=False, warm_up=False)
    engine_of(graphs._model.module, merge_products=True)
    with pytest.raises(RuntimeError, match="given other memory, whose memory CUDA graphs read"):
        tokens(graphs)


def test_models_that_are_made_elsewhere_are_no_hint():
    model = model_of()
    watch = ModelWatch(model)
    model_of()
    assert [*model.model.layers[:1]] == [model.model.layers[0]]  # a container of its own
    assert watch.seems_same()
    model.model.norm.register_parameter("weight", model.model.norm.weight)
    assert not watch.seems_same()  # a hint, no more
    assert watch.change() is None and watch.seems_same()


def test_code_that_makes_modules_is_compiled_once_where_a_model_is_watched():
    model = model_of()
    watch, counter = ModelWatch(model), CompileCounter()
    compiled = torch.compile(lambda rows: model.model.layers[:1][0].mlp(rows), backend=counter)
    torch._dynamo.reset()
    for _ in range(3):
        compiled(torch.ones(1, tiny_models.SIZES["hidden_size"], dtype=torch.float64))
    assert counter.frame_count == 1 and watch.seems_same()
    torch._dynamo.reset()
