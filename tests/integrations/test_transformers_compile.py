"""Models train in one graph: torch.compile(model, fullgraph=True)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from tiny_models import ALTERNATING, SIZES, SLIDING, VOCABULARY, llama, qwen3, sharpened, tokens
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import saccade.integrations.transformers as integration
from saccade.integrations.transformers.masks import GraphMask

LENGTH = 20


def gemma3() -> Any:
    config = transformers.Gemma3TextConfig(
        **SIZES, **SLIDING, layer_types=ALTERNATING, query_pre_attn_scalar=16
    )
    return transformers.Gemma3ForCausalLM(config)


def mixtral() -> Any:
    config = transformers.MixtralConfig(
        **SIZES, sliding_window=8, num_local_experts=2, num_experts_per_tok=1
    )
    return transformers.MixtralForCausalLM(config)


MODELS = {function.__name__: function for function in (llama, qwen3, gemma3, mixtral)}


def batch(kind: str, length: int = LENGTH) -> dict[str, Tensor]:
    """A batch of two as collators make it."""
    input_ids = tokens(2, length)
    if kind == "packed":
        positions = torch.cat([torch.arange(7), torch.arange(length - 7)])
        return {
            "input_ids": input_ids,
            "labels": input_ids,
            "position_ids": positions.expand(2, -1),
        }
    real = torch.ones(2, length, dtype=torch.long)
    if kind == "padded":
        real[1, length - 6 :] = 0
    if kind == "left-padded":
        real[1, :6] = 0
    if kind == "holes":
        real[1, 3:6] = 0
    labels = input_ids.masked_fill(real == 0, -100)
    masked = {} if kind == "plain" else {"attention_mask": real}
    return {"input_ids": input_ids * real, "labels": labels, **masked}


def of_a_step(call: Any, model: Any, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """The loss and all gradients of one training step."""
    model.zero_grad()
    loss = call(**given, use_cache=False).loss
    loss.backward()
    # The next step's gradients must not be added to these.
    grads = {name: weights.grad.clone() for name, weights in model.named_parameters()}
    return {"loss": loss.detach(), **grads}


def pair(name: str) -> tuple[Any, Any]:
    """Two models of the same weights: one attends through saccade, the other as transformers."""
    integration.register()
    ours = sharpened(MODELS[name]()).train()
    theirs = copy.deepcopy(ours)
    ours.set_attn_implementation("saccade")
    theirs.set_attn_implementation("sdpa")
    return ours, theirs


def assert_same_step(compiled: Any, ours: Any, theirs: Any, given: dict[str, Tensor]) -> None:
    got, wanted = of_a_step(compiled, ours, given), of_a_step(theirs, theirs, given)
    for name in wanted:
        torch.testing.assert_close(got[name], wanted[name], rtol=2e-4, atol=2e-5, msg=name)


@pytest.fixture(autouse=True)
def anew() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


KINDS = ("plain", "padded", "packed")
# Each model by one kind of batches in every run, by the others in the slow one.
EACH = [
    pytest.param(name, kind, marks=[pytest.mark.slow] * (place % 3 != (number + 1) % 3))
    for number, name in enumerate(MODELS)
    for place, kind in enumerate(KINDS)
]


@pytest.mark.parametrize(("name", "kind"), EACH)
def test_one_graph_trains_as_sdpa(name: str, kind: str) -> None:
    ours, theirs = pair(name)
    counter: Any = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    assert_same_step(compiled, ours, theirs, batch(kind))
    assert counter.frame_count == 1


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    "kind", [pytest.param("plain", marks=SLOW), "padded", pytest.param("packed", marks=SLOW)]
)
def test_batches_of_other_lengths_compile_nothing_anew(kind: str) -> None:
    ours, theirs = pair("qwen3")
    for each in (ours, theirs):
        del each.model.layers[1:]  # another layer is as much of a graph again
    counter: Any = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for length in (20, 23, 17):
        assert_same_step(compiled, ours, theirs, batch(kind, length))
    assert counter.frame_count <= 2  # once for the first length, once for any


def test_padding_is_read_when_the_graph_runs() -> None:
    ours, theirs = pair("llama")
    counter: Any = CompileCounterWithBackend("eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True)
    for kind in ("padded", "left-padded", "holes"):
        assert_same_step(compiled, ours, theirs, batch(kind))
    assert counter.frame_count == 1


@pytest.mark.parametrize("kind", [pytest.param("padded", marks=SLOW), "packed"])
def test_with_checkpoints_inside(kind: str) -> None:
    ours, theirs = pair("gemma3")
    with warnings.catch_warnings():  # a later transformers calls it activation checkpointing
        warnings.simplefilter("ignore", FutureWarning)
        ours.gradient_checkpointing_enable({"use_reentrant": False})
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same_step(compiled, ours, theirs, batch(kind))


@pytest.mark.slow  # a minute of a C++ compiler; operators have an Inductor test of their own
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Inductor's own
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")
def test_by_inductor() -> None:
    ours, theirs = pair("llama")
    for each in (ours, theirs):
        del each.model.layers[1:]  # each layer is so many seconds of a C++ compiler
    assert_same_step(torch.compile(ours, fullgraph=True), ours, theirs, batch("padded"))


def masked(function: Any, length: int = 12) -> Any:
    """The mask that a graph makes of a mask function, written out."""

    def call(real: Tensor) -> Tensor:
        mask = integration.lazy_mask(2, length, length, 0, 0, function, real, use_vmap=True)
        assert isinstance(mask, GraphMask)
        return mask.written_out() | False

    return torch.compile(call, backend="eager", fullgraph=True)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # Dynamo's own, below torch.vmap
def test_mask_functions_of_ones_own() -> None:
    ids = torch.arange(12) // 5
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 9:] = False
    functions = {
        "reads": lambda b, h, q, k: (ids[q] == ids[k]) & (k <= q),
        "an operation that masks do not know": lambda b, h, q, k: torch.sin(q * 1.0) < 0.5 + k * 0,
    }
    for name, function in functions.items():
        wanted = integration.lazy_mask(2, 12, 12, 0, 0, function, real, use_vmap=True)
        assert torch.equal(masked(function)(real), wanted.written_out()), name


def graph_mask() -> GraphMask:
    real = torch.ones(2, 12, dtype=torch.bool)
    real[1, 9:] = False

    def make(given: Tensor) -> GraphMask:
        mask = integration.lazy_mask(2, 12, 12, attention_mask=given)
        assert isinstance(mask, GraphMask)
        return mask

    return torch.compile(make, backend="eager", fullgraph=True)(real)


def test_a_graph_mask_is_sliced_and_moved() -> None:
    mask = graph_mask()
    wanted = torch.ones(12, 12).tril().bool().expand(2, 1, 12, 12).clone()
    wanted[1, :, :, 9:] = False
    assert (mask.size(), mask.size(2), mask.dim()) == ((2, 1, 12, 12), 12, 4)
    assert torch.equal(mask.written_out(), wanted)
    part = mask[:, :, 3:, :10]
    assert part.shape == (2, 1, 9, 10)
    assert torch.equal(part.written_out(), wanted[:, :, 3:, :10])
    assert torch.equal(mask.to("cpu").written_out(), wanted)
    with pytest.raises(TypeError, match="takes parts of 4"):
        mask[0]
    with pytest.raises(TypeError, match="takes a device"):
        mask.to(torch.float32)


def test_a_graph_mask_is_no_number() -> None:
    scores: Any = torch.zeros(2, 1, 12, 12)
    with pytest.raises(TypeError):
        _ = scores + graph_mask()
    with pytest.raises(TypeError):
        torch.where(graph_mask(), scores, 0.0)  # pyright: ignore[reportArgumentType, reportCallIssue]


@pytest.mark.slow
def test_generates_with_a_static_cache() -> None:
    ours, theirs = pair("llama")
    ours.eval()
    theirs.eval()
    prompts = {
        "input_ids": torch.tensor([[0, 0, 11, 12, 13], [21, 22, 23, 24, 25]]),
        "attention_mask": torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]]),
    }
    options: Any = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False}
    wanted = theirs.generate(**prompts, **options)
    # generate makes masks before it calls the model: they are no part of a graph.
    ours.forward = torch.compile(ours.forward, backend="eager")
    assert torch.equal(ours.generate(**prompts, **options, cache_implementation="static"), wanted)
    assert int(wanted.max()) < VOCABULARY
