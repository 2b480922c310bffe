"""Steps that read prompts, padded to a few sizes: the same tokens, and nothing written beside."""

import random
from typing import Any

import disturbed
import pytest
import served
import torch
from blind import Blind, beside
from pairs import covering
from replayed import with_graphs
from sampled import REQUESTS, of_one_alone
from transformers.utils import import_utils

import saccade
from saccade.serving.model import BatchStep
from saccade.serving.prompt_steps import PackedTokens, PromptStep, PromptSteps, read_prompt_sizes

NEW = 10
GREEDY = {"max_new_tokens": NEW, "stop_tokens": ()}


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of padded steps, and 0 for each that was packed anew."""
    found: list[int] = []
    padded, packed = PromptSteps.padded, PromptSteps.packed

    def note_padded(self: PromptSteps, plan: Any, rows: Any, size: int) -> Any:
        found.append(size)
        return padded(self, plan, rows, size)

    def note_packed(self: PromptSteps, plan: Any, lanes: Any) -> Any:
        found.append(0)
        return packed(self, plan, lanes)

    monkeypatch.setattr(PromptSteps, "padded", note_padded)
    monkeypatch.setattr(PromptSteps, "packed", note_packed)
    return found


@pytest.mark.parametrize(
    ("name", "num_pages", "prompt_sizes", "run_ahead", "batch_sizes"),
    covering(served.NAMES, [13, 400], [[16], [4, 9, 16], [7]], [False, True], [None, [2, 6]]),
)
def test_tokens_are_those_of_uncached_generation(
    name, num_pages, prompt_sizes, run_ahead, batch_sizes, taken
):
    engine = served.engine(
        name, num_pages=num_pages, prompt_sizes=prompt_sizes, run_ahead=run_ahead,
        batch_sizes=batch_sizes,
    )  # fmt: skip
    generated = engine.generate(served.prompts(), **GREEDY)
    assert served.tokens_of(generated) == served.wanted(name, NEW)
    assert set(taken) <= {*prompt_sizes, *([0] if prompt_sizes[-1] < 16 else [])} and taken
    served.assert_nothing_is_held(engine)


@pytest.mark.parametrize("run_ahead", [False, True])
def test_a_request_draws_the_same_tokens_whatever_else_is_served(run_ahead, taken):
    wanted = [
        of_one_alone(prompt, options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    taken.clear()
    engine = served.engine(num_pages=14, run_ahead=run_ahead, prompt_sizes=[8, 16])
    asked = [
        engine.submit(prompt, max_new_tokens=9, stop_tokens=[4, 8, 15, 16], **options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    for completion, alone in zip(asked, wanted, strict=True):
        found = completion.result()
        assert (found.tokens, found.reason) == (alone.tokens, alone.reason)
    assert set(taken) <= {8, 16} and taken
    served.assert_nothing_is_held(engine)


def test_samples_begin_where_their_prompt_ends_in_a_padded_step(taken):
    prompt = served.prompts()[1][:18]
    drawn: dict[str, Any] = {"max_new_tokens": 12, "stop_tokens": (), "temperature": 1.3}
    alone = [
        served.engine().generate([prompt], seed=5 + number, **drawn)[0].tokens
        for number in range(4)
    ]
    taken.clear()
    engine = served.engine(num_pages=64, run_ahead=True, prompt_sizes=[4, 16])
    other = engine.submit(served.prompts()[3], **GREEDY)  # whose rows lie before theirs
    samples = engine.submit_samples(prompt, 4, seed=5, **drawn)
    assert [sample.result().tokens for sample in samples] == alone
    assert other.result().tokens == served.uncached("llama", tuple(served.prompts()[3]), NEW)
    assert 0 not in taken
    served.assert_nothing_is_held(engine)


def test_what_a_step_gives_is_what_a_packed_one_gives():
    engine = served.engine("gemma2", num_pages=64, max_batch_tokens=40, prompt_sizes=[40])
    for prompt in served.prompts()[:4]:
        engine.submit(prompt, **GREEDY)
    worker, model = engine._worker, engine._model
    worker._take_in()
    plan = worker._scheduler.plan()
    assert plan is not None and len(plan.chunks) == 4 and plan.rows == 40
    options: dict[str, Any] = {"batch_invariant": False, "implementation": None}
    packed = BatchStep(engine.cache, plan, model.numbers, options)
    rows = [worker._row(chunk, chunk.request) for chunk in plan.chunks]
    engine._prompts._decoder.say_sequences(plan.chunks, rows)
    engine._prompts._send(plan.chunks)
    padded = engine._prompts._step(40)
    for ours, theirs in zip(padded.begin(), packed.begin(), strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(padded.last_rows[:4], packed.last_rows)
    for ours, theirs in zip(padded._slots, packed._slots, strict=True):
        assert torch.equal(ours, theirs)
    assert torch.equal(padded._offsets[:5], packed._offsets)


def test_rows_of_padding_write_nothing(taken):
    engine = served.engine(num_pages=64, prompt_sizes=[16])
    engine.generate([served.prompts()[1]], **GREEDY)
    layer = engine.cache.pages(0).key_pages
    held = layer.isfinite().all(-1).sum()  # pages were filled with NaN
    prompt = served.prompts()[7]
    engine.generate([prompt], **GREEDY)
    written = layer.isfinite().all(-1).sum() - held
    assert int(written) == 2 * (len(prompt) + NEW - 1)
    assert set(taken) == {16} and len(prompt) < 16


@pytest.mark.parametrize("name", ["llama", "gemma2", "mistral"])
def test_a_step_waits_for_nothing(name, monkeypatch):
    monkeypatch.setattr(import_utils, "is_cuda_stream_capturing", lambda: True)
    for operator in ("attention_paged", "write_kv_cache"):
        monkeypatch.setattr(saccade, operator, beside(getattr(saccade, operator)))
    real, blind = PromptSteps.padded, []

    def padded(self: PromptSteps, plan: Any, rows: Any, size: int) -> Any:
        with Blind():
            blind.append(size)
            return real(self, plan, rows, size)

    monkeypatch.setattr(PromptSteps, "padded", padded)
    engine = served.engine(name, prompt_sizes=[8, 16], run_ahead=True)
    assert served.tokens_of(engine.generate(served.prompts(), **GREEDY))
    assert set(blind) <= {8, 16} and blind


def test_graphs_give_the_same_tokens(monkeypatch, taken):
    with_graphs(monkeypatch)
    engine = served.engine(num_pages=20, cuda_graphs=True, compile=False)
    assert "\nsteps that read prompts are CUDA graphs for 16 rows (" in engine.explain()
    assert "were tried" not in engine.explain()  # nothing else will come
    asked = [
        engine.submit(prompt, max_new_tokens=9, stop_tokens=[4, 8, 15, 16], **options)
        for prompt, options in zip(served.prompts(), REQUESTS, strict=False)
    ]
    found = [completion.result().tokens for completion in asked]
    assert set(taken) == {16}
    served.assert_nothing_is_held(engine)
    for tokens, prompt, options in zip(found, served.prompts(), REQUESTS, strict=False):
        assert tokens == of_one_alone(prompt, options).tokens


@pytest.mark.parametrize("seed", range(3))
def test_whatever_happens_no_token_changes(seed, monkeypatch):
    with_graphs(monkeypatch)
    options: dict[str, Any] = {"cuda_graphs": True, "compile": False}
    engine = served.engine(num_pages=24, run_ahead=True, **options)
    found = disturbed.disturb(engine, 160, random.Random(seed), monkeypatch)
    assert len(found) > 15
    alone = served.engine(num_pages=64)
    for prompt, asked, tokens in found:
        assert disturbed.ask(alone, prompt, asked).result().tokens == tokens


def test_steps_that_cannot_be_captured_run_eagerly_and_say_why(monkeypatch, taken):
    begin = PromptStep.begin

    def fails(self: PromptStep) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing\nand more")

    with_graphs(monkeypatch)
    monkeypatch.setattr(PromptStep, "begin", fails)
    engine = served.engine(cuda_graphs=True, compile=False)
    monkeypatch.setattr(PromptStep, "begin", begin)
    assert (
        "steps that read prompts run eagerly: LlamaForCausalLM cannot be captured: operation not "
        "permitted when stream is capturing" in engine.explain()
    )
    assert engine.explain().startswith("decode steps are CUDA graphs")
    generated = engine.generate(served.prompts(), **GREEDY)
    assert served.tokens_of(generated) == served.wanted("llama", NEW)
    assert set(taken) == {0}


def test_steps_larger_than_those_that_are_captured_are_tried(monkeypatch):
    with_graphs(monkeypatch)
    engine = served.engine(cuda_graphs=True, compile=False, prompt_sizes=[4, 8])
    assert "CUDA graphs for 4, 8 rows" in engine.explain()
    assert "\nlarger ones were tried (" in engine.explain()


def test_sizes_of_steps():
    assert read_prompt_sizes(None, 512, padded=False) is None
    assert read_prompt_sizes([], 512, padded=True) is None
    assert read_prompt_sizes([9, 3, 9], 512, padded=False) == [3, 9]
    assert read_prompt_sizes(None, 100, padded=True) == [32, 64, 100]
    assert (read_prompt_sizes(None, 512, padded=True) or [])[-2:] == [384, 512]
    assert (read_prompt_sizes(None, 4096, padded=True) or [])[-1] == 1024


@pytest.mark.parametrize(
    ("sizes", "error", "message"),
    [
        ([17], ValueError, "prompt_sizes: got .17., takes .* up to max_batch_tokens, 16"),
        ([0], ValueError, "prompt_sizes: got 0"),
        ([1.5], TypeError, "prompt_sizes: got float"),
        (8, TypeError, "prompt_sizes: got int, takes whole numbers"),
    ],
)
def test_bad_arguments_are_named(sizes, error, message):
    with pytest.raises(error, match=message):
        served.engine(prompt_sizes=sizes)


def test_sequences_that_leave_say_nothing_more():
    packed = PackedTokens(8, 3, torch.device("cpu"))
    packed.send([2, 1, 4], [1, 2, 3, 4, 5, 6, 7])
    packed.send([1], [9])
    assert packed.counts.tolist() == [1, 0, 0]
    assert packed.tokens(1).tolist() == [9]
