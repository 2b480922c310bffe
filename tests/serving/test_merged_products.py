"""Merged products: what is merged, what others see of it, and what is refused."""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from replayed import with_graphs
from torch import Tensor

import saccade
from saccade.serving import merged_products
from saccade.serving.compiled_layers import CompiledLayers
from saccade.serving.model import PackedModel

transformers = pytest.importorskip("transformers")
PROMPTS = [[5, 9, 11, 3], [7, 2], [1, 8, 6, 4, 12, 13, 10]]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "stop_tokens": ()}


def model_of(**changes: Any) -> Any:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(  # whose q, k and v have biases, and o, gate and up none
        **{
            "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
            "tie_word_embeddings": True, **changes,
        }
    )  # fmt: skip
    return transformers.Qwen2ForCausalLM(config)


def engine_of(model: Any, **options: Any) -> saccade.Engine:
    return saccade.Engine(model, num_pages=32, merge_products=True, **options)


def tokens(engine: saccade.Engine) -> list[list[int]]:
    return [each.tokens for each in engine.generate(PROMPTS, **OPTIONS)]


def plain_tokens(model: Any) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        sequence = list(prompt)
        with torch.no_grad():
            for _ in range(OPTIONS["max_new_tokens"]):
                logits = model(torch.tensor([sequence]), use_cache=False).logits
                sequence.append(int(logits[0, -1].argmax()))
        found.append(sequence[len(prompt) :])
    return found


