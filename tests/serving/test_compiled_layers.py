"""Layers compiled as one: what they give, how many graphs there are, and that the model stays."""

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import interrupts
import pytest
import served
import tiny_models
import torch
import transformers
from torch._dynamo import config as dynamo_config
from torch._dynamo.testing import CompileCounter

import saccade
from saccade import integrations
from saccade.serving import compiled_layers
from saccade.serving.compiled_layers import CompiledLayers

LAYERS = 3


class OneSequence:
    """Attends to the rows of a pass, and keeps nothing."""

    def attend(self, layer: int, query: Any, key: Any, value: Any, **options: Any) -> torch.Tensor:
        self.layers.append(layer)
        return saccade.attention(query, key, value, **options).transpose(1, 2)

    def __init__(self) -> None:
        self.layers: list[int] = []


def model_of(kind: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    integrations.transformers.register()
    config = getattr(transformers, f"{kind}Config")(
        **tiny_models.SIZES | {"num_hidden_layers": LAYERS} | changes
    )
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    model.set_attn_implementation("saccade")
    return model


@torch.inference_mode()
def logits(model: Any, step: Any, rows: int) -> torch.Tensor:
    numbers = torch.arange(rows)[None]
    return model(
        input_ids=numbers * 7 % 90, position_ids=numbers, use_cache=False, saccade_step=step
    ).logits


# Layers that are alike have one graph for one row and one for others; Gemma's are of two kinds, for
# windows and not, with softcap; every second one is the same again.
@pytest.mark.parametrize(
    "kind, most, numbers", [("Llama", 3, (5, 9, 1, 2, 9, 1)), ("Gemma2", 2, (5, 9))]
)
def test_as_many_graphs_as_kinds_of_layers(kind, most, numbers):
    model, counter = model_of(kind), CompileCounter()
    layers = CompiledLayers(model, counter)
    assert len(layers) == LAYERS
    for rows in numbers:
        step = OneSequence()
        found = layers.call(step, lambda under_way, rows=rows: logits(model, under_way, rows))
        assert step.layers == [*range(LAYERS)]
        assert torch.equal(found, logits(model, OneSequence(), rows))
    assert counter.frame_count <= most


def test_the_model_is_as_it_was_after_a_pass_that_fails():
    model = model_of("Llama")
    layers = CompiledLayers(model, "eager")

    class Fails(OneSequence):
        def attend(self, layer: int, *rows: Any, **options: Any) -> torch.Tensor:
            raise RuntimeError("no pages are left")

    wanted = logits(model, OneSequence(), 3)
    with pytest.raises(RuntimeError, match="no pages are left"):
        layers.call(Fails(), lambda step: logits(model, step, 3))
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert torch.equal(logits(model, OneSequence(), 3), wanted)
    with pytest.raises(AttributeError):
        _ = compiled_layers._under_way.step.attend


def test_other_threads_have_the_model_as_it_is():
    model, counter = model_of("Llama"), CompileCounter()
    ours, theirs = CompiledLayers(model, counter), CompiledLayers(model, counter)
    entered, leave = threading.Event(), threading.Event()

    def another_pass(step: Any) -> None:
        entered.set()
        leave.wait()

    with ThreadPoolExecutor(1) as another_thread:

        def run(step: Any) -> Any:
            found = another_thread.submit(logits, model, OneSequence(), 3).result()
            assert counter.frame_count == 0
            waits = another_thread.submit(theirs.call, OneSequence(), another_pass)
            assert not entered.wait(0.1)
            return found, waits

        found, waits = ours.call(OneSequence(), run)
        leave.set()
        waits.result()
    assert all(module._compiled_call_impl is None for module in model.modules())
    assert torch.equal(found, logits(model, OneSequence(), 3))


def test_an_interrupt_in_any_line_leaves_the_model_as_it_was():
    model = model_of("Llama", num_hidden_layers=1)
    layers = CompiledLayers(model, "eager")
    settings = {name: getattr(dynamo_config, name) for name in compiled_layers.SETTINGS}
    line, came = 0, True
    while came:
        interrupt = interrupts.Interrupt(line, "serving/compiled_layers")
        with suppress(KeyboardInterrupt), interrupt.armed():
            layers.call("a step", lambda _: None)
        assert all(module._compiled_call_impl is None for module in model.modules())
        assert settings == {name: getattr(dynamo_config, name) for name in settings}
        assert getattr(compiled_layers._under_way, "step", None) is None
        line, came = line + 1, interrupt.came
    assert line > 20


def engine_tokens(monkeypatch: pytest.MonkeyPatch, backend: Any, **options: Any) -> tuple[Any, str]:
    monkeypatch.setattr(CompiledLayers.__init__, "__defaults__", (backend,))
    engine = served.engine(num_pages=200, **options)
    made = engine.generate(served.prompts(), max_new_tokens=12, stop_tokens=())
    served.assert_nothing_is_held(engine)
    return [generated.tokens for generated in made], engine.explain()


def test_an_engine_gives_the_same_tokens_with_compiled_layers(monkeypatch):
    wanted, said = engine_tokens(monkeypatch, "eager")
    assert "compiled" not in said
    found, said = engine_tokens(monkeypatch, "eager", compile=True)
    assert "layers are compiled as one" in said
    assert found == wanted


def test_a_model_that_cannot_be_compiled_goes_on_as_it_is(monkeypatch):
    def fails(graph: Any, examples: Any) -> Any:
        raise NotImplementedError("this backend compiles nothing")

    wanted, _ = engine_tokens(monkeypatch, "eager")
    found, said = engine_tokens(monkeypatch, fails, compile=True)
    assert found == wanted
    assert "no layers are compiled" in said
    assert "this backend compiles nothing" in said


def test_wrong_logits_of_compiled_layers_are_noticed(monkeypatch):
    def wrong(graph: Any, examples: Any) -> Any:
        return lambda *inputs: [
            each * 1.5 if each.is_floating_point() else each for each in graph(*inputs)
        ]

    wanted, _ = engine_tokens(monkeypatch, "eager")
    found, said = engine_tokens(monkeypatch, wrong, compile=True)
    assert found == wanted
    assert "no layers are compiled" in said


def test_what_is_no_answer_is_refused():
    with pytest.raises(ValueError, match="compile: got 'always', takes True, False or \"auto\""):
        served.engine(compile="always")