@pytest.fixture
def products(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of all products of merged weights."""
    seen: list[int] = []
    linear = torch.nn.functional.linear

    def noted(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        seen.append(weight.shape[0])
        return linear(rows, weight, bias)

    monkeypatch.setattr(merged_products, "F", type("F", (), {"linear": staticmethod(noted)}))
    return seen


def test_tokens_are_the_models_by_two_products_a_layer(products: list[int]) -> None:
    model = model_of()
    wanted, engine = plain_tokens(model), engine_of(model)
    assert "4 groups of products are merged" in engine.explain()
    products.clear()
    assert tokens(engine) == wanted
    steps = engine.statistics().steps
    assert products == [64, 96] * (2 * steps)  # 32 + 16 + 16 of q, k and v; gate and up
    assert plain_tokens(model) == wanted and len(products) == 4 * steps  # others are not touched


def test_the_model_is_what_it_was_for_others() -> None:
    model = model_of()
    before = copy.deepcopy(model.state_dict())
    parameters = {name: id(each) for name, each in model.named_parameters()}
    size = sum(each.nbytes for each in model.parameters())
    engine = engine_of(model)
    assert {name: id(each) for name, each in model.named_parameters()} == parameters
    assert all(torch.equal(each, before[name]) for name, each in model.state_dict().items())
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage() for each in model.parameters()
    }
    assert sum(storage.nbytes() for storage in storages.values()) == size  # nothing twice
    tokens(engine)
    assert not any("forward" in vars(each) for each in model.modules())
    assert tokens(engine_of(model)) == tokens(engine)  # a second engine finds them merged


def test_a_training_step_and_loaded_weights_are_seen(products: list[int]) -> None:
    model = model_of()
    engine = engine_of(model)
    tokens(engine)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    model(torch.tensor([PROMPTS[2]]), labels=torch.tensor([PROMPTS[2]])).loss.backward()
    optimizer.step()
    trained = plain_tokens(model)
    assert tokens(engine) == trained
    other = model_of(initializer_range=0.3)
    model.load_state_dict(other.state_dict())
    products.clear()
    assert tokens(engine) == plain_tokens(other) != trained
    assert products


def test_weights_that_were_replaced_leave_the_merged_product(products: list[int]) -> None:
    model, other = model_of(), model_of(initializer_range=0.3)
    engine = engine_of(model)
    model.load_state_dict(other.state_dict(), assign=True)  # other parameters altogether
    products.clear()
    assert tokens(engine) == plain_tokens(other)
    assert not products


def test_another_threads_pass_is_not_merged() -> None:
    model = model_of()
    engine = engine_of(model)
    group: Any = engine._model.step_layers
    assert isinstance(group, merged_products.MergedProducts)
    rows, found = torch.randn(1, 3, 32), []

    def run(_: Any) -> None:
        projection = model.model.layers[0].self_attn.q_proj
        thread = threading.Thread(target=lambda: found.append(projection(rows)))
        thread.start()
        thread.join()
        assert all(each._rows is None for each in group.groups)

    group.call(None, run)
    torch.testing.assert_close(found[0], model.model.layers[0].self_attn.q_proj(rows))


def test_an_interrupted_pass_leaves_the_model_as_it_was() -> None:
    model = model_of()
    group: Any = engine_of(model)._model.step_layers
    with pytest.raises(KeyboardInterrupt):
        group.call(None, lambda _: (_ for _ in ()).throw(KeyboardInterrupt()))
    assert not any("forward" in vars(each) for each in model.modules())


class Wrapped(torch.nn.Linear):
    """As libraries of quantisation have them."""


def replace_forward(layer: Any) -> None:
    layer.forward = layer.forward


def share_memory(layer: Any) -> None:
    layer.weight.share_memory_()


def part_of_more(layer: Any) -> None:
    more = torch.zeros(2, *layer.weight.shape)
    layer.weight.data = more[0].copy_(layer.weight.data)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda layer: setattr(layer, "__class__", Wrapped), "a layer is a Wrapped"),
        (replace_forward, "a layer's forward was replaced"),
        (lambda layer: setattr(layer, "bias", None), "some have a bias"),
        (share_memory, "a weight's memory"),
        (part_of_more, "a weight's memory"),
        (lambda layer: layer.register_forward_pre_hook(
            lambda layer, rows: (rows[0].clone(),)), ""),
    ],
)  # fmt: skip
def test_what_is_not_merged_has_a_reason(change: Any, reason: str) -> None:
    model = model_of(num_hidden_layers=1)
    change(model.model.layers[0].self_attn.k_proj)
    wanted, engine = plain_tokens(model), engine_of(model)
    if reason:
        assert f"1 groups of products are not merged: {reason}" in engine.explain()
    assert "1 groups of products are merged" in engine.explain()
    assert tokens(engine) == wanted


def test_other_types_are_refused() -> None:
    with pytest.raises(ValueError, match='merge_products: got 1, takes True, False or "auto"'):
        saccade.Engine(model_of(), merge_products=1)  # type: ignore[arg-type]


def test_products_are_merged_where_layers_are_compiled_for_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompiledLayers.__init__, "__defaults__", ("eager",))
    model = model_of()
    assert "merged" not in saccade.Engine(model, num_pages=64, compile=True).explain()
    with_graphs(monkeypatch)
    options: dict[str, Any] = {"num_pages": 64, "cuda_graphs": True, "warm_up": False}
    assert "merged" not in saccade.Engine(model, **options, compile=False).explain()
    assert "merged" not in saccade.Engine(model, **options, merge_products=False).explain()
    wanted, engine = plain_tokens(model), saccade.Engine(model, **options)
    assert "4 groups of products are merged" in engine.explain()
    assert tokens(engine) == wanted


def test_compiled_layers_merge_where_all_products_are_merged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CompiledLayers.__init__, "__defaults__", ("eager",))
    model = model_of(num_hidden_layers=1)
    replace_forward(model.model.layers[0].self_attn.k_proj)
    wanted, engine = plain_tokens(model), engine_of(model, compile=True)
    assert "1 groups of products are not merged: a layer's forward" in engine.explain()
    assert ", each product by itself, as some are not merged" in engine.explain()
    assert tokens(engine) == wanted


def test_a_model_whose_code_takes_no_views_is_served_as_it_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = model_of()
    given = merged_products.MergedGroup.product
    monkeypatch.setattr(
        merged_products.MergedGroup, "product",
        lambda self, number, rows: given(self, number, rows).view(-1),
    )  # fmt: skip
    engine = engine_of(model)
    assert "no products are merged" in engine.explain()
    assert tokens(engine) == plain_tokens(model)


def test_layers_that_are_called_twice_or_apart_are_no_group() -> None:
    class Twice(torch.nn.Module):
        def __init__(self, inner: torch.nn.Linear) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, rows: Tensor) -> Tensor:
            return self.inner(rows) + self.inner(rows)

    model = model_of(num_hidden_layers=1)
    model.model.layers[0].mlp.up_proj = Twice(model.model.layers[0].mlp.up_proj)
    found = merged_products.linears_of_equal_rows(PackedModel(model))
    attention = model.model.layers[0].self_attn
    assert found == [[attention.q_proj, attention.k_proj, attention.v_proj]]
